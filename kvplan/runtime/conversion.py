"""GGUF files, converted once to what loads in a second: the library takes a dozen to parse and dequantize one."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from hashlib import sha256
from io import StringIO
from pathlib import Path
from typing import Any

from kvplan.core.specs import ModelSpec
from kvplan.errors import InputError, MissingPartError, UnsupportedModelError
from kvplan_kernels.cache import TORCH_FLOAT


def cache_root() -> Path:
    """Return the folder for what kvplan can make again: $XDG_CACHE_HOME/kvplan, else ~/.cache/kvplan."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "kvplan"


def converted_folder(path: Path, spec: ModelSpec, *, keep: bool = True) -> Path:
    """Return a folder with config, safetensors and tokenizer of the GGUF file *path*, converting it if need be.

    A conversion belongs to one state of one file: path, size and time of change are part of its name. With *keep*
    false it goes to a temporary folder, which is left to the system to clean.

    Raises:
        InputError: The file is damaged, or the cache folder cannot be written.
        UnsupportedModelError: The library knows no such architecture or weight type in GGUF.
        MissingPartError: The packages that read GGUF are not installed.
    """
    if not keep:
        folder = Path(tempfile.mkdtemp(prefix="kvplan-"))
        _convert(path, spec, folder)
        return folder
    target = cache_root() / _conversion_name(path, spec)
    if target.exists():
        return target
    try:
        with _scratch(target) as scratch:
            _convert(path, spec, scratch)
            _publish(scratch, target)
    except OSError as error:
        raise InputError(
            f"the converted model cannot be kept: {error}", where=str(target), hint="set XDG_CACHE_HOME elsewhere"
        ) from error
    return target


def _conversion_name(path: Path, spec: ModelSpec) -> str:
    import transformers

    state = path.stat()
    parts = (
        spec.digest,
        str(path.resolve()),
        state.st_size,
        state.st_mtime_ns,
        spec.float_type,
        transformers.__version__,
    )
    return sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]


@contextmanager
def _scratch(target: Path) -> Iterator[Path]:
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=target.name + ".", dir=target.parent))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _publish(scratch: Path, target: Path) -> None:
    """Give the finished conversion its name; where another process was first, its conversion is as good."""
    whole = scratch.with_name(scratch.name + ".whole")
    scratch.rename(whole)
    try:
        whole.rename(target)
    except OSError:
        shutil.rmtree(whole)
        if not target.exists():
            raise


def _convert(path: Path, spec: ModelSpec, folder: Path) -> None:
    try:
        import accelerate  # noqa: F401 - the library needs both and fails late without them
        import gguf  # noqa: F401
    except ImportError as error:
        raise MissingPartError(
            f"reading GGUF weights takes {error.name}, which is not installed", hint="pip install 'kvplan[profile]'"
        ) from error
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"gguf_file": path.name, "local_files_only": True, "trust_remote_code": False}
    try:
        with quiet(), redirect_stderr(StringIO()):  # one of its progress bars cannot be turned off
            model, report = AutoModelForCausalLM.from_pretrained(
                path.parent,
                dtype=TORCH_FLOAT[spec.float_type],
                output_loading_info=True,
                **_dense_weights(),
                **options,
            )
            check_complete(path, report)
            AutoTokenizer.from_pretrained(path.parent, **options).save_pretrained(folder)
            model.save_pretrained(folder)
    except (ValueError, KeyError, IndexError, OSError) as error:
        line = str(error).strip().partition("\n")[0]
        raise UnsupportedModelError(f"transformers cannot read {path}: {line}") from error


def _dense_weights() -> dict[str, object]:
    """Return the argument that asks for plain weights: since it has kernels for packed ones, they are the default."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def check_complete(path: Path, report: dict[str, Any]) -> None:
    """Refuse a model some of whose weights are in no file: the library would fill them with random numbers."""
    missing = sorted(report["missing_keys"])
    if missing:
        raise InputError(f"{len(missing)} weights are not there: {missing[0]}", where=str(path))


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the library's progress bars and notes off the terminal; errors still come as exceptions."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
