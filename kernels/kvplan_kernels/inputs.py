"""The tensors of a case: made-up keys, values and queries, and a cache that holds them."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kvplan_kernels.append.reference import append
from kvplan_kernels.cache import AttentionOptions, Batch, LayerCache
from kvplan_kernels.cases import Case, Data, QueryType, Tables
from kvplan_kernels.format import Code, TensorFormat, parse
from kvplan_kernels.layout import KVLayout, Order
from kvplan_kernels.learning import learn
from kvplan_kernels.parameters import LayerParameters, usual
from kvplan_kernels.tensor_format import E4M3_MAX, E5M2_MAX

QUERY_TYPE: Final = {
    QueryType.BF16: torch.bfloat16,
    QueryType.FP16: torch.float16,
    QueryType.FP32: torch.float32,
}
_SINGLE_TOKENS: Final = 2
_LARGEST: Final = {Code.E4M3: E4M3_MAX, Code.E5M2: E5M2_MAX}
"""What the largest operands are, where codes are not relative to a scale."""
_LEFT_BYTES: Final = (0xFF, 0x7B)
"""NaN in both 16-bit types; 61,280 in fp16 and 1.3e36 in bf16."""
AppendCall = Callable[[LayerCache, Batch, Tensor, Tensor, Tensor], int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """A case's tensors.

    Attributes:
        cache: Holds no token yet; its bytes are what a page's last owner may have left: NaN, or huge numbers.
        empty: The batch before any append.
        batch: The batch once all tokens are held.
        key: As handed in, [longest length, kv_heads, head_dim]: each sequence holds its first tokens.
        value: As key.
        query: [batch, queries, query_heads, head_dim].
        options: Scale, window and softcap.
        sink_logits: float32 [query_heads] or None.
        positions: int32 [batch, queries] or None.
    """

    cache: LayerCache
    empty: Batch
    batch: Batch
    key: Tensor
    value: Tensor
    query: Tensor
    options: AttentionOptions
    sink_logits: Tensor | None
    positions: Tensor | None

    def appends(self) -> list[tuple[Batch, Tensor, Tensor, Tensor]]:
        """Return the append calls that fill the cache: most tokens at once, the last one at a time."""
        lengths = self.batch.lengths
        bulk = (lengths - _SINGLE_TOKENS).clamp(min=0)
        steps = [bulk] + [(lengths - bulk - done).clamp(0, 1) for done in range(_SINGLE_TOKENS)]
        calls, batch = [], self.empty
        for counts in steps:
            rows = [torch.arange(n) + first for first, n in zip(batch.lengths.tolist(), counts.tolist(), strict=True)]
            tokens = torch.cat(rows)
            calls.append((batch, self.key[tokens], self.value[tokens], counts))
            batch = batch.after(counts)
        return calls

    def fill(self, call: AppendCall = append) -> None:
        """Append all tokens to the cache."""
        for batch, key, value, counts in self.appends():
            call(self.cache, batch, key, value, counts)


def make_inputs(case: Case, order: Order = Order.LANES) -> Inputs:
    """Return the tensors of *case*, the same ones each time."""
    layout = case.layout(order)
    generator = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))
    key, value, query = _tensors(case, generator)
    cache, empty, batch = _empty_cache(
        case, layout, generator, learn(layout.format, key, value, usual(layout.head_dim))
    )
    heads = case.kv_heads * case.gqa_ratio
    shape = (len(case.lengths), case.queries)
    longest = max(case.lengths)
    return Inputs(
        cache=cache,
        empty=empty,
        batch=batch,
        key=key,
        value=value,
        query=query,
        options=AttentionOptions(scale=case.head_dim**-0.5, window=case.window, softcap=case.softcap),
        sink_logits=torch.randn(heads, generator=generator) if case.sink_logits else None,
        positions=torch.randint(-1, longest + 5, shape, generator=generator, dtype=torch.int32)
        if case.positions
        else None,
    )


def _tensors(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    shape = (max(case.lengths), case.kv_heads, case.head_dim)
    heads = case.kv_heads * case.gqa_ratio
    key, value = (torch.randn(shape, generator=generator) for _ in range(2))
    query = torch.randn(len(case.lengths), case.queries, heads, case.head_dim, generator=generator)
    form = parse(case.format)
    match case.data:
        case Data.NORMAL:
            pass
        case Data.OFFSET:
            key += 8 * torch.randn(shape[1:], generator=generator)
            value += 3
        case Data.OUTLIERS:
            key[:, :, [1, 7, case.head_dim - 2]] *= 30
            value[:, :, case.head_dim // 2] *= 30
        case Data.FLAT:
            query *= 1e-3
        case Data.SPREAD:
            query *= 12
        case Data.NEGATIVE:
            key, query = -(8 + key / 4), 4 + query.abs()
        case Data.DENORMAL:
            key, value = key * 1e-39, value * 1e-39
        case Data.EXTREME:
            token, channel = torch.arange(shape[0])[:, None, None], torch.arange(shape[2])
            least = (token % 32 == 5) | (channel % 32 == 3)
            most = [_LARGEST.get(tensor.code, 1.0) for tensor in (form.key, form.value)]
            key, value = (torch.where(least, -size, size).expand(shape).contiguous() for size in most)
            query = torch.ones_like(query)
        case Data.TIES:
            key, value = (_ties(shape, tensor, generator) for tensor in (form.key, form.value))
    dtype = QUERY_TYPE[case.query_type]
    return key.to(dtype), value.to(dtype), query.to(dtype)


def _ties(shape: tuple[int, int, int], tensor: TensorFormat, generator: torch.Generator) -> Tensor:
    """Return values of which half lie halfway between two codes."""
    return _float_ties(shape, generator) if tensor.code.is_float else _integer_ties(shape, tensor.bits, generator)


def _float_ties(shape: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    """Return floats of one bit more than E4M3 has, from below its least to above its largest normal number."""
    fraction = torch.randint(-31, 32, shape, generator=generator).float()
    return fraction * 2.0 ** torch.randint(-11, 5, shape, generator=generator)


def _integer_ties(shape: tuple[int, int, int], bits: int, generator: torch.Generator) -> Tensor:
    """Return whole and half multiples of a scale that every group of 32 tokens or channels has."""
    steps = (1 << min(bits, 8)) - 1
    scale = 3 if bits < 8 else 1  # A third is no binary fraction; bf16 holds 3 x 15 / 2, and not 3 x 255 / 2.
    codes = torch.randint(0, 2 * min(steps, 64) + 1, shape, generator=generator) / 2
    codes[5::32], codes[6::32] = 0, steps
    codes[:, :, 3::32], codes[:, :, 4::32] = 0, steps
    return codes * scale


def _empty_cache(
    case: Case, layout: KVLayout, generator: torch.Generator, parameters: LayerParameters
) -> tuple[LayerCache, Batch, Batch]:
    rows = len(case.lengths)
    width = max(layout.blocks(length) for length in case.lengths)
    blocks = width * rows + 1
    cache = LayerCache.allocate(layout, blocks=blocks, slots=rows + 1, parameters=parameters)
    left = _LEFT_BYTES[int(torch.randint(len(_LEFT_BYTES), (), generator=generator))]
    for buffer in (cache.pages, cache.ring, cache.sinks):
        buffer.fill_(left)
    order = torch.arange(blocks) if case.tables is Tables.ORDERED else torch.randperm(blocks, generator=generator)
    table = order[: width * rows].reshape(rows, width).to(torch.int32)
    slots = torch.randperm(rows + 1, generator=generator)[:rows].to(torch.int32)
    empty = Batch(block_tables=table, slots=slots, lengths=torch.zeros(rows, dtype=torch.int32))
    held = Batch(
        block_tables=_shared(case, layout, table) if case.tables is Tables.SHARED else table,
        slots=slots,
        lengths=torch.tensor(case.lengths, dtype=torch.int32),
    )
    return cache, empty, held


def _shared(case: Case, layout: KVLayout, table: Tensor) -> Tensor:
    """Return *table* with the pages of the longest sequence wherever both sequences' pages are full."""
    shared = table.clone()
    longest = max(range(len(case.lengths)), key=case.lengths.__getitem__)
    for row, length in enumerate(case.lengths):
        full = min(layout.quantized_tokens(length)) // layout.block_tokens
        shared[row, :full] = table[longest, :full]
    return shared
