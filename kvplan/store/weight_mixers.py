"""The recurrent parts of models' layers, each to its weights; sources as in `weight_parts`."""

from collections.abc import Iterator

from kvplan.core.weights import Weight
from kvplan.store.weight_parts import Flag, Part, Place, linear, other, within


def _rank(place: Place, key: str) -> int:
    """Return the features of a time step: `auto` is one for each 16 of the hidden size."""
    return -(-place.hidden // 16) if place.keys.get(key) in (None, "auto") else place.keys.size(key)


def mamba(at: str, *, rank: str, state: str, kernel: str, inner: str, bias: Flag, conv_bias: Flag,
          normed: bool = False) -> Part:  # fmt: skip
    """Return a Mamba mixer (arXiv 2312.00752), *inner* the key of what the hidden size is multiplied with."""

    def build(place: Place) -> Iterator[Weight]:
        stated = place.keys.count("intermediate_size", required=False) if inner == "expand" else None
        wide, steps = stated or place.keys.size(inner) * place.hidden, _rank(place, rank)
        states, biased = place.keys.size(state), place.flag(bias)
        yield from linear(place, "in_proj", 2 * wide, place.hidden, bias=biased)
        yield other(place, "conv1d", wide * (place.keys.size(kernel) + place.flag(conv_bias)))
        yield from linear(place, "x_proj", steps + 2 * states, wide)
        yield from linear(place, "dt_proj", wide, steps, bias=True)
        yield other(place, "A_log", wide * (states + 1))
        yield from linear(place, "out_proj", place.hidden, wide, bias=biased)
        if normed:
            yield other(place, "layernorms", steps + 2 * states)

    return within(at, build)


def mamba2(at: str, *, heads: str, head_dim: str, groups: str, state: str, kernel: str, bias: Flag, conv_bias: Flag,
           norm: Flag = True, out_bias: Flag | None = None) -> Part:  # fmt: skip
    """Return a Mamba 2 mixer (arXiv 2405.21060); inner channels as its cache rule counts them."""

    def build(place: Place) -> Iterator[Weight]:
        many, states = place.keys.size(heads), place.keys.size(state)
        if place.keys.get("mamba_d_ssm"):
            wide = place.keys.size("mamba_d_ssm")
        elif place.keys.get(head_dim) in (None, "auto"):
            wide = place.keys.size("mamba_expand") * place.hidden
        else:
            wide = many * place.keys.size(head_dim)
        convolved, biased = wide + 2 * place.keys.size(groups) * states, place.flag(bias)
        yield from linear(place, "in_proj", wide + convolved + many, place.hidden, bias=biased)
        yield other(place, "conv1d", convolved * (place.keys.size(kernel) + place.flag(conv_bias)))
        yield other(place, "A_log", 3 * many)
        if place.flag(norm):
            yield other(place, "norm", wide)
        last = biased if out_bias is None else place.flag(out_bias)
        yield from linear(place, "out_proj", place.hidden, wide, bias=last)

    return within(at, build)


def _delta_sizes(place: Place) -> tuple[int, int, int, int]:
    keys = place.keys
    value_heads, value_dim = keys.size("linear_num_value_heads"), keys.size("linear_value_head_dim")
    key = keys.size("linear_num_key_heads") * keys.size("linear_key_head_dim")
    return key, value_heads * value_dim, value_heads, value_dim


def gated_delta(projections: tuple[str, ...], at: str = "linear_attn") -> Part:
    """Return a gated delta net (arXiv 2412.06464): inputs in two matrices (Qwen 3 Next) or four (3.5)."""

    def build(place: Place) -> Iterator[Weight]:
        key, value, heads, size = _delta_sizes(place)
        wide = 2 * key + value
        rows = {"in_proj_qkvz": wide + value, "in_proj_ba": 2 * heads, "in_proj_qkv": wide, "in_proj_z": value,
                "in_proj_b": heads, "in_proj_a": heads}  # fmt: skip
        for name in projections:
            yield from linear(place, name, rows[name], place.hidden)
        yield other(place, "conv1d", wide * place.keys.size("linear_conv_kernel_dim"))
        yield other(place, "A_log", 2 * heads + size)
        yield from linear(place, "out_proj", place.hidden, value)

    return within(at, build)


def olmo_delta(at: str = "linear_attn") -> Part:
    """Return OLMo Hybrid's gated delta net: a matrix for each input."""

    def build(place: Place) -> Iterator[Weight]:
        key, value, heads, size = _delta_sizes(place)
        rows = {"q_proj": key, "k_proj": key, "v_proj": value, "a_proj": heads, "b_proj": heads, "g_proj": value}
        for name, features in rows.items():
            yield from linear(place, name, features, place.hidden)
        yield other(place, "conv1d", (2 * key + value) * place.keys.size("linear_conv_kernel_dim"))
        yield other(place, "A_log", 2 * heads + size)
        yield from linear(place, "o_proj", place.hidden, value)

    return within(at, build)


def kimi_delta(at: str = "self_attn") -> Part:
    """Return Kimi delta attention (arXiv 2510.26692)."""

    def build(place: Place) -> Iterator[Weight]:
        if place.keys.get("linear_attn_config") is not None:
            own, names = place.keys.inside("linear_attn_config"), ("num_heads", "head_dim", "short_conv_kernel_size")
        else:
            own, names = place.keys, ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
        heads, size, kernel = (own.size(name) for name in names)
        wide, hidden = heads * size, place.hidden
        for name in ("q_proj", "k_proj", "v_proj"):
            yield from linear(place, name, wide, hidden)
        yield other(place, "conv1d", 3 * wide * kernel)
        for name in ("f", "g"):
            yield from linear(place, f"{name}_a_proj", size, hidden)
            yield from linear(place, f"{name}_b_proj", wide, size)
        yield from linear(place, "b_proj", heads, hidden)
        yield other(place, "A_log", wide + heads + size)
        yield from linear(place, "o_proj", hidden, wide)

    return within(at, build)


def short_convolution(at: str = "conv") -> Part:
    """Return LFM2's short convolution."""

    def build(place: Place) -> Iterator[Weight]:
        hidden, biased = place.hidden, place.flag(("conv_bias", False))
        yield from linear(place, "in_proj", 3 * hidden, hidden, bias=biased)
        yield other(place, "conv", hidden * (place.keys.size("conv_L_cache") + biased))
        yield from linear(place, "out_proj", hidden, hidden, bias=biased)

    return within(at, build)


def gated_recurrence(at: str = "temporal_block") -> Part:
    """Return a gated linear recurrence (arXiv 2402.19427), whose gates are a square for each head."""

    def build(place: Place) -> Iterator[Weight]:
        width, hidden, heads = place.positive(place.hidden, "lru_width"), place.hidden, place.heads
        for name in ("linear_y", "linear_x"):
            yield from linear(place, name, width, hidden, bias=True)
        yield from linear(place, "linear_out", hidden, width, bias=True)
        yield other(place, "conv_1d", width * (place.keys.size("conv1d_width") + 1))
        yield other(place, "rg_lru", 2 * heads * (width // heads) * (width // heads + 1) + width)

    return within(at, build)


def old_rwkv() -> Part:
    """Return a block of RWKV 4 (arXiv 2305.13048); the first has one norm more."""

    def build(place: Place) -> Iterator[Weight]:
        hidden = place.hidden
        inner = place.positive(hidden, "attention_hidden_size")
        wide = place.positive(4 * hidden, "intermediate_size")
        for name in ("key", "value", "receptance"):
            yield from linear(place, f"attention.{name}", inner, hidden)
        yield from linear(place, "attention.output", hidden, inner)
        yield from linear(place, "feed_forward.key", wide, hidden)
        yield from linear(place, "feed_forward.receptance", hidden, hidden)
        yield from linear(place, "feed_forward.value", hidden, wide)
        yield other(place, "time", 2 * inner + 5 * hidden)
        yield other(place, "norms", 2 * hidden, copies=3 if place.index == 0 else 2)

    return build


def lightning(at: str = "self_attn") -> Part:
    """Return lightning attention (arXiv 2501.08313)."""

    def build(place: Place) -> Iterator[Weight]:
        size = place.keys.count("head_dim", required=False) or place.hidden // place.heads
        wide = place.heads * size
        yield from linear(place, "qkv_proj", 3 * wide, place.hidden)
        yield from linear(place, "output_gate", wide, place.hidden)
        yield from linear(place, "out_proj", place.hidden, wide)
        yield other(place, "norm", wide)

    return within(at, build)
