"""Rows of token ids to train on and to test with: plain text, and text with keys and values strewn in."""

import random
from dataclasses import dataclass

import torch

UNSCORED = -100
ANSWER_WEIGHT = 4.0


@dataclass(frozen=True)
class Row:
    """Token ids (T,), what to predict from each (T,), and how much each prediction counts (T,)."""

    ids: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor


class RowSource:
    """Draws rows from one stream of text tokens, the same rows for the same seed."""

    def __init__(self, stream: torch.Tensor, keys: list[int], values: list[int], seed: int) -> None:
        self._stream = stream
        self._keys = keys
        self._values = values
        self._random = random.Random(seed)

    def text_row(self, length: int) -> Row:
        """Consecutive text tokens, each predicting the next."""
        window = self._window(length + 1)
        return Row(window[:-1], window[1:], torch.ones(length))

    def needle_row(self, length: int) -> Row:
        """Text with pairs in its first part and, later, some keys asked again with their value to be predicted.

        A key comes at random and its first value cannot be known, so neither is scored.
        """
        pairs = self._pairs(self._random.choice([1, 2, 4, 8, 16, 32]))
        asked = self._random.choices(pairs, k=max(2, length // 64))
        window = self._window(length + 1 - 2 * (len(pairs) + len(asked))).tolist()
        turn = len(window) // 2
        ids, answers = self._strewn(window[:turn], pairs)
        later, later_answers = self._strewn(window[turn:], asked)
        answers = [-1] * len(answers) + later_answers
        tokens = torch.tensor(ids + later)
        targets, weights = tokens.clone(), torch.ones(len(tokens))
        inserted = set(self._keys) | set(self._values)
        for i, answer in enumerate(answers):
            if answer > 0:
                weights[i] = ANSWER_WEIGHT
            elif int(tokens[i]) in inserted:
                targets[i] = UNSCORED
        return Row(tokens[:-1], targets[1:], weights[1:])

    def trial(self, length: int, pairs: int) -> tuple[list[int], int]:
        """One question: `length` tokens that end in a key seen before, and the value that followed it."""
        chosen = self._pairs(pairs)
        window = self._window(length - 1 - 2 * pairs).tolist()
        ids, _ = self._strewn(window, chosen)
        key, value = self._random.choice(chosen)
        return [*ids, key], value

    def _pairs(self, count: int) -> list[tuple[int, int]]:
        return list(zip(self._random.sample(self._keys, count), self._random.sample(self._values, count), strict=True))

    def _window(self, length: int) -> torch.Tensor:
        start = self._random.randrange(len(self._stream) - length)
        return self._stream[start : start + length]

    def _strewn(self, text: list[int], pairs: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
        """Insert pairs at random places; the second list holds the value where a value was put, -1 elsewhere."""
        places = sorted(self._random.randrange(len(text) + 1) for _ in pairs)
        ids: list[int] = []
        marks: list[int] = []
        start = 0
        for place, (key, value) in zip(places, pairs, strict=True):
            ids += [*text[start:place], key, value]
            marks += [-1] * (place - start + 1) + [value]
            start = place
        return ids + text[start:], marks + [-1] * (len(text) - start)
