"""Retrieval trials: a value hidden in held-out text, asked for at the end, through the cache."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvplan.errors import InputError
from kvplan.quality.passages import Passage, tokenize

_KEYS: Final = """
anchor apricot basket beacon blanket bottle bridge bucket button candle canyon carpet castle cherry compass copper
cotton cradle desert dragon engine falcon feather forest fountain garden glacier hammer harbor island jacket kettle
ladder lantern lemon marble meadow mirror needle ocean orchard paddle pepper piano pillow planet pocket puzzle rabbit
river rocket saddle sailor shadow silver spider statue temple thunder tunnel valley violin walnut window
"""
_DIGITS: Final = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialForm:
    """How a trial reads.

    Attributes:
        pair: What is hidden, with {key} and {value}; question and answer come at the end.
        pairs: Pairs hidden in one trial, of which one is asked for.
        longest_tokens: The longest context the form is meant for; None is the model's own.
        keys: To choose from.
        values: To choose from; empty makes random numbers.
    """

    pair: str
    question: str
    answer: str
    pairs: int
    keys: tuple[str, ...]
    values: tuple[str, ...] = ()
    longest_tokens: int | None = None


TEXT_FORM: Final = TrialForm(
    pair="\n\nNote: the secret number of the {key} is {value}.\n\n",
    question="\n\nNote: the secret number of the {key} is",
    answer=" {value}",
    pairs=1,
    keys=tuple(_KEYS.split()),
)
"""For any model. One pair: a small model does not tell several apart even in 16 bits, and then nothing can be lost."""

_OWN_FORM_PAIRS: Final = 16


def read_form(path: Path) -> TrialForm:
    """Return the form that a model was made for, from its retrieval.json.

    Raises:
        InputError: The file is not such a form.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return TrialForm(
            pair=fields["pair"],
            question=fields["question"],
            answer=fields["answer"],
            pairs=_OWN_FORM_PAIRS,
            keys=tuple(fields["keys"]),
            values=tuple(fields["values"]),
            longest_tokens=int(fields["longest"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"no form of retrieval trials: {error}", where=str(path)) from error


def make_trials(
    tokenizer: Any,
    stream: Sequence[int],
    opening: Sequence[int],
    form: TrialForm,
    *,
    context_tokens: int,
    trials: int,
    seed: int,
) -> list[Passage]:
    """Return *trials* trials of equal length; the depth of the pair asked for is spread over the context.

    Question and answer are fed through the cache, so that all that is known of the pair comes from there. The answer
    counts as found if each of its tokens is the likeliest, given those before: what greedy decoding would write.
    """
    chooser = random.Random(seed)
    drawn = [_draw(tokenizer, form, chooser) for _ in range(trials)]
    fed_tokens = max(len(asked) - 1 for _, asked, _ in drawn)
    made = []
    for index, (pairs, asked, answer_tokens) in enumerate(drawn):
        body = context_tokens + 1 - len(asked) - len(opening) - sum(map(len, pairs))
        if not 0 < body < len(stream):
            raise InputError(
                f"retrieval in {context_tokens} tokens: there is no room for the text around the pairs",
                hint="use a longer context and a text that is longer than it",
            )
        start = chooser.randrange(len(stream) - body)
        depth = round((index + 0.5) / trials * body)
        places = [depth, *(chooser.randrange(body + 1) for _ in pairs[1:])]
        ids = [*opening, *_strewn(stream[start : start + body], pairs, places), *asked]
        made.append(
            Passage(
                prompt=tuple(ids[: -fed_tokens - 1]),
                fed=tuple(ids[-fed_tokens - 1 : -1]),
                targets=tuple(ids[-fed_tokens:]),
                scored=answer_tokens,
            )
        )
    return made


def _draw(tokenizer: Any, form: TrialForm, chooser: random.Random) -> tuple[list[list[int]], list[int], int]:
    """Return the pairs, the one asked for first; question and answer; and the length of the answer."""
    keys = chooser.sample(form.keys, form.pairs)
    numbers = [str(chooser.randrange(10 ** (_DIGITS - 1), 10**_DIGITS)) for _ in keys]
    values = chooser.sample(form.values, form.pairs) if form.values else numbers
    texts = [form.pair.format(key=key, value=value) for key, value in zip(keys, values, strict=True)]
    pairs = [tokenize(tokenizer, text) for text in texts]
    question, answer = (
        tokenize(tokenizer, text.format(key=keys[0], value=values[0])) for text in (form.question, form.answer)
    )
    return pairs, [*question, *answer], len(answer)


def _strewn(text: Sequence[int], pairs: list[list[int]], places: list[int]) -> list[int]:
    """Return *text* with each pair put before the token at its place."""
    ids: list[int] = []
    done = 0
    for place, pair in sorted(zip(places, pairs, strict=True)):
        ids += [*text[done:place], *pair]
        done = place
    return [*ids, *text[done:]]
