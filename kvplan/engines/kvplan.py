"""kvplan's own runtime: `kvplan.runtime.session.Runtime`.

Every layer keeps every token, whatever its window; a block number means a page in every layer. Beside its pages a
sequence has the rings of its residual and its sinks in 16 bits.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from kvplan.core.allocation import BEHIND_WINDOW, ROUNDING, Allocation, BlockGroup, Capacity, Setup, Term, largest
from kvplan.core.formats import in_residual, read_format
from kvplan.core.layouts import ModelLayout, lay_out
from kvplan.core.logical import logical_size
from kvplan.core.specs import ModelSpec
from kvplan.engines.engine import CHECKPOINT, GGUF, Engine, Launch, LaunchText
from kvplan.engines.kvplan_tiers import TieredAllocation
from kvplan.engines.limits import Limits
from kvplan.errors import UnsupportedFormatError
from kvplan_kernels.layer_formats import LayerFormats, ModelFormat
from kvplan_kernels.layout import KVLayout
from kvplan_kernels.tier_formats import TieredFormat

NAME: Final = "kvplan"
BLOCK_TOKENS: Final = 64
UNFILLED: Final = "residual and sinks not filled"
EMPTY: Final = "pages left empty"
_DEFAULT_KERNEL: Final = "cpu"


@dataclass(frozen=True, kw_only=True)
class RuntimeAllocation(Allocation):
    """The caches of one model in the runtime."""

    model: ModelSpec
    form: ModelFormat
    setup: Setup
    notes: tuple[str, ...] = ()

    @cached_property
    def layout(self) -> ModelLayout:
        """How all layers are laid out."""
        return lay_out(self.model, self.form, self.setup.block_tokens or BLOCK_TOKENS)

    @property
    def blocks(self) -> tuple[BlockGroup, ...]:
        """Groups of layers with what a block of each takes."""
        return tuple(
            BlockGroup(layers=n, block_tokens=layout.block_tokens, bytes_per_block=layout.page_bytes)
            for layout, n in self.layout.counted
        )

    def logical_bytes(self, tokens: int) -> float:
        """Return geometry times format of a sequence of *tokens*."""
        return logical_size(self.model, self.form, tokens).bytes_per_sequence

    def logical_growth_bytes(self, tokens: int) -> float:
        """Return what one more token adds to that."""
        return logical_size(self.model, self.form, tokens).growth_bytes_per_token

    def sequence_bytes(self, tokens: int) -> int:
        """Return what a sequence of *tokens* takes."""
        return self.layout.sequence_bytes(tokens)

    def growth_bytes(self, tokens: int) -> float:
        """Return a page's bytes a token, averaged over the block; nothing while the residual has room."""
        if all(in_residual(layout.format, tokens) for layout, _ in self.layout.counted):
            return 0.0
        return self.layout.block_bytes / self.layout.block_tokens

    def terms(self, tokens: int) -> tuple[Term, ...]:
        """Return the terms between logical and allocated; their sum is the difference."""
        counted, blocks = self.layout.counted, self.layout.blocks(tokens)
        filled = self.layout.logical_bytes(tokens)
        behind = filled - self.logical_bytes(tokens)
        unfilled = self.layout.own_bytes - sum(n * _in_16_bits(layout, tokens) for layout, n in counted)
        empty = sum(n * (blocks - layout.blocks(tokens)) * layout.page_bytes for layout, n in counted)
        rounding = self.sequence_bytes(tokens) - filled - unfilled - empty
        found = (
            Term(BEHIND_WINDOW, behind, "every layer keeps every token"),
            Term(UNFILLED, unfilled, "a ring holds the most that a residual can have, whole"),
            Term(EMPTY, empty, "a block is a page in every layer, also where more tokens stay in 16 bits"),
            Term(ROUNDING, rounding, "places of the last block that no token takes"),
        )
        return tuple(term for term in found if term.bytes)

    def capacity(self, pool_bytes: int) -> Capacity:
        """Return what a pool of *pool_bytes* holds beside the residuals of as many sequences as fit."""
        concurrency = pool_bytes // max(1, self.sequence_bytes(self.setup.context_tokens))
        blocks = max(0, pool_bytes - max(1, concurrency) * self.layout.own_bytes) // self.layout.block_bytes
        return Capacity(
            blocks=blocks,
            tokens=blocks * self.layout.block_tokens,
            max_concurrency=concurrency,
            max_context=largest(lambda tokens: self.sequence_bytes(tokens) <= pool_bytes),
        )


def _in_16_bits(layout: KVLayout, tokens: int) -> int:
    """Return the bytes of residual and sinks that hold tokens."""
    if not layout.format.quantized:
        return 0
    stored = zip((layout.format.key, layout.format.value), layout.quantized_tokens(tokens), strict=True)
    kept = sum(tokens - quantized for tensor, quantized in stored if tensor.quantized)
    return 2 * layout.kv_heads * layout.head_dim * kept


def allocate(model: ModelSpec, format_name: str, setup: Setup) -> Allocation:
    """Return the allocation of kvplan's runtime.

    Raises:
        UnsupportedFormatError: No kernel takes the format with this model and block size, or several ranks are asked.
        InputError: The model has no layers.
    """
    if setup.tensor_parallel != 1 or setup.pipeline_parallel != 1:
        raise UnsupportedFormatError("kvplan's runtime works on one device", hint="leave --tp and --pp out")
    form = read_format(format_name)
    if isinstance(form, TieredFormat):
        tiered = TieredAllocation(model=model, form=form, block_tokens=setup.block_tokens or BLOCK_TOKENS, setup=setup)
        tiered.logical_bytes(setup.context_tokens)
        return tiered
    allocation = RuntimeAllocation(model=model, form=form, setup=setup)
    allocation.logical_bytes(setup.context_tokens)
    assert allocation.layout.layers
    return allocation


def launch(setting: Launch) -> LaunchText:
    """Return the Python call that makes the runtime hold the sequences in the blocks.

    The implementation of the kernels that were measured is named; the runtime's own choice is not written.
    """
    implementation = setting.kernel.partition("/")[0]
    chosen = "" if implementation in ("", _DEFAULT_KERNEL) else f', kernel="{implementation}"'
    form = read_format(setting.format)
    learned = ", calibration=calibration" if form.calibrated else ""
    if isinstance(form, TieredFormat):
        return LaunchText(command=_tiered_command(form, setting, chosen))
    held = f"block_tokens={setting.block_tokens}, blocks={setting.blocks}, slots={setting.sequences}"
    parse = "parse_formats" if isinstance(form, LayerFormats) else "parse"
    return LaunchText(command=f'Runtime(loaded, {parse}("{setting.format}"), {held}{chosen}{learned})')


def _tiered_command(form: TieredFormat, setting: Launch, chosen: str) -> str:
    """Return the call of the runtime in tiers, with the blocks that the loads need of each."""
    blocks = [0] * len(form.tiers)
    for load in setting.loads:
        each = form.blocks(load.bucket.total_tokens, setting.block_tokens, load.bucket.prompt_tokens)
        blocks = [held + load.sequences * more for held, more in zip(blocks, each, strict=True)]
    held = f"block_tokens={setting.block_tokens}, blocks={tuple(blocks)}, slots={setting.sequences}"
    return f'TieredRuntime(loaded, parse_formats("{setting.format}"), {held}{chosen})'


LIMITS: Final = Limits(
    unused={"draft_tokens": "drafts no tokens", "prefix_caching": "keeps no prefixes of finished sequences"}
)

ENGINE: Final = Engine(
    limits=LIMITS, dequantizes=True, name=NAME, title="kvplan's runtime", rules="", allocate=allocate, launch=launch,
    reads=frozenset({CHECKPOINT, GGUF}), pool_is_rest=True,
)  # fmt: skip
