"""What llama.cpp caches in: the values of `--cache-type-k` and `--cache-type-v`.

From ggml-org/llama.cpp `common/arg.cpp` (kv_cache_types) and `ggml/src/ggml-common.h` (sizes of a block of 32
elements), read 2026-11-30 at 0c1e570. Quantized K came with ggml-org/llama.cpp#4312, quantized V with flash attention
(#7372).
"""

from typing import Final

from kvplan.core.packing import BITS_16, EngineFormat, Packing
from kvplan.engines.engine import find_format

NAME: Final = "llama.cpp"
_SOURCE: Final = "common/arg.cpp, kv_cache_types, and ggml/src/ggml-common.h, 2026-11-30"
BLOCK_ELEMENTS: Final = 32
"""Elements of a block; a head's size is a multiple of it, or no kernel reads the cache."""
_CPU_ONLY: Final = "CUDA and Metal have no attention over it: it runs on the CPU"


def _blocks(name: str, bits: int, group_bits: int, same_as: str = "", like: str = "", why: str = "") -> EngineFormat:
    packing = Packing(bits=bits, group_elements=BLOCK_ELEMENTS, group_bits=group_bits)
    return EngineFormat(
        name=name, key=packing, value=packing, latent=packing, same_as=same_as, like=like, why=why, source=_SOURCE,
        since="May 2024",
    )  # fmt: skip


def _floats(name: str, packing: Packing, same_as: str = "") -> EngineFormat:
    return EngineFormat(name=name, key=packing, value=packing, latent=packing, same_as=same_as, source=_SOURCE)


FORMATS: Final = (
    _floats("f16", BITS_16, same_as="fp16"),
    _floats("bf16", BITS_16, same_as="bf16"),
    _floats("f32", Packing(bits=32)),
    _blocks("q8_0", 8, 16, like="int8"),
    _blocks("q5_1", 5, 32),
    _blocks("q5_0", 5, 16),
    _blocks("q4_1", 4, 32, same_as="k4v4-g32"),
    _blocks("q4_0", 4, 16, like="int4"),
    _blocks("iq4_nl", 4, 16, like="int4", why=_CPU_ONLY),
)


def find_pair(name: str) -> tuple[EngineFormat, EngineFormat]:
    """Return the formats of K and of V that *name* stands for, as `q8_0` or `q8_0/q4_0`.

    Raises:
        UnsupportedFormatError: llama.cpp has no such format.
    """
    first, slash, second = name.removeprefix(f"{NAME}:").partition("/")
    key = find_format(NAME, FORMATS, first)
    return key, find_format(NAME, FORMATS, second) if slash else key
