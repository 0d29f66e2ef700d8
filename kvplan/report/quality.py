"""The screen and the JSON of `kvplan quality`."""

from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console
from rich.markup import escape

from kvplan.core.quality_bounds import Bound, QualityBounds
from kvplan.core.records import Quality
from kvplan.report.json import dump, plain
from kvplan.report.table import plain_table

_COLUMNS: Final = (
    ("format", False),
    ("perplexity", True),
    ("increase", True),
    ("at most", True),
    ("mean KL", True),
    ("KL p99", True),
    ("flips", True),
    ("at most", True),
    ("keys", True),
)


def print_quality(
    console: Console, results: Sequence[tuple[Quality, QualityBounds]], *, floor: str, sixteen_bit: str
) -> None:
    """Print one row a format.

    Args:
        console: Where to.
        results: Each result with its bounds; at least one.
        floor: What the 16-bit row compares, in a sentence.
        sixteen_bit: The name of the 16-bit format that the others are compared with.
    """
    table = plain_table(_COLUMNS)
    for quality, bounds in results:
        table.add_row(*map(escape, _row(quality, bounds)))
    console.print(table)
    quality, bounds = results[0]
    key = quality.key
    kernels = ", ".join(dict.fromkeys(result.key.kernel for result, _ in results))
    lines = [
        f"{bounds.documents} documents, {bounds.positions} positions, each against {sixteen_bit} on the same tokens",
        f"at most: upper bound at {100 * bounds.confidence:g}%; keys: found of {bounds.trials}, in brackets at 16 bits",
        f"prefill {key.prefill}, chunks of up to {key.chunk_tokens}, block size {key.block_tokens}, {kernels}",
    ]
    if any(result.key.format == sixteen_bit for result, _ in results):
        lines.append(floor)
    for line in lines:
        console.print(line, markup=False, highlight=False)


def _row(quality: Quality, bounds: QualityBounds) -> tuple[str, ...]:
    perplexity = bounds.perplexity_16bit * (1 + bounds.perplexity_increase.estimate)
    return (
        quality.key.format,
        f"{perplexity:.2f}",
        _percent(bounds.perplexity_increase.estimate, signed=True),
        _upper(bounds.perplexity_increase, signed=True),
        f"{bounds.kl.estimate:.5f}",
        "-" if bounds.kl_p99 is None else f"{bounds.kl_p99:.4f}",
        _percent(bounds.top1_flips.estimate),
        _upper(bounds.top1_flips),
        _found(quality),
    )


def _percent(share: float, *, signed: bool = False) -> str:
    return f"{100 * share:{'+' if signed else ''}.2f}%"


def _upper(bound: Bound, *, signed: bool = False) -> str:
    return "-" if bound.upper is None else _percent(bound.upper, signed=signed)


def _found(quality: Quality) -> str:
    """Return the keys found through the format, and at 16 bits."""
    if not quality.trials:
        return "-"
    hits, before = (sum(getattr(trial, name) for trial in quality.trials) for name in ("hit", "hit_16bit"))
    return f"{hits} ({before})"


def quality_json(model: str, results: Sequence[tuple[Quality, QualityBounds]]) -> str:
    """Return results as JSON; the divergences of single positions are left out."""
    return dump({"model": model, "results": [_result(quality, bounds) for quality, bounds in results]})


def _result(quality: Quality, bounds: QualityBounds) -> dict[str, Any]:
    body: dict[str, Any] = plain(quality)
    for document in body["documents"]:
        del document["kl_values"]
    return {"format": quality.key.format, "bounds": plain(bounds), **body}
