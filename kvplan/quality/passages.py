"""What is scored: token ids to prefill, token ids fed one chunk at a time, and what should follow each of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

import numpy as np

from kvplan.errors import InputError

DOCUMENTS: Final = 16
_SCORED_PART: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    """One sequence to score.

    Attributes:
        prompt: Prefilled; nothing of it is scored.
        fed: Teacher-forced through the cache, token by token or in chunks.
        targets: The token that should follow each of *fed*.
        scored: Positions of *fed* that count, the last ones.
    """

    prompt: tuple[int, ...]
    fed: tuple[int, ...]
    targets: tuple[int, ...]
    scored: int

    @property
    def tokens(self) -> int:
        """Tokens held at the end."""
        return len(self.prompt) + len(self.fed)


def tokenize(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of *text*, without the ones that open a sequence."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def opening_ids(tokenizer: Any) -> list[int]:
    """Return what the tokenizer puts before every sequence: a token that some models cannot do without."""
    whole: list[int] = tokenizer("a")["input_ids"]
    bare = tokenize(tokenizer, "a")
    at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
    return whole[:at]


def cut_documents(
    stream: Sequence[int], opening: Sequence[int], *, context_tokens: int, documents: int | None
) -> list[Passage]:
    """Cut *stream* into documents of *context_tokens* that do not overlap; the last quarter of each is scored.

    Args:
        stream: Token ids of the text.
        opening: Put before each document.
        context_tokens: Tokens of a document, *opening* included; one more is read as the last target.
        documents: How many; None takes what there is, up to 16.

    Raises:
        InputError: The text is too short.
    """
    own = context_tokens + 1 - len(opening)
    available = len(stream) // own
    wanted = min(DOCUMENTS, available) if documents is None else documents
    if not 1 <= wanted <= available:
        raise InputError(
            f"the text has {len(stream)} tokens: {available} documents of {context_tokens} tokens, "
            f"{max(1, wanted)} are asked for",
            hint="use a longer text, fewer documents or a shorter context",
        )
    return [_cut([*opening, *stream[i * own : (i + 1) * own]]) for i in range(wanted)]


def _cut(ids: list[int]) -> Passage:
    scored = (len(ids) - 1) // _SCORED_PART
    start = len(ids) - 1 - scored
    return Passage(prompt=tuple(ids[:start]), fed=tuple(ids[start:-1]), targets=tuple(ids[start + 1 :]), scored=scored)


def data_digest(passages: Iterable[Passage]) -> str:
    """Return the SHA-256 of the token ids of *passages*: what was scored, without the text itself."""
    digest = sha256()
    for passage in passages:
        for part in (passage.prompt, passage.fed, passage.targets[-passage.scored :]):
            digest.update(np.asarray([len(part), *part], dtype="<i4").tobytes())
    return digest.hexdigest()
