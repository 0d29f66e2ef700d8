"""Elements that are too large for the codes, kept beside them: dense codes and a sparse rest.

Of each token's elements of one head those of largest magnitude lie beside the codes; the codes hold the token cut at
the magnitude that comes next, and what was cut off is added when it is read (Hooper et al. 2024, KVQuant, arXiv
2401.18079, section 3.4, keeps 1% of each vector in this way, by their values and not by what was cut off).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Outliers:
    """The outliers of tokens.

    Attributes:
        rest: What was cut off, float32 [..., tokens, outliers], the largest element's first.
        channel: int64, of the same shape.
    """

    rest: Tensor
    channel: Tensor


def cut(values: Tensor, count: int) -> tuple[Tensor, Outliers]:
    """Return *values*, float32 [..., tokens, head_dim], without their *count* outliers, and these.

    Of equal magnitudes the first channel's is taken. A token with a NaN or an infinity is left as it is.
    """
    sizes, order = values.abs().sort(dim=-1, descending=True, stable=True)
    sound = values.isfinite().all(-1, keepdim=True)
    most = torch.where(sound, sizes[..., count : count + 1], torch.inf)
    dense = torch.where(values > most, most, torch.where(values < -most, -most, values))
    channel = torch.where(sound, order[..., :count], 0)
    rest = torch.where(sound, (values - dense).gather(-1, channel), 0.0)
    return dense, Outliers(rest=rest, channel=channel)


def restored(dense: Tensor, outliers: Outliers) -> Tensor:
    """Return *dense* with what was cut off."""
    return dense.scatter_add(-1, outliers.channel, outliers.rest)
