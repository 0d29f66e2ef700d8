"""The weights of each family with experts or latent attention, built of parts; sources as in `weight_parts`."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from kvplan.core.specs import LayerKind
from kvplan.core.weights import Weight
from kvplan.store.weight_parts import (
    Flag,
    Part,
    Place,
    Width,
    attention,
    dense_first,
    embedding,
    experts,
    feed_forward,
    first_of,
    fused_attention,
    has_shared,
    latent_attention,
    linear,
    norms,
    other,
    parts,
    said,
    shared_width,
    vocabulary,
    where,
    within,
)
from kvplan.store.weight_rules import (
    AFTER_NORMS,
    ATTENTION_BIAS,
    DRAFT,
    FOUR_NORMS,
    MLP,
    MLP_BIAS,
    OUTER,
    OUTER_BIASED,
    TWO_BIASED,
    TWO_NORMS,
    WeightRule,
    decoder,
)

ROUTED: Final = first_of("n_routed_experts", "num_local_experts", "num_experts")
NUMBERED: Final = first_of("num_experts", "num_local_experts")
_MIXTRAL_NAMES: Final = ("w1", "w3", "w2")


def shared_experts(key: str, default: int | None, at: str = "mlp.shared_experts", *, bias: Flag = False) -> Part:
    """Return the experts that every token goes through, as wide as *key* says experts."""
    return where(has_shared(key, default), feed_forward(at, width=shared_width(key, default), bias=bias))


def deepseek(attend: Part, *, first: int, shared: int | None = 1, extra: Part | None = None) -> WeightRule:
    """Return the rule of dense layers at first, then of experts with some that every token goes through."""
    many = parts(
        experts(count=ROUTED, corrected=True), shared_experts("n_shared_experts", shared), *([extra] if extra else [])
    )
    return decoder(attend, where(dense_first(first), many, MLP), draft=DRAFT)


def in_steps(place: Place) -> bool:
    """Whether a layer of Qwen's has experts: one in each `decoder_sparse_step`, but those of `mlp_only_layers`."""
    left_out = place.keys.get("mlp_only_layers") or []
    if not isinstance(left_out, list):
        raise place.keys.wrong("mlp_only_layers must be a list of layer numbers")
    return place.index not in left_out and (place.index + 1) % place.positive(1, "decoder_sparse_step") == 0


def gated_shared(place: Place) -> Iterator[Weight]:
    """Return Qwen's expert for every token, and its gate; a width of 0 says that there is none."""
    if place.number(None, "shared_expert_intermediate_size"):
        yield from feed_forward("mlp.shared_expert", width="shared_expert_intermediate_size")(place)
        yield other(place, "mlp.shared_expert_gate", place.hidden)


def _ernie_experts(place: Place) -> bool:
    last = place.number(None, "num_hidden_layers") - 1
    stated = place.keys.get("moe_layer_end_index")
    end = last if stated in (None, -1) else place.number(last, "moe_layer_end_index")
    start, every = place.number(1, "moe_layer_start_index"), place.positive(1, "moe_layer_interval")
    return (place.index + 1) % every == 0 and start <= place.index <= end


def _ernie_statics(place: Place) -> list[Weight]:
    return [other(place, "mlp.moe_statics", place.keys.size("moe_num_experts"))]


_ERNIE_BIAS: Final = ("use_bias", False)
_ERNIE_MOE: Final = parts(
    experts(count="moe_num_experts"), _ernie_statics,
    shared_experts("moe_num_shared_experts", 2, bias=_ERNIE_BIAS),
)  # fmt: skip


def _llama4_experts(place: Place) -> bool:
    listed = place.keys.get("moe_layers")
    if isinstance(listed, list) and listed:
        return place.index in listed
    return (place.index + 1) % place.positive(1, "interleave_moe_layer_step") == 0


def _one_number(place: Place) -> list[Weight]:
    """Raise UnsupportedModelError where layers have several numbers of experts."""
    for key in ("num_experts", "moe_intermediate_size", "num_shared_expert"):
        listed = place.keys.get(key)
        if isinstance(listed, list) and len(set(map(str, listed))) > 1:
            raise place.keys.unsupported(key, "layers of several numbers or widths of experts")
    return []


def _nested(key: str) -> Width:
    return lambda place: place.keys.inside("ffn_config").size(key)


def _gemma_outer(place: Place) -> Iterator[Weight]:
    """Return the embeddings of Gemma 3n and 4: one more for all layers, where the config has a size for it."""
    yield from OUTER(place)
    small = place.number(256, "hidden_size_per_layer_input")
    if small:
        wide = place.layers * small
        yield other(place, "embed_tokens_per_layer", place.number(262144, "vocab_size_per_layer_input") * wide)
        yield from linear(place, "per_layer_model_projection", wide, place.hidden)
        yield other(place, "per_layer_projection_norm", small)


def _scalar(place: Place) -> list[Weight]:
    return [other(place, "layer_scalar", 1)]


def _gemma_inputs(place: Place) -> Iterator[Weight]:
    small, hidden = place.number(256, "hidden_size_per_layer_input"), place.hidden
    yield from linear(place, "per_layer_input_gate", small, hidden)
    yield from linear(place, "per_layer_projection", hidden, small)
    yield other(place, "post_per_layer_input_norm", hidden)


def _has_inputs(place: Place) -> bool:
    return place.number(256, "hidden_size_per_layer_input") > 0


def _altup(place: Place) -> Iterator[Weight]:
    """Return what Gemma 3n's layers have to mix their inputs (arXiv 2301.13310), and their low-rank residual."""
    many, rank, hidden = place.positive(4, "altup_num_inputs"), place.positive(64, "laurel_rank"), place.hidden
    yield other(place, "altup", many * many * (1 + many) + many * hidden + 2 * hidden)
    yield from linear(place, "laurel.linear_left", rank, hidden)
    yield from linear(place, "laurel.linear_right", hidden, rank)
    yield other(place, "laurel.post_laurel_norm", hidden)


def _altup_outer(place: Place) -> Iterator[Weight]:
    copies = 2 * (place.positive(4, "altup_num_inputs") - 1)
    yield from _gemma_outer(place)
    yield from linear(place, "altup_projections.0", place.hidden, place.hidden, copies=copies)


def _of_layer(place: Place) -> int:
    """Return the width of this layer's feed-forward part where the config lists one a layer."""
    listed = place.keys.get("intermediate_size")
    if not isinstance(listed, list):
        return place.keys.size("intermediate_size")
    if len(listed) != place.layers or type(listed[place.index]) is not int:
        raise place.keys.wrong(f"intermediate_size must be a number or a list of {place.layers}")
    return int(listed[place.index])


def _gemma4_width(place: Place) -> int:
    double = place.flag(("use_double_wide_mlp", False)) and place.spec.shared_with is not None
    return place.keys.size("intermediate_size") * (2 if double else 1)


def _gemma4_own_v(place: Place) -> bool:
    return not (place.keys.get("attention_k_eq_v") and place.spec.kind is LayerKind.FULL)


def _gemma4_experts(place: Place) -> Iterator[Weight]:
    yield from experts("", count="num_experts", router="router.proj")(place)
    yield other(place, "router.scale", place.hidden + place.keys.size("num_experts"))
    yield from norms("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")(
        place
    )


def _windowed(place: Place) -> bool:
    return place.spec.kind is LayerKind.SLIDING


def _sinks(place: Place) -> list[Weight]:
    """Return MiMo V2's sinks, by default of layers with a window."""
    key = "add_swa_attention_sink_bias" if _windowed(place) else "add_full_attention_sink_bias"
    return [other(place, "self_attn.sinks", place.heads)] if place.flag((key, _windowed(place))) else []


def _step_heads(place: Place) -> int:
    setting = place.keys.get("attention_other_setting")
    if _windowed(place) and setting is not None:
        return place.keys.inside("attention_other_setting").size("num_attention_heads")
    own = place.keys.in_layer(place.index, frozenset({"num_attention_heads", "num_key_value_heads", "head_dim"}))
    return own.size("num_attention_heads")


def _step_attention(place: Place) -> Iterator[Weight]:
    """Return Step 3.5's attention: layers with a window have other query heads, each head a gate."""
    spec, heads, hidden = place.spec, _step_heads(place), place.hidden
    biased = place.flag(ATTENTION_BIAS)
    yield from linear(place, "q_proj", heads * spec.head_dim, hidden, bias=biased)
    for name in ("k_proj", "v_proj"):
        yield from linear(place, name, spec.kv_heads * spec.head_dim, hidden, bias=biased)
    yield from linear(place, "o_proj", hidden, heads * spec.head_dim, bias=biased)
    gate = place.keys.get("gating")
    if place.flag(("use_head_wise_attn_gate", True)) or gate:
        each = 1 if gate in (None, True, "per-head") else spec.head_dim
        yield from linear(place, "g_proj", heads * each, hidden)
    yield other(place, "norms", 2 * spec.head_dim)


def _step_experts(place: Place) -> bool:
    if place.keys.get("mlp_layer_types") is not None:
        return dense_first(0)(place)
    listed = place.keys.get("moe_layers_enum")
    if listed is None and place.keys.get("first_k_dense_replace") is not None:
        return dense_first(0)(place)
    items = listed.split(",") if isinstance(listed, str) else listed
    if not isinstance(items, list) or not all(str(item).strip().isdecimal() for item in items):
        raise place.keys.wrong("moe_layers_enum must be a list of layer numbers", "it says which layers have experts")
    return place.index in {int(item) for item in items}


_STEP_MOE: Final = parts(
    experts(
        "moe", count=first_of("moe_num_experts", "n_routed_experts", "num_local_experts", "num_experts"), corrected=True
    ),
    feed_forward("share_expert", width="share_expert_dim", bias=MLP_BIAS),
)


def _v4_attention(place: Place) -> Iterator[Weight]:
    """Return DeepSeek V4's attention: one KV head, outputs in groups, and a compressor where entries are cached."""
    keys, hidden, heads, size = place.keys, place.hidden, place.heads, place.spec.head_dim
    query, groups, rank = keys.size("q_lora_rank"), keys.size("o_groups"), keys.size("o_lora_rank")
    yield from linear(place, "wq_a", query, hidden)
    yield other(place, "q_norm", query)
    yield from linear(place, "wq_b", heads * size, query)
    yield from linear(place, "wkv", size, hidden)
    yield other(place, "kv_norm", size)
    yield from linear(place, "wo_a", groups * rank, heads * size // groups)
    yield from linear(place, "wo_b", hidden, groups * rank)
    yield other(place, "attn_sink", heads)
    if not place.spec.sides:
        return
    ratio = place.spec.sides[0].tokens_per_entry
    overlaps = 2 if len(place.spec.sides) > 1 else 1
    yield from _compressor(place.inside("compressor"), overlaps * size, ratio, size)
    if overlaps > 1:
        index, many = keys.size("index_head_dim"), keys.size("index_n_heads")
        yield from _compressor(place.inside("indexer.compressor"), overlaps * index, ratio, index)
        yield from linear(place, "indexer.wq_b", many * index, query)
        yield other(place, "indexer.weights_proj", many * hidden)


def _compressor(place: Place, wide: int, ratio: int, norm: int) -> Iterator[Weight]:
    for name in ("wkv", "wgate"):
        yield other(place, name, wide * place.hidden)
    yield other(place, "ape", ratio * wide + norm)


def _v4_choice(place: Place) -> list[Weight]:
    """Return what chooses experts: in the first layers a table from tokens, in others a term for each expert."""
    listed = place.keys.listed("mlp_layer_types", {"hash_moe": True, "moe": False})
    hashed = (
        place.index < place.number(3, "num_hash_layers")
        if listed is None
        else any(listed[place.index : place.index + 1])
    )
    table = place.width(vocabulary) * place.keys.size("num_experts_per_tok")
    return [other(place, "ffn.gate", table if hashed else place.width(ROUTED))]


def _hyper(place: Place) -> list[Weight]:
    """Return the hyper-connections (arXiv 2409.19606) around both halves of a layer."""
    many = place.positive(4, "hc_mult")
    wide = (2 + many) * many
    return [other(place, "hc", wide * (many * place.hidden + 1) + 3, copies=2)]


def _hyper_head(place: Place) -> list[Weight]:
    many = place.positive(4, "hc_mult")
    return [other(place, "hc_head", many * (many * place.hidden + 1) + 1)]


_V4: Final = WeightRule(
    layer=parts(
        within("attn", _v4_attention),
        experts("ffn", count=ROUTED, names=_MIXTRAL_NAMES), _v4_choice,
        feed_forward("ffn.shared_experts", width="moe_intermediate_size", bias=MLP_BIAS),
        norms("attn_norm", "ffn_norm"), _hyper,
    ),
    outer=parts(embedding("embed"), norms("norm"), _hyper_head), head="head",
)  # fmt: skip


def _longcat(place: Place) -> Iterator[Weight]:
    """Return a layer of LongCat Flash: attention and a dense part twice, experts beside the second (arXiv 2509.01322).

    Experts that do nothing have no weights, but a row of the router each.
    """
    for half in ("0", "1"):
        yield from latent_attention(f"self_attn.{half}")(place)
        yield from feed_forward(f"mlps.{half}", width=first_of("ffn_hidden_size", "intermediate_size"))(place)
        yield from norms(f"input_layernorm.{half}", f"post_attention_layernorm.{half}")(place)
    count = place.width(ROUTED)
    yield from experts(
        count=ROUTED, router="router.classifier", width=first_of("expert_ffn_hidden_size", "moe_intermediate_size"),
        routed=lambda at: count + at.number(0, "zero_expert_num"), corrected=True,
    )(place)  # fmt: skip


_BIASED: Final = attention(bias=ATTENTION_BIAS)
_NORMED: Final = attention(bias=ATTENTION_BIAS, head_norms=True)
_MLA: Final = latent_attention()
GRANITE_EXPERTS: Final = experts(
    "block_sparse_moe", count="num_local_experts", width="intermediate_size", router="router.layer",
    names=("input_linear", "output_linear"), fused=True, module="",
)  # fmt: skip
_MIXTRAL: Final = experts(
    "block_sparse_moe", count=first_of("num_local_experts"), width="intermediate_size", names=_MIXTRAL_NAMES
)
_MINIMAX: Final = experts(
    "block_sparse_moe", count="num_local_experts", width="intermediate_size", names=_MIXTRAL_NAMES, corrected=True
)
_V3: Final = deepseek(_MLA, first=3)
_QWEN_MOE: Final = experts(count=NUMBERED)
_CORRECTED_MOE: Final = parts(experts(count=NUMBERED, corrected=True), shared_experts("num_shared_experts", 1))
_STEP: Final = decoder(
    within("self_attn", _step_attention), where(_step_experts, _STEP_MOE, feed_forward(bias=MLP_BIAS))
)
_AX_NORM: Final = norms("post_mlp_layernorm")


def granite_shared(place: Place) -> Iterator[Weight]:
    """Return Granite's feed-forward part beside the experts; a width of 0 says that there is none."""
    wide = place.number(0, "shared_intermediate_size")
    if wide:
        yield from linear(place, "shared_mlp.input_linear", 2 * wide, place.hidden)
        yield from linear(place, "shared_mlp.output_linear", place.hidden, wide)


def _aria_shared(place: Place) -> int:
    return place.number(2, "moe_num_shared_experts") * place.keys.size("intermediate_size")


def _afmoe_gate(place: Place) -> Iterator[Weight]:
    yield from linear(place, "self_attn.gate_proj", place.heads * place.spec.head_dim, place.hidden)


def _after_dense(place: Place) -> bool:
    return place.index >= place.number(1, "num_dense_layers")


_AFMOE: Final = parts(
    experts(count=NUMBERED, router="router.gate", corrected=True), shared_experts("num_shared_experts", 2)
)

MIXTURES: Final[dict[str, WeightRule]] = {
    "afmoe": decoder(_NORMED, _afmoe_gate, where(_after_dense, _AFMOE, MLP),
                     norm=parts(TWO_NORMS, norms("pre_mlp_layernorm", "post_mlp_layernorm"))),
    "aria_text": decoder(
        _BIASED, experts(count="moe_num_experts", width="intermediate_size", router="router"),
        feed_forward("mlp.shared_experts", width=_aria_shared, bias=MLP_BIAS)),
    "axk1": deepseek(_MLA, first=1, extra=_AX_NORM),
    "dbrx": WeightRule(
        layer=parts(
            fused_attention("norm_attn_norm.attn", "Wqkv", "out_proj"),
            experts("ffn", count=_nested("moe_num_experts"), width=_nested("ffn_hidden_size"), router="router.layer",
                    names=("w1", "v1", "w2"), module="experts.mlp."),
            norms("norm_attn_norm.norm_1", "norm_attn_norm.norm_2")),
        outer=parts(embedding("wte"), norms("norm_f")), stem="blocks"),
    "deepseek": decoder(_BIASED, where(
        dense_first(0), parts(experts(count=ROUTED), shared_experts("n_shared_experts", 0)), MLP)),
    "deepseek_ref": _V4,
    "deepseek_v2": decoder(
        _MLA, where(dense_first(0), parts(experts(count=ROUTED), shared_experts("n_shared_experts", 2, bias=MLP_BIAS)),
                    feed_forward(bias=MLP_BIAS))),
    "deepseek_v3": _V3,
    "deepseek_v32": _V3,
    "deepseek_v4": _V4,
    "dots1": deepseek(_NORMED, first=0, shared=0),
    "ernie4_5_moe": replace(
        decoder(attention(bias=_ERNIE_BIAS), where(_ernie_experts, _ERNIE_MOE, feed_forward(bias=_ERNIE_BIAS))),
        head_bias=_ERNIE_BIAS),
    "exaone_moe": decoder(
        attention(head_norms=True),
        where(dense_first(1), _CORRECTED_MOE, MLP)),
    "flex_olmo": decoder(attention(bias=ATTENTION_BIAS, wide_norms=True),
                         experts(count=NUMBERED, width="intermediate_size"), norm=AFTER_NORMS),
    "gemma3n_text": decoder(
        attention(bias=ATTENTION_BIAS, head_norms=True), feed_forward(width=_of_layer), _gemma_inputs, _altup,
        norm=FOUR_NORMS, outer=_altup_outer),
    "gemma4_text": decoder(
        attention(bias=ATTENTION_BIAS, head_norms=True, own_v=_gemma4_own_v), feed_forward(width=_gemma4_width),
        where(_has_inputs, _gemma_inputs), where(said(("enable_moe_block", False)), _gemma4_experts), _scalar,
        norm=FOUR_NORMS, outer=_gemma_outer),
    "gemma4_unified_text": decoder(
        attention(bias=ATTENTION_BIAS, head_norms=True, own_v=_gemma4_own_v), feed_forward(width=_gemma4_width),
        _scalar, norm=FOUR_NORMS),
    "glm4_moe": deepseek(attention(bias=ATTENTION_BIAS, out_bias=False, head_norms=("use_qk_norm", False)), first=1),
    "glm4_moe_lite": deepseek(_MLA, first=1),
    "glm_moe_dsa": _V3,
    "gpt_oss": decoder(
        attention(bias=("attention_bias", True), sinks=True),
        experts(count=first_of("num_local_experts", "num_experts"), width="intermediate_size", router="router",
                names=("gate_up_proj", "down_proj"), module="experts.", fused=True, bias=True)),
    "granitemoe": decoder(_BIASED, GRANITE_EXPERTS),
    "granitemoe_swa": decoder(attention(bias=ATTENTION_BIAS, sinks=True), GRANITE_EXPERTS, granite_shared),
    "granitemoeshared": decoder(_BIASED, GRANITE_EXPERTS, granite_shared),
    "hy_v3": decoder(_NORMED, where(
        dense_first(1), parts(experts(count=NUMBERED, corrected=True),
                              shared_experts("num_shared_experts", 1, bias=MLP_BIAS)), feed_forward(bias=MLP_BIAS))),
    "hunyuan_v1_moe": decoder(_NORMED, _one_number, experts(
        count=lambda place: _first(place, "num_experts"), width="intermediate_size", router="gate.wg"),
        feed_forward("mlp.shared_mlp")),
    "kimi_k2": _V3,
    "llama4_text": decoder(
        _BIASED, where(
            _llama4_experts,
            parts(experts("feed_forward", count=NUMBERED, width="intermediate_size", router="router"),
                  feed_forward("feed_forward.shared_expert")),
            feed_forward("feed_forward", width="intermediate_size_mlp"))),
    "longcat_flash": WeightRule(layer=_longcat, outer=OUTER, per_block=2),
    "mellum": decoder(_NORMED, where(dense_first(0), experts(count=NUMBERED), MLP)),
    "mimo_v2_flash": decoder(attention(bias=ATTENTION_BIAS, out_bias=False), _sinks,
                             where(dense_first(1), experts(count=ROUTED, corrected=True), MLP)),
    "minicpm3": decoder(_MLA, feed_forward(bias=MLP_BIAS)),
    "minimax_m2": decoder(attention(wide_norms=True), _MINIMAX),
    "mistral4": decoder(
        _MLA, where(dense_first(0), parts(experts(count=ROUTED), shared_experts("n_shared_experts", 1)), MLP)),
    "mixtral": decoder(attention(), _MIXTRAL),
    "olmoe": decoder(attention(bias=ATTENTION_BIAS, wide_norms=True),
                     experts(count=NUMBERED, width="intermediate_size")),
    "phimoe": replace(decoder(_BIASED, _MIXTRAL, norm=TWO_BIASED, outer=OUTER_BIASED),
                      head_bias=("lm_head_bias", False)),
    "qwen2_moe": decoder(attention(bias=("qkv_bias", True), out_bias=False),
                         where(in_steps, parts(_QWEN_MOE, gated_shared), MLP)),
    "qwen3_moe": decoder(_NORMED, where(in_steps, _QWEN_MOE, MLP)),
    "qwen3_vl_moe_text": decoder(_NORMED, where(in_steps, _QWEN_MOE, MLP)),
    "sarvam_mla": deepseek(_MLA, first=1),
    "sarvam_moe": deepseek(attention(bias=ATTENTION_BIAS, out_bias=False, head_norms=("use_qk_norm", True)), first=1),
    "solar_open": decoder(attention(bias=ATTENTION_BIAS, out_bias=False), experts(count=ROUTED, corrected=True),
                          shared_experts("n_shared_experts", 1)),
    "step3p5": _STEP,
    "step3p7": _STEP,
    "youtu": decoder(_MLA, MLP),
}  # fmt: skip
"""By the config's `model_type`."""


def _first(place: Place, key: str) -> int:
    value: Any = place.keys.get(key)
    return int(value[0]) if isinstance(value, list) and value and type(value[0]) is int else place.keys.size(key)
