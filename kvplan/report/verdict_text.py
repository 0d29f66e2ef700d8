"""One verdict of a comparison in words, the same in every report."""

from math import expm1, log

from kvplan.core.comparisons import FigureVerdict
from kvplan.units import format_bytes, format_seconds


def change_text(verdict: FigureVerdict) -> str:
    """Return the figures and what became of them: '1.23 of decode_16bit_s, was 0.98 (+25.0%)'."""
    if verdict.current is None and verdict.baseline is None:
        return verdict.reason
    text = f"{figure_text(verdict.current, verdict.unit)} against {figure_text(verdict.baseline, verdict.unit)}"
    if verdict.low is not None and verdict.high is not None and verdict.low > 0:
        text += f" ({_rise(verdict.low)} to {_rise(verdict.high)})"
    return f"{text}; {verdict.reason}" if verdict.reason else text


def _rise(factor: float) -> str:
    return f"{100 * expm1(log(factor)):+.1f}%"


def figure_text(value: float | None, unit: str) -> str:
    """Return a figure with its unit; '-' where there is none."""
    if value is None:
        return "-"
    if unit == "bytes":
        return f"{value:.0f} B" if value < 1024 else format_bytes(value, digits=2)
    if unit == "s":
        return format_seconds(value)
    if unit == "count":
        return f"{value:.0f}"
    return f"{value:.4g}" + (f" {unit}" if unit == "nats" or unit.startswith("of ") else "")
