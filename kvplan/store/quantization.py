"""A config's quantization_config to the bits that each weight is stored in.

Formats are those of the files as vLLM loads them (vllm-project/vllm, vllm/model_executor/layers/quantization, main of
2026-11): scales of fp8 in 32 bits, of int4 and of int8 in 16, of NVFP4 and MXFP4 in 8. Names of modules match with
what is before the language model's own name left away, for each library writes it in its own way.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvplan.core.weights import FLOAT16, Weight, WeightFormat, WeightKind
from kvplan.store.keys import Keys

_PREFIXES: Final = ("model.", "language_model.", "backbone.", "transformer.")
_REGEX_PREFIXES: Final = ("", "model.", "language_model.model.", "model.language_model.")
_LINEAR: Final = "Linear"
_CONVERTED: Final = (WeightKind.LINEAR, WeightKind.EXPERT)

_PER_MATRIX: Final = WeightFormat(bits=8, matrix_bytes=8)
"""With a scale of the weights and one of the inputs."""
_PER_ROW: Final = WeightFormat(bits=8, group_rows=1, scale_bits=32)
_NVFP4: Final = WeightFormat(bits=4, group_rows=1, group_columns=16, scale_bits=8, matrix_bytes=8)
_MXFP4: Final = WeightFormat(bits=4, group_rows=1, group_columns=32, scale_bits=8)
_MXFP8: Final = WeightFormat(bits=8, group_rows=1, group_columns=32, scale_bits=8)


def _blocks(high: int, wide: int) -> WeightFormat:
    return WeightFormat(bits=8, group_rows=high, group_columns=wide, scale_bits=32)


def _grouped(bits: int, group: int, *, zeros: bool, ordered: bool = False) -> WeightFormat:
    """Return codes of *bits* with a 16-bit scale a group, a zero point in *bits*, and the place of each column."""
    return WeightFormat(
        bits=bits, group_rows=1, group_columns=group, scale_bits=16 + (bits if zeros else 0),
        column_bytes=4 if ordered else 0,
    )  # fmt: skip


_ALGORITHMS: Final = {
    "FP8": _PER_MATRIX, "FP8_PER_CHANNEL_PER_TOKEN": _PER_ROW, "FP8_PB_WO": _blocks(128, 128), "MXFP8": _MXFP8,
    "NVFP4": _NVFP4, "NVFP4_AWQ": _NVFP4, "W4A16_NVFP4": _NVFP4, "W4A8_NVFP4_FP8": _NVFP4,
}  # fmt: skip
"""NVIDIA Model Optimizer's `quant_algo` (vllm, quantization/modelopt.py)."""


class ModuleNames:
    """A list of modules: names, beginnings or ends of names, patterns with a star, regular expressions after `re:`."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.exact: set[str] = set()
        starts, expressions, stars = [], [], []
        for pattern in patterns:
            if pattern.startswith("re:"):
                expressions.append(re.compile(pattern.removeprefix("re:")))
                continue
            name = _own(pattern)
            if "*" not in name:
                self.exact.add(name)
            elif name.endswith("*") and "*" not in name[:-1]:
                starts.append(name[:-1])
            else:
                stars.append(".*".join(re.escape(part) for part in name.split("*")))
        self.starts = tuple(starts)
        self.expressions = expressions
        self.stars = re.compile("|".join(rf"(?:.*\.)?(?:{star})(?:\..*)?" for star in stars)) if stars else None

    def __contains__(self, name: str) -> bool:
        """Whether the list has the module, one that it is in, or its last names."""
        if self.exact:
            parts = name.split(".")
            for first in range(len(parts)):
                if any(".".join(parts[first:last]) in self.exact for last in range(len(parts), first, -1)):
                    return True
        if name.startswith(self.starts) or (self.stars and self.stars.fullmatch(name)):
            return True
        return any(one.match(prefix + name) for one in self.expressions for prefix in _REGEX_PREFIXES)


def _own(name: str) -> str:
    """Return the name of a module below the language model."""
    while True:
        prefix = next((one for one in _PREFIXES if name.startswith(one) and len(name) > len(one)), None)
        if prefix is None:
            return name
        name = name.removeprefix(prefix)


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """Which weights are stored in fewer bits.

    Attributes:
        kept: Modules that stay in 16 bits.
        named: Formats of the modules of a list.
        rest: The format of other linear layers, of experts too; None where they stay in 16 bits.
        experts: The format of other experts where it is their own.
        kinds: What `rest` converts.
    """

    kept: ModuleNames = field(default_factory=lambda: ModuleNames(()))
    named: tuple[tuple[ModuleNames, WeightFormat], ...] = ()
    rest: WeightFormat | None = None
    experts: WeightFormat | None = None
    kinds: tuple[WeightKind, ...] = _CONVERTED

    def format_of(self, weight: Weight) -> WeightFormat:
        """Return how *weight* is stored."""
        if weight.kind is WeightKind.OTHER or weight.name in self.kept:
            return FLOAT16
        for names, form in self.named:
            if weight.name in names:
                return form
        if self.experts is not None and weight.kind is WeightKind.EXPERT:
            return self.experts
        return self.rest if self.rest is not None and weight.kind in self.kinds else FLOAT16


def read_quantization(config: Mapping[str, Any], keys: Keys, *, language: bool = True) -> Quantization:
    """Return what the config's `quantization_config` says of the weights.

    What stands in the language model's own part is for its weights alone; *language* is False for those beside it.

    Raises:
        UnsupportedModelError: The method is unknown, or a part of it.
        InputError: A value cannot be.
    """
    outer = Keys(config, keys.where, keys.type, keys.architecture)
    found = _stated((outer, keys) if language else (outer,))
    experts = keys.get("expert_dtype")
    if not language or experts in (None, "fp8", "bfloat16"):
        return found
    if experts != "fp4":
        raise keys.unsupported("expert_dtype", f"experts in {str(experts)[:60]!r}")
    return replace(found, experts=_MXFP4)  # DeepSeek V4: groups of 32, as its model card says


def _stated(holders: Sequence[Keys]) -> Quantization:
    for holder in holders:
        for key in ("quantization_config", "compression_config"):
            if holder.get(key):
                return _read(holder.inside(key))
    return Quantization()


def _read(keys: Keys) -> Quantization:
    method = str(keys.get("quant_method") or ("modelopt" if keys.get("quant_algo") else "")).replace("_", "-")
    reader = _METHODS.get(method)
    if reader is None:
        raise keys.unsupported("quant_method", f"weights stored by {method[:60]!r}")
    return reader(keys)


def _names(keys: Keys, *spellings: str) -> ModuleNames:
    for key in spellings:
        listed = keys.get(key)
        if listed is None:
            continue
        if not isinstance(listed, Sequence) or not all(isinstance(one, str) for one in listed):
            raise keys.wrong(f"quantization_config.{key} is no list of modules")
        return _compiled(keys, [listed] if isinstance(listed, str) else listed)
    return ModuleNames(())


def _compiled(keys: Keys, patterns: Iterable[str]) -> ModuleNames:
    try:
        return ModuleNames(patterns)
    except re.error as error:
        raise keys.wrong(f"quantization_config names modules by no regular expression: {error}") from error


def _fp8(keys: Keys) -> Quantization:
    """Return fp8 in blocks or with one scale a matrix; lists of single layers beside make it Model Optimizer's."""
    blocks = keys.get("weight_block_size")
    form = _PER_MATRIX if blocks is None else _block_format(keys, "weight_block_size", blocks)
    kept = _names(keys, "modules_to_not_convert", "ignored_layers")
    return Quantization(kept=kept, named=_quantized_layers(keys), rest=form)


def _block_format(keys: Keys, key: str, blocks: Any) -> WeightFormat:
    if not isinstance(blocks, list) or len(blocks) != 2 or not all(type(n) is int and n > 0 for n in blocks):
        raise keys.wrong(f"{key} is {str(blocks)[:60]!r}", "it is two numbers of features")
    return _blocks(*blocks)


def _row_fp8(keys: Keys) -> Quantization:
    return Quantization(kept=_names(keys, "modules_to_not_convert"), rest=_PER_ROW)


def _quantized_layers(keys: Keys) -> tuple[tuple[ModuleNames, WeightFormat], ...]:
    """Return the formats of Model Optimizer's `quantized_layers`, one list of modules for each."""
    layers = keys.get("quantized_layers")
    if not layers:
        return ()
    if not isinstance(layers, Mapping) or not all(isinstance(one, Mapping) for one in layers.values()):
        raise keys.wrong("quantized_layers is no object of objects, by module")
    by_format: dict[WeightFormat, list[str]] = {}
    for name, one in layers.items():
        by_format.setdefault(_algorithm(keys, one.get("quant_algo")), []).append(name)
    return tuple((_compiled(keys, names), form) for form, names in by_format.items())


def _algorithm(keys: Keys, name: Any) -> WeightFormat:
    if not isinstance(name, str) or name not in _ALGORITHMS:
        raise keys.unsupported("quant_algo", f"weights stored by {str(name)[:60]!r}")
    return _ALGORITHMS[name]


def _modelopt(keys: Keys) -> Quantization:
    kept = _names(keys, "ignore", "exclude_modules")
    if keys.get("quantized_layers"):
        return Quantization(kept=kept, named=_quantized_layers(keys))
    return Quantization(kept=kept, rest=_algorithm(keys, keys.get("quant_algo")))


def _compressed(keys: Keys) -> Quantization:
    """Return compressed-tensors' groups, each with the modules or classes that it is for."""
    groups = keys.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(one, Mapping) for one in groups.values()):
        raise keys.wrong("config_groups is no object of objects")
    if keys.get("quantization_status") == "frozen" and not keys.get("format"):
        raise keys.unsupported("quantization_status", "weights that are not compressed")
    named: list[tuple[ModuleNames, WeightFormat]] = []
    rest = None
    for one in groups.values():
        form = _scheme(keys, one.get("weights"))
        targets = one.get("targets")
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            raise keys.wrong("config_groups has a group without targets", "they are a list of modules")
        if _LINEAR in targets:
            rest = form
        named.append((_compiled(keys, [target for target in targets if target != _LINEAR]), form))
    return Quantization(kept=_names(keys, "ignore"), named=tuple(named), rest=rest)


def _scheme(keys: Keys, weights: Any) -> WeightFormat:
    """Return the format of a group (compressed-tensors, `QuantizationArgs`)."""
    if not isinstance(weights, Mapping):
        raise keys.unsupported("config_groups", "weights in 16 bits")
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    group, strategy = weights.get("group_size"), weights.get("strategy")
    if kind == "float" and bits == 4:
        return _MXFP4 if group == 32 else _NVFP4
    if bits == 8 and strategy == "block":
        blocks = weights.get("block_structure")
        return _block_format(keys, "block_structure", blocks) if blocks else _blocks(128, 128)
    if bits == 8 and strategy in ("channel", "tensor"):
        return _PER_ROW if strategy == "channel" else _PER_MATRIX
    if kind == "int" and bits in (4, 8) and strategy in ("group", "channel"):
        size = group if strategy == "group" and type(group) is int and group > 0 else 0
        return _grouped(bits, size, zeros=not weights.get("symmetric", True), ordered=bool(weights.get("actorder")))
    raise keys.unsupported("config_groups", f"{bits!s:.20} bits of {kind!s:.20} by {strategy!s:.20}")


def _integers(keys: Keys) -> Quantization:
    """Return GPTQ's and AWQ's groups: a zero point each, but that symmetric codes are stored with one as well."""
    bits, group = keys.get("bits") or keys.get("w_bit"), keys.get("group_size") or keys.get("q_group_size")
    if bits not in (2, 3, 4, 8) or type(group) is not int:
        raise keys.wrong(f"quantization_config says bits {str(bits)[:20]!r} and group_size {str(group)[:20]!r}")
    if keys.get("modules_in_block_to_quantize"):
        raise keys.unsupported("modules_in_block_to_quantize", "some of the layers in fewer bits")
    form = _grouped(bits, max(group, 0), zeros=True, ordered=bool(keys.get("desc_act")))
    kept = _names(keys, "modules_to_not_convert")
    if keys.get("dynamic") is not None:
        kept = _left_out(keys)
    kinds = (*_CONVERTED, WeightKind.HEAD) if keys.get("lm_head") is True else _CONVERTED
    return Quantization(kept=kept, rest=form, kinds=kinds)


def _left_out(keys: Keys) -> ModuleNames:
    """Return the modules that GPTQModel's `dynamic` leaves out, by regular expressions after `-:`."""
    rules = keys.get("dynamic")
    if not isinstance(rules, Mapping) or not all(str(rule).startswith("-:") for rule in rules):
        raise keys.unsupported("dynamic", "layers in several bits")
    return _compiled(keys, ["re:" + str(rule).removeprefix("-:") for rule in rules])


def _round(keys: Keys) -> Quantization:
    if keys.get("extra_config"):
        raise keys.unsupported("extra_config", "layers in several bits")
    return _integers(keys)


def _bitsandbytes(keys: Keys) -> Quantization:
    """Return 8 bits with a scale a row, or 4 with one for 64 elements, itself in 8 bits where quantized twice.

    Scales quantized twice share one of 32 bits for 256 of them (arXiv 2305.14314, section 3): 8.125 bits each, taken
    for 8.
    """
    kept = _names(keys, "llm_int8_skip_modules")
    if keys.get("load_in_8bit"):
        return Quantization(kept=kept, rest=_PER_ROW)
    if not keys.get("load_in_4bit"):
        raise keys.wrong("quantization_config of bitsandbytes has neither load_in_4bit nor load_in_8bit")
    scale = 8 if keys.get("bnb_4bit_use_double_quant") else 32
    return Quantization(kept=kept, rest=WeightFormat(bits=4, group_rows=1, group_columns=64, scale_bits=scale))


def _mxfp4(keys: Keys) -> Quantization:
    """Return MXFP4 of the experts alone (transformers' Mxfp4Config converts nothing else)."""
    kept = _names(keys, "modules_to_not_convert")
    return Quantization(kept=kept, rest=_MXFP4, kinds=(WeightKind.EXPERT,))


_METHODS: Final[dict[str, Callable[[Keys], Quantization]]] = {
    "auto-round": _round, "awq": _integers, "bitsandbytes": _bitsandbytes, "compressed-tensors": _compressed,
    "fbgemm-fp8": _row_fp8, "fp8": _fp8, "gptq": _integers, "modelopt": _modelopt, "modelopt-fp4": _modelopt,
    "modelopt-mixed": _modelopt, "mxfp4": _mxfp4,
}  # fmt: skip
