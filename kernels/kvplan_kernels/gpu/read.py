"""Reading memory as fast as the device can, to know what the decode kernels could reach."""

from typing import Final

import torch
from torch import Tensor

from kvplan_kernels.gpu import targets
from kvplan_kernels.layout import ceil_div

TILE: Final = 2048
"""Words of one load of a program: 16 bytes for each of 128 lanes, four times."""
TILES: Final = 16


def read_words(words: Tensor) -> Tensor:
    """Return *words*, int32 [count] on a GPU, folded by exclusive or, for each part that one program reads."""
    from kvplan_kernels.gpu import read_kernels  # Triton is slow to import, and not everywhere

    programs = ceil_div(words.numel(), TILE * TILES)
    folds = torch.empty(programs, dtype=torch.int32, device=words.device)
    target = targets.target(words.device)
    target.launch(
        read_kernels.fold_words, (programs,), words, folds, words.numel(), TILE=TILE, TILES=TILES, num_warps=4
    )
    return folds
