"""Published methods by name: what each is in parts, and where it departs from its source.

Standard library only. A method is a name for a format; what is printed is the format's own name.
"""

from dataclasses import dataclass
from typing import Final

_EDGES: Final = "@0,1,-2,-1=bf16"
"""The layers that vLLM leaves in 16 bits in TurboQuant's formats, where a model has no recurrent ones."""
_TURBOQUANT: Final = "Zandieh et al. 2025, TurboQuant, arXiv 2504.19874, as vLLM has it; V is rotated as well"

_KVTUNER: Final = "@".join(
    (
        "kivi-k2v2-g32-r32",
        "0,2=kivi-k8v8-g32-r32",
        "4-5,12,22-25=kivi-k4v4-g32-r32",
        "8,26=kivi-k4v2-g32-r32",
        "11,15,17=kivi-k8v4-g32-r32",
    )
)
_KVQUANT: Final = (
    "Hooper et al. 2024, KVQuant, arXiv 2401.18079: levels by sensitivity, keys by channel, one outlier a token and "
    "head (1% in the paper), one sink, K before RoPE; V's range in each head, no Q-Norm"
)
_KITTY: Final = (
    "Xia et al. 2025, Kitty, arXiv 2511.18643: {share} of the channels of K at 4 bits; keys leave the buffer when the "
    "last of 128 has come, not with the next"
)


@dataclass(frozen=True, slots=True)
class Method:
    """A method.

    Attributes:
        format: The name of the format that it is.
        source: Where it was published, its settings, and what is not as there.
    """

    format: str
    source: str


METHODS: Final = {
    "kivi-2": Method("kivi-paper", "Liu et al. 2024, KIVI, arXiv 2402.02750: groups of 32, residual of 128"),
    "kivi-4": Method("kivi-paper-k4v4-g32-r128", "Liu et al. 2024, KIVI, arXiv 2402.02750, in 4 bits"),
    "kitty": Method("kivi-paper-k2v2-g128-b1-r128-s32", _KITTY.format(share="12.5%")),
    "kitty-pro": Method("kivi-paper-k2v2-g128-b2-r128-s32", _KITTY.format(share="25%")),
    "flexgen-4": Method("k4v4-g64", "Sheng et al. 2023, FlexGen, arXiv 2303.06865: groups of 64 channels"),
    "atom-4": Method("k4v4-g128", "Zhao et al. 2023, Atom, arXiv 2310.19102: groups of 128 channels"),
    "quarot-4": Method("had-k4v4-g128-c95", "Ashkboos et al. 2024, QuaRot, arXiv 2404.00456: clipped to 0.95"),
    "spinquant-4": Method("had-k4v4-g128", "Liu et al. 2024, SpinQuant, arXiv 2405.16406: its rotation R3"),
    "qserve-4": Method("smooth-int4", "Lin et al. 2024, QServe, arXiv 2405.04532: SmoothAttention, per token and head"),
    "skvq-2": Method(
        "prerope-order-k2v2-g32-me4m3-c96-r128-s5",
        "Duanmu et al. 2024, SKVQ, arXiv 2405.06219: K before RoPE, FP8 scale and minimum; groups of 32, since "
        "channels are ordered within a head, clipped to 0.96 everywhere",
    ),
    "smoothquant-kv8": Method(
        "scaled-tensor-static-int8",
        "Xiao et al. 2023, SmoothQuant, arXiv 2211.10438: static, one calibrated scale for K and one for V of a layer",
    ),
    **{
        f"kvquant-{bits}": Method(f"prerope-scaled-channel-static-nuq{bits}/nuq{bits}-o1-s1", _KVQUANT)
        for bits in (4, 3, 2)
    },
    "diffkv-high": Method("k8v4-r64", "Zhang et al. 2024, LeanKV/DiffKV, arXiv 2412.03131: the high tier alone"),
    "diffkv-low": Method("k4v2-r64", "Zhang et al. 2024, LeanKV/DiffKV, arXiv 2412.03131: the low tier alone"),
    "diffkv": Method(
        "tiers-25-k8v4+50-k4v2",
        "Zhang et al. 2024, LeanKV/DiffKV, arXiv 2412.03131: both tiers and a window of 64, with fixed shares in the "
        "place of its thresholds, which are fitted to a model",
    ),
    "h2o": Method(
        "tiers-sum-20-16bit",
        "Zhang et al. 2023, H2O, arXiv 2306.14048: the 20% that received most, and a window of 64 tokens in the place "
        "of one that is half of the budget",
    ),
    "snapkv": Method(
        "tiers-once-w32-25-16bit",
        "Li et al. 2024, SnapKV, arXiv 2404.14469: window of 32, largest of 7 neighbours, a share of the prompt in the "
        "place of a number of tokens, one choice for the query heads of a KV head",
    ),
    "vllm:int8_per_token_head": Method("sym-int8-mfp32", "vLLM, int8_per_token_head: symmetric, an fp32 scale"),
    "kvtuner-qwen2.5-7b": Method(
        _KVTUNER,
        "Li et al. 2025, KVTuner, arXiv 2502.04420: its preset KVTuner4_1 for Qwen2.5-7B-Instruct of 28 layers, in "
        "KIVI's mode; cmd2001/KVTuner, calibration_presets",
    ),
    "turboquant-k8v4": Method(f"fp8_e4m3/int4{_EDGES}", "TurboQuant's format of least loss in vLLM, turboquant_k8v4"),
    "turboquant-4": Method(f"had-lloyd4/int4{_EDGES}", _TURBOQUANT),
    "turboquant-k3v4": Method(f"had-lloyd3/int4{_EDGES}", _TURBOQUANT),
    "turboquant-3": Method(f"had-lloyd3/int3{_EDGES}", _TURBOQUANT),
}
"""Every method by name; those whose format has an @ are of a model's layers."""
