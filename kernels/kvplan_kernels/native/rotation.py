"""The Hadamard rotation on the CPU, compiled: bit for bit `rotation.butterflies`."""

import torch
from torch import Tensor

from kvplan_kernels.native import loader


def rotate(values: Tensor) -> Tensor:
    """Return *values* [..., head_dim] rotated head by head, float32."""
    rotated = values.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if rotated.numel():
        loader.rotate_rows(rotated)
    return rotated
