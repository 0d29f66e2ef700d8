"""How the families of attention-only models say what their layers cache.

Each reader takes a config's keys to its layers. Sources are the configuration and modeling files of transformers 5.24
(huggingface/transformers, src/transformers/models/<model_type>) unless a reader names another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from kvplan.core.specs import LayerKind, LayerSpec, SideCache, StateCache
from kvplan.store.keys import CONTEXT, HEADS, HIDDEN, LAYERS_MAX, CacheRule, HeadRule, Keys, WindowRule

_KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "num_attention_groups")
_OTHER_KV_HEADS: Final = ("multi_query", "multi_query_attention", "multi_query_group_num", "kv_n_heads")
_OF_A_LAYER: Final = frozenset({"num_attention_heads", "num_key_value_heads", "head_dim"})
_LAYER_KINDS: Final = {"full_attention": LayerKind.FULL, "sliding_attention": LayerKind.SLIDING}
_CHUNK_KINDS: Final = {"full_attention": LayerKind.FULL, "chunked_attention": LayerKind.CHUNKED}
_MTP_KEYS: Final = ("num_nextn_predict_layers",)


def kv_heads(keys: Keys, heads: int) -> int:
    """Return the KV heads of a layer of *heads* query heads.

    Raises:
        UnsupportedModelError: Another key than the family's own tells a number of them.
        InputError: They do not share the query heads evenly.
    """
    found = _kv_heads(keys, heads)
    if heads % found:
        raise keys.wrong(f"{heads} query heads cannot share {found} KV heads evenly")
    return found


def _kv_heads(keys: Keys, heads: int) -> int:
    rule = keys.architecture.heads
    if rule is HeadRule.GROUP_NUMBER:
        return keys.size("multi_query_group_num") if keys.get("multi_query_attention") else heads
    if isinstance(keys.get("num_key_value_heads"), list):
        raise keys.unsupported("num_key_value_heads", "layers or heads of several shapes")
    if rule is HeadRule.GROUPED:
        for key in _OTHER_KV_HEADS:
            if keys.get(key):
                raise keys.unsupported(key, f"a number of KV heads that {keys.type} is not known to read")
    if rule is HeadRule.FALCON and (keys.get("new_decoder_architecture") or keys.get("n_head_kv")):
        rule = HeadRule.GROUPED
    if rule is not HeadRule.GROUPED and keys.get("num_key_value_heads") is None:
        return 1 if "multi_query" not in keys or keys.get("multi_query") else heads
    if any(key in keys and keys.get(key) is None for key in _KV_HEADS):
        return heads
    return heads if keys.count(*_KV_HEADS, required=False) is None else keys.size(*_KV_HEADS)


def head_dim(keys: Keys, heads: int) -> int:
    """Return the head size: stated, else the class's own, else derived; null and 0 state nothing."""
    names = keys.architecture.head_dim_keys
    nothing = any(name in keys and not keys.get(name) for name in names)
    stated = None if nothing and not any(keys.get(name) for name in names) else keys.count(*names, required=False)
    if stated:
        return stated
    hidden = keys.size(*HIDDEN)
    if hidden % heads:
        raise keys.wrong(f"hidden_size {hidden} is no multiple of {heads} heads", "the config needs head_dim")
    return hidden // heads


def full_layer(keys: Keys) -> LayerSpec:
    """Return a layer of full attention with K and V heads of one size."""
    heads = keys.size(*HEADS)
    return LayerSpec(kind=LayerKind.FULL, kv_heads=kv_heads(keys, heads), head_dim=head_dim(keys, heads))


def windowed(keys: Keys, layer: LayerSpec, window: int | None) -> LayerSpec:
    """Return *layer* with a window, or as it is where the window holds the whole context."""
    if window is None or window >= keys.size(*CONTEXT):
        return layer
    return replace(layer, kind=LayerKind.SLIDING, window_tokens=window)


def plain_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """Return layers of one shape, each full or with a window by the architecture's rule."""
    window = _window(keys)
    layer = full_layer(keys)
    sliding = windowed(keys, layer, window)
    kinds = _kinds(keys, keys.layer_count(), window)
    return tuple(sliding if kind is LayerKind.SLIDING else layer for kind in kinds)


def _window(keys: Keys) -> int | None:
    """Return the window, or None where it is switched off or left null."""
    if keys.architecture.gated and not keys.get("use_sliding_window"):
        return None
    if "sliding_window" in keys and not keys.get("sliding_window"):
        return None
    return keys.count("sliding_window", required=False)


def _kinds(keys: Keys, layers: int, window: int | None) -> list[LayerKind]:
    listed = keys.listed("layer_types", _LAYER_KINDS, layers)
    rule = keys.architecture.window
    if listed is not None:
        if LayerKind.SLIDING in listed and rule is WindowRule.NONE:
            raise keys.unsupported("layer_types", f"sliding windows that {keys.type} is not known to have")
        if LayerKind.SLIDING in listed and window is None:
            raise keys.wrong("layer_types names sliding_attention without a sliding_window")
        return listed
    if window is None:
        return [LayerKind.FULL] * layers
    return [LayerKind.SLIDING if slides else LayerKind.FULL for slides in _slides(keys, rule, layers, window)]


def _slides(keys: Keys, rule: WindowRule, layers: int, window: int) -> list[bool]:
    if rule is WindowRule.ALL:
        return [True] * layers
    if rule is WindowRule.AFTER:
        first = keys.count("max_window_layers") or 0
        return [layer >= first for layer in range(layers)]
    if rule is WindowRule.PATTERN:
        every = keys.size("sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers")
        return [(layer + 1) % every != 0 for layer in range(layers)]
    if rule is WindowRule.NONE and window >= keys.size(*CONTEXT):
        return [False] * layers
    raise keys.unsupported("sliding_window", f"a window whose layers {keys.type} does not name in layer_types")


def _repeated(keys: Keys, layer: LayerSpec) -> tuple[LayerSpec, ...]:
    """Return *layer* for each layer of multi-token prediction that the config names."""
    return (layer,) * (keys.count(*_MTP_KEYS, required=False, maximum=LAYERS_MAX) or 0)


def latent_layer(keys: Keys) -> LayerSpec:
    """Return a layer of multi-head latent attention: the latent and the shared rotated key, one vector a token."""
    rope = keys.size("qk_rope_head_dim")
    latent = keys.size("kv_lora_rank")
    return LayerSpec(kind=LayerKind.LATENT, kv_heads=1, head_dim=latent + rope, value_dim=0, rope_dim=rope)


def latent_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """Return layers of multi-head latent attention (DeepSeek V2, arXiv 2405.04434, section 2.1)."""
    return (latent_layer(keys),) * keys.layer_count()


def _latent_drafts(keys: Keys) -> tuple[LayerSpec, ...]:
    return _repeated(keys, latent_layer(keys))


_LATENT_KEYS: Final = frozenset({"kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"})
LATENT: Final = CacheRule(layers=latent_layers, reads=_LATENT_KEYS, drafts=_latent_drafts)


def doubled_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """Return the latent layers of LongCat Flash, which has two of attention in each that `num_layers` counts."""
    doubled = keys.count("num_layers", required=False, maximum=LAYERS_MAX)
    return (latent_layer(keys),) * (2 * doubled if doubled else keys.layer_count())


DOUBLED: Final = CacheRule(layers=doubled_layers, reads=_LATENT_KEYS)


def indexed_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """Return latent layers, of which those with an indexer of their own keep one key a token for it.

    The indexer's keys are counted in the type that the model runs in, as transformers caches them; engines keep them
    in 8 bits (DeepSeek V3.2).
    """
    keyed = _indexed_layer(keys)
    return tuple(keyed if own else latent_layer(keys) for own in _own_indexers(keys, keys.layer_count()))


def _indexed_layer(keys: Keys) -> LayerSpec:
    return replace(latent_layer(keys), sides=(SideCache(name="indexer keys", elements=keys.size("index_head_dim")),))


def _own_indexers(keys: Keys, layers: int) -> list[bool]:
    """Return which layers run an indexer; the others take the choice of the layer before (GLM-5.2)."""
    types = {"full": True, "shared": False}
    listed = keys.listed("indexer_types", types, layers)
    if listed is None:
        listed = keys.listed("index_topk_pattern", {**types, "F": True, "S": False}, layers)
    if listed is not None:
        return listed
    every = keys.count("index_topk_freq", required=False) or 1
    offset = keys.count("index_skip_topk_offset", required=False)
    first = 2 if offset is None else offset
    return [max(layer - first + 1, 0) % every == 0 for layer in range(layers)]


def _indexed_drafts(keys: Keys) -> tuple[LayerSpec, ...]:
    return _repeated(keys, _indexed_layer(keys))


INDEXED: Final = CacheRule(
    layers=indexed_layers,
    reads=_LATENT_KEYS | {"index_topk", "index_head_dim", "index_n_heads"},
    drafts=_indexed_drafts,
)


def compressed_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """Return DeepSeek V4's layers: a window, and entries that each stand for several tokens.

    Keys are read as values too. A layer with a ratio of 4 keeps a key of an indexer for each entry as well. The tokens
    that await their entry are not counted: at most one ratio of them, and each engine holds them in its own way.
    """
    window = LayerSpec(
        kind=LayerKind.SLIDING, kv_heads=keys.size("num_key_value_heads"), head_dim=keys.size("head_dim"), value_dim=0,
        rope_dim=keys.size("qk_rope_head_dim"), window_tokens=keys.size("sliding_window"),
    )  # fmt: skip
    index = keys.size("index_head_dim")
    return tuple(replace(window, sides=_entries(window.head_dim, index, ratio)) for ratio in _ratios(keys))


def _entries(elements: int, index: int, ratio: int) -> tuple[SideCache, ...]:
    entries = SideCache(name="compressed entries", elements=elements, tokens_per_entry=ratio)
    if ratio == 0:
        return ()
    if ratio == _HEAVY_RATIO:
        return (entries,)
    return (entries, SideCache(name="indexer keys", elements=index, tokens_per_entry=ratio))


_SPARSE_RATIO, _HEAVY_RATIO = 4, 128
"""With an indexer, and without: transformers' `compressed_sparse_attention` and `heavily_compressed_attention`."""


def _ratios(keys: Keys) -> list[int]:
    layers = keys.layer_count()
    known = {0: 0, _SPARSE_RATIO: _SPARSE_RATIO, _HEAVY_RATIO: _HEAVY_RATIO}
    named = {"sliding_attention": 0, "compressed_sparse_attention": _SPARSE_RATIO,
             "heavily_compressed_attention": _HEAVY_RATIO}  # fmt: skip
    rates = keys.get("compress_rates")
    if rates is not None and rates != {name: ratio for name, ratio in named.items() if ratio}:
        raise keys.unsupported("compress_rates", "other ratios than 4 and 128")
    listed = keys.listed("layer_types", named, layers)
    found = listed if listed is not None else keys.listed("compress_ratios", known)
    if found is None or len(found) < layers:
        raise keys.wrong(f"compress_ratios must be a list of {layers} ratios, one a layer")
    return found[:layers]  # those of layers for multi-token prediction follow


COMPRESSED: Final = CacheRule(
    layers=compressed_layers,
    reads=frozenset({
        "compress_ratios", "compress_rates", "index_topk", "index_head_dim", "index_n_heads", "qk_rope_head_dim",
    }),
)  # fmt: skip


def gemma_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """Return the layers of Gemma 3n and 4: windows, global layers of another shape, and late layers that share.

    The last `num_kv_shared_layers` layers attend to the K and V of the last layer before them of their own kind.
    """
    if keys.get("use_bidirectional_attention") == "all":
        raise keys.unsupported("use_bidirectional_attention", "attention that is not causal")
    kinds = _kinds(keys, keys.layer_count(), keys.size("sliding_window"))
    if "global_head_dim" in keys.architecture.defaults:
        kinds[-1] = LayerKind.FULL  # whatever the list says: Gemma4TextConfig
    own = [_gemma_layer(keys.in_layer(index, _OF_A_LAYER), kind) for index, kind in enumerate(kinds)]
    shared = keys.count("num_kv_shared_layers") or 0
    first = len(own) - shared
    if first < 1:
        raise keys.wrong(f"num_kv_shared_layers is {shared} of {len(own)} layers", "one must have a cache to share")
    return tuple(own[:first]) + tuple(_shared(keys, own, kinds, index, first) for index in range(first, len(own)))


def _gemma_layer(keys: Keys, kind: LayerKind) -> LayerSpec:
    layer = full_layer(keys)
    if kind is LayerKind.SLIDING:
        return windowed(keys, layer, keys.size("sliding_window"))
    if keys.get("per_layer_config") is not None or "global_head_dim" not in keys.architecture.defaults:
        return layer
    heads = keys.count("num_global_key_value_heads", required=False) if keys.get("attention_k_eq_v") else None
    return replace(layer, head_dim=keys.size("global_head_dim"), kv_heads=heads or layer.kv_heads)


def _shared(keys: Keys, own: Sequence[LayerSpec], kinds: Sequence[LayerKind], index: int, first: int) -> LayerSpec:
    source = next((layer for layer in range(first - 1, -1, -1) if kinds[layer] is kinds[index]), None)
    if source is None:
        raise keys.wrong(f"layer {index} shares a cache of a kind that no layer before {first} has")
    return replace(own[index], shared_with=source)


GEMMA: Final = CacheRule(
    layers=gemma_layers,
    reads=frozenset({
        "num_kv_shared_layers", "global_head_dim", "num_global_key_value_heads", "attention_k_eq_v",
        "per_layer_config",
    }),
)  # fmt: skip


def chunked_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """Return Llama 4's layers: chunks where positions are rotated, all tokens in every fourth or as listed."""
    layer = full_layer(keys)
    none = "attention_chunk_size" in keys and not keys.get("attention_chunk_size")
    chunk = None if none else keys.size("attention_chunk_size")
    layers = keys.layer_count()
    kinds = keys.listed("layer_types", _CHUNK_KINDS, layers)
    if kinds is None:
        every = keys.size("no_rope_layer_interval")
        rotated = keys.listed("no_rope_layers", {0: False, 1: True}, layers) if keys.get("no_rope_layers") else None
        rotated = rotated or [(index + 1) % every != 0 for index in range(layers)]
        kinds = [LayerKind.CHUNKED if one else LayerKind.FULL for one in rotated]
    if chunk is None or chunk >= keys.size(*CONTEXT):
        return (layer,) * layers
    short = replace(layer, kind=LayerKind.CHUNKED, window_tokens=chunk)
    return tuple(short if kind is LayerKind.CHUNKED else layer for kind in kinds)


CHUNKS: Final = CacheRule(layers=chunked_layers, reads=frozenset({"attention_chunk_size"}))


def two_shape_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """Return MiMo V2's layers: values narrower than keys, and more KV heads in the layers with a window.

    The `swa_` keys are in the model's own config.json and read so by SGLang (models/mimo_v2_flash.py); transformers'
    class doubles the KV heads of such layers instead, which is the same. `attention_chunk_size` means nothing there.
    The window is what `sliding_window` says; transformers adds the query to a `sliding_window_size` beside it.
    """
    heads = keys.size(*HEADS)
    full = LayerSpec(
        kind=LayerKind.FULL, kv_heads=kv_heads(keys, heads), head_dim=keys.size("head_dim"),
        value_dim=keys.size("v_head_dim"),
    )  # fmt: skip
    slides = LayerSpec(
        kind=LayerKind.FULL,
        kv_heads=keys.count("swa_num_key_value_heads", required=False) or 2 * full.kv_heads,
        head_dim=keys.count("swa_head_dim", required=False) or full.head_dim,
        value_dim=keys.count("swa_v_head_dim", required=False) or full.value_dim,
    )
    short = windowed(keys, slides, keys.size("sliding_window"))
    kinds = keys.listed("layer_types", _LAYER_KINDS, keys.layer_count())
    if kinds is None:
        kinds = keys.listed("hybrid_layer_pattern", {0: LayerKind.FULL, 1: LayerKind.SLIDING}, keys.layer_count())
    if kinds is None:
        raise keys.wrong("has neither layer_types nor hybrid_layer_pattern", f"a {keys.type} config needs one")
    return tuple(short if kind is LayerKind.SLIDING else full for kind in kinds)


TWO_SHAPES: Final = CacheRule(
    layers=two_shape_layers,
    reads=frozenset({
        "hybrid_layer_pattern", "swa_head_dim", "swa_num_key_value_heads", "swa_v_head_dim", "v_head_dim",
        "attention_chunk_size",
    }),
)  # fmt: skip


def step_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """Return the layers of Step 3.5 and 3.7: `layer_types` may go on with those for multi-token prediction.

    `attention_other_setting` and `per_layer_config` give layers with a window other query heads; their K and V are as
    in the other layers unless a number of KV heads says otherwise.
    """
    layers, full = keys.layer_count(), full_layer(keys)
    listed = keys.listed("layer_types", _LAYER_KINDS)
    if listed is None:
        return (full,) * layers
    drafts = keys.count(*_MTP_KEYS, required=False) or 0
    if len(listed) not in (layers, layers + drafts):
        raise keys.wrong(f"layer_types must be a list of {layers} names, one a layer")
    window = keys.size("sliding_window")
    return tuple(
        windowed(keys, _step_layer(keys, index), window) if kind is LayerKind.SLIDING else full
        for index, kind in enumerate(listed[:layers])
    )


def _step_layer(keys: Keys, index: int) -> LayerSpec:
    """Return the K and V of a layer with a window; the query heads are other than the key that names them says."""
    own = keys.in_layer(index, _OF_A_LAYER)
    if keys.get("attention_other_setting") is not None:
        own = keys.inside("attention_other_setting")
    return LayerSpec(
        kind=LayerKind.FULL,
        kv_heads=own.count(*_KV_HEADS, required=False) or keys.size(*_KV_HEADS),
        head_dim=own.count("head_dim", required=False) or keys.size("head_dim"),
    )


STEP: Final = CacheRule(layers=step_layers, reads=frozenset({"per_layer_config", "attention_other_setting"}))


def block_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """Return the layers of Nemotron NAS (DeciLM), which `block_configs` shapes one by one.

    `n_heads_in_group` is the query heads that share a KV head (vLLM and SGLang read it so for nemotron-nas).
    """
    blocks = keys.get("block_configs")
    if not isinstance(blocks, list) or len(blocks) != keys.layer_count():
        raise keys.wrong(f"block_configs must be a list of {keys.layer_count()} objects, one a layer")
    heads = keys.size(*HEADS)
    return tuple(_block_layer(keys, block, heads) for block in blocks)


def _block_layer(keys: Keys, block: Any, heads: int) -> LayerSpec:
    attention = block.get("attention") if isinstance(block, Mapping) else None
    if not isinstance(attention, Mapping):
        raise keys.wrong("block_configs has a layer without attention", "no_op says that there is none")
    if attention.get("no_op") or attention.get("replace_with_linear"):
        return LayerSpec(kind=LayerKind.NONE)
    for key in ("num_sink_tokens", "sparsify", "window_length"):
        if attention.get(key):
            raise keys.unsupported(f"block_configs.attention.{key}", "attention to some of the tokens")
    group = attention.get("n_heads_in_group")
    if type(group) is not int or group < 1 or heads % group:
        raise keys.wrong(f"n_heads_in_group is {str(group)[:60]!r}", f"it divides the {heads} query heads")
    return LayerSpec(kind=LayerKind.FULL, kv_heads=heads // group, head_dim=head_dim(keys, heads))


BLOCKS: Final = CacheRule(layers=block_layers, reads=frozenset({"block_configs"}))


def nested_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """Return the layers of DBRX and MPT, whose KV heads stand in `attn_config`; else as many as query heads.

    What else stands there (a max_length of 20, an empty model_type) is a library's default and means nothing.
    """
    heads = keys.size(*HEADS)
    inner = keys.inside("attn_config") if keys.get("attn_config") is not None else None
    shared = inner.count("kv_n_heads", required=False) if inner else None
    if inner and inner.get("attn_type") == "multiquery_attention":
        shared = 1
    if inner and inner.get("sliding_window_size") not in (None, -1):
        raise inner.unsupported("attn_config.sliding_window_size", "a window")
    if shared is not None and (shared < 1 or heads % shared):
        raise keys.wrong(f"{heads} query heads cannot share {shared} KV heads evenly")
    layer = LayerSpec(kind=LayerKind.FULL, kv_heads=shared or heads, head_dim=head_dim(keys, heads))
    return (layer,) * keys.layer_count()


NESTED: Final = CacheRule(layers=nested_layers, reads=frozenset({"attn_config"}))


def scaled_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """Return OpenELM's layers, each with KV heads of its own number (arXiv 2404.14619)."""
    listed, size = keys.get("num_kv_heads"), keys.size("head_dim")
    layers = keys.layer_count()
    if not isinstance(listed, list) or len(listed) != layers or not all(type(n) is int and n > 0 for n in listed):
        raise keys.wrong(f"num_kv_heads must be a list of {layers} numbers, one a layer")
    return tuple(LayerSpec(kind=LayerKind.FULL, kv_heads=heads, head_dim=size) for heads in listed)


SCALED: Final = CacheRule(layers=scaled_layers)


def crossed_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """Return the decoder layers of Whisper: their own K and V, and those of the encoder's states, which never grow.

    The encoder's states are `max_source_positions` for every sequence (WhisperConfig), heads as many as query heads.
    """
    heads, hidden = keys.size("decoder_attention_heads"), keys.size(*HIDDEN)
    if hidden % heads:
        raise keys.wrong(f"d_model {hidden} is no multiple of {heads} heads")
    crossed = StateCache(
        name="K and V of the encoder's states", elements=2 * hidden * keys.size("max_source_positions")
    )
    layer = LayerSpec(kind=LayerKind.FULL, kv_heads=heads, head_dim=hidden // heads, states=(crossed,))
    return (layer,) * keys.size("decoder_layers", maximum=LAYERS_MAX)


CROSSED: Final = CacheRule(layers=crossed_layers, reads=frozenset({"is_encoder_decoder"}))
PLAIN: Final = CacheRule(layers=plain_layers)


def _plain_drafts(keys: Keys) -> tuple[LayerSpec, ...]:
    return _repeated(keys, full_layer(keys))


DRAFTED: Final = CacheRule(layers=plain_layers, drafts=_plain_drafts)
"""Of one shape, with layers for multi-token prediction like them (vLLM, models/mimo_mtp.py and glm4_moe_mtp.py)."""


def softmax_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """Return the layers of MiniMax M2, whose `attn_type_list` is that of its predecessor: all of attention."""
    keys.listed("attn_type_list", {1: True}, keys.layer_count())
    return plain_layers(keys)


SOFTMAX: Final = CacheRule(layers=softmax_layers, reads=frozenset({"attn_type_list"}))
