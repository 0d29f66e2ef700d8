"""What llama.cpp prints of its buffers when it makes a context, and Ollama of its devices.

Wordings are those of ggml-org/llama.cpp src/llama-kv-cache.cpp, -iswa.cpp and src/llama-memory-recurrent.cpp at 0c1e570
and at 4227c9b (August 2025), of llama.cpp and src/llama-kv-cache.cpp of June 2024 to March 2025, of ollama/ollama
ml/device.go (`kv cache device=`), and of public logs of 2024 to 2026. A size line restates the buffer lines before it.
llama-server prints none of them but at verbosity 4 (common/log.cpp).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from kvplan.core.allocation import Setup
from kvplan.engines.llama_cpp import AUTO_SLOTS, NO_FLASH_ATTENTION, SWA_FULL, UNIFIED
from kvplan.engines.llama_cpp_formats import NAME
from kvplan.engines.log_fields import COUNT, DIGITS, NUMBER, WHOLE, first_match
from kvplan.engines.logs import Line, LogFacts, Measured, Printed, printed

_SIZE: Final = NUMBER + r" (?P<unit>[KMG]iB|MB)"
_BUFFER: Final = re.compile(r"(?P<device>[\w-]{1,99}) +(?P<what>KV|RS) buffer size += +" + _SIZE)
_CELLS: Final = re.compile(
    r"size += +"
    + _SIZE
    + r" \( *(?P<cells>\d{1,12}) cells, *(?P<layers>\d{1,12}) layers, *(?P<slots>\d{1,12})/(?P<streams>\d{1,12}) seqs\)"
)
_STATES: Final = re.compile(
    r"size += +" + _SIZE + r" \( *(?P<cells>\d{1,12}) cells, *(?P<layers>\d{1,12}) layers, *(?P<slots>\d{1,12}) seqs"
    r" *(?:(?P<kept>\d{1,12}) rs_seq)?\)"
)
_SELF: Final = re.compile(r"KV self size += +" + _SIZE)
_TYPES: Final = re.compile(
    r"K \((?P<key>\w{1,20})\): +(?P<k>" + DIGITS + r") MiB, +V \((?P<value>\w{1,20})\): +(?P<v>" + DIGITS + ") MiB"
)
_CREATING: Final = re.compile(
    r"creating +(?P<which>non-SWA|SWA|main|indexer|DSA) KV cache, size = " + NUMBER + " cells"
)
_CONTEXT: Final = re.compile(r"constructing llama_context|(?P<draft>creating MTP draft context|loading draft model)")
_OLLAMA: Final = re.compile(r'msg="kv cache" device=(?P<device>\S{1,99}) size="' + NUMBER + ' (?P<unit>[KMGT]iB|B)"')
_OLLAMA_SETUP: Final = re.compile(rf"KvSize:(?P<context>{WHOLE}) KvCacheType:(?P<format>\w{{0,20}})")
_WEIGHTS: Final = re.compile(r"(?P<device>[\w-]{1,99}) +model buffer size += +" + _SIZE)
_COMPUTE: Final = re.compile(r"(?P<device>[\w-]{1,99}) +compute buffer size += +" + _SIZE)
_FIELDS: Final = {
    "context": re.compile(r"\bn_ctx +(?:= |: )" + COUNT),
    "slots": re.compile(r"\bn_seq_max += " + COUNT),
    "batch": re.compile(r"\bn_ubatch += " + COUNT),
    "unified": re.compile(r"\bkv_unified += (true|false|0|1)\b"),
    "flash": re.compile(r"\bflash_attn += (\w+)"),
}
_VERSIONS: Final = (
    re.compile(r"\bbuild: (\d{4,6})\b"),
    re.compile(r"\bbuild += (\d{4,6})\b"),
    re.compile(r"\bversion: (\d{4,6}) \("),
    re.compile(r"\bb(\d{4,6})-[0-9a-f]{7,40}"),
)
_MODEL: Final = re.compile(r"loaded meta data with .{0,200}? from (\S.{0,999}?\.gguf)")
_FULL: Final = "using full-size SWA cache"
_RECOGNIZED: Final = re.compile(
    r"\bllama_(?:model_loader|context|kv_cache|new_context|server)|\b(?:srv|slot) +\w+:|common_init_from_params"
)
_HINT: Final = (
    "llama-server prints its caches at verbosity 4: start it with `-lv 4` (llama-cli and the library print them always)"
)
_HOST: Final = re.compile(r"CPU|_Host|_Mapped|BLAS")
_DECIMAL_MB: Final = {"MB": 2.0**20}
"""llama.cpp's MB of before 2024 are MiB."""


class CacheKind(StrEnum):
    """Which cache a line is of."""

    WHOLE = "KV cache"
    WINDOW = "KV cache of windows"
    INDEXER = "indexer's keys"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedCache:
    """One cache that a context made.

    Attributes:
        context: Which context of the process, from 1.
        size: What its size line says.
        buffers: What its devices hold.
        cells: Of a buffer.
        slots: Sequences that it serves.
        streams: Buffers that the slots have between them.
        formats: Of K and of V.
    """

    kind: CacheKind
    context: int
    size: Printed | None = None
    buffers: tuple[Printed, ...] = ()
    cells: Printed | None = None
    layers: int | None = None
    slots: int | None = None
    streams: int | None = None
    formats: tuple[str, str] | None = None
    parts: tuple[Printed, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedStates:
    """The states that a context made.

    Attributes:
        kept: States of earlier tokens that each slot keeps, to go back to.
    """

    context: int
    size: Printed | None = None
    buffers: tuple[Printed, ...] = ()
    slots: int | None = None
    kept: int = 0
    layers: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaFacts(LogFacts):
    """What a log of llama.cpp says, cache by cache.

    Attributes:
        devices: What Ollama says of each device, all caches together.
    """

    caches: tuple[LoggedCache, ...] = ()
    states: tuple[LoggedStates, ...] = ()
    devices: tuple[Printed, ...] = ()


class _Reader:
    """Reads lines in order: buffer lines belong to the next size line, or to the next cache that is created."""

    def __init__(self) -> None:
        self.caches: list[LoggedCache] = []
        self.states: list[LoggedStates] = []
        self.devices: list[Printed] = []
        self.context = 0
        self._open: LoggedCache | None = None
        self._state_buffers: list[Printed] = []

    def read(self, line: Line) -> None:
        """Take one line."""
        text = line.text
        if match := _CONTEXT.search(text):
            self.close()
            self.context = max(1, self.context) + 1 if match["draft"] else self.context + 1
        elif match := _CREATING.search(text):
            self.close()
            kinds = {"SWA": CacheKind.WINDOW, "indexer": CacheKind.INDEXER}
            self._open = LoggedCache(
                kind=kinds.get(match["which"], CacheKind.WHOLE), context=max(1, self.context),
                cells=printed(match["number"], "cells", line.number),
            )  # fmt: skip
        elif match := _BUFFER.search(text):
            self._buffer(line, match)
        elif match := _CELLS.search(text) or _SELF.search(text):
            self._size(line, match)
        elif match := _STATES.search(text):
            self._state(line, match)
        elif match := _OLLAMA.search(text):
            figure = _figure(line, match)
            again = any(figure.rank == other.rank for other in self.devices)  # what was tried before is over
            self.devices = [figure] if again else [*self.devices, figure]

    def close(self) -> None:
        """End the cache whose lines were being read."""
        if self._open is not None:
            self.caches.append(self._open)
        if self._state_buffers:
            self.states.append(LoggedStates(context=max(1, self.context), buffers=tuple(self._state_buffers)))
        self._open, self._state_buffers = None, []

    def _opened(self) -> LoggedCache:
        if self._open is None:
            self._open = LoggedCache(kind=CacheKind.WHOLE, context=max(1, self.context))
        return self._open

    def _buffer(self, line: Line, match: re.Match[str]) -> None:
        if match["what"] == "RS":
            self._state_buffers.append(_figure(line, match))
            return
        opened = self._opened()
        self._open = replace(opened, buffers=(*opened.buffers, _figure(line, match)))

    def _size(self, line: Line, match: re.Match[str]) -> None:
        counts = match.groupdict()
        types = _TYPES.search(line.text)
        opened = self._opened()
        self._open = replace(
            opened,
            size=_figure(line, match),
            cells=printed(counts["cells"], "cells", line.number) if counts.get("cells") else opened.cells,
            layers=_count(counts, "layers"),
            slots=_count(counts, "slots"),
            streams=_count(counts, "streams"),
            formats=(types["key"], types["value"]) if types else None,
            parts=tuple(printed(types[name], "MiB", line.number) for name in ("k", "v")) if types else (),
        )
        kept, self._state_buffers = self._state_buffers, []
        self.close()
        self._state_buffers = kept

    def _state(self, line: Line, match: re.Match[str]) -> None:
        counts = match.groupdict()
        buffers, self._state_buffers = tuple(self._state_buffers), []
        self.close()
        made = LoggedStates(
            context=max(1, self.context), size=_figure(line, match), buffers=buffers, slots=_count(counts, "slots"),
            kept=_count(counts, "kept") or 0, layers=_count(counts, "layers"),
        )  # fmt: skip
        self.states.append(made)


def _figure(line: Line, match: re.Match[str]) -> Printed:
    groups = match.groupdict()
    scale = _DECIMAL_MB.get(groups["unit"])
    return printed(groups["number"], groups["unit"], line.number, scale=scale, rank=groups.get("device") or "")


def _count(groups: dict[str, str | None], name: str) -> int | None:
    value = groups.get(name)
    return None if value is None else int(value)


def read_log(lines: Sequence[Line]) -> LlamaFacts | None:
    """Return what a log of llama.cpp or Ollama says; None where nothing in it is theirs."""
    reader = _Reader()
    for line in lines:
        reader.read(line)
    reader.close()
    caches, states, devices = tuple(reader.caches), tuple(reader.states), tuple(reader.devices)
    if not (caches or states or devices or any(_RECOGNIZED.search(line.text) for line in lines)):
        return None
    setup, stated = _setup(lines, caches)
    return LlamaFacts(
        engine=NAME,
        version=_version(lines),
        model=first_match(lines, _MODEL),
        format=_format(lines, caches),
        setup=setup,
        stated=stated,
        figures=_by_name(caches, states, devices),
        measured=_measured(lines),
        hint=_HINT,
        caches=caches,
        states=states,
        devices=devices,
    )


def _by_name(
    caches: Sequence[LoggedCache], states: Sequence[LoggedStates], devices: Sequence[Printed]
) -> dict[str, tuple[Printed, ...]]:
    items: tuple[LoggedCache | LoggedStates, ...] = (*caches, *states)
    made = {
        "sizes": tuple(item.size for item in items if item.size),
        "buffers": tuple(buffer for item in items for buffer in item.buffers),
        "devices": tuple(devices),
    }
    return {name: figures for name, figures in made.items() if figures}


def _setup(lines: Sequence[Line], caches: Sequence[LoggedCache]) -> tuple[Setup, frozenset[str]]:
    """Return the setting; its context is of one slot, of all of them where as many share it as do by default."""
    said = {name: first_match(lines, regex) for name, regex in _FIELDS.items()}
    ollama = next((match for line in lines if (match := _OLLAMA_SETUP.search(line.text))), None)
    main = next((cache for cache in caches if cache.slots), None)
    slots = main.slots if main and main.slots else int(said["slots"] or 0)
    unified = said["unified"] in ("true", "1") or bool(main and main.streams == 1)
    whole = int(said["context"] or (ollama["context"] if ollama else 0))
    counted = 0 if unified and slots == AUTO_SLOTS else slots
    options = {UNIFIED} if unified and counted > 1 else set()
    options |= {SWA_FULL} if any(_FULL in line.text for line in lines) else set()
    options |= {NO_FLASH_ATTENTION} if said["flash"] in ("0", "disabled") else set()
    build = _version(lines)
    setup = Setup(
        context_tokens=whole // counted if counted > 1 else whole,
        sequences=counted or None,
        max_batched_tokens=int(said["batch"]) if said["batch"] else None,
        version=(int(build),) if build else None,
        options=frozenset(options),
    )
    named = {"context_tokens": whole, "sequences": slots, "max_batched_tokens": said["batch"], "version": build}
    return setup, frozenset(name for name, value in named.items() if value)


def _format(lines: Sequence[Line], caches: Sequence[LoggedCache]) -> str:
    for cache in caches:
        if cache.formats:
            key, value = cache.formats
            return key if key == value else f"{key}/{value}"
    return next((match["format"] for line in lines if (match := _OLLAMA_SETUP.search(line.text))), "")


def _measured(lines: Sequence[Line]) -> Measured:
    """Return weights and the buffer of computation of the one device, a host where that is all; none of several."""
    found: dict[str, Printed] = {}
    for name, regex in (("weights", _WEIGHTS), ("activations", _COMPUTE)):
        matches = [(line, match) for line in lines if (match := regex.search(line.text))]
        own = [_figure(line, match) for line, match in matches if not _HOST.search(match["device"])]
        own = own or [_figure(line, match) for line, match in matches]
        if len(own) == 1:
            found[name] = own[0]
    return Measured(weights=found.get("weights"), activations=found.get("activations"))


def _version(lines: Sequence[Line]) -> str:
    return next((found for regex in _VERSIONS if (found := first_match(lines, regex))), "")
