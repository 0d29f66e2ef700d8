"""What an error of torch, Triton or CUDA means for a cell, and which line of what a dead process wrote names it."""

import re
import sys
from typing import Any, Final

from kvplan.core.records import CellStatus
from kvplan.errors import DoesNotFitError, KvplanError, MismatchError, NotRecordedError, UnsupportedFormatError
from kvplan_kernels.format import UnsupportedError

FAULT: Final = 1
"""What a measuring process that met a fault returns."""

_OUT_OF_MEMORY_TEXTS: Final = (
    "not enough memory", "can't allocate memory", "cannot allocate memory", "bad_alloc",
    "out of memory", "error_out_of_memory", "status_alloc_failed",
)  # fmt: skip
"""How torch and libc word it inside a RuntimeError; then CUDA through torch and Triton, its driver, and its libraries.
torch has a class of its own for what its allocator refuses, and it is a RuntimeError that says so too. A CUDA context
outlives all of them."""
_TOO_MANY_RESOURCES: Final = "too many resources requested for launch"
"""CUDA's text for a kernel that takes more registers than there are (CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES)."""
_CAPTURE_LOST: Final = "previous error during capture"
"""CUDA's text where the recording of a graph ends after an error: the one before says what happened."""

_ADVICE: Final = re.compile(
    r"Search for `|GPU device may be out of range|For more detailed error information|CUDA kernel errors might"
    r"|For debugging consider|Compile with `|Device-side assertion|Exception raised from |frame #\d+"
)
"""Lines that torch writes after the one that names an error (c10/cuda/CUDAException.cpp and CUDAMiscFunctions.cpp of
PyTorch 2.13, c10/util/Exception.h)."""
_ALLOCATOR: Final = re.compile(r"\w+ out of memory\. Tried to allocate .*? is free\.", re.DOTALL)
"""What of the allocator's long line tells how much was wanted and how much there is."""
_WHAT: Final = re.compile(r"^what\(\):\s*")
"""The C++ runtime's mark before the text of an exception that nobody caught."""


def outcome(error: Exception) -> CellStatus | None:
    """Return what *error* means for a cell; None where it is a fault, after which the process is not to be trusted.

    Every error of CUDA's but those about memory and resources is a fault: after an illegal access, a launch that timed
    out, an assertion on the device or an ECC error, all that the process asks of the GPU fails alike.
    """
    error = _cause(error)
    if isinstance(error, UnsupportedError | UnsupportedFormatError) or _needs(error):
        return CellStatus.UNSUPPORTED
    if isinstance(error, MismatchError | NotRecordedError):
        return CellStatus.FAILED
    if isinstance(error, MemoryError | DoesNotFitError):
        return CellStatus.OUT_OF_MEMORY
    text = str(error).lower()
    said = isinstance(error, RuntimeError) and any(one in text for one in _OUT_OF_MEMORY_TEXTS)
    return CellStatus.OUT_OF_MEMORY if said else None


def user_error(error: Exception) -> KvplanError | None:
    """Return what to tell a user whose command met *error*; None where it is a fault of kvplan's or the machine's."""
    kinds: dict[CellStatus | None, type[KvplanError]] = {
        CellStatus.OUT_OF_MEMORY: DoesNotFitError, CellStatus.UNSUPPORTED: UnsupportedFormatError,
    }  # fmt: skip
    kind = kinds.get(outcome(error))
    return kind(told(error) or "memory ran out") if kind else None


def told(error: Exception) -> str:
    """Return what *error* says, in one line, without the advice that torch adds."""
    error = _cause(error)
    if needs := _needs(error):
        return needs
    text = str(getattr(error, "error_message", None) or error)  # Triton's str shows the kernel's source first
    if match := _ALLOCATOR.search(text):
        return " ".join(match[0].split())
    return next((line.strip() for line in text.splitlines() if _says(line)), "")


def last_words(error: Exception) -> str:
    """Return the line that names *error*, as a traceback ends."""
    kind, text = type(_cause(error)), told(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{name}: {text}" if text else name


def telling_line(written: str) -> str:
    r"""Return the last line of *written* that says something: torch's advice and C++ frames do not.

    >>> telling_line("torch.AcceleratorError: CUDA error: misaligned address\nCompile with `TORCH_USE_CUDA_DSA` to …")
    'torch.AcceleratorError: CUDA error: misaligned address'
    """
    lines = [line for line in written.splitlines() if _says(line)]
    return _WHAT.sub("", lines[-1].strip()) if lines else ""


def _says(line: str) -> bool:
    return bool(line.strip()) and not _ADVICE.match(line.strip())


def _cause(error: Exception) -> Exception:
    """Return the error that ended the recording of a graph, where *error* only says that it ended."""
    while _CAPTURE_LOST in str(error) and isinstance(error.__context__, Exception):
        error = error.__context__
    return error


def _needs(error: Any) -> str:
    """Return what a kernel takes too much of for this GPU; empty where *error* is another."""
    # Whoever can raise it has imported it; on machines without Triton there is nothing to import.
    out_of_resources = getattr(sys.modules.get("triton.runtime.errors"), "OutOfResources", ())
    if isinstance(error, out_of_resources):
        return f"the kernel needs {error.required} of {error.name}, the GPU has {error.limit}"
    if isinstance(error, RuntimeError) and _TOO_MANY_RESOURCES in str(error):
        return "the kernel needs more registers or threads than the GPU has"
    return ""
