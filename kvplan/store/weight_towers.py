"""The weights of the parts of models that see: a tower, and what leads from it to the language model.

Sources as in `weight_parts`; names too, for lists of modules that are not quantized name them.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from kvplan.core.weights import Weight, WeightKind
from kvplan.errors import UnsupportedModelError
from kvplan.store.keys import HIDDEN, Keys

_TEXT: Final = ("text_config", "llm_config", "language_config", "thinker_config")


def _matrix(name: str, rows: int, columns: int, *, copies: int = 1, bias: bool = True) -> Iterator[Weight]:
    yield Weight(name=name, rows=rows, columns=columns, copies=copies, kind=WeightKind.LINEAR)
    if bias:
        yield _vector(name, rows, copies)


def _vector(name: str, elements: int, copies: int = 1) -> Weight:
    return Weight(name=name, rows=elements, copies=copies)


def _layers(
    at: str, copies: int, hidden: int, wide: int, *, queries: tuple[str, ...], out: str, mlp: tuple[str, ...],
    bias: bool = True, mlp_bias: bool = True, norms: int,
) -> Iterator[Weight]:  # fmt: skip
    """Yield the layers of an encoder; `qkv` is queries, keys and values in one matrix, *norms* elements of a layer."""
    for name in queries:
        yield from _matrix(at + name, hidden * (3 if len(queries) == 1 else 1), hidden, copies=copies, bias=bias)
    yield from _matrix(at + out, hidden, hidden, copies=copies, bias=bias)
    for name in mlp[:-1]:
        yield from _matrix(at + name, wide, hidden, copies=copies, bias=mlp_bias)
    yield from _matrix(at + mlp[-1], hidden, wide, copies=copies, bias=mlp_bias)
    yield _vector(at + "norms", norms, copies)


def _attention(at: str, out: str = "o_proj") -> tuple[tuple[str, ...], str]:
    return tuple(f"{at}.{name}" for name in ("q_proj", "k_proj", "v_proj")), f"{at}.{out}"


def _qwen3(outer: Keys, seen: Keys, text: int) -> Iterator[Weight]:
    """Yield the tower of Qwen3-VL and 3.5, with a merger for each layer that the language model looks into."""
    hidden, area = seen.size("hidden_size"), seen.size("spatial_merge_size") ** 2
    deep = seen.get("deepstack_visual_indexes") or []
    if not isinstance(deep, list):
        raise seen.wrong("deepstack_visual_indexes must be a list of layer numbers")
    yield _vector("visual.patch_embed", hidden * (_patch(seen) * seen.size("temporal_patch_size") + 1))
    yield _vector("visual.pos_embed", seen.size("num_position_embeddings") * hidden)
    yield from _layers(
        "visual.blocks.0.", seen.size("depth"), hidden, seen.size("intermediate_size"), queries=("attn.qkv",),
        out="attn.proj", mlp=("mlp.linear_fc1", "mlp.linear_fc2"), norms=4 * hidden,
    )  # fmt: skip
    for name, copies, norm in (("merger", 1, hidden), ("deepstack_merger_list.0", len(deep), area * hidden)):
        if copies:
            yield from _merger(f"visual.{name}.", copies, area * hidden, seen.size("out_hidden_size"), 2 * norm)


def _merger(at: str, copies: int, wide: int, out: int, norm: int) -> Iterator[Weight]:
    yield _vector(at + "norm", norm, copies)
    yield from _matrix(at + "linear_fc1", wide, wide, copies=copies)
    yield from _matrix(at + "linear_fc2", out, wide, copies=copies)


def _patch(seen: Keys) -> int:
    """Return the numbers of one patch of an image."""
    channels = seen.count("in_channels", "in_chans", "num_channels", required=False) or 3
    return channels * seen.size("patch_size") ** 2


def _qwen2(outer: Keys, seen: Keys, text: int) -> Iterator[Weight]:
    """Yield the tower of Qwen2-VL, whose `hidden_size` is what it gives, and of 2.5-VL."""
    newer = outer.type == "qwen2_5_vl"
    hidden = seen.size("hidden_size" if newer else "embed_dim")
    out = seen.size("out_hidden_size" if newer else "hidden_size")
    area = seen.count("spatial_merge_size", required=False) or 2
    yield _vector(
        "visual.patch_embed", hidden * _patch(seen) * (seen.count("temporal_patch_size", required=False) or 2)
    )
    wide = seen.size("intermediate_size") if newer else hidden * (seen.count("mlp_ratio", required=False) or 4)
    mlp = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj") if newer else ("mlp.fc1", "mlp.fc2")
    yield from _layers(
        "visual.blocks.0.", seen.size("depth"), hidden, wide, queries=("attn.qkv",), out="attn.proj", mlp=mlp,
        norms=2 * hidden if newer else 4 * hidden,
    )  # fmt: skip
    yield from _merger("visual.merger.", 1, area**2 * hidden, out, hidden if newer else 2 * hidden)


def _pixtral(seen: Keys) -> Iterator[Weight]:
    hidden = seen.size("hidden_size")
    queries, out = _attention("attention")
    yield _vector("vision_tower.patch_conv", hidden * (_patch(seen) + 1))
    yield from _layers(
        "vision_tower.transformer.layers.0.", seen.size("num_hidden_layers"), hidden, seen.size("intermediate_size"),
        queries=queries, out=out, mlp=tuple(f"feed_forward.{name}_proj" for name in ("gate", "up", "down")),
        bias=False, mlp_bias=False, norms=2 * hidden,
    )  # fmt: skip


def _clip(seen: Keys, *, siglip: bool) -> Iterator[Weight]:
    """Yield a CLIP tower with its class token, or a SigLIP tower with its head where the config keeps that."""
    hidden, wide = seen.size("hidden_size"), seen.size("intermediate_size")
    places = (seen.size("image_size") // seen.size("patch_size")) ** 2 + (0 if siglip else 1)
    queries, out = _attention("self_attn", "out_proj")
    beside = hidden if siglip else 3 * hidden  # a bias; or a class token and a norm before the layers
    yield _vector("vision_tower.embeddings", hidden * (_patch(seen) + places) + beside + 2 * hidden)
    yield from _layers(
        "vision_tower.encoder.layers.0.", seen.size("num_hidden_layers"), hidden, wide, queries=queries, out=out,
        mlp=("mlp.fc1", "mlp.fc2"), norms=4 * hidden,
    )  # fmt: skip
    if siglip and seen.get("vision_use_head") is not False:
        yield _vector("vision_tower.head", 3 * hidden)
        yield from _matrix("vision_tower.head.attention.in_proj", 3 * hidden, hidden)
        yield from _matrix("vision_tower.head.attention.out_proj", hidden, hidden)
        yield from _matrix("vision_tower.head.mlp.fc1", wide, hidden)
        yield from _matrix("vision_tower.head.mlp.fc2", hidden, wide)


def _tower(seen: Keys) -> Iterator[Weight]:
    kind = str(seen.get("model_type"))[:60]
    if kind == "pixtral":
        return _pixtral(seen)
    if kind in ("clip_vision_model", "siglip_vision_model"):
        return _clip(seen, siglip=kind.startswith("siglip"))
    raise seen.unsupported("vision_config", f"a tower of model_type {kind!r}")


def _llava(outer: Keys, seen: Keys, text: int) -> Iterator[Weight]:
    if isinstance(outer.get("vision_feature_layer"), list):
        raise outer.unsupported("vision_feature_layer", "several layers that are read")
    biased = outer.get("multimodal_projector_bias") is not False
    yield from _tower(seen)
    yield from _matrix("multi_modal_projector.linear_1", text, seen.size("hidden_size"), bias=biased)
    yield from _matrix("multi_modal_projector.linear_2", text, text, bias=biased)


def _mistral(outer: Keys, seen: Keys, text: int) -> Iterator[Weight]:
    hidden, biased = seen.size("hidden_size"), bool(outer.get("multimodal_projector_bias"))
    merge = outer.count("spatial_merge_size", required=False) or 2
    yield from _tower(seen)
    yield _vector("multi_modal_projector.norm", hidden)
    yield from _matrix("multi_modal_projector.patch_merger", hidden, merge**2 * hidden, bias=False)
    yield from _matrix("multi_modal_projector.linear_1", text, hidden, bias=biased)
    yield from _matrix("multi_modal_projector.linear_2", text, text, bias=biased)


def _gemma3(outer: Keys, seen: Keys, text: int) -> Iterator[Weight]:
    hidden = seen.size("hidden_size")
    yield from _clip(seen, siglip=True)
    yield _vector("multi_modal_projector", hidden * (text + 1))


def _gemma4(outer: Keys, seen: Keys, text: int) -> Iterator[Weight]:
    if seen.get("use_clipped_linears"):
        raise seen.unsupported("use_clipped_linears", "bounds beside every matrix")
    hidden, head = seen.size("hidden_size"), seen.size("head_dim")
    queries, out = _attention("self_attn")
    if hidden != seen.size("num_attention_heads") * head or seen.get("num_key_value_heads") not in (
        None, seen.get("num_attention_heads"),
    ):  # fmt: skip
        raise seen.unsupported("head_dim", "heads that do not make the hidden size")
    yield _vector("vision_tower.patch_embedder", hidden * (_patch(seen) + 2 * seen.size("position_embedding_size")))
    yield from _layers(
        "vision_tower.encoder.layers.0.", seen.size("num_hidden_layers"), hidden, seen.size("intermediate_size"),
        queries=queries, out=out, mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), bias=False, mlp_bias=False,
        norms=4 * hidden + 2 * head,
    )  # fmt: skip
    if seen.get("standardize"):
        yield _vector("vision_tower.std", 2 * hidden)
    yield from _matrix("embed_vision.embedding_projection", text, hidden, bias=False)


def _llama4(outer: Keys, seen: Keys, text: int) -> Iterator[Weight]:
    hidden, wide = seen.size("hidden_size"), seen.size("intermediate_size")
    queries, out = _attention("self_attn")
    if seen.get("pixel_shuffle_ratio") not in (None, 0.5):
        raise seen.unsupported("pixel_shuffle_ratio", "another number of patches than four that become one")
    places = (seen.size("image_size") // seen.size("patch_size")) ** 2 + 1
    inner, given = seen.size("projector_input_dim"), seen.size("projector_output_dim")
    yield _vector("vision_model.patch_embedding", hidden * (_patch(seen) + places + 1 + 4))
    yield from _layers(
        "vision_model.model.layers.0.", seen.size("num_hidden_layers"), hidden, wide, queries=queries, out=out,
        mlp=("mlp.fc1", "mlp.fc2"), norms=4 * hidden,
    )  # fmt: skip
    yield from _matrix("vision_model.vision_adapter.mlp.fc1", inner, 4 * hidden, bias=False)
    yield from _matrix("vision_model.vision_adapter.mlp.fc2", given, inner, bias=False)
    yield from _matrix("multi_modal_projector.linear_1", text, seen.size("vision_output_dim"), bias=False)


def _kimi(outer: Keys, seen: Keys, text: int) -> Iterator[Weight]:
    """Yield the tower of Kimi K2.5, whose own config spells its sizes `vt_`; four patches become one."""
    hidden = seen.size("vt_hidden_size", "hidden_size")
    merged = seen.get("merge_kernel_size")
    if merged is not None and list(merged if isinstance(merged, list | tuple) else ()) != [2, 2]:
        raise seen.unsupported("merge_kernel_size", "another number of patches than four that become one")
    for key, plain in (("mm_projector_type", "patchmerger"), ("pos_emb_type", "divided_fixed"), ("norm_type", None)):
        if seen.get(key) not in (None, plain):
            raise seen.unsupported(key, f"{str(seen.get(key))[:60]!r}")
    places = seen.size("init_pos_emb_height", "pos_emb_height") * seen.size("init_pos_emb_width", "pos_emb_width")
    yield _vector("vision_tower.patch_embed", hidden * (_patch(seen) + 1 + places + 2))
    yield from _layers(
        "vision_tower.layers.0.", seen.size("vt_num_hidden_layers", "num_hidden_layers"), hidden,
        seen.size("vt_intermediate_size", "intermediate_size"), queries=("attn.wqkv",), out="attn.wo",
        mlp=("mlp.fc0", "mlp.fc1"), norms=4 * hidden,
    )  # fmt: skip
    given = seen.count("mm_hidden_size", required=False) or outer.count("projection_hidden_size", required=False)
    yield _vector("mm_projector.pre_norm", 2 * (given or hidden))
    yield from _matrix("mm_projector.in_proj", 4 * (given or hidden), 4 * (given or hidden))
    yield from _matrix("mm_projector.out_proj", text, 4 * (given or hidden))


_TOWERS: Final[dict[str, Callable[[Keys, Keys, int], Iterator[Weight]]]] = {
    "gemma3": _gemma3, "gemma4": _gemma4, "kimi_k25": _kimi, "llama4": _llama4, "llava": _llava, "mistral3": _mistral,
    "qwen2_5_vl": _qwen2, "qwen2_vl": _qwen2, "qwen3_5": _qwen3, "qwen3_5_moe": _qwen3, "qwen3_vl": _qwen3,
    "qwen3_vl_moe": _qwen3,
}  # fmt: skip


def tower_weights(config: Mapping[str, Any], language: Keys) -> list[Weight]:
    """Return the weights of what *config* has beside its language model; none where it is one.

    Raises:
        UnsupportedModelError: It has a part whose weights are not known, or does not describe it.
        InputError: A key of the part is missing or cannot be.
    """
    if not any(isinstance(config.get(key), Mapping) for key in _TEXT) and not config.get("vision_config"):
        return []
    outer = Keys(config, language.where, str(config.get("model_type"))[:60], language.architecture)
    heard = sorted(key for key in config if key.startswith("audio") and isinstance(config[key], Mapping))
    if heard:
        raise outer.unsupported(heard[0], "a part that hears, whose weights are not known")
    reader = _TOWERS.get(outer.type)
    if reader is None:
        message = f"the weights of what {outer.type} has beside its language model are not known"
        raise UnsupportedModelError(message, where=language.where, hint="name a model with its weights")
    return list(reader(outer, outer.inside("vision_config"), language.size(*HIDDEN)))
