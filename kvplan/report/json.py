"""Results as JSON for other programs: schema 1, no NaN, absent figures null with a reason."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from math import isfinite
from typing import Any, Final

from kvplan.core.comparisons import Comparison
from kvplan.core.formats import FormatFacts
from kvplan.core.plans import Option, Plan
from kvplan.core.sizes import CacheSize
from kvplan.engines.engine import LaunchText
from kvplan.engines.logs import Finding, LogFacts

SCHEMA: Final = 1


def dump(body: Mapping[str, object]) -> str:
    """Return *body* as JSON text with its schema first."""
    return json.dumps({"schema": SCHEMA, **{key: plain(value) for key, value in body.items()}}, indent=2)


def plain(value: object) -> Any:
    """Return *value* as JSON can hold it: dataclasses by field, enums by value, what is not finite as null."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float) and not isfinite(value):
        return None
    return value


def plan_json(plan: Plan, launch: LaunchText | None = None) -> str:
    """Return a recommendation as JSON, with how the engine is started."""
    return dump(
        {
            "engine": plan.engine,
            "launch": launch,
            "outcome": plan.outcome,
            "verdict": plan.sentence,
            "concurrency": plan.concurrency,
            "pick": _setting(plan.pick) if plan.pick else None,
            "options": [_option(option) for option in plan.options],
            "refused": [{"setting": setting, "reason": reason} for setting, reason in plan.refused],
            "remedies": plan.remedies,
            "missing": [{"format": f, "block_tokens": b, "target": what} for f, b, what in plan.missing],
            "measured_on": plan.device or None,
            "bottleneck": plan.bottleneck,
            "remarks": plan.remarks,
        }
    )


def _setting(option: Option) -> dict[str, object]:
    return {
        "format": option.format, "block_tokens": option.block_tokens, "blocks": option.blocks, "slots": option.slots,
    }  # fmt: skip


def _option(option: Option) -> dict[str, object]:
    memory = option.memory
    return {
        **_setting(option),
        "status": option.status,
        "sessions": option.sessions,
        "effective_bits": option.effective_bits,
        "memory": {
            "need_bytes": memory.need_bytes, "limit_bytes": memory.limit_bytes, "cache_bytes": memory.cache_bytes,
            "terms": memory.terms,
        },
        "tpot": option.tpot,
        "ttft": option.ttft,
        "step_shares": option.shares,
        "quality": option.quality,
        "verdicts": option.verdicts,
    }  # fmt: skip


def sizes_json(results: Sequence[CacheSize]) -> str:
    """Return the answers of `kvplan size` as JSON."""
    return dump({"results": [_whole(plain(_size(size))) for size in results]})


def _whole(value: Any) -> Any:
    """Return *value* with the floats that are whole as integers: bytes may be fractions and rarely are."""
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _size(size: CacheSize) -> dict[str, object]:
    capacity = size.capacity and {**plain(size.capacity), "evidence": size.pool_evidence}
    parts = {
        "logical": size.logical, "allocated": size.allocated,
        "terms": size.terms, "beside": size.beside, "capacity": capacity, "memory": size.pool,
        "notes": size.notes, "reason": size.reason,
    }  # fmt: skip
    return {
        "model": size.model, "format": size.format, "engine": size.engine, "tp": size.setup.tensor_parallel,
        "pp": size.setup.pipeline_parallel, "context": size.context_tokens, "evidence": "exact",
        **{key: part for key, part in parts.items() if part},
    }  # fmt: skip


def explanation_json(facts: LogFacts, findings: Sequence[Finding]) -> str:
    """Return what became of a log's figures as JSON."""
    run = facts.measured
    measured = {
        name: figure.value
        for name, figure in (
            ("usable_bytes", run.usable), ("weight_bytes", run.weights), ("activation_bytes", run.activations),
            ("context_bytes", run.context), ("graph_bytes", run.graphs),
        )
        if figure is not None
    }  # fmt: skip
    return dump(
        {
            "engine": facts.engine, "version": facts.version or None, "model": facts.model or None,
            "format": facts.format or None, "context": facts.setup.context_tokens or None,
            "tp": facts.setup.tensor_parallel, "pp": facts.setup.pipeline_parallel, "findings": findings,
            "measured": _whole(measured),
        }
    )  # fmt: skip


def formats_json(facts: Sequence[FormatFacts]) -> str:
    """Return the list of formats as JSON."""
    return dump(
        {
            "formats": [
                {
                    "name": fact.name, **({"format": fact.format} if fact.format else {}),
                    "bits_k": fact.bits_k, "bits_v": fact.bits_v,
                    "effective_bits": fact.effective_bits, "fused": fact.fused,
                    "calibrated": bool(fact.learns), "learns": fact.learns,
                    "engines": fact.engines, "source": fact.source,
                    **({"bytes_per_token": fact.bytes_per_token} if fact.bytes_per_token is not None else {}),
                    **({"unsupported": fact.unsupported} if fact.unsupported else {}),
                }
                for fact in facts
            ]
        }
    )  # fmt: skip


def comparison_json(comparison: Comparison) -> str:
    """Return a comparison as JSON."""
    return dump(
        {
            "status": int(comparison.status),
            "verdict": comparison.sentence,
            "margin": comparison.margin,
            "figures": comparison.verdicts,
        }
    )
