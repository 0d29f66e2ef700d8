"""The parts that models' layers are built of, each to its weights.

A part takes a place in a model to the weights there. Names are those of the checkpoints, below the language model's
own, for lists of modules that are not quantized name them. Shapes are those of the modeling files of transformers 5.24
(huggingface/transformers, src/transformers/models/<model_type>); a test holds them equal to the parameters of its
classes. Parameters that take part in no matrix product are counted under the name of their module.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from kvplan.core.specs import LayerKind, LayerSpec
from kvplan.core.weights import Weight, WeightKind
from kvplan.store.keys import HEADS, HIDDEN, Keys

Flag = bool | tuple[str, bool] | Callable[["Place"], bool]
"""Always so, or as the config's key says, with what its class takes where the key is left out; or as a test says."""
FACTOR_MAX = 1000
Width = str | Callable[["Place"], int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where in a model weights are.

    Attributes:
        keys: The language model's.
        index: Of the layer; 0 outside of layers.
        name: Of the module that the part is in, with a dot after it; empty for the model itself.
        spec: What the layer caches; of layer 0 outside of layers.
        layers: Of the model.
    """

    keys: Keys
    index: int
    name: str
    spec: LayerSpec
    layers: int

    @property
    def hidden(self) -> int:
        """The hidden size."""
        return self.keys.size(*HIDDEN)

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.keys.size(*HEADS)

    def inside(self, name: str) -> "Place":
        """Return the place of the module *name* here."""
        return replace(self, name=f"{self.name}{name}.") if name else self

    def number(self, default: int | None, *names: str) -> int:
        """Return the first of the keys that is set, else *default*; InputError where that is None."""
        found = self.keys.count(*names, required=default is None)
        return found if found is not None else default or 0

    def positive(self, default: int, *names: str) -> int:
        """Return the first of the keys that is set, else *default*; InputError where it is 0."""
        return self.keys.size(*names) if any(self.keys.get(name) is not None for name in names) else default

    def factor(self, default: float | None, name: str) -> float | None:
        """Return what *name* says times something, *default* where it is left out; None where it is null."""
        value = self.keys.get(name) if name in self.keys else default
        if value is not None and not (isinstance(value, int | float) and 0 < value < FACTOR_MAX):
            raise self.keys.wrong(f"{name} is {str(value)[:60]!r}", f"it is a number up to {FACTOR_MAX}")
        return value

    def flag(self, flag: Flag) -> bool:
        """Return what *flag* says here."""
        if isinstance(flag, bool):
            return flag
        if not isinstance(flag, tuple):
            return flag(self)
        key, default = flag
        return bool(self.keys.get(key)) if key in self.keys else default

    def width(self, width: Width) -> int:
        """Return the number of features that *width* says."""
        return self.keys.size(width) if isinstance(width, str) else width(self)


Part = Callable[[Place], Iterable[Weight]]
Test = Callable[[Place], bool]


def linear(
    place: Place, name: str, rows: int, columns: int, *, bias: bool = False, copies: int = 1,
    kind: WeightKind = WeightKind.LINEAR,
) -> Iterator[Weight]:  # fmt: skip
    """Yield a matrix of *rows* outputs and *columns* inputs, and its bias."""
    yield Weight(name=place.name + name, rows=rows, columns=columns, copies=copies, kind=kind)
    if bias:
        yield other(place, name, rows, copies=copies)


def other(place: Place, name: str, elements: int, *, copies: int = 1) -> Weight:
    """Return a weight that stays in 16 bits."""
    return Weight(name=place.name + name, rows=elements, copies=copies)


def parts(*some: Part) -> Part:
    """Return the parts as one."""
    return lambda place: chain.from_iterable(part(place) for part in some)


def within(name: str, *some: Part) -> Part:
    """Return the parts in the module *name*."""
    return lambda place: parts(*some)(place.inside(name))


def where(test: Test, then: Part, otherwise: Part | None = None) -> Part:
    """Return *then* in places that pass the test, *otherwise* or nothing in others."""
    return lambda place: then(place) if test(place) else otherwise(place) if otherwise else ()


def said(flag: Flag) -> Test:
    """Return the test whether the config says so."""
    return lambda place: place.flag(flag)


def either(*keys: str) -> Test:
    """Return the test whether one of the keys says so, which stand for the same in two spellings."""
    return lambda place: any(place.keys.get(key) for key in keys)


def attends(place: Place) -> bool:
    """Whether the layer has attention."""
    return place.spec.kind is not LayerKind.NONE


def norms(*names: str, bias: Flag = False) -> Part:
    """Return norms over the hidden size."""
    return lambda place: [other(place, name, place.hidden * (2 if place.flag(bias) else 1)) for name in names]


def embedding(name: str = "embed_tokens") -> Part:
    """Return the input embedding."""
    return lambda place: [other(place, name, place.width(vocabulary) * place.hidden)]


def vocabulary(place: Place) -> int:
    """Return the tokens of the vocabulary."""
    return place.keys.size("vocab_size", "padded_vocab_size")


def attention(
    at: str = "self_attn", *, names: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj"),
    bias: Flag = False, out_bias: Flag | None = None, queries: int = 1, sinks: Flag = False, own_v: Test | None = None,
    head_norms: Flag = False, wide_norms: Flag = False, norm_bias: bool = False,
) -> Part:  # fmt: skip
    """Return attention with K and V heads as the layer's cache has them.

    Args:
        at: The module.
        names: Of the matrices of queries, keys, values and the output.
        bias: Of queries, keys and values.
        out_bias: Of the output; as *bias* where None.
        queries: Times the query heads: 2 with a gate for each.
        sinks: Whether each query head has a logit of its own.
        own_v: Whether values have a projection of their own and not that of keys.
        head_norms: Whether queries and keys are normed head by head, with one weight for all heads.
        wide_norms: Whether they are normed with a weight for each head.
        norm_bias: Whether norms head by head have a bias.
    """

    def build(place: Place) -> Iterator[Weight]:
        spec, heads, hidden = place.spec, place.heads, place.hidden
        biased, value = place.flag(bias), spec.head_dim if spec.value_dim is None else spec.value_dim
        yield from linear(place, names[0], queries * heads * spec.head_dim, hidden, bias=biased)
        if spec.shared_with is None:
            yield from linear(place, names[1], spec.kv_heads * spec.head_dim, hidden, bias=biased)
            if own_v is None or own_v(place):
                yield from linear(place, names[2], spec.kv_heads * value, hidden, bias=biased)
        yield from linear(place, names[3], hidden, heads * value, bias=biased if out_bias is None else
                          place.flag(out_bias))  # fmt: skip
        if place.flag(sinks):
            yield other(place, "sinks", heads)
        keyed = spec.shared_with is None
        if place.flag(head_norms):
            yield other(place, "norms", spec.head_dim * (1 + norm_bias), copies=1 + keyed)
        if place.flag(wide_norms):
            yield other(place, "norms", spec.head_dim * (heads + keyed * spec.kv_heads))

    return within(at, build)


def fused_attention(at: str, name: str, out: str, *, bias: Flag = False, out_bias: Flag | None = None) -> Part:
    """Return attention whose queries, keys and values are one matrix."""

    def build(place: Place) -> Iterator[Weight]:
        wide = place.heads * place.spec.head_dim
        rows = wide + 2 * place.spec.kv_heads * place.spec.head_dim
        yield from linear(place, name, rows, place.hidden, bias=place.flag(bias))
        last = bias if out_bias is None else out_bias
        yield from linear(place, out, place.hidden, wide, bias=place.flag(last))

    return within(at, build)


def latent_attention(at: str = "self_attn", *, bias: Flag = ("attention_bias", False)) -> Part:
    """Return latent attention (arXiv 2405.04434), with an indexer in layers that cache its keys (DeepSeek V3.2)."""

    def build(place: Place) -> Iterator[Weight]:
        keys, heads, hidden, biased = place.keys, place.heads, place.hidden, place.flag(bias)
        rope, plain, value = (keys.size(key) for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
        query, latent = keys.count("q_lora_rank", required=False), keys.size("kv_lora_rank")
        if query:
            yield from linear(place, "q_a_proj", query, hidden, bias=biased)
            yield other(place, "q_a_layernorm", query)
        yield from linear(place, "q_b_proj" if query else "q_proj", heads * (plain + rope), query or hidden)
        yield from linear(place, "kv_a_proj_with_mqa", latent + rope, hidden, bias=biased)
        yield other(place, "kv_a_layernorm", latent)
        yield from linear(place, "kv_b_proj", heads * (plain + value), latent)
        yield from linear(place, "o_proj", hidden, heads * value, bias=biased)
        if place.spec.sides:
            yield from _indexer(place.inside("indexer"), query or hidden)

    return within(at, build)


def _indexer(place: Place, query: int) -> Iterator[Weight]:
    heads, size = place.keys.size("index_n_heads"), place.keys.size("index_head_dim")
    yield from linear(place, "wq_b", heads * size, query)
    yield from linear(place, "wk", size, place.hidden)
    yield other(place, "k_norm", 2 * size)
    yield other(place, "weights_proj", heads * place.hidden)


GATED, FUSED, PLAIN = ("gate_proj", "up_proj"), ("gate_up_proj",), ("up_proj",)


def feed_forward(
    at: str = "mlp", *, ups: tuple[str, ...] = GATED, down: str = "down_proj", width: Width = "intermediate_size",
    bias: Flag = False,
) -> Part:  # fmt: skip
    """Return a feed-forward layer; `gate_up_proj` is gate and up in one matrix."""

    def build(place: Place) -> Iterator[Weight]:
        wide, hidden, biased = place.width(width), place.hidden, place.flag(bias)
        for name in ups:
            yield from linear(place, name, wide * (2 if ups is FUSED else 1), hidden, bias=biased)
        yield from linear(place, down, hidden, wide, bias=biased)

    return within(at, build)


def experts(
    at: str = "mlp", *, count: Width, width: Width = "moe_intermediate_size", router: str = "gate",
    names: tuple[str, ...] = (*GATED, "down_proj"), inputs: Width | None = None, module: str = "experts.0.",
    fused: bool = False, bias: bool = False, corrected: Flag = False, routed: Width | None = None,
) -> Part:  # fmt: skip
    """Return a router and the experts that it chooses among.

    Args:
        at: The module.
        count: Of the experts.
        width: Of each.
        router: Its module.
        names: Of the matrices up, and of the one down at the end.
        inputs: Features that experts read and write where they are not the hidden size.
        fused: Whether gate and up are one matrix.
        bias: Of router and experts.
        corrected: Whether the router has a term for each expert that balances them (arXiv 2408.15664).
        module: Of the first expert, with a dot after it.
        routed: What the router chooses among where that is more than the experts.
    """

    def build(place: Place) -> Iterator[Weight]:
        many, wide = place.width(count), place.width(width)
        read = place.width(inputs) if inputs else place.hidden
        chosen = place.width(routed) if routed else many
        yield other(place, router, chosen * (place.hidden + bias + place.flag(corrected)))
        for name in names[:-1]:
            yield from linear(
                place, module + name, wide * (1 + fused), read, bias=bias, copies=many, kind=WeightKind.EXPERT
            )
        yield from linear(place, module + names[-1], read, wide, bias=bias, copies=many, kind=WeightKind.EXPERT)

    return within(at, build)


def dense_first(default: int) -> Test:
    """Return the test whether a layer has experts: from `first_k_dense_replace` on, or as `mlp_layer_types` lists."""

    def test(place: Place) -> bool:
        listed = place.keys.listed("mlp_layer_types", {"dense": False, "sparse": True})
        if listed is not None:
            return place.index >= len(listed) or listed[place.index]
        every = place.keys.get("moe_layer_freq")
        if isinstance(every, list):
            return place.index >= len(every) or bool(every[place.index])
        first = place.number(default, "first_k_dense_replace")
        return place.index >= first and place.index % (every if type(every) is int and every > 0 else 1) == 0

    return test


def shared_width(key: str, default: int | None, width: str = "moe_intermediate_size") -> Width:
    """Return the width of experts that every token goes through: as wide as *key* says experts."""
    return lambda place: place.number(default, key) * place.keys.size(width)


def has_shared(key: str, default: int | None) -> Test:
    """Return the test whether there are experts that every token goes through."""
    return lambda place: place.number(default, key) > 0


def product(*keys: str) -> Width:
    """Return the product of what the keys say."""

    def build(place: Place) -> int:
        total = 1
        for key in keys:
            total *= place.keys.size(key)
        return total

    return build


def first_of(*keys: str) -> Width:
    """Return what the first of the keys says that is set."""
    return lambda place: place.keys.size(*keys)
