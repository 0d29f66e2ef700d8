"""The weights of each family with recurrent layers, built of parts; sources as in `weight_parts`."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from kvplan.core.weights import Weight
from kvplan.store.weight_mixers import (
    gated_delta,
    gated_recurrence,
    kimi_delta,
    lightning,
    mamba,
    mamba2,
    old_rwkv,
    olmo_delta,
    short_convolution,
)
from kvplan.store.weight_mixtures import (
    GRANITE_EXPERTS,
    NUMBERED,
    ROUTED,
    gated_shared,
    granite_shared,
    in_steps,
    shared_experts,
)
from kvplan.store.weight_parts import (
    PLAIN,
    Flag,
    Part,
    Place,
    attends,
    attention,
    dense_first,
    embedding,
    experts,
    feed_forward,
    latent_attention,
    linear,
    norms,
    other,
    parts,
    where,
    within,
)
from kvplan.store.weight_rules import ATTENTION_BIAS, MLP, MLP_BIAS, WeightRule, decoder, joined

_MAMBA: Final = mamba(
    "mixer", rank="time_step_rank", state="state_size", kernel="conv_kernel", inner="expand", bias=("use_bias", False),
    conv_bias=("use_conv_bias", True),
)  # fmt: skip
_MAMBA_ONLY: Final = WeightRule(
    layer=parts(_MAMBA, norms("norm")), outer=parts(embedding("embeddings"), norms("norm_f"))
)


def _mixer(norm: Flag = True, out_bias: Flag | None = None) -> Part:
    return mamba2(
        "mamba", heads="mamba_n_heads", head_dim="mamba_d_head", groups="mamba_n_groups", state="mamba_d_state",
        kernel="mamba_d_conv", bias=("mamba_proj_bias", False), conv_bias=("mamba_conv_bias", True), norm=norm,
        out_bias=out_bias,
    )  # fmt: skip


_FEED: Final = feed_forward("feed_forward", bias=MLP_BIAS)
_FF_NORMS: Final = norms("input_layernorm", "pre_ff_layernorm")
_FF_OUTER: Final = parts(embedding(), norms("final_layernorm"))
_ATTENTION: Final = attention(bias=ATTENTION_BIAS)


def _jamba_experts(place: Place) -> bool:
    period, offset = place.positive(2, "expert_layer_period"), place.number(1, "expert_layer_offset")
    return place.number(16, "num_experts") > 1 and place.index % period == offset


def _granite_experts(place: Place) -> bool:
    return place.number(8, "num_local_experts") > 0


_KINDS: Final = {
    "M": "M", "*": "*", "-": "-", "E": "E", "mamba": "M", "linear_attention": "M", "attention": "*",
    "full_attention": "*", "mlp": "-", "moe": "E",
}  # fmt: skip


def _nemotron_kind(place: Place) -> str:
    """Return the letter of a block of Nemotron H's, of the model or of those that draft."""
    own = place.index < place.layers
    names = ("layers_block_type", "layer_types", "hybrid_override_pattern") if own else (
        "mtp_layers_block_type", "mtp_hybrid_override_pattern")  # fmt: skip
    for key in names:
        kinds = place.keys.listed(key, _KINDS)
        if kinds:
            return kinds[place.index if own else (place.index - place.layers) % len(kinds)]
    raise place.keys.wrong(f"has no {names[0]}")


def _nemotron_latent(place: Place) -> int:
    return place.number(0, "moe_latent_size") or place.hidden


_NEMOTRON_MOE: Final = experts(
    "mixer", count=ROUTED, names=("up_proj", "down_proj"), inputs=_nemotron_latent, corrected=True
)
_NEMOTRON_SHARED: Final = where(
    lambda place: place.number(1, "n_shared_experts") > 0,
    feed_forward("mixer.shared_experts", ups=PLAIN, width="moe_shared_expert_intermediate_size", bias=MLP_BIAS),
)


def _latent_projections(place: Place) -> Iterator[Weight]:
    small = place.number(0, "moe_latent_size")
    if small:
        biased = place.flag(MLP_BIAS)
        yield from linear(place, "mixer.fc1_latent_proj", small, place.hidden, bias=biased)
        yield from linear(place, "mixer.fc2_latent_proj", place.hidden, small, bias=biased)


_NEMOTRON: Final = {
    "M": mamba2("mixer", heads="mamba_num_heads", head_dim="mamba_head_dim", groups="n_groups", state="ssm_state_size",
                kernel="conv_kernel", bias=("use_bias", False), conv_bias=("use_conv_bias", True)),
    "*": attention("mixer"),
    "-": feed_forward("mixer", ups=PLAIN, bias=MLP_BIAS),
    "E": parts(_NEMOTRON_MOE, _NEMOTRON_SHARED, _latent_projections),
}  # fmt: skip


def _nemotron_layer(place: Place) -> Iterator[Weight]:
    yield from _NEMOTRON[_nemotron_kind(place)](place)
    yield other(place, "norm", place.hidden)


def _nemotron_draft(place: Place) -> Iterator[Weight]:
    """Return what joins inputs in the first block that drafts, and the norm in the last."""
    if place.index == place.layers:
        yield from joined("enorm", "hnorm", "final_layernorm", matrix="eh_proj")(place)


_DELTA_MTP: Final = within("mtp", joined("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", matrix="fc"))


def _delta(*projections: str, feed: Part) -> WeightRule:
    """Return the rule of Qwen's delta nets, with attention that is gated; one more layer drafts."""
    mixed = where(attends, attention(bias=ATTENTION_BIAS, head_norms=True, queries=2), gated_delta(projections))
    return replace(decoder(mixed, feed), draft=parts(), draft_stem="mtp.layers", draft_outer=_DELTA_MTP)


_QWEN_MOE: Final = where(in_steps, parts(experts(count=NUMBERED), gated_shared), MLP)
_ALL_MOE: Final = parts(experts(count=NUMBERED), gated_shared)
_INPUTS: Final = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


def _lfm_width(place: Place) -> int:
    """Return the width that LFM2's class makes of the config's: two thirds, rounded up to a multiple."""
    wide = place.keys.size("intermediate_size", "block_ff_dim")
    if not place.flag(("block_auto_adjust_ff_dim", True)):
        return wide
    factor = place.factor(1.0, "block_ffn_dim_multiplier")
    wide, step = int(2 * wide / 3), place.positive(256, "block_multiple_of")
    if factor is None:
        return wide
    return -(-int(factor * wide) // step) * step


_LFM_NAMES: Final = ("w1", "w3")
_LFM_MIXED: Final = where(
    attends, attention(names=("q_proj", "k_proj", "v_proj", "out_proj"), head_norms=True), short_convolution()
)
_LFM_NORMS: Final = norms("operator_norm", "ffn_norm")
_LFM_OUTER: Final = parts(embedding(), norms("embedding_norm"))
_LFM_MOE: Final = where(
    lambda place: place.index >= place.number(2, "num_dense_layers"),
    experts("feed_forward", count=NUMBERED, names=("w1", "w3", "w2"), corrected=("use_expert_bias", True)),
    feed_forward("feed_forward", ups=_LFM_NAMES, down="w2"),
)
_MINIMAX: Final = decoder(
    where(attends, attention(), lightning()),
    experts("block_sparse_moe", count="num_local_experts", width="intermediate_size", names=("w1", "w3", "w2")),
)


def _kimi_refusals(place: Place) -> list[Weight]:
    """Raise UnsupportedModelError for what Kimi K3 adds to Kimi Linear."""
    for key in ("routed_expert_hidden_size", "mla_use_output_gate", "attn_res_block_size"):
        if place.keys.get(key):
            raise place.keys.unsupported(key, "matrices that Kimi Linear does not have")
    return []


def _halved(place: Place) -> int:
    return max(1, place.width("intermediate_size") // 2)


_GRIFFIN: Final = decoder(
    where(attends, attention("temporal_block", bias=ATTENTION_BIAS, out_bias=True), gated_recurrence()),
    feed_forward("mlp_block", width=_halved, bias=True), norm=norms("temporal_pre_norm", "channel_pre_norm"),
    outer=parts(embedding(), norms("final_norm")),
)  # fmt: skip


HYBRIDS: Final[dict[str, WeightRule]] = {
    "bamba": decoder(where(attends, _ATTENTION, _mixer()), _FEED, norm=_FF_NORMS, outer=_FF_OUTER),
    "falcon_h1": decoder(_ATTENTION, _mixer(("mamba_rms_norm", False), ("projectors_bias", False)), _FEED,
                         norm=_FF_NORMS, outer=_FF_OUTER),
    "falcon_mamba": _MAMBA_ONLY,
    "granitemoehybrid": decoder(
        where(attends, _ATTENTION, _mixer()),
        where(_granite_experts, GRANITE_EXPERTS), granite_shared),
    "jamba": decoder(
        where(attends, attention(), mamba(
            "mamba", rank="mamba_dt_rank", state="mamba_d_state", kernel="mamba_d_conv", inner="mamba_expand",
            bias=("mamba_proj_bias", False), conv_bias=("mamba_conv_bias", True), normed=True)),
        where(_jamba_experts, experts("feed_forward", count="num_experts", width="intermediate_size", router="router"),
              feed_forward("feed_forward")),
        norm=_FF_NORMS, outer=_FF_OUTER),
    "kimi_linear": decoder(
        _kimi_refusals,
        where(attends, latent_attention(), kimi_delta()),
        where(dense_first(1), parts(
            experts(count=NUMBERED, corrected=True), shared_experts("num_shared_experts", 1)), MLP)),
    "lfm2": decoder(_LFM_MIXED, feed_forward("feed_forward", ups=_LFM_NAMES, down="w2", width=_lfm_width),
                    norm=_LFM_NORMS, outer=_LFM_OUTER),
    "lfm2_moe": decoder(_LFM_MIXED, _LFM_MOE, norm=_LFM_NORMS, outer=_LFM_OUTER),
    "mamba": _MAMBA_ONLY,
    "mamba2": replace(_MAMBA_ONLY, layer=parts(
        mamba2("mixer", heads="num_heads", head_dim="head_dim", groups="n_groups", state="state_size",
               kernel="conv_kernel", bias=("use_bias", False), conv_bias=("use_conv_bias", True)), norms("norm"))),
    "minimax": _MINIMAX,
    "minimax_text_01": _MINIMAX,
    "nemotron_h": WeightRule(layer=_nemotron_layer, outer=parts(embedding("embeddings"), norms("norm_f")),
                             draft=_nemotron_draft, draft_stem="mtp.layers"),
    "olmo_hybrid": decoder(where(attends, attention(bias=ATTENTION_BIAS, wide_norms=True), olmo_delta()), MLP),
    "recurrent_gemma": _GRIFFIN,
    "rwkv": WeightRule(layer=old_rwkv(), outer=parts(embedding("embeddings"), norms("ln_out", bias=True)),
                       stem="blocks", head="head"),
    "qwen3_5_moe_text": _delta(*_INPUTS, feed=_ALL_MOE),
    "qwen3_5_text": _delta(*_INPUTS, feed=MLP),
    "qwen3_next": _delta("in_proj_qkvz", "in_proj_ba", feed=_QWEN_MOE),
}  # fmt: skip
"""By the config's `model_type`."""
