"""llama.cpp's row of the table of engines."""

from typing import Final

from kvplan.engines.engine import GGUF, Engine
from kvplan.engines.limits import Limits
from kvplan.engines.llama_cpp import BATCH_TOKENS, RULES, SWA_FULL, UNIFIED, allocate, default_format
from kvplan.engines.llama_cpp_devices import GPU_LAYERS, NO_OFFLOAD, TENSOR_SPLIT
from kvplan.engines.llama_cpp_formats import FORMATS, NAME
from kvplan.engines.llama_cpp_launch import launch

LIMITS: Final = Limits(
    oldest=(0, 5), newest=(0, 5), builds=True, unused={"block_tokens": "keeps cells and has no blocks"},
    options={SWA_FULL: "", UNIFIED: "", NO_OFFLOAD: "", "flash-attn": "off", GPU_LAYERS: "N", TENSOR_SPLIT: "A,B"},
)  # fmt: skip

ENGINE: Final = Engine(
    batched_tokens=BATCH_TOKENS, splits_batches=True, batch_logits=True, reads=frozenset({GGUF}),
    name=NAME, title="llama.cpp", rules=RULES, allocate=allocate, launch=launch, formats=FORMATS,
    default_format=default_format, limits=LIMITS, pairs=True,
    logs=("kvplan.engines.llama_cpp_log", "kvplan.engines.llama_cpp_explain"),
)  # fmt: skip
