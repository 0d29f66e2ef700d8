"""Formats that differ by layer, and their names: `int4@0,1,-2,-1=bf16` is int4 but for the first and last two layers.

Standard library only. Layers are those of a model that cache keys and values of their own, counted from 0, or from the
end with -1. A model's cache has one `ModelFormat`; a layer's has one `CacheFormat`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Final, TypeAlias

from kvplan_kernels.format import TIERS, CacheFormat, Lesson, UnsupportedError, kernel_refusal, parse
from kvplan_kernels.methods import METHODS
from kvplan_kernels.tier_formats import TieredFormat, parse_tiers

LAYERS_MAX: Final = 9999
"""The largest number of a layer that a name may have; no model comes near it."""
_NUMBER: Final = r"[0-9]{1,4}|-[1-9][0-9]{0,3}"
_LAYERS: Final = re.compile(rf"(?P<first>{_NUMBER})(?:-(?P<last>{_NUMBER}))?")
_MEND: Final = "write <format>@<layers>=<format>, with layers as 0,1,4-7,-2,-1"
_RUN_MIN: Final = 3
"""Layers in a row that a name has as a range."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFormats:
    """How a model's keys and values are stored where not all of its layers store them alike; made by `by_layer`.

    Attributes:
        rest: The format of the layers that are no exceptions.
        exceptions: The others, each with its format: those counted from 0 before those counted from the end.
    """

    rest: CacheFormat
    exceptions: tuple[tuple[int, CacheFormat], ...]

    @property
    def parts(self) -> tuple[CacheFormat, ...]:
        """The formats in it, each once."""
        return tuple(dict.fromkeys((self.rest, *(form for _, form in self.exceptions))))

    def of_layers(self, count: int) -> tuple[CacheFormat, ...]:
        """Return the format of each of a model's *count* layers.

        Raises:
            UnsupportedError: The model has no such layer, one that is named from both ends with two formats, or none
                that is left to quantize.

        >>> [form.name for form in parse_formats("int4@0,-1=bf16").of_layers(3)]
        ['bf16', 'int4', 'bf16']
        """
        found: dict[int, CacheFormat] = {}
        for named, form in self.exceptions:
            layer = named if named >= 0 else count + named
            if not 0 <= layer < count:
                raise UnsupportedError(f"no layer {named} among the {count} that cache keys and values")
            if found.setdefault(layer, form) != form:
                raise UnsupportedError(f"two formats for layer {layer}, which is {named} of {count} layers; leave one")
        stored = tuple(found.get(layer, self.rest) for layer in range(count))
        if self.quantized and not any(form.quantized for form in stored):
            raise UnsupportedError(f"all of the {count} layers that cache keys and values are named in 16 bits")
        return stored

    @property
    def calibrated(self) -> tuple[Lesson, ...]:
        """What some layer's format learns from the model."""
        return tuple(dict.fromkeys(lesson for form in self.parts for lesson in form.calibrated))

    @property
    def quantized(self) -> bool:
        """Whether any layer stores anything in fewer than 16 bits."""
        return any(form.quantized for form in self.parts)

    @property
    def name(self) -> str:
        """The canonical name.

        >>> parse_formats("k4v4@2,0,1=bf16@-2--1=bf16").name
        'int4@0-2,-2,-1=bf16'
        """
        grouped: dict[CacheFormat, list[int]] = {}
        for layer, form in self.exceptions:
            grouped.setdefault(form, []).append(layer)
        return f"{self.rest}" + "".join(f"@{_layers_text(layers)}={form}" for form, layers in grouped.items())

    def __str__(self) -> str:
        """Return the name."""
        return self.name


ModelFormat: TypeAlias = CacheFormat | LayerFormats | TieredFormat
"""How a model's keys and values are stored: alike in all of its layers, by layer, or by what tokens received."""


def by_layer(rest: CacheFormat, exceptions: Mapping[int, CacheFormat]) -> CacheFormat | LayerFormats:
    """Return *rest* with *exceptions* by layer; *rest* itself where they are none.

    >>> by_layer(parse("int4"), {-1: parse("bf16"), 0: parse("int4")}).name
    'int4@-1=bf16'
    """
    others = [(layer, form) for layer, form in exceptions.items() if form != rest]
    if not others:
        return rest
    others.sort(key=lambda item: (item[0] < 0, item[0]))
    return LayerFormats(rest=rest, exceptions=tuple(others))


def parse_formats(name: str) -> ModelFormat:
    """Return the format that *name* stands for, by layer or in tiers where it says so.

    Raises:
        UnsupportedError: A format in it is unknown or not stored here, layers or tiers cannot be read, or a layer has
            two.
    """
    if name in METHODS:
        name = METHODS[name].format
    if name.startswith(TIERS) and "@" not in name:
        return parse_tiers(name)
    rest, *clauses = name.split("@")
    exceptions: dict[int, CacheFormat] = {}
    for clause in clauses:
        layers, equals, form_name = clause.partition("=")
        if not equals:
            raise UnsupportedError(f"format {name!r}: no format for layers {layers!r}; {_MEND}, in quotes in YAML")
        form = _read_part(name, form_name)
        for layer in _read_layers(name, layers):
            if exceptions.setdefault(layer, form) != form:
                raise UnsupportedError(f"format {name!r}: two formats for layer {layer}; leave one")
    return by_layer(_read_part(name, rest), exceptions)


def formats_refusal(kernel: str, form: ModelFormat) -> str | None:
    """Return why no kernel of the implementation *kernel* takes some layer of *form*, or None."""
    return next((reason for part in form.parts if (reason := kernel_refusal(kernel, part))), None)


def check_formats(kernel: str, form: ModelFormat) -> None:
    """Refuse a format that no kernel of the implementation *kernel* takes.

    Raises:
        UnsupportedError: The implementation has no kernel for some layer of *form*.
    """
    if (reason := formats_refusal(kernel, form)) is not None:
        raise UnsupportedError(reason)


def _read_part(name: str, part: str) -> CacheFormat:
    if not part and name:
        raise UnsupportedError(f"format {name!r}: one of its formats is missing; {_MEND}")
    return parse(part)


def _read_layers(name: str, text: str) -> Iterator[int]:
    for item in text.split(","):
        match = _LAYERS.fullmatch(item)
        if match is None:
            raise UnsupportedError(f"format {name!r}: layers {item!r}; {_MEND}, up to {LAYERS_MAX}")
        first = int(match["first"])
        last = first if match["last"] is None else int(match["last"])
        if last < first or (first < 0) != (last < 0):  # how long it is from one end to the other, the model says
            mend = "count upwards, and from one end: 0-3, or -4--1"
            raise UnsupportedError(f"format {name!r}: layers {item!r}; {mend}")
        yield from range(first, last + 1)


def _layers_text(layers: list[int]) -> str:
    """Return *layers*, in order, as a name has them.

    >>> _layers_text([0, 1, 2, 5, -2, -1])
    '0-2,5,-2,-1'
    """
    found: list[str] = []
    for _, items in groupby(enumerate(layers), key=lambda item: (item[1] < 0, item[1] - item[0])):
        run = [layer for _, layer in items]
        found += [f"{run[0]}-{run[-1]}"] if len(run) >= _RUN_MIN else map(str, run)
    return ",".join(found)
