"""Documents do not overlap, keep the opening token, and their digest knows every token."""

from dataclasses import replace

import pytest

from kvplan.errors import InputError
from kvplan.quality.passages import Passage, cut_documents, data_digest, opening_ids

STREAM = list(range(1000, 2000))


class Letters:
    """A tokenizer of letters that opens every sequence with token 1."""

    def __call__(self, text: str, *, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [1] * add_special_tokens + [ord(letter) for letter in text]}


def test_the_last_quarter_is_fed_and_each_token_predicts_the_next() -> None:
    first, second = cut_documents(STREAM, [7], context_tokens=100, documents=2)
    ids = [*first.prompt, *first.fed]

    assert ids == [7, *range(1000, 1099)]
    assert (len(first.prompt), len(first.fed), first.scored) == (75, 25, 25)
    assert [*ids, first.targets[-1]][-25:] == list(first.targets)
    assert second.prompt[:2] == (7, first.targets[-1] + 1)


def test_without_a_count_the_text_is_used_up_to_sixteen_documents() -> None:
    assert len(cut_documents(STREAM, [], context_tokens=99, documents=None)) == 10
    assert len(cut_documents(STREAM, [], context_tokens=39, documents=None)) == 16


@pytest.mark.parametrize("documents", [11, None])
def test_a_text_that_is_too_short_says_how_long_it_is(documents: int | None) -> None:
    context = 99 if documents else 2000
    with pytest.raises(InputError, match="the text has 1000 tokens"):
        cut_documents(STREAM, [], context_tokens=context, documents=documents)


def test_the_opening_is_what_the_tokenizer_puts_first() -> None:
    assert opening_ids(Letters()) == [1]


@pytest.mark.parametrize("part", ["prompt", "fed", "targets"])
def test_the_digest_knows_every_token_and_where_parts_end(part: str) -> None:
    passage = Passage(prompt=(1, 2, 3), fed=(4, 5), targets=(5, 6), scored=2)
    changed = replace(passage, **{part: (9, *getattr(passage, part)[1:])})
    moved = replace(passage, prompt=(1, 2), fed=(3, 4, 5))

    assert len({data_digest([p]) for p in (passage, changed, moved)}) == 3
    assert data_digest([passage]) == data_digest([replace(passage)])
