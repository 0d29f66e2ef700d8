"""The weights of each family of dense decoders, built of parts; sources as in `weight_parts`."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from kvplan.core.weights import Weight
from kvplan.store.keys import CONTEXT
from kvplan.store.weight_parts import (
    FACTOR_MAX,
    FUSED,
    PLAIN,
    Flag,
    Part,
    Place,
    Width,
    attention,
    either,
    embedding,
    experts,
    feed_forward,
    fused_attention,
    linear,
    norms,
    other,
    parts,
    said,
    vocabulary,
    where,
    within,
)

ATTENTION_BIAS: Final = ("attention_bias", False)
MLP_BIAS: Final = ("mlp_bias", False)


def hidden_width(place: Place) -> int:
    """Return the hidden size."""
    return place.hidden


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightRule:
    """The weights of one family.

    Attributes:
        layer: Those of one layer.
        outer: Those outside of layers, the output embedding aside.
        stem: Name of the list of layers.
        head: Name of the output embedding.
        head_width: Its inputs.
        head_bias: Whether it has a bias.
        draft: What a layer for multi-token prediction has beside those of `layer`; None where that is not known.
        draft_stem: Name of the list of those layers; empty where they go on with the model's own.
        draft_outer: What all of them share beside the model's embeddings.
        per_block: Layers of the cache that one of the layers here makes.
    """

    layer: Part
    outer: Part
    stem: str = "layers"
    head: str = "lm_head"
    head_width: Width = hidden_width
    head_bias: Flag = False
    draft: Part | None = None
    draft_stem: str = ""
    draft_outer: Part | None = None
    per_block: int = 1


TWO_NORMS: Final = norms("input_layernorm", "post_attention_layernorm")
TWO_BIASED: Final = norms("input_layernorm", "post_attention_layernorm", bias=True)
FOUR_NORMS: Final = parts(TWO_NORMS, norms("pre_feedforward_layernorm", "post_feedforward_layernorm"))
AFTER_NORMS: Final = norms("post_attention_layernorm", "post_feedforward_layernorm")
OUTER: Final = parts(embedding(), norms("norm"))
OUTER_BIASED: Final = parts(embedding(), norms("norm", bias=True))
OLD_OUTER: Final = parts(embedding("wte"), norms("ln_f", bias=True))
MLP: Final = feed_forward()


def decoder(*layer: Part, norm: Part = TWO_NORMS, outer: Part = OUTER, draft: Part | None = None) -> WeightRule:
    """Return the rule of a decoder whose layers have these parts and norms."""
    return WeightRule(layer=parts(*layer, norm), outer=outer, draft=draft)


def joined(*names: str, matrix: str, at: str = "") -> Part:
    """Return what joins a state and the embedding of the next token, with norms, before a layer that drafts."""

    def build(place: Place) -> Iterator[Weight]:
        yield other(place, matrix, 2 * place.hidden**2)  # in 16 bits in quantized models too
        yield from norms(*names)(place)

    return within(at, build)


DRAFT: Final = joined("enorm", "hnorm", "shared_head.norm", matrix="eh_proj")
"""Of DeepSeek V3 and those after it (arXiv 2412.19437, section 2.2); checkpoints hold both embeddings once more."""


def four_times(place: Place) -> int:
    """Return the width of a feed-forward layer: `n_inner`, else four times the hidden size."""
    return place.number(0, "n_inner") or 4 * place.hidden


def quadruple(place: Place) -> int:
    """Return four times the hidden size."""
    return 4 * place.hidden


def _old(attend: Part, *, ups: tuple[str, ...], down: str, mlp: str = "mlp", norm: Part, outer: Part, stem: str,
         width: Width = four_times, head_bias: Flag = False, head: str = "lm_head") -> WeightRule:  # fmt: skip
    """Return the rule of a decoder from before Llama: one matrix up, LayerNorm."""
    feed = feed_forward(mlp, ups=ups, down=down, width=width, bias=True)
    return WeightRule(layer=parts(attend, feed, norm), outer=outer, stem=stem, head=head, head_bias=head_bias)


_LN: Final = norms("ln_1", "ln_2", bias=True)
_4H: Final = ("dense_h_to_4h",)


def _positions(name: str, ahead: int = 0) -> Part:
    """Return learned positions, *ahead* more than the context has."""
    return lambda place: [other(place, name, (place.keys.size(*CONTEXT) + ahead) * place.hidden)]


def _single(*names: str) -> Part:
    """Return weights of one element."""
    return lambda place: [other(place, name, 1) for name in names]


def _diff(place: Place) -> list[Weight]:
    """Return the lambdas of differential attention (arXiv 2410.05258)."""
    return [other(place, "self_attn.lambda", 4 * place.spec.head_dim)]


def _sub_norms(place: Place) -> list[Weight]:
    return [
        other(place, "self_attn.attn_sub_norm", place.hidden),
        other(place, "mlp.ffn_sub_norm", place.width("intermediate_size")),
    ]


def _falcon_norms(place: Place) -> list[Weight]:
    """Return one norm, or two with attention and feed-forward layer one after the other, or as the config says."""
    grouped = place.flag(("new_decoder_architecture", False)) or bool(place.keys.get("n_head_kv"))
    beside = place.flag(("parallel_attn", True))
    many = place.number(2 if grouped else 1, "num_ln_in_parallel_attn") if beside else 2
    return [other(place, "input_layernorm", 2 * place.hidden, copies=2 if many == 2 else 1)]


def _falcon_width(place: Place) -> int:
    return place.number(0, "ffn_hidden_size") or 4 * place.hidden


FALCON: Final = WeightRule(
    layer=parts(
        fused_attention("self_attention", "query_key_value", "dense", bias=("bias", False)),
        feed_forward(ups=_4H, down="dense_4h_to_h", width=_falcon_width, bias=("bias", False)),
        _falcon_norms,
    ),
    outer=parts(embedding("word_embeddings"), norms("ln_f", bias=True)),
    stem="h",
)


def _opt_width(place: Place) -> int:
    return place.number(0, "word_embed_proj_dim") or place.hidden


def _opt_outer(place: Place) -> Iterator[Weight]:
    wide, hidden = _opt_width(place), place.hidden
    yield other(place, "embed_tokens", place.width(vocabulary) * wide)
    yield from _positions("embed_positions", 2)(place)
    if wide != hidden:
        yield from linear(place, "project_in", hidden, wide)
        yield from linear(place, "project_out", wide, hidden)
    if place.flag(("do_layer_norm_before", True)) and not place.flag(("_remove_final_layer_norm", False)):
        yield from _opt_norms("final_layer_norm")(place)


def _opt_norms(*names: str) -> Part:
    return where(said(("layer_norm_elementwise_affine", True)), norms(*names, bias=True))


def _mpt_refusals(place: Place) -> list[Weight]:
    """Raise UnsupportedModelError for what MPT's own code has and transformers' class has not."""
    inner = place.keys.inside("attn_config") if place.keys.get("attn_config") is not None else None
    if inner and (inner.get("qk_ln") or inner.get("alibi") is False):
        raise inner.unsupported("attn_config", "norms of queries and keys, or learned positions")
    if place.keys.get("no_bias") is False:
        raise place.keys.unsupported("no_bias", "biases in every layer")
    return []


def _expansion(place: Place) -> int:
    return place.positive(4, "expansion_ratio") * place.hidden


def _half(place: Place) -> int:
    return max(1, place.width("intermediate_size") // 2)


_NAS_MULTIPLE: Final = 256


def _nas_layer(place: Place) -> Iterator[Weight]:
    """Return a layer of Nemotron NAS: parts that `no_op` leaves out have no norm either (vLLM, models/nemotron_nas.py).

    A width is two thirds of `ffn_mult` hidden sizes, rounded up to a multiple of 256.
    """
    block = place.keys.get("block_configs")[place.index]
    if not block["attention"].get("no_op"):
        yield from attention(bias=ATTENTION_BIAS)(place)
        yield other(place, "input_layernorm", place.hidden)
    feed = block.get("ffn")
    if not isinstance(feed, dict) or feed.get("replace_with_linear"):
        raise place.keys.unsupported("block_configs", "a layer whose feed-forward part is not given or linear")
    if not feed.get("no_op"):
        multiple = feed.get("ffn_mult")
        if not isinstance(multiple, int | float) or not 0 < multiple < FACTOR_MAX:
            raise place.keys.wrong("block_configs has a layer without ffn_mult", f"it is a number up to {FACTOR_MAX}")
        wide = -(-int(2 * multiple * place.hidden / 3) // _NAS_MULTIPLE) * _NAS_MULTIPLE
        yield from feed_forward(width=lambda _: wide)(place)
        yield other(place, "post_attention_layernorm", place.hidden)


def _chatglm_refusals(place: Place) -> list[Weight]:
    if "multi_query_attention" not in place.keys:
        raise place.keys.unsupported("model_type", "the first ChatGLM, whose weights differ")
    return []


def _one_vocabulary(place: Place) -> list[Weight]:
    if place.keys.get("output_vocab_size"):
        raise place.keys.unsupported("output_vocab_size", "another vocabulary of outputs than of inputs")
    return []


def _openelm_layer(place: Place) -> Iterator[Weight]:
    """Return a layer of OpenELM: heads and width are its own (apple/OpenELM, modeling_openelm.py)."""
    spec, hidden = place.spec, place.hidden
    heads = _own(place, "num_query_heads")
    wide = _divisible(_own(place, "ffn_multipliers") * hidden, place.positive(256, "ffn_dim_divisor"))
    yield from linear(place, "attn.qkv_proj", round(heads + 2 * spec.kv_heads) * spec.head_dim, hidden)
    yield from linear(place, "attn.out_proj", hidden, round(heads) * spec.head_dim)
    if place.flag(("normalize_qk_projections", True)):
        yield other(place, "attn.norms", 2 * spec.head_dim)
    yield from linear(place, "ffn.proj_1", wide * (2 if place.flag(("ffn_with_glu", True)) else 1), hidden)
    yield from linear(place, "ffn.proj_2", hidden, wide)
    yield from norms("attn_norm", "ffn_norm")(place)


def _own(place: Place, key: str) -> float:
    listed = place.keys.get(key)
    known = isinstance(listed, list) and len(listed) == place.layers
    if not known or not isinstance(listed[place.index], int | float) or not 0 < listed[place.index] < FACTOR_MAX:
        raise place.keys.wrong(f"{key} must be a list of {place.layers} numbers, one a layer")
    return float(listed[place.index])


def _divisible(width: float, step: int) -> int:
    """Return the multiple of *step* nearest to *width*, never a tenth below it."""
    near = max(step, int(width + step / 2) // step * step)
    return near + step if near < 0.9 * width else near


def _whisper(stem: str, layers: str, wide: str, *, crossed: bool) -> Part:
    """Return one half of Whisper: its keys have no bias; the decoder attends to the encoder in each layer too."""

    def build(place: Place) -> Iterator[Weight]:
        hidden, count = place.hidden, place.keys.size(layers)
        for at in ("self_attn", "encoder_attn")[: 1 + crossed]:
            for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                biased = name != "k_proj"
                yield from linear(place, f"{stem}.layers.0.{at}.{name}", hidden, hidden, bias=biased, copies=count)
        yield from linear(place, f"{stem}.layers.0.fc1", place.keys.size(wide), hidden, bias=True, copies=count)
        yield from linear(place, f"{stem}.layers.0.fc2", hidden, place.keys.size(wide), bias=True, copies=count)
        yield other(place, f"{stem}.layers.0.norms", 2 * hidden * (2 + crossed), copies=count)
        yield other(place, f"{stem}.layer_norm", 2 * hidden)

    return build


def _whisper_outer(place: Place) -> Iterator[Weight]:
    hidden, taps = place.hidden, 3
    yield other(place, "encoder.conv1", hidden * (taps * place.positive(80, "num_mel_bins") + 1))
    yield other(place, "encoder.conv2", hidden * (taps * hidden + 1))
    yield other(place, "encoder.embed_positions", hidden * place.keys.size("max_source_positions"))
    yield other(place, "decoder.embed_positions", hidden * place.keys.size("max_target_positions"))
    yield from embedding("decoder.embed_tokens")(place)
    yield from _whisper("encoder", "encoder_layers", "encoder_ffn_dim", crossed=False)(place)
    yield from _whisper("decoder", "decoder_layers", "decoder_ffn_dim", crossed=True)(place)


_APERTUS: Final = decoder(
    attention(bias=ATTENTION_BIAS, head_norms=True), feed_forward(ups=PLAIN),
    within("mlp.act_fn", _single("alpha_p", "alpha_n", "beta", "eps")), _one_vocabulary,
)  # fmt: skip
_MINICPM_MOE: Final = experts(
    count="num_experts", width="intermediate_size", names=("w1", "w3", "w2"),
)  # fmt: skip

_LLAMA: Final = decoder(attention(bias=ATTENTION_BIAS), feed_forward(bias=MLP_BIAS))
_BARE: Final = decoder(attention(), MLP)
_BIASED: Final = attention(bias=True, out_bias=False)
_QWEN2: Final = decoder(_BIASED, MLP)
_QWEN3: Final = decoder(attention(bias=ATTENTION_BIAS, head_norms=True), MLP)
_GEMMA_ATTENTION: Final = attention(bias=ATTENTION_BIAS)
_PHI: Final = WeightRule(
    layer=parts(
        attention(names=("q_proj", "k_proj", "v_proj", "dense"), bias=True, head_norms=("qk_layernorm", False),
                  norm_bias=True),
        feed_forward(ups=("fc1",), down="fc2", bias=True,
                     width=lambda place: place.number(0, "intermediate_size") or four_times(place)),
        norms("input_layernorm", bias=True),
    ),
    outer=parts(embedding(), norms("final_layernorm", bias=True)),
    head_bias=True,
)  # fmt: skip
_GLM_ATTENTION: Final = attention(bias=("attention_bias", True), out_bias=False)

DENSE: Final[dict[str, WeightRule]] = {
    "apertus": _APERTUS,
    "apertus1p5_text": _APERTUS,
    "arcee": decoder(attention(bias=ATTENTION_BIAS), feed_forward(ups=PLAIN, bias=MLP_BIAS)),
    "baichuan": decoder(fused_attention("self_attn", "W_pack", "o_proj"), MLP),
    "biogpt": _old(attention(names=("q_proj", "k_proj", "v_proj", "out_proj"), bias=True), ups=("fc1",), down="fc2",
                   mlp="", norm=norms("self_attn_layer_norm", "final_layer_norm", bias=True), stem="layers",
                   width="intermediate_size", head="output_projection",
                   outer=parts(embedding(), _positions("embed_positions", 2), norms("layer_norm", bias=True))),
    "bitnet": decoder(attention(bias=ATTENTION_BIAS), MLP, _sub_norms),
    "bloom": _old(fused_attention("self_attention", "query_key_value", "dense", bias=True), ups=_4H,
                  down="dense_4h_to_h", norm=TWO_BIASED, stem="h", width=quadruple, outer=parts(
                      embedding("word_embeddings"), norms("word_embeddings_layernorm", "ln_f", bias=True))),
    "chatglm": WeightRule(
        layer=parts(
            _chatglm_refusals,
            fused_attention("self_attention", "query_key_value", "dense", bias=("add_qkv_bias", False),
                            out_bias=("add_bias_linear", False)),
            feed_forward(ups=FUSED, down="dense_4h_to_h", width="ffn_hidden_size", bias=("add_bias_linear", False)),
            TWO_NORMS,
        ),
        outer=parts(embedding(), norms("final_layernorm")), stem="encoder.layers", head="output_layer"),
    "codegen": _old(fused_attention("attn", "qkv_proj", "out_proj"), ups=("fc_in",), down="fc_out",
                    norm=norms("ln_1", bias=True), stem="h", outer=OLD_OUTER, head_bias=True),
    "cohere": decoder(attention(bias=ATTENTION_BIAS, wide_norms=("use_qk_norm", False)), MLP,
                      norm=norms("input_layernorm")),
    "cohere2": decoder(attention(bias=ATTENTION_BIAS), MLP, norm=norms("input_layernorm")),
    "cwm": decoder(attention(), feed_forward(bias=MLP_BIAS)),
    "diffllama": decoder(attention(bias=ATTENTION_BIAS), MLP, _diff),
    "ernie4_5": decoder(attention(bias=("use_bias", False)), feed_forward(bias=("use_bias", False))),
    "exaone": _LLAMA,
    "exaone4": decoder(attention(head_norms=True), MLP, norm=AFTER_NORMS),
    "falcon": FALCON,
    "gemma": decoder(_GEMMA_ATTENTION, MLP),
    "gemma2": decoder(_GEMMA_ATTENTION, MLP, norm=FOUR_NORMS),
    "gemma3_text": decoder(attention(bias=ATTENTION_BIAS, head_norms=True), MLP, norm=FOUR_NORMS),
    "glm": decoder(_GLM_ATTENTION, feed_forward(ups=FUSED)),
    "glm4": decoder(_GLM_ATTENTION, feed_forward(ups=FUSED),
                    norm=parts(TWO_NORMS, norms("post_self_attn_layernorm", "post_mlp_layernorm"))),
    "gpt2": _old(fused_attention("attn", "c_attn", "c_proj", bias=True), ups=("c_fc",), down="c_proj", norm=_LN,
                 stem="h", outer=parts(OLD_OUTER, _positions("wpe"))),
    "gpt_bigcode": _old(fused_attention("attn", "c_attn", "c_proj", bias=True), ups=("c_fc",), down="c_proj", norm=_LN,
                        stem="h", outer=parts(OLD_OUTER, _positions("wpe"))),
    "gpt_neox": _old(fused_attention("attention", "query_key_value", "dense", bias=("attention_bias", True)), ups=_4H,
                     down="dense_4h_to_h", width="intermediate_size", norm=TWO_BIASED, stem="layers", head="embed_out",
                     outer=parts(embedding("embed_in"), norms("final_layer_norm", bias=True))),
    "gpt_neo": _old(attention("attn.attention", names=("q_proj", "k_proj", "v_proj", "out_proj"), out_bias=True),
                    ups=("c_fc",), down="c_proj", norm=_LN, stem="h", outer=parts(OLD_OUTER, _positions("wpe")),
                    width=lambda place: place.number(0, "intermediate_size") or 4 * place.hidden),
    "gptj": _old(attention("attn", names=("q_proj", "k_proj", "v_proj", "out_proj")), ups=("fc_in",), down="fc_out",
                 norm=norms("ln_1", bias=True), stem="h", outer=OLD_OUTER, head_bias=True),
    "granite": _LLAMA,
    "granite_swa": decoder(attention(bias=ATTENTION_BIAS, sinks=True), feed_forward(bias=MLP_BIAS)),
    "helium": decoder(attention(bias=ATTENTION_BIAS, out_bias=False), feed_forward(bias=MLP_BIAS)),
    "hunyuan_v1_dense": _QWEN3,
    "hyperclovax": decoder(attention(bias=ATTENTION_BIAS), feed_forward(bias=MLP_BIAS),
                           where(said(("use_post_norm", True)), norms("post_norm1", "post_norm2"))),
    "internlm": decoder(attention(bias=("bias", True)), MLP),
    "internlm2": decoder(fused_attention("attention", "wqkv", "wo", bias=("bias", False)),
                         feed_forward("feed_forward", ups=("w1", "w3"), down="w2"),
                         norm=norms("attention_norm", "ffn_norm")),
    "internlm3": decoder(attention(bias=either("qkv_bias", "attention_bias"),
                                   out_bias=either("bias", "attention_bias")),
                         feed_forward(bias=either("bias", "mlp_bias"))),
    "iquestcoder": _LLAMA,
    "jais2": decoder(attention(bias=("attention_bias", True)), feed_forward(ups=PLAIN, bias=("mlp_bias", True)),
                     norm=TWO_BIASED, outer=OUTER_BIASED),
    "llama": _LLAMA,
    "mimo": replace(
        decoder(attention(bias=("attention_bias", True), out_bias=False), MLP), draft_stem="mtp_layers",
        draft=joined("token_layernorm", "hidden_layernorm", "final_layernorm", matrix="input_proj")),
    "minicpm": decoder(attention(bias=ATTENTION_BIAS), where(said(("num_experts", False)), _MINICPM_MOE, MLP)),
    "ministral": _BARE,
    "ministral3": _BARE,
    "mistral": _BARE,
    "mpt": WeightRule(
        layer=parts(_mpt_refusals, fused_attention("attn", "Wqkv", "out_proj"),
                    feed_forward("ffn", ups=PLAIN, width=_expansion), norms("norm_1", "norm_2")),
        outer=parts(embedding("wte"), norms("norm_f")), stem="blocks"),
    "nanochat": decoder(attention(bias=ATTENTION_BIAS), feed_forward(ups=("fc1",), down="fc2"), norm=parts(),
                        outer=embedding()),
    "nemotron": decoder(attention(bias=ATTENTION_BIAS), feed_forward(ups=PLAIN, bias=MLP_BIAS), norm=TWO_BIASED,
                        outer=OUTER_BIASED),
    "nemotron-nas": WeightRule(layer=_nas_layer, outer=OUTER),
    "olmo": decoder(attention(bias=ATTENTION_BIAS), MLP, norm=parts(), outer=embedding()),
    "olmo2": decoder(attention(bias=ATTENTION_BIAS, wide_norms=True), MLP, norm=AFTER_NORMS),
    "olmo3": decoder(attention(bias=ATTENTION_BIAS, wide_norms=True), MLP, norm=AFTER_NORMS),
    "openelm": WeightRule(layer=_openelm_layer, outer=parts(embedding("token_embeddings"), norms("norm"))),
    "opt": WeightRule(
        layer=parts(attention(names=("q_proj", "k_proj", "v_proj", "out_proj"), bias=("enable_bias", True)),
                    feed_forward("", ups=("fc1",), down="fc2", width="ffn_dim", bias=("enable_bias", True)),
                    _opt_norms("self_attn_layer_norm", "final_layer_norm")),
        outer=_opt_outer, stem="decoder.layers", head_width=_opt_width),
    "persimmon": _old(
        parts(fused_attention("self_attn", "query_key_value", "dense", bias=True),
              where(said(("qk_layernorm", True)), lambda place: [other(place, "norms", 4 * place.spec.head_dim)])),
        ups=_4H, down="dense_4h_to_h", width="intermediate_size", norm=TWO_BIASED, stem="layers",
        outer=parts(embedding(), norms("final_layernorm", bias=True))),
    "phi": _PHI,
    "phi-msft": replace(_PHI, stem="h"),
    "phi3": decoder(fused_attention("self_attn", "qkv_proj", "o_proj"), feed_forward(ups=FUSED)),
    "qwen": WeightRule(
        layer=parts(fused_attention("attn", "c_attn", "c_proj", bias=True, out_bias=False),
                    feed_forward(ups=("w1", "w2"), down="c_proj", width=_half), norms("ln_1", "ln_2")),
        outer=parts(embedding("wte"), norms("ln_f")), stem="h"),
    "qwen2": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen2_vl_text": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3_vl_text": _QWEN3,
    "RefinedWeb": FALCON,
    "RefinedWebModel": FALCON,
    "seed_oss": decoder(attention(bias=("attention_bias", True), out_bias=("attention_out_bias", False)),
                        feed_forward(bias=MLP_BIAS)),
    "smollm3": _LLAMA,
    "stablelm": decoder(
        attention(bias=("use_qkv_bias", False), out_bias=False, wide_norms=("qk_layernorm", False)), MLP,
        norm=where(said(("use_parallel_residual", False)), norms("input_layernorm", bias=True), TWO_BIASED),
        outer=OUTER_BIASED),
    "starcoder2": decoder(attention(bias=("use_bias", True)),
                          feed_forward(ups=("c_fc",), down="c_proj", bias=("use_bias", True)), norm=TWO_BIASED,
                          outer=OUTER_BIASED),
    "whisper": WeightRule(layer=parts(), outer=_whisper_outer, head="proj_out"),
    "vaultgemma": decoder(_GEMMA_ATTENTION, MLP, norm=norms("input_layernorm", "pre_feedforward_layernorm")),
}  # fmt: skip
"""By the config's `model_type`."""
