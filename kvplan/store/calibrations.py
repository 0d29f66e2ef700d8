"""Calibration files: what formats have learned of a model, as a safetensors file that holds numbers and no code.

A tensor is called layer.<layer>.<recipe>.<name>: formats whose names give the same recipe share what was learned.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvplan.core.specs import ModelSpec
from kvplan.errors import InputError
from kvplan.store.files import read_file, write_atomically
from kvplan.store.safetensors import read_safetensors_header
from kvplan_kernels.layer_formats import ModelFormat

SCHEMA: Final = 1
SUFFIX: Final = ".calibration.safetensors"
_KIND: Final = "kvplan calibration"
_WINDOWS: Final = "windows"
_FACTS: Final = ("model", "model_digest", "data_digest", "created")
_BYTES_MAX: Final = 1 << 32

Array = NDArray[Any]
Learned = Mapping[str, Array]
"""Tensors of one layer by name."""

_OVERWRITE: Final = "give --force to overwrite it, or another -o"
_LEARNS: Final = "leave it out, or ask for one that does, as unbias-int4"


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Calibration:
    """What formats have learned of one model.

    Attributes:
        model: As the user named it.
        model_digest: Of the model's spec.
        data_digest: SHA-256 of the token ids that were read.
        created: UTC, ISO 8601.
        versions: Of kvplan and of what else shaped the numbers.
        windows: int64: hashes of stretches of the text, so that scoring can tell whether it scores any of it.
        recipes: By `recipe_names`, the tensors of each layer.
    """

    model: str
    model_digest: str
    data_digest: str
    created: str
    versions: Mapping[str, str]
    windows: Array
    recipes: Mapping[str, Sequence[Learned]]

    def kept(self, before: "Calibration") -> "Calibration":
        """Return this with what *before* has of the same model and text, and this has not."""
        return replace(self, recipes={**before.recipes, **self.recipes})

    def digest(self, form: ModelFormat) -> str:
        """Return the SHA-256 of what *form* has learned."""
        digest = sha256()
        for recipe in recipe_names(form):
            for layer, tensors in enumerate(self.recipes[recipe]):
                for name, array in sorted(tensors.items()):
                    digest.update(f"{layer}.{recipe}.{name} {array.dtype} {array.shape}".encode() + array.tobytes())
        return digest.hexdigest()


def learned_digest(form: ModelFormat, calibration: Calibration | None) -> str:
    """Return the SHA-256 of what *form* has learned; empty where it learns nothing."""
    return "" if calibration is None or not form.calibrated else calibration.digest(form)


def recipe_names(form: ModelFormat) -> tuple[str, ...]:
    """Return what *form* learns, by name.

    >>> from kvplan_kernels.format import parse
    >>> recipe_names(parse("unbias-smooth-had-int4"))
    ('unbias', 'unbias-smooth')
    """
    names = ("-".join(part.recipe(lesson)) for part in form.parts for lesson in part.calibrated)
    return tuple(dict.fromkeys(names))


def calibration_path(model: str) -> Path:
    """Return the file in the current folder that a model's calibration is written to and looked for by default.

    >>> str(calibration_path("Qwen/Qwen2.5-7B"))
    'Qwen2.5-7B.calibration.safetensors'
    """
    return Path(Path(model).name + SUFFIX)


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Write *calibration* to *path*, whole or not at all.

    Raises:
        InputError: It cannot be written.
    """
    from safetensors.numpy import save

    tensors = {
        f"layer.{layer}.{recipe}.{name}": np.ascontiguousarray(array)
        for recipe, layers in calibration.recipes.items()
        for layer, learned in enumerate(layers)
        for name, array in learned.items()
    }
    facts = {name: getattr(calibration, name) for name in _FACTS}
    metadata = {"kind": _KIND, "schema": str(SCHEMA), "versions": json.dumps(dict(calibration.versions)), **facts}
    write_atomically(path, save(tensors | {_WINDOWS: calibration.windows}, metadata=metadata))


def load_calibration(path: Path, spec: ModelSpec) -> Calibration:
    """Return the calibration of *spec* that *path* holds.

    Raises:
        InputError: It is no calibration file, is damaged, was written by another version, or is of another model.
    """
    read_safetensors_header(path)  # says what is wrong with a file that is cut short
    metadata, tensors = _read(path)
    if metadata.get("kind") != _KIND:
        raise InputError("is no calibration", where=str(path), hint="`kvplan calibrate` writes one")
    if metadata.get("schema") != str(SCHEMA):
        message = f"calibration of schema {metadata.get('schema')}; this kvplan reads {SCHEMA}"
        raise InputError(message, where=str(path), hint=_again(spec))
    try:
        facts = {name: metadata[name] for name in _FACTS}
        windows = tensors.pop(_WINDOWS)
        versions = {str(name): str(value) for name, value in json.loads(metadata["versions"]).items()}
        recipes = _recipes(tensors, len(spec.layers))
    except (KeyError, ValueError, AttributeError) as error:
        raise InputError(f"is a damaged calibration: {error}", where=str(path), hint=_again(spec)) from error
    if facts["model_digest"] != spec.digest:
        message = f"was learned from another model than {spec.name}: {facts['model']}, {facts['model_digest'][:12]}"
        raise InputError(message, where=str(path), hint=_again(spec))
    return Calibration(windows=windows, versions=versions, recipes=recipes, **facts)


def load_earlier(path: Path, spec: ModelSpec, *, data_digest: str, versions: Mapping[str, str]) -> Calibration | None:
    """Return what *path* holds, to be kept beside what is learned from the same text; None where there is no file.

    Raises:
        InputError: It is something else, which would be lost.
    """
    if not path.exists():
        return None
    try:
        before = load_calibration(path, spec)
    except InputError as error:
        raise InputError(error.message, where=str(path), hint=_OVERWRITE) from error
    if before.data_digest != data_digest or before.versions != versions:
        what = "from other text" if before.data_digest != data_digest else "by other versions of kvplan or its packages"
        raise InputError(f"was learned {what}", where=str(path), hint=_OVERWRITE)
    return before


def find_calibration(spec: ModelSpec, forms: Iterable[ModelFormat], path: Path | None) -> Calibration | None:
    """Return what *forms* have learned of *spec*: from *path*, else the default file; None where there is none.

    No file is read where no format learns anything.

    Raises:
        InputError: *path* is not there or for no format, or either file is not a calibration of the model.
    """
    if not any(form.calibrated for form in forms):
        if path is not None:
            raise InputError("no format that is asked for learns from the model", where="--calibration", hint=_LEARNS)
        return None
    found = path or calibration_path(spec.name)
    return load_calibration(found, spec) if path is not None or found.exists() else None


def _again(spec: ModelSpec) -> str:
    return f"learn again with `kvplan calibrate {spec.name} -f FORMAT`"


def _read(path: Path) -> tuple[dict[str, str], dict[str, Array]]:
    from safetensors import SafetensorError, safe_open
    from safetensors.numpy import load

    try:
        with safe_open(str(path), "numpy") as file:
            metadata = file.metadata() or {}
        return dict(metadata), load(read_file(path, limit_bytes=_BYTES_MAX))
    except (SafetensorError, KeyError) as error:
        raise InputError(f"is no safetensors file: {str(error).partition(chr(10))[0]}", where=str(path)) from error


def _recipes(tensors: Mapping[str, Array], layers: int) -> dict[str, list[dict[str, Array]]]:
    recipes: dict[str, list[dict[str, Array]]] = {}
    for full, array in tensors.items():
        word, layer, recipe, name = full.split(".")
        if word != "layer" or not 0 <= int(layer) < layers:
            raise ValueError(f"tensor {full!r}")
        recipes.setdefault(recipe, [{} for _ in range(layers)])[int(layer)][name] = array
    return recipes
