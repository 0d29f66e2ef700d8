"""The table of operations."""

from typing import Any, Final

from kvplan_kernels.append.op import APPEND
from kvplan_kernels.decode.op import DECODE
from kvplan_kernels.dequantize.op import DEQUANTIZE
from kvplan_kernels.op import Op

OPS: Final[dict[str, Op[Any]]] = {
    "append": APPEND,
    "decode": DECODE,
    "dequantize": DEQUANTIZE,
}
