"""What kvplan knows of an engine: how it allocates, what it caches in, how it is started."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Final

from kvplan.core.allocation import Allocation, CachePart, Setup
from kvplan.core.packing import EngineFormat, Packing
from kvplan.core.records import Load
from kvplan.core.specs import LayerSpec, ModelSpec, StateCache
from kvplan.engines.limits import Limits
from kvplan.errors import UnsupportedFormatError, UnsupportedModelError, UnsupportedSettingError

if TYPE_CHECKING:
    from kvplan.engines.logs import Finding, Line, LogFacts


CHECKPOINT: Final = "checkpoint"
GGUF: Final = "GGUF"
AUTO: Final = "auto"
"""The engine's own default for a model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A setting to start an engine with.

    Attributes:
        format: As the engine names it.
        sequences: The most at once.
        blocks: Of the pool; 0 leaves it to the engine.
        loads: What the pool is for, bucket by bucket.
        memory_utilization: The part of the device that the engine may use, 0 to 1.
        kernel: Implementation and path that was measured, of kvplan's own runtime.
    """

    model: str
    format: str
    block_tokens: int
    context_tokens: int
    sequences: int
    blocks: int = 0
    loads: tuple[Load, ...] = ()
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    max_batched_tokens: int | None = None
    prefix_caching: bool | None = None
    memory_utilization: float = 0.9
    kernel: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchText:
    """How to start an engine so.

    Attributes:
        command: One line for a shell, or one call.
        file_name: Of a config file that says the same; empty where the engine reads none.
        file_text: What stands in it.
    """

    command: str
    file_name: str = ""
    file_text: str = ""


def run_type(model: ModelSpec) -> str:
    """Return the type that the model runs in, by kvplan's name."""
    return str(model.float_type)


def no_remarks(model: ModelSpec, setup: Setup) -> tuple[str, ...]:
    """Return what to know of how an engine runs a model: nothing where its allocator refuses what it does not run."""
    return ()


def stated_type(known: Mapping[str, Mapping[str, str]]) -> Callable[[ModelSpec], str]:
    """Return what an engine caches a model in that takes the checkpoint's word for it.

    *known* has, for each library whose word it takes, the engine's own name of a format by kvplan's.
    """

    def default(model: ModelSpec) -> str:
        stated = model.stated_cache
        return run_type(model) if stated is None else known.get(stated.library, {}).get(stated.format, run_type(model))

    return default


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """One engine.

    Attributes:
        title: As its makers write it.
        rules: The releases whose allocator is counted where none is named.
        formats: What it caches in, the first unquantized; empty where any of kvplan's formats will do.
        limits: Releases, options and blocks that it takes.
        check_model: Returns what to know of how it runs a model; raises UnsupportedModelError where it does not.
        default_format: Returns what a model is cached in where nothing is said.
        allocate: Returns the allocation of a model in the format of a name.
        launch: Returns how it is started.
        logs: The module that reads its start-up logs and the one that explains their figures; empty where it prints
            none that is known. They are imported when a log is read.
        batched_tokens: Of a forward pass where nothing is said.
        splits_batches: Whether a larger batch is computed in passes of that many.
        reads: The files of weights that it is started with.
        batch_logits: Whether it makes logits of every token of a batch, not of each sequence's last.
        dequantizes: Whether the weights of a GGUF file are made 16 bits when they are loaded.
        pool_is_rest: Whether its pool is what weights and activations leave of a share of the device.
        pairs: Whether K and V may have formats of their own, written K/V.
        runs_here: Whether the measuring runtime can call its own cache, to score what kvplan has no kernel for.
    """

    name: str
    title: str
    rules: str
    allocate: Callable[[ModelSpec, str, Setup], Allocation]
    launch: Callable[[Launch], LaunchText]
    formats: tuple[EngineFormat, ...] = ()
    limits: Limits = field(default_factory=Limits)
    check_model: Callable[[ModelSpec, Setup], tuple[str, ...]] = no_remarks
    default_format: Callable[[ModelSpec], str] = run_type
    logs: tuple[str, str] | tuple[()] = ()
    batched_tokens: int = 8192
    splits_batches: bool = False
    reads: frozenset[str] = frozenset({CHECKPOINT})
    batch_logits: bool = False
    dequantizes: bool = False
    pool_is_rest: bool = False
    pairs: bool = False
    runs_here: bool = False

    def served(self, model: ModelSpec) -> ModelSpec:
        """Return *model* with the weights as this engine holds them."""
        if self.dequantizes or model.stored_weight_bytes is None:
            return model
        return replace(model, weight_bytes=model.stored_weight_bytes)

    def format_name(self, model: ModelSpec, name: str) -> str:
        """Return the format that *name* asks for: `auto` is the model's default, any other is itself."""
        return self.default_format(model) if name.removeprefix(f"{self.name}:") == AUTO else name

    def pass_tokens(self, batch_tokens: int | None) -> int:
        """Return the tokens of a forward pass where a batch has as many; None is the engine's own."""
        if batch_tokens is None:
            return self.batched_tokens
        return min(batch_tokens, self.batched_tokens) if self.splits_batches else batch_tokens

    def has_format(self, name: str) -> bool:
        """Whether it caches in the format of a name of its own, or in one that stores the same bits."""
        key, slash, value = name.removeprefix(f"{self.name}:").partition("/")
        words = {word for form in self.formats for word in form.names} | ({AUTO} if self.formats else set())
        return key in words and (not slash or (self.pairs and value in words))

    def read_log(self, lines: "Sequence[Line]") -> "LogFacts | None":
        """Return what a start-up log says; None where it is not of this engine."""
        facts: LogFacts | None = import_module(self.logs[0]).read_log(lines) if self.logs else None
        return facts

    def explain(self, facts: "LogFacts", model: ModelSpec | None) -> "tuple[Finding, ...]":
        """Return a finding for each figure of such a log."""
        findings: tuple[Finding, ...] = import_module(self.logs[1]).explain(facts, model) if self.logs else ()
        return findings

    @property
    def allocator(self) -> str:
        """The allocator in a few words."""
        return f"{self.title} {self.rules}".strip()


def find_format(engine: str, formats: tuple[EngineFormat, ...], name: str) -> EngineFormat:
    """Return the engine's format of *name*, which may be kvplan's name for the same bits.

    Raises:
        UnsupportedFormatError: The engine has no such format.
    """
    word = name.removeprefix(f"{engine}:")
    for form in formats:
        if word in form.names:
            return form
    raise UnsupportedFormatError(
        f"{engine} has no cache format {name[:60]!r}", hint=f"it has {', '.join(form.name for form in formats)}"
    )


def rank_heads(model: ModelSpec, layer: LayerSpec, tensor_parallel: int) -> int:
    """Return the KV heads of *layer* that one rank holds: its part of them, or one of which others hold copies.

    Raises:
        UnsupportedSettingError: The ranks divide neither the KV heads nor the query heads.
    """
    heads = layer.kv_heads
    if model.query_heads % tensor_parallel or (heads % tensor_parallel and tensor_parallel % heads):
        message = (
            f"{tensor_parallel} ranks do not divide {model.query_heads} query and {heads} KV heads of {model.name}"
        )
        raise UnsupportedSettingError(message, where="--tp", hint="give a number of ranks that divides the heads")
    return max(1, heads // tensor_parallel)


def check_stages(model: ModelSpec, setup: Setup) -> None:
    """Refuse more pipeline stages than layers.

    Raises:
        UnsupportedSettingError: There are more.
    """
    stages, count = setup.pipeline_parallel, len(model.layers)
    if stages > count:
        message = f"{stages} stages for {count} layers"
        raise UnsupportedSettingError(message, where="--pp", hint="give at most a stage a layer")


def check_drafts(model: ModelSpec, setup: Setup) -> None:
    """Refuse to draft with a model that has no layers for it.

    Raises:
        UnsupportedSettingError: It has none.
    """
    if setup.draft_tokens and not model.draft_layers:
        message = f"{model.name} has no draft layers"
        raise UnsupportedSettingError(message, where="--draft-tokens", hint="leave it out")


def rank_elements(model: ModelSpec, state: StateCache, ranks: int) -> int:
    """Return the elements of *state* that one of *ranks* holds.

    Raises:
        UnsupportedSettingError: They do not divide it.
    """
    if state.elements % ranks:
        message = f"{ranks} ranks do not divide the states of {model.name}"
        raise UnsupportedSettingError(message, where="--tp", hint="give a number of ranks that divides them")
    return state.elements // ranks


def state_parts(
    model: ModelSpec, layer: LayerSpec, ranks: int, bits_of: Callable[[StateCache], int]
) -> list[CachePart]:
    """Return the states of a sequence in one layer on one of *ranks*, stored in the bits that an engine gives them."""
    sizes = [(state.name, rank_elements(model, state, ranks) * bits_of(state) / 8) for state in layer.states]
    return [CachePart(name=name, layers=1, logical_unit_bytes=size, unit_bytes=size) for name, size in sizes]


def head_bytes(layer: LayerSpec, key: Packing, value: Packing) -> float:
    """Return the bytes of K and V of one head of one token of *layer*."""
    value_dim = layer.head_dim if layer.value_dim is None else layer.value_dim
    return float(key.vector_bytes(layer.head_dim) + value.vector_bytes(value_dim))


def refuse_layer(engine: str, model: ModelSpec, what: str) -> UnsupportedModelError:
    """Return the error that *engine*'s allocator is not known here for *what* of *model*."""
    return UnsupportedModelError(
        f"how {engine} allocates {what} is not known here",
        where=model.name,
        hint="`kvplan size` without --engine counts its logical bytes",
    )
