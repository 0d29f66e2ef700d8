"""The screen and the JSON of `kvplan calibrate`."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from kvplan.report.json import dump
from kvplan.report.table import plain_table, say
from kvplan.store.calibrations import Calibration
from kvplan.units import format_bytes

_COLUMNS = (("learned", False), ("tensors of a layer", False), ("in all", True))


def print_calibration(console: Console, calibration: Calibration, path: str, tokens: Sequence[int]) -> None:
    """Print what a file holds, one row for each transform that was learned after others.

    Args:
        console: Where to.
        calibration: What is in the file.
        path: The file.
        tokens: Of each document.
    """
    table = plain_table(_COLUMNS)
    for recipe, layers in sorted(calibration.recipes.items()):
        names = ", ".join(layers[0]) if layers else ""
        table.add_row(escape(recipe), escape(names), format_bytes(_recipe_bytes(calibration, recipe)))
    console.print(table)
    say(console, f"{path}: {calibration.model}, {len(tokens)} documents of {max(tokens)} tokens, none of them scored")


def calibration_json(calibration: Calibration, path: str, tokens: Sequence[int]) -> str:
    """Return the same as JSON."""
    return dump(
        {
            "file": path,
            "model": calibration.model,
            "model_digest": calibration.model_digest,
            "data_digest": calibration.data_digest,
            "documents": len(tokens),
            "tokens": sum(tokens),
            "learned": [
                {"name": recipe, "tensors": sorted(layers[0]), "bytes": _recipe_bytes(calibration, recipe)}
                for recipe, layers in sorted(calibration.recipes.items())
            ],
        }
    )


def _recipe_bytes(calibration: Calibration, recipe: str) -> int:
    return sum(array.nbytes for tensors in calibration.recipes[recipe] for array in tensors.values())
