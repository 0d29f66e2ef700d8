"""Data that kvplan ships: the demo model, text to score a model on, and workloads. No code beyond finding it."""

from importlib.resources import as_file, files
from importlib.resources.abc import Traversable
from pathlib import Path

__all__ = [
    "calibration_text",
    "demo_model_path",
    "demo_retrieval_path",
    "held_out_text",
    "workload_path",
]

_DATA: Traversable = files(__name__)


def demo_model_path() -> Path:
    """Folder of the demo model, as `from_pretrained` of transformers takes it."""
    return _on_disk("demo")


def demo_retrieval_path() -> Path:
    """JSON file with the strings that the demo model's retrieval trials are made of."""
    return _on_disk("demo/retrieval.json")


def held_out_text() -> str:
    """Python documentation that the demo model never saw, 112 thousand characters; models are scored on it."""
    return _text("text/python_topics_heldout.txt")


def calibration_text() -> str:
    """Python documentation, 27 thousand characters, to choose settings on; never scored and never trained on."""
    return _text("text/python_topics_calibration.txt")


def workload_path(name: str) -> Path:
    """File of a workload that ships with kvplan, such as `demo`."""
    return _on_disk(f"workloads/{name}.yaml")


def _text(name: str) -> str:
    return _DATA.joinpath(name).read_text(encoding="utf-8")


def _on_disk(name: str) -> Path:
    """Path of a resource; kvplan is installed unpacked, so the path stays valid."""
    with as_file(_DATA.joinpath(name)) as path:
        return path
