import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from kvplan.core.specs import ModelSpec
from kvplan.engines import explain_log, read_log
from kvplan.engines.logs import Verdict
from kvplan.store.configs import read_geometry

Spec = Callable[..., ModelSpec]
Agreeing = Callable[[str, ModelSpec], list[tuple[int, str, str]]]
_NUMBER: Final = re.compile(r"(?<![\w.,:-])\d[\d,]*(?:\.\d+)?(?![\w:-]*\d)(?![.,]\d)")
_FACTORS: Final = (0.5, 0.9, 1.1, 2)


def model(layers: int, heads: int, kv: int | None, hidden: int, **more: Any) -> ModelSpec:
    """The model of a config with these keys, of the Llama family unless *more* names another."""
    config = {
        "model_type": "llama", "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv,
        "hidden_size": hidden, "max_position_embeddings": 131072, "vocab_size": 128256, **more,
    }  # fmt: skip
    geometry = read_geometry({key: value for key, value in config.items() if value is not None}, "config.json")
    return ModelSpec(
        name="m", digest="d", architecture=geometry.architecture, layers=geometry.layers,
        query_heads=geometry.query_heads, hidden_size=geometry.hidden_size, vocab_size=geometry.vocab_size,
        context_tokens=geometry.context_tokens, float_type=geometry.float_type, draft_layers=geometry.draft_layers,
    )  # fmt: skip


@pytest.fixture(scope="session")
def spec() -> Spec:
    """Makes the model of a config."""
    return model


def altered(log: str) -> Iterator[tuple[int, str, str]]:
    """Every number of a log made another, one at a time: its line, what stands there then, and the log."""
    lines = log.split("\n")
    for index, line in enumerate(lines):
        for match in _NUMBER.finditer(line):
            number = match[0].rstrip(",")
            for factor in _FACTORS:
                text = f"{float(number.replace(',', '')) * factor:{',' if ',' in number else ''}.{_decimals(number)}f}"
                other = line[: match.start()] + text + line[match.start() + len(number) :]
                if text != number:
                    yield index + 1, text, "\n".join([*lines[:index], other, *lines[index + 1 :]])


def _decimals(number: str) -> int:
    return len(number.partition(".")[2])


def agreeing_alterations(log: str, spec: ModelSpec) -> list[tuple[int, str, str]]:
    """The line, name and text of figures that were made others and are said to agree all the same."""

    def agreeing(text: str) -> set[tuple[int, str, str]]:
        facts = read_log(text)
        findings = explain_log(facts, spec) if facts else ()
        return {(item.line, item.what, item.printed) for item in findings if item.verdict is Verdict.AGREES}

    before = agreeing(log)
    return [
        item
        for number, text, other in altered(log)
        for item in sorted(agreeing(other) - before)
        if item[0] == number and item[2].split()[0] == text
    ]


@pytest.fixture(scope="session")
def agreeing() -> Agreeing:
    """Finds the figures of a log that agree when they are halved, doubled, or made a tenth more or less."""
    return agreeing_alterations
