"""Reading and writing files so that a bad one is one line to the user and a half-written one never appears."""

import os
import tempfile
from pathlib import Path
from typing import Any, Final

from kvplan.errors import InputError

JSON_BYTES_MAX: Final = 64 * 2**20
"""No model config comes near this; a larger one is not read into memory."""


def file_error(path: Path, error: OSError, doing: str = "read") -> InputError:
    """Return what to tell the user of *error*."""
    if isinstance(error, FileNotFoundError) and doing == "write":
        return InputError("lies in a folder that does not exist", where=str(path), hint="make the folder first")
    if isinstance(error, FileNotFoundError):
        return InputError("no such file", where=str(path))
    if isinstance(error, IsADirectoryError):
        return InputError("is a folder where a file belongs", where=str(path))
    return InputError(f"cannot {doing}: {error.strerror or error}", where=str(path))


def read_file(path: Path, *, limit_bytes: int | None = None) -> bytes:
    """Return the bytes of *path*.

    Raises:
        InputError: It is missing, a folder, unreadable, or larger than *limit_bytes*.
    """
    try:
        if path.is_dir():
            raise InputError("is a folder where a file belongs", where=str(path))
        if limit_bytes is None and path.exists() and not path.is_file():
            raise InputError("is a device or pipe where a file belongs", where=str(path))
        with path.open("rb") as file:
            data = file.read(-1 if limit_bytes is None else limit_bytes + 1)
    except OSError as error:
        raise file_error(path, error) from error
    except ValueError as error:  # a name with a zero byte
        raise InputError(f"{str(path)!r} is no file name") from error
    if limit_bytes is not None and len(data) > limit_bytes:
        raise InputError(f"is larger than {limit_bytes} bytes, too large to be what it should be", where=str(path))
    return data


def read_text(path: Path, *, limit_bytes: int) -> str:
    """Return the text of *path*, which must be UTF-8; a byte order mark is dropped."""
    data = read_file(path, limit_bytes=limit_bytes)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = f"byte {data[error.start]:#04x} is not UTF-8"
        raise InputError(message, where=f"{path}:{line}", hint="save the file as UTF-8") from error


def decode_object(path: Path, data: bytes) -> dict[str, Any]:
    """Return the JSON object that *data*, read from *path*, holds; InputError with the line where it holds none.

    Infinity and NaN are taken: model configs have them.
    """
    import json

    try:
        found = json.loads(data)
    except json.JSONDecodeError as error:
        if not data.strip():
            raise InputError("is empty", where=str(path)) from error
        raise InputError(f"is no JSON: {error.msg}", where=f"{path}:{error.lineno}") from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError("is no JSON: a byte is not UTF-8", where=f"{path}:{line}") from error
    except RecursionError as error:
        raise InputError("is JSON nested too deep", where=str(path)) from error
    except ValueError as error:  # a number of more digits than Python reads
        raise InputError("is no JSON: a number has too many digits", where=str(path)) from error
    if not isinstance(found, dict):
        raise InputError("is JSON but no object", where=str(path))
    return found


def json_error(path: Path, data: bytes, error: Exception) -> InputError:
    """Return what to tell the user of JSON that cannot be read: the line, where *error* names a byte."""
    text = str(error)
    if isinstance(error, RecursionError):
        return InputError("is JSON nested too deep to be what it should be", where=str(path))
    if not data.strip():
        return InputError("is empty", where=str(path))
    if "truncated" in text:
        line = data.count(b"\n") + 1
        return InputError(f"ends in the middle of its JSON, after {len(data)} bytes", where=f"{path}:{line}")
    _, found, tail = text.rpartition("(byte ")
    if found and tail.rstrip(")").isdigit():
        line = data.count(b"\n", 0, int(tail.rstrip(")"))) + 1
        return InputError(text, where=f"{path}:{line}")
    return InputError(text.replace("\n", " "), where=str(path))


def write_atomically(path: Path, data: bytes, *, overwrite: bool = True) -> None:
    """Write *data* to *path*: after a crash or a full disk the old file is there, whole.

    A device or pipe, such as /dev/stdout, is written to as it is.

    Raises:
        InputError: It cannot be written, or exists and *overwrite* is false.
    """
    if path.is_dir():
        raise InputError("is a folder where a file belongs", where=str(path))
    device = path.exists() and not path.is_file()
    if not overwrite and path.exists() and not device:
        raise InputError("exists and would be overwritten", where=str(path), hint="name another file")
    try:
        if device:
            path.write_bytes(data)
        else:
            _write_and_rename(path.resolve() if path.is_symlink() else path, data)
    except OSError as error:
        raise file_error(path, error, "write") from error


def _write_and_rename(path: Path, data: bytes) -> None:
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name[:100]}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(_mode(path))
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _mode(path: Path) -> int:
    """Return the old file's permissions, else a fresh one's: a temporary file has none for others."""
    if path.exists():
        return path.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def sync_folder(folder: Path) -> None:
    """Flush the names in *folder* to disk, where the system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
