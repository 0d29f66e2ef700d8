"""How the families with a recurrent state say what their layers cache.

Shapes are those of vLLM (vllm/model_executor/layers/mamba/mamba_utils.py at 02d7108), which keeps the last k - 1 inputs
of a convolution of k: no step needs more. transformers 5.24 keeps k of them, and the same state. A state is of the type
that `mamba_ssm_cache_dtype` or `mamba_ssm_dtype` names, else of the one that transformers keeps it in, nearly
everywhere 32 bits; an engine may keep it in the model's own type then (vLLM's `auto`).
"""

from collections.abc import Sequence
from typing import Final

from kvplan.core.specs import LayerKind, LayerSpec, StateCache
from kvplan.store.attention import LATENT, full_layer, kv_heads, latent_layer, windowed
from kvplan.store.keys import HEADS, HIDDEN, LAYERS, LAYERS_MAX, CacheRule, Keys

_DTYPE_KEYS: Final = ("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
_MIXED_KINDS: Final = {"full_attention": True, "attention": True, "linear_attention": False, "mamba": False}
_NOTHING: Final = LayerSpec(kind=LayerKind.NONE)
_FLOAT32_BITS: Final = 32


def _states(keys: Keys, convolved: int, kernel: int, recurrent: int, *, fixed: bool = False) -> tuple[StateCache, ...]:
    """Return the states of *convolved* channels, each with the inputs that the next step reads, and of *recurrent*.

    *fixed* says that every engine keeps the family's recurrent state in 32 bits where the config names no type.
    """
    free = not fixed and all(keys.get(key) is None for key in _DTYPE_KEYS)
    return (
        StateCache(name="convolution inputs", elements=convolved * (kernel - 1), inputs=kernel - 1),
        StateCache(name="recurrent state", elements=recurrent, item_bits=keys.state_bits(*_DTYPE_KEYS), free_type=free),
    )


def _only_state(states: tuple[StateCache, ...]) -> LayerSpec:
    return LayerSpec(kind=LayerKind.NONE, states=states)


def _mixed(keys: Keys, attends: Sequence[bool], states: tuple[StateCache, ...]) -> tuple[LayerSpec, ...]:
    """Return a layer of attention for each that attends, one of states for each other."""
    attention = full_layer(keys) if any(attends) else _NOTHING
    return tuple(attention if one else _only_state(states) for one in attends)


def _mamba1(keys: Keys, state_key: str, kernel_key: str, inner: int) -> tuple[StateCache, ...]:
    return _states(keys, inner, keys.size(kernel_key), inner * keys.size(state_key))


def mamba_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """Return the layers of Mamba (arXiv 2312.00752): a state of every inner channel, no attention."""
    inner = keys.count("intermediate_size", required=False) or keys.size("expand") * keys.size(*HIDDEN)
    return (_only_state(_mamba1(keys, "state_size", "conv_kernel", inner)),) * keys.layer_count()


MAMBA: Final = CacheRule(layers=mamba_layers, reads=frozenset({"state_size", "conv_kernel", "time_step_rank"}))


def jamba_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """Return Jamba's layers: one of attention in each period, Mamba in the others (arXiv 2403.19887)."""
    states = _mamba1(keys, "mamba_d_state", "mamba_d_conv", keys.size("mamba_expand") * keys.size(*HIDDEN))
    listed = keys.listed("layers_block_type", _MIXED_KINDS, keys.layer_count())
    if listed is not None:
        return _mixed(keys, listed, states)
    period, offset = keys.size("attn_layer_period"), keys.count("attn_layer_offset")
    return _mixed(keys, [layer % period == offset for layer in range(keys.layer_count())], states)


_MAMBA_KEYS: Final = frozenset({"mamba_d_state"})
JAMBA: Final = CacheRule(layers=jamba_layers, reads=_MAMBA_KEYS | {"attn_layer_period", "layers_block_type"})


def _mamba2(
    keys: Keys, inner: int, *, groups: str, state: str, kernel: str, fixed: bool = False
) -> tuple[StateCache, ...]:
    """Return the states of Mamba 2 (arXiv 2405.21060): x, B and C go through the convolution, each head has a state."""
    wide = inner + 2 * keys.size(groups) * keys.size(state)
    return _states(keys, wide, keys.size(kernel), inner * keys.size(state), fixed=fixed)


def mamba2_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """Return the layers of Mamba 2, which has no attention: `num_heads` and `head_dim` are those of the state."""
    inner = keys.size("num_heads") * keys.size("head_dim")
    states = _mamba2(keys, inner, groups="n_groups", state="state_size", kernel="conv_kernel")
    return (_only_state(states),) * keys.layer_count()


MAMBA2: Final = CacheRule(layers=mamba2_layers, reads=frozenset({"state_size", "conv_kernel", "time_step_rank"}))


def _mamba2_mixer(keys: Keys) -> tuple[StateCache, ...]:
    """Return the states of the mixer of Bamba, Falcon H1 and Granite 4: `auto` heads share the inner channels."""
    heads = keys.size("mamba_n_heads")
    inner = keys.count("mamba_d_ssm", required=False) or keys.size("mamba_expand") * keys.size(*HIDDEN)
    stated = keys.get("mamba_d_head")
    if inner % heads or (stated not in (None, "auto") and heads * keys.size("mamba_d_head") != inner):
        raise keys.wrong(f"mamba_n_heads {heads} and mamba_d_head {str(stated)[:60]} do not make {inner} channels")
    return _mamba2(keys, inner, groups="mamba_n_groups", state="mamba_d_state", kernel="mamba_d_conv")


def bamba_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """Return Bamba's layers: attention in those that `attn_layer_indices` or the list of layer types names."""
    layers = keys.layer_count()
    for key in ("layer_types", "layers_block_type"):
        listed = keys.listed(key, _MIXED_KINDS, layers)
        if listed is not None:  # small Granite 4 models are of this type and have attention alone
            return _mixed(keys, listed, () if all(listed) else _mamba2_mixer(keys))
    indices = keys.get("attn_layer_indices") or []
    if not isinstance(indices, list) or not all(type(index) is int and 0 <= index < layers for index in indices):
        raise keys.wrong("attn_layer_indices must be a list of layer numbers")
    return _mixed(keys, [layer in indices for layer in range(layers)], _mamba2_mixer(keys))


BAMBA: Final = CacheRule(layers=bamba_layers, reads=_MAMBA_KEYS | {"layers_block_type", "attn_layer_indices"})


def parallel_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """Return Falcon H1's layers: attention and Mamba 2 side by side in each (arXiv 2507.22448)."""
    layer, states = full_layer(keys), _mamba2_mixer(keys)
    both = LayerSpec(kind=layer.kind, kv_heads=layer.kv_heads, head_dim=layer.head_dim, states=states)
    return (both,) * keys.layer_count()


PARALLEL: Final = CacheRule(layers=parallel_layers, reads=_MAMBA_KEYS)

_BLOCKS: Final = {
    "M": "state", "*": "attention", "-": "none", "E": "none", "mamba": "state", "linear_attention": "state",
    "attention": "attention", "full_attention": "attention", "mlp": "none", "moe": "none",
}  # fmt: skip
"""Nemotron H's blocks, in its pattern of letters and in lists of either transformers version."""


def _blocks(keys: Keys, kinds: Sequence[str]) -> tuple[LayerSpec, ...]:
    attention = full_layer(keys) if "attention" in kinds else _NOTHING
    inner = keys.size("mamba_num_heads") * keys.size("mamba_head_dim")
    states = _mamba2(keys, inner, groups="n_groups", state="ssm_state_size", kernel="conv_kernel", fixed=True)
    made = {"attention": attention, "state": _only_state(states), "none": _NOTHING}
    return tuple(made[kind] for kind in kinds)


def nemotron_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """Return Nemotron H's layers: each is a mixer or a feed-forward layer alone, which caches nothing.

    The list or pattern sets their number; a list wins (NemotronHConfig).
    """
    for key in ("layers_block_type", "layer_types", "hybrid_override_pattern"):
        kinds = keys.listed(key, _BLOCKS)
        if kinds:
            stated = keys.count("num_hidden_layers", required=False)
            if stated is not None and stated != len(kinds):
                raise keys.wrong(f"{key} has {len(kinds)} layers and num_hidden_layers says {stated}")
            return _blocks(keys, kinds)
    raise keys.wrong("has no layers_block_type and no hybrid_override_pattern", f"a {keys.type} config needs one")


def _nemotron_drafts(keys: Keys) -> tuple[LayerSpec, ...]:
    layers = keys.count("num_nextn_predict_layers", required=False, maximum=LAYERS_MAX) or 0
    kinds: list[str] = []
    for key in ("mtp_layers_block_type", "mtp_hybrid_override_pattern"):
        kinds = kinds or keys.listed(key, _BLOCKS) or []
    return _blocks(keys, kinds) * layers if layers and kinds else ()


NEMOTRON: Final = CacheRule(
    layers=nemotron_layers,
    reads=frozenset({
        "hybrid_override_pattern", "layers_block_type", "mamba_num_heads", "mamba_head_dim", "ssm_state_size",
        "conv_kernel", "time_step_rank", "attention_head_dim",
    }),
    drafts=_nemotron_drafts,
)  # fmt: skip


def delta_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """Return the layers of Qwen 3 Next, 3.5 and 3.6: three gated delta nets (arXiv 2412.06464), then attention."""
    key_heads, value_heads = keys.size("linear_num_key_heads"), keys.size("linear_num_value_heads")
    key_dim, value_dim = keys.size("linear_key_head_dim"), keys.size("linear_value_head_dim")
    states = _states(
        keys,
        2 * key_heads * key_dim + value_heads * value_dim,
        keys.size("linear_conv_kernel_dim"),
        value_heads * value_dim * key_dim,
    )
    layers = keys.layer_count()
    listed = keys.listed("layer_types", _MIXED_KINDS, layers)
    if listed is None:
        every = keys.size("full_attention_interval")
        listed = [(layer + 1) % every == 0 for layer in range(layers)]
    return _mixed(keys, listed, states)


def _delta_drafts(keys: Keys) -> tuple[LayerSpec, ...]:
    """Return the layers for multi-token prediction, all of full attention (vLLM, models/qwen3_next_mtp.py)."""
    layers = keys.count("mtp_num_hidden_layers", "num_nextn_predict_layers", required=False, maximum=LAYERS_MAX) or 0
    return (full_layer(keys),) * layers if layers else ()


DELTA: Final = CacheRule(
    layers=delta_layers,
    reads=frozenset({
        "linear_num_key_heads", "linear_num_value_heads", "linear_conv_kernel_dim", "full_attention_interval",
    }),
    drafts=_delta_drafts,
)  # fmt: skip


def kimi_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """Return the layers of Kimi Linear and K3: Kimi delta attention, and latent attention in some (arXiv 2510.26692).

    The model's own configuration has them in `linear_attn_config`, transformers as keys of their own.
    """
    if keys.get("linear_attn_config") is not None:
        own, names = keys.inside("linear_attn_config"), ("num_heads", "head_dim", "short_conv_kernel_size")
        attends = _numbered_layers(own, keys.layer_count())
    else:
        own, names = keys, ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
        listed = keys.listed("layer_types", _MIXED_KINDS, keys.layer_count())
        if listed is None:
            raise keys.wrong("has neither linear_attn_config nor layer_types", f"a {keys.type} config needs one")
        attends = listed
    heads, size, kernel = (own.size(name) for name in names)
    delta = _only_state(_states(keys, 3 * heads * size, kernel, heads * size**2, fixed=True))
    return tuple(latent_layer(keys) if one else delta for one in attends)


def _numbered_layers(own: Keys, layers: int) -> list[bool]:
    """Return which layers attend, of two lists that number them from 1 and name each once."""
    attends, linear = own.get("full_attn_layers"), own.get("kda_layers")
    if not isinstance(attends, list) or not isinstance(linear, list):
        raise own.wrong("linear_attn_config has no full_attn_layers and kda_layers", "they list layers from 1 on")
    numbers = [*attends, *linear]
    if not all(type(number) is int for number in numbers) or sorted(numbers) != list(range(1, layers + 1)):
        raise own.wrong(f"linear_attn_config does not name each of {layers} layers once")
    return [number in attends for number in range(1, layers + 1)]


KIMI: Final = CacheRule(
    layers=kimi_layers,
    reads=LATENT.reads | {"linear_attn_config", "linear_conv_kernel_dim", "mla_use_nope"},
)


def convolved_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """Return the layers of LFM2: short convolutions, and attention in those that are listed (Lfm2Config)."""
    layers = keys.layer_count()
    kinds = keys.listed("layer_types", {"full_attention": True, "conv": False}, layers)
    if kinds is None:
        listed = keys.get("full_attn_idxs")
        if not isinstance(listed, list):
            raise keys.wrong("has neither layer_types nor full_attn_idxs", f"a {keys.type} config needs one")
        kinds = [layer in listed for layer in range(layers)]
    inputs = keys.size("conv_L_cache") - 1
    state = StateCache(name="convolution inputs", elements=keys.size(*HIDDEN) * inputs, inputs=inputs)
    return _mixed(keys, kinds, (state,))


CONVOLVED: Final = CacheRule(layers=convolved_layers, reads=frozenset({"conv_L_cache", "full_attn_idxs"}))


def lightning_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """Return the layers of MiniMax 01: lightning attention, and softmax attention in some (arXiv 2501.08313).

    `attn_type_list` of the model's own configuration says 1 for softmax attention; transformers lists layer types.
    """
    layers, attention = keys.layer_count(), full_layer(keys)
    kinds = keys.listed("layer_types", _MIXED_KINDS, layers)
    if kinds is None:
        kinds = keys.listed("attn_type_list", {0: False, 1: True}, layers)
    if kinds is None:
        raise keys.wrong("has neither layer_types nor attn_type_list", f"a {keys.type} config needs one")
    elements = keys.size(*HEADS) * attention.head_dim**2
    state = StateCache(name="recurrent state", elements=elements, item_bits=keys.state_bits(*_DTYPE_KEYS))
    return _mixed(keys, kinds, (state,))


LIGHTNING: Final = CacheRule(layers=lightning_layers, reads=frozenset({"attn_type_list"}))


_HYBRID_KINDS: Final = {
    "hybrid": True, "mamba": False, "linear_attention": False, "m": False, "g": True,
}  # fmt: skip


def _with_attention(keys: Keys, hybrid: Sequence[bool], states: tuple[StateCache, ...]) -> tuple[LayerSpec, ...]:
    """Return layers that all keep *states*; hybrid ones attend as well, to twice the hidden size in as many heads."""
    heads, wide = keys.size(*HEADS), 2 * keys.size(*HIDDEN)
    if wide % heads:
        raise keys.wrong(f"twice hidden_size {wide // 2} is no multiple of {heads} heads")
    both = LayerSpec(kind=LayerKind.FULL, kv_heads=kv_heads(keys, heads), head_dim=wide // heads, states=states)
    return tuple(both if one else _only_state(states) for one in hybrid)


def _hybrid_layers(keys: Keys) -> list[bool] | None:
    layers = keys.layer_count()
    for key in ("layers_block_type", "layer_types"):
        listed = keys.listed(key, _HYBRID_KINDS, layers)
        if listed is not None:
            return listed
    return None


def zamba_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """Return Zamba's layers: Mamba in each, and one attention whose weights some of them share (arXiv 2405.16712)."""
    layers, hybrid = keys.layer_count(), _hybrid_layers(keys)
    if hybrid is None:  # the first three aside, as ZambaConfig makes them
        period, offset = keys.size("attn_layer_period"), keys.count("attn_layer_offset")
        hybrid = ([False, False, True] + [layer % period == offset for layer in range(layers - 3)])[:layers]
    inner = keys.size("mamba_expand") * keys.size(*HIDDEN)
    return _with_attention(keys, hybrid, _mamba1(keys, "mamba_d_state", "mamba_d_conv", inner))


def zamba2_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """Return the layers of Zamba 2, with Mamba 2 (arXiv 2411.15242)."""
    hybrid = _hybrid_layers(keys)
    if hybrid is None:
        raise keys.wrong("has no layers_block_type", f"a {keys.type} config needs one")
    inner = keys.size("mamba_expand") * keys.size(*HIDDEN)
    states = _mamba2(keys, inner, groups="mamba_ngroups", state="mamba_d_state", kernel="mamba_d_conv")
    return _with_attention(keys, hybrid, states)


_ZAMBA_KEYS: Final = _MAMBA_KEYS | {"layers_block_type", "attention_head_dim", "attn_layer_period", "kv_channels"}
ZAMBA: Final = CacheRule(layers=zamba_layers, reads=_ZAMBA_KEYS)
ZAMBA2: Final = CacheRule(layers=zamba2_layers, reads=_ZAMBA_KEYS)


def griffin_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """Return the layers of Recurrent Gemma: gated linear recurrences, and attention in a window (arXiv 2402.19427)."""
    kinds = keys.listed("block_types", {"recurrent": False, "attention": True})
    if not kinds:
        raise keys.wrong("has no block_types", f"a {keys.type} config needs them")
    width = keys.count("lru_width", required=False) or keys.size(*HIDDEN)
    states = _states(keys, width, keys.size("conv1d_width"), width, fixed=True)
    attention = windowed(keys, full_layer(keys), keys.size("attention_window_size"))
    return tuple(attention if kinds[layer % len(kinds)] else _only_state(states) for layer in range(keys.layer_count()))


GRIFFIN: Final = CacheRule(layers=griffin_layers, reads=frozenset({"block_types", "lru_width"}))
_XLSTM_MULTIPLE: Final = 64


def xlstm_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """Return the layers of xLSTM: a matrix, a vector and a number for each head (arXiv 2503.13427).

    Widths are rounded up to a multiple of 64; states are kept in 32 bits (xLSTMConfig).
    """
    heads, hidden = keys.size("num_heads"), keys.size(*HIDDEN)
    key, value = (_share(keys, name, default, hidden) for name, default in _XLSTM_FACTORS)
    if key % heads or value % heads:
        raise keys.wrong(f"{heads} heads do not divide {key} and {value} channels")
    bits = _FLOAT32_BITS if keys.get("inference_state_dtype") is None else keys.state_bits("inference_state_dtype")
    elements = key * value // heads + key + heads
    state = StateCache(name="recurrent state", elements=elements, item_bits=bits)
    return (_only_state((state,)),) * keys.size("num_blocks", *LAYERS, maximum=LAYERS_MAX)


_XLSTM_FACTORS: Final = (("qk_dim_factor", 0.5), ("v_dim_factor", 1.0))


def _share(keys: Keys, name: str, default: float, hidden: int) -> int:
    factor = keys.get(name) if keys.get(name) is not None else default
    if not isinstance(factor, int | float) or not 0 < factor <= hidden:
        raise keys.wrong(f"{name} is {str(factor)[:60]!r}", "it is a part of the hidden size")
    return int((hidden * factor + _XLSTM_MULTIPLE - 1) // _XLSTM_MULTIPLE) * _XLSTM_MULTIPLE


XLSTM: Final = CacheRule(layers=xlstm_layers)


def grouped_delta_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """Return the layers of Ling's hybrids: Kimi delta attention, then latent attention at the end of each group.

    The heads of both are as many and as wide (BailingHybridConfig).
    """
    layers = keys.layer_count()
    attends = keys.listed("layer_types", _MIXED_KINDS, layers)
    if attends is None:
        every = keys.size("layer_group_size")
        attends = [(layer + 1) % every == 0 or layer >= layers // every * every for layer in range(layers)]
    heads, size = keys.size(*HEADS), keys.size("head_dim")
    states = _states(keys, 3 * heads * size, keys.size("short_conv_kernel_size"), heads * size**2, fixed=True)
    return tuple(latent_layer(keys) if one else _only_state(states) for one in attends)


GROUPED_DELTA: Final = CacheRule(
    layers=grouped_delta_layers, reads=LATENT.reads | {"linear_conv_kernel_dim"}, drafts=LATENT.drafts
)


def old_rwkv_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """Return the layers of RWKV 4 (arXiv 2305.13048): two shifted tokens, and three numbers for each channel."""
    hidden = keys.size(*HIDDEN)
    inner = keys.count("attention_hidden_size", required=False) or hidden
    states = (
        StateCache(name="shifted tokens", elements=2 * hidden),
        StateCache(name="recurrent state", elements=3 * inner, item_bits=_FLOAT32_BITS),
    )
    return (_only_state(states),) * keys.layer_count()


OLD_RWKV: Final = CacheRule(layers=old_rwkv_layers, reads=frozenset({"rescale_every"}))


def rwkv_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """Return the layers of RWKV 5 to 7 (arXiv 2404.05892): two shifted tokens, and a matrix for each head.

    The matrices are kept in 32 bits (mlc-ai/mlc-llm, python/mlc_llm/model/rwkv5/rwkv5_model.py, `create_rnn_state`).
    """
    hidden = keys.size(*HIDDEN)
    inner = keys.count("attention_hidden_size", required=False) or hidden
    size = keys.size("head_size", "head_dim")
    if inner % size:
        raise keys.wrong(f"head_size {size} does not divide {inner} channels")
    states = (
        StateCache(name="shifted tokens", elements=2 * hidden),
        StateCache(name="recurrent state", elements=inner * size, item_bits=_FLOAT32_BITS),
    )
    return (_only_state(states),) * keys.layer_count()


RWKV: Final = CacheRule(layers=rwkv_layers, reads=frozenset({"rescale_every"}))
