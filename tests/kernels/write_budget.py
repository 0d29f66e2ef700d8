"""Write `inspect_budget.json`, the figures that the tests hold the compiled GPU kernels to.

Run `make budget` after a kernel got better, or where one must get worse for a reason worth telling in the commit. Every
figure comes out of `kvplan kernels inspect --json`; no GPU is needed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

BUDGET: Final = Path(__file__).parent / "inspect_budget.json"
SHAPE: Final = ("gqa", "queries", "query_type", "softcap", "positions")
NAMES: Final = ("op", "kernel", "tensor", "format", "arch")
FIGURES: Final = (
    "tile_tokens", "warps", "registers", "spills", "loop_spills", "shared_bytes", "instructions_per_element",
    "int_to_float", "load_bytes", "tensor_core_instructions",
)  # fmt: skip
_ELSEWHERE: Final = ("--arch", "sm_80,sm_89,sm_100,sm_120,gfx942")
_COMMON: Final = tuple(
    option for name in ("fp8_e4m3", "int8", "int4", "int2", "kivi-k4v4-g64") for option in ("-f", name)
)
_STORED: Final = tuple(
    option
    for name in (
        "int3", "k6v6", "nvfp4", "mxfp4", "lloyd4", "llama.cpp:q8_0", "llama.cpp:q5_1", "fp8_e5m2", "nuq4", "nuq3",
        "static-int8", "int4-g64-o1", "kivi-k2v2-g64-b1-r128", "prerope-int4",
    )
    for option in ("-f", name)
)  # fmt: skip
_BOTH: Final = ("-f", "int4", "-f", "kivi-k4v4-g64")

QUICK: Final[tuple[tuple[str, ...], ...]] = (
    ("--arch", "sm_90", *_COMMON),
    ("--arch", "sm_90", "-f", "int4", "--op", "append"),
    ("--arch", "gfx942", "-f", "int4"),
)
"""Arguments of the command whose kernels `make test` compiles."""

ALL: Final[tuple[tuple[str, ...], ...]] = (
    ("--arch", "sm_90"),
    ("--arch", "sm_90", *_STORED),
    ("--arch", "sm_90", "--op", "append", "-f", "int3", "-f", "nvfp4"),
    ("--arch", "sm_80,sm_100,sm_120", "-f", "int3", "-f", "nvfp4"),
    ("--arch", "sm_90", "--op", "append", *_COMMON),
    ("--arch", "sm_90", "--op", "dequantize", *_COMMON),
    ("--arch", "sm_90", "--op", "received", *_COMMON),
    ("--arch", "sm_90", "--queries", "8", "-f", "bf16", *_COMMON),
    ("--arch", "sm_90", *_BOTH, "--gqa", "1"),
    ("--arch", "sm_90", *_BOTH, "--gqa", "8"),
    ("--arch", "sm_90", *_BOTH, "--query-type", "fp32"),
    ("--arch", "sm_90", "-f", "int4", "--softcap", "30", "--positions", "--queries", "4"),
    ("-f", "int4", "--op", "read"),
    (*_ELSEWHERE, "-f", "bf16", *_COMMON),
    (*_ELSEWHERE, "-f", "int4", "--queries", "8"),
    (*_ELSEWHERE, "-f", "int4", "--op", "append"),
    (*_ELSEWHERE, "-f", "int4", "--op", "dequantize"),
    (*_ELSEWHERE, "-f", "int4", "--op", "received"),
)
"""Arguments of the command whose kernels the budget holds; what `QUICK` asks for is among it."""


def inspect(*arguments: str) -> list[dict[str, Any]]:
    """Return the kernels that the command prints.

    Raises:
        RuntimeError: The command failed; its message is the command's.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kvplan", "kernels", "inspect", "--json", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    kernels: list[dict[str, Any]] = json.loads(done.stdout)["kernels"]
    return kernels


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what tells a kernel from others: its names and the call's shape."""
    shape = row.get("shape", row)
    return tuple(row[name] for name in NAMES) + tuple(shape[name] for name in SHAPE)


def row(kernel: dict[str, Any]) -> dict[str, Any]:
    """Return a kernel as a row of the budget."""
    found = dict(zip((*NAMES, *SHAPE), key(kernel), strict=True)) | {name: kernel[name] for name in FIGURES}
    return found | {"instructions_per_element": _rounded(kernel["instructions_per_element"])}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def main() -> int:
    """Write the budget; return the exit status."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for arguments in ALL:
        sys.stdout.write(f"kvplan kernels inspect {' '.join(arguments)}\n")
        sys.stdout.flush()
        for kernel in inspect(*arguments):
            if not kernel["unsupported"]:
                rows[key(kernel)] = row(kernel)
        BUDGET.write_text("[\n" + ",\n".join(map(json.dumps, rows.values())) + "\n]\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
