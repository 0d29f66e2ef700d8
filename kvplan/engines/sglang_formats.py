"""What SGLang caches in: the values of `--kv-cache-dtype`.

From PyPI `sglang` 0.4.6.post5, 0.5.5, 0.5.9, 0.5.15, 0.5.16 and 0.5.23 (2026-10-30), read 2026-11-30: the choices in
`srt/arg_groups/fields/model.py` (before 0.5.16 `srt/server_args.py`), the tensors in `srt/mem_cache/memory_pool.py` and
the devices in `srt/arg_groups/kv_cache_hook.py`.
"""

from typing import Final

from kvplan.core.packing import BITS_16, EngineFormat, Packing
from kvplan.engines.engine import stated_type

NAME: Final = "sglang"
_CHOICES: Final = "srt/arg_groups/fields/model.py, kv_cache_dtype, sglang 0.5.23, 2026-10-30"
_POOLS: Final = "srt/mem_cache/memory_pool.py and srt/arg_groups/kv_cache_hook.py, sglang 0.5.23, 2026-10-30"

_BYTE: Final = Packing(bits=8)
_FP4: Final = Packing(bits=4, group_elements=16, group_bits=8)
_MXFP8: Final = Packing(bits=8, group_elements=32, group_bits=8)
SPARSE_LATENT: Final = Packing(bits=8, group_elements=128, group_bits=32)
"""What sparse MLA stores of a latent vector in fp8_e4m3, beside 16 bits for the position."""
FP4_NAMES: Final = ("nvfp4", "fp4_mx_block16")
_BLACKWELL: Final = "block-scaled operands are Blackwell's"

FORMATS: Final = (
    EngineFormat(
        name="bf16", key=BITS_16, value=BITS_16, latent=BITS_16, aliases=("bfloat16",), since="0.1",
        source=_CHOICES,
    ),
    EngineFormat(
        name="fp16", key=BITS_16, value=BITS_16, latent=BITS_16, aliases=("float16",), since="0.1", source=_CHOICES,
    ),
    EngineFormat(
        name="fp8_e4m3", key=_BYTE, value=_BYTE, latent=_BYTE, same_as="fp8_e4m3", capability=89,
        why="Triton and FlashInfer convert E4M3 from compute capability 8.9 on", since="0.4", source=_CHOICES,
    ),
    EngineFormat(
        name="fp8_e5m2", key=_BYTE, value=_BYTE, latent=_BYTE, capability=80,
        why="its kernels are written for Ampere and later", since="0.3", source=_CHOICES,
    ),
    EngineFormat(
        name="mxfp8", key=_MXFP8, value=_MXFP8, capability=100, why=_BLACKWELL, since="0.5.16", source=_POOLS,
    ),
    EngineFormat(name="nvfp4", key=_FP4, value=_FP4, capability=100, why=_BLACKWELL, since="0.5.16", source=_POOLS),
    EngineFormat(
        name="fp4_mx_block16", key=_FP4, value=_FP4, latent=_FP4, aliases=("fp4_e2m1",), since="0.5.5", source=_POOLS,
    ),
)  # fmt: skip

default_format: Final = stated_type({"modelopt": {"fp8_e4m3": "fp8_e4m3"}})
"""What `auto` is (sglang `kv_cache_dtype.py`, `configure_kv_cache_dtype`, main of 2026-11): FP8 that Model Optimizer's
checkpoints name, else the run's type."""
