"""The launches of a call of each operation on tensors that hold nothing: what can be looked at without a GPU.

The calls are the operations' own, so what is looked at is what is launched. An operation that has Triton kernels has a
row in `CALLS`, each of its kernels one in `KERNELS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Final

import torch
from torch import Tensor

from kvplan_kernels.append import gpu as append
from kvplan_kernels.cache import TORCH_FLOAT, AttentionOptions, Batch, LayerCache
from kvplan_kernels.decode import gpu as decode
from kvplan_kernels.dequantize import gpu as dequantize
from kvplan_kernels.gpu.read import read_words
from kvplan_kernels.gpu.targets import Launch, recording
from kvplan_kernels.layout import KVLayout, ceil_div
from kvplan_kernels.parameters import neutral

FLOAT_BYTES: Final = 4
WORD_BYTES: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A call, by its shapes.

    Attributes:
        layout: Of the cache, in rows.
        batch: Sequences.
        tokens: That each sequence holds.
        queries: Query tokens of each sequence, or tokens to append to it.
        gqa: Query heads of a KV head.
        query_type: Type of queries and of tokens to append; None is the cache's own.
        softcap: Softcap, None for none.
        positions: Whether queries stand elsewhere than at the sequence's end.
    """

    layout: KVLayout
    batch: int = 1
    tokens: int
    queries: int = 1
    gqa: int = 1
    query_type: torch.dtype | None = None
    softcap: float | None = None
    positions: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The type of what is handed in."""
        return TORCH_FLOAT[self.layout.float_type] if self.query_type is None else self.query_type


def launches_of(op: str, call: Call, *, multiprocessors: int, arch: str) -> list[Launch]:
    """Return what a call of *op* launches on a device of *multiprocessors*.

    Args:
        op: A name in `CALLS`.
        call: The call.
        multiprocessors: Of the device.
        arch: Of the device, such as sm_90; NVIDIA's begin with sm_.

    Raises:
        UnsupportedError: No kernel takes the call; the message says why.
    """
    with recording(multiprocessors=multiprocessors, arch=arch) as launches:
        CALLS[op](call)
    return launches


def _absent(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _cache(call: Call) -> LayerCache:
    layout, blocks = call.layout, call.batch * call.layout.blocks(call.tokens)
    rows = ((blocks, layout.page_bytes), (call.batch, layout.ring_bytes), (call.batch, layout.sink_bytes))
    pages, ring, sinks = (_absent(*shape, dtype=torch.uint8) for shape in rows)
    return LayerCache(layout=layout, pages=pages, ring=ring, sinks=sinks, parameters=neutral(layout, "meta"))


def _batch(call: Call) -> Batch:
    return Batch(
        block_tables=_absent(call.batch, call.layout.blocks(call.tokens)),
        slots=_absent(call.batch),
        lengths=_absent(call.batch),
    )


def _decode(call: Call, *, received: bool = False) -> None:
    heads = call.gqa * call.layout.kv_heads
    decode.decode(
        _cache(call),
        _batch(call),
        _absent(call.batch, call.queries, heads, call.layout.head_dim, dtype=call.dtype),
        AttentionOptions(scale=call.layout.head_dim**-0.5, softcap=call.softcap),
        positions=_absent(call.batch, call.queries) if call.positions else None,
        received=received,
    )


def _append(call: Call) -> None:
    new = _absent(call.batch * call.queries, call.layout.kv_heads, call.layout.head_dim, dtype=call.dtype)
    append.append_counting(_cache(call), _batch(call), new, new, _absent(call.batch), _absent(1), most=call.queries)


def _dequantize(call: Call) -> None:
    dequantize.dequantize_tokens(_cache(call), _batch(call), call.tokens)


def _read(call: Call) -> None:
    read_words(_cache(call).pages.view(-1).view(torch.int32))


CALLS: Final[dict[str, Callable[[Call], None]]] = {
    "decode": _decode,
    "received": lambda call: _decode(call, received=True),
    "append": _append,
    "dequantize": _dequantize,
    "read": _read,
}
"""By the name of an operation; received is decode that also says what weight each token received, read is what reads
the pages and does no more: decode is held against it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What the programs of a launch do.

    Attributes:
        elements: Of K or V, or of the output where neither is read, that the counted instructions of a program handle.
        programs: Those that share the work.
        rounds: Times that the program with most work runs through the counted instructions.
        bytes: That have to be read and written, by all programs.
    """

    elements: int
    programs: int
    rounds: int
    bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedKernel:
    """How a kernel's instructions are counted.

    Attributes:
        loop: Whether the main loop is counted, with its matrix products; else the whole kernel.
        branches: Whether programs take different branches, so that the whole is more than any of them runs.
        share: Returns what the programs of a launch do.
    """

    loop: bool
    branches: bool = False
    share: Callable[[Launch, Call], Share]


def stored_tensor(launch: Launch) -> str:
    """Return "k" or "v" where the kernel handles one of them, else an empty string."""
    tensor = launch.arguments.get("T")
    return "" if tensor is None else "k" if tensor == launch.arguments["G"].keys else "v"


def _token_bytes(layout: KVLayout, prefix: str) -> float:
    """Return the bytes in pages of one token of K or V of one head."""
    return sum(section.nbytes for section in layout.sections if section.name[0] == prefix) / layout.block_tokens


def _workspace_bytes(launch: Launch, call: Call, splits: int) -> int:
    rows: int = call.batch * call.layout.kv_heads * splits * launch.arguments["rows"]
    return rows * (call.layout.head_dim + 2) * FLOAT_BYTES


def _split_share(launch: Launch, call: Call) -> Share:
    tile, splits, layout = launch.arguments["BN"], launch.arguments["splits"], call.layout
    pairs, all_splits, row_blocks = launch.grid
    return Share(
        elements=2 * tile * layout.head_dim,
        programs=pairs * splits * row_blocks,
        rounds=ceil_div(ceil_div(call.tokens, tile), splits),
        bytes=call.batch * layout.logical_bytes(call.tokens) + _workspace_bytes(launch, call, all_splits),
    )


def _merge_share(launch: Launch, call: Call) -> Share:
    output = prod(launch.grid) * call.layout.head_dim * FLOAT_BYTES
    return Share(
        elements=call.layout.head_dim,
        programs=prod(launch.grid),
        rounds=1,
        bytes=_workspace_bytes(launch, call, launch.arguments["splits"]) + output,
    )


def _received_share(launch: Launch, call: Call) -> Share:
    layout, places = call.layout, launch.arguments["G"].keys.tokens
    of_token = layout.kv_heads * (_token_bytes(layout, "k") + call.gqa * FLOAT_BYTES)
    return Share(
        elements=launch.arguments["BN"] // places * layout.head_dim,
        programs=launch.arguments["page_tiles"] * launch.grid[1],
        rounds=places * call.queries,
        bytes=call.batch * call.tokens * of_token,
    )


def _tile_share(launch: Launch, call: Call, tokens: int, bytes_per_token: float) -> Share:
    return Share(
        elements=launch.arguments["TILE"] * call.layout.head_dim,
        programs=prod(launch.grid),
        rounds=1,
        bytes=call.batch * call.layout.kv_heads * tokens * bytes_per_token,
    )


def _moved_share(launch: Launch, call: Call) -> Share:
    size = 2 * call.layout.head_dim + _token_bytes(call.layout, stored_tensor(launch))
    return _tile_share(launch, call, call.queries if "poisons" in launch.arguments else call.tokens, size)


def _rest_share(launch: Launch, call: Call) -> Share:
    return _tile_share(launch, call, call.queries, 4 * call.layout.head_dim)


def _read_share(launch: Launch, call: Call) -> Share:
    arguments = launch.arguments
    return Share(
        elements=arguments["TILE"] * arguments["TILES"], programs=prod(launch.grid), rounds=1,
        bytes=arguments["count"] * WORD_BYTES,
    )  # fmt: skip


KERNELS: Final = {
    "decode_split": CountedKernel(loop=True, share=_split_share),
    "decode_merge": CountedKernel(loop=False, share=_merge_share),
    "decode_received": CountedKernel(loop=True, share=_received_share),
    "append_pages": CountedKernel(loop=False, branches=True, share=_moved_share),
    "append_rest": CountedKernel(loop=False, branches=True, share=_rest_share),
    "dequantize_tokens": CountedKernel(loop=False, branches=True, share=_moved_share),
    "fold_words": CountedKernel(loop=False, share=_read_share),
}
"""By the name of the Triton function."""
