"""What vLLM caches in: the values of `--kv-cache-dtype`.

From vllm-project/vllm `vllm/config/cache.py` (CacheDType), `vllm/v1/kv_cache_interface.py` (bytes of a page) and
`vllm/model_executor/layers/quantization/turboquant/config.py`, read 2026-11-30 at 0.28 and at 001cabc.
"""

from typing import Final

from kvplan.core.packing import BITS_16, EngineFormat, Packing

_CACHE: Final = "vllm/config/cache.py, CacheDType, 2026-11-30"
_PAGES: Final = "vllm/v1/kv_cache_interface.py, real_page_size_bytes, 2026-11-30"
_TURBOQUANT: Final = "vllm/model_executor/layers/quantization/turboquant/config.py, 2026-11-30"

_BYTE: Final = Packing(bits=8)
_SCALED_8: Final = Packing(bits=8, vector_bits=32)
_SCALED_4: Final = Packing(bits=4, vector_bits=32)
"""With a float32 scale a head and token."""
_E4M3_NEEDS: Final = "Triton and FlashInfer convert E4M3 from compute capability 8.9 on (vllm-project/vllm#26431)"
SPARSE_LATENT: Final = "fp8_ds_mla"
"""Of sparse MLA in 8 bits: 512 E4M3 with a float32 scale for each 128, and 64 bf16 that carry the position."""

BOUNDARY_LAYERS: Final = 2
"""Layers at either end that TurboQuant leaves in 16 bits in models without recurrent layers."""


def _turboquant(name: str, key: Packing, value: Packing) -> EngineFormat:
    return EngineFormat(name=name, key=key, value=value, source=_TURBOQUANT)


FORMATS: Final = (
    EngineFormat(
        name="bf16", key=BITS_16, value=BITS_16, latent=BITS_16, aliases=("bfloat16",), since="0.1",
        source=_CACHE,
    ),
    EngineFormat(
        name="fp16", key=BITS_16, value=BITS_16, latent=BITS_16, aliases=("float16", "half"), since="0.1",
        source=_CACHE,
    ),
    EngineFormat(
        name="fp8_e4m3", key=_BYTE, value=_BYTE, latent=_BYTE, same_as="fp8_e4m3", aliases=("fp8", "fp8_inc"),
        capability=89, why=_E4M3_NEEDS, since="0.4.1", source=_CACHE,
    ),
    EngineFormat(
        name="fp8_e5m2", key=_BYTE, value=_BYTE, latent=_BYTE,
        since="0.3", source=_CACHE,
    ),
    EngineFormat(
        name=SPARSE_LATENT, key=_BYTE, value=_BYTE,
        latent=Packing(bits=8, group_elements=128, group_bits=32), latent_rope=BITS_16, capability=90,
        why="FlashMLA's sparse kernels need it", since="0.11", source=_PAGES,
    ),
    EngineFormat(
        name="int8_per_token_head", like="int8", key=_SCALED_8, value=_SCALED_8,
        source=_PAGES,
    ),
    EngineFormat(
        name="fp8_per_token_head", like="fp8_e4m3", key=_SCALED_8, value=_SCALED_8,
        capability=89, why=_E4M3_NEEDS, source=_PAGES,
    ),
    EngineFormat(
        name="int4_per_token_head", like="int4", key=_SCALED_4, value=_SCALED_4,
        source=_CACHE,
    ),
    EngineFormat(
        name="nvfp4", key=Packing(bits=4, group_elements=16, group_bits=8),
        value=Packing(bits=4, group_elements=16, group_bits=8), capability=100,
        why="FlashInfer's NVFP4 attention is for Blackwell", source=_PAGES,
    ),
    _turboquant("turboquant_k8v4", Packing(bits=8), Packing(bits=4, vector_bits=32)),
    _turboquant("turboquant_4bit_nc", Packing(bits=4, vector_bits=16), Packing(bits=4, vector_bits=32)),
    _turboquant("turboquant_k3v4_nc", Packing(bits=3, vector_bits=16), Packing(bits=4, vector_bits=32)),
    _turboquant("turboquant_3bit_nc", Packing(bits=3, vector_bits=16), Packing(bits=3, vector_bits=32)),
)  # fmt: skip
