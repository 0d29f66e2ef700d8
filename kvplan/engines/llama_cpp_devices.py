"""Where llama.cpp keeps the cache of each layer: on the device that has the layer, or in main memory.

From `llama_model_base::load_tensors` (src/llama-model.cpp of ggml-org/llama.cpp at 0c1e570, read 2026-11-30). Counted
with the output as one layer more, the last `--gpu-layers` are on devices, split as `--tensor-split` says.
"""

from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import ceil
from typing import Final

from kvplan.core.allocation import Setup
from kvplan.core.specs import ModelSpec
from kvplan.errors import UnsupportedSettingError

GPU_LAYERS: Final = "gpu-layers"
TENSOR_SPLIT: Final = "tensor-split"
NO_OFFLOAD: Final = "no-kv-offload"


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Which layers cache where, by their number; those that draft go on after the model's.

    Attributes:
        devices: Layers of each device.
        main_memory: Layers whose cache is in main memory.
    """

    devices: tuple[tuple[int, ...], ...]
    main_memory: tuple[int, ...]


def placed(model: ModelSpec, setup: Setup) -> Placement:
    """Return where the layers of *model* cache.

    Raises:
        UnsupportedSettingError: An option of that cannot be, more devices than layers, or tensor parallelism.
    """
    if setup.tensor_parallel > 1:
        message = "llama.cpp gives each device whole layers; its split of heads (--split-mode tensor) is not known here"
        raise UnsupportedSettingError(message, where="--tp", hint="count the devices with --pp")
    ends = _ends(model, setup)
    every = len(model.layers) + len(model.draft_layers) + 1
    on_devices = _gpu_layers(setup, every)
    first = every - on_devices
    borders = [ceil(end * on_devices) for end in ends]
    devices: list[list[int]] = [[] for _ in ends]
    main_memory: list[int] = []
    for index in range(len(model.layers) + (len(model.draft_layers) if setup.draft_tokens else 0)):
        if index < first or NO_OFFLOAD in setup.options:
            main_memory.append(index)
        else:
            devices[sum(border <= index - first for border in borders)].append(index)
    return Placement(devices=tuple(map(tuple, devices)), main_memory=tuple(main_memory))


def _gpu_layers(setup: Setup, every: int) -> int:
    asked = setup.option(GPU_LAYERS)
    if asked is None or asked == "all":
        return every
    if not asked.isdecimal():
        message = f"{GPU_LAYERS}={asked[:20]} is no number of layers"
        raise UnsupportedSettingError(message, where="--engine-option", hint="give a number, or all")
    return min(int(asked), every)


def _ends(model: ModelSpec, setup: Setup) -> list[Fraction]:
    """Return where the part of each device ends, of 1."""
    asked = setup.option(TENSOR_SPLIT)
    parts = [Fraction(1)] * setup.pipeline_parallel if asked is None else _parts(asked)
    if setup.pipeline_parallel not in (1, len(parts)):
        message = f"{TENSOR_SPLIT}={asked} is of {len(parts)} devices, not of {setup.pipeline_parallel}"
        raise UnsupportedSettingError(message, where="--pp", hint="leave one out")
    if len(parts) > len(model.layers):
        message = f"{len(parts)} devices for {len(model.layers)} layers"
        raise UnsupportedSettingError(message, where="--pp", hint="give at most a device a layer")
    return [end / sum(parts) for end in accumulate(parts)]


def _parts(text: str) -> list[Fraction]:
    try:
        parts = [Fraction(part) for part in text.replace("/", ",").split(",")]
    except ValueError:
        parts = []
    if not parts or min(parts) < 0 or not sum(parts):
        message = f"{TENSOR_SPLIT}={text[:40]} is no list of parts"
        raise UnsupportedSettingError(message, where="--engine-option", hint="write it as 3,1")
    return parts
