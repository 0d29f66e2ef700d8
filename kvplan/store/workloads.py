"""Workload files: YAML in, a checked `Workload` out, and back."""

from functools import partial
from pathlib import Path
from typing import Any, Final

from kvplan.core.workloads import Arrival, Bucket, Prefill, QualityBudget, Search, Target, Workload
from kvplan.engines import ENGINES, engines_with, find_engine, having
from kvplan.engines.engine import Engine
from kvplan.errors import InputError, UnsupportedFormatError
from kvplan.store.documents import Section, Value, open_document
from kvplan.units import parse_share
from kvplan_kernels.format import CacheFormat, FloatType, UnsupportedError
from kvplan_kernels.layer_formats import parse_formats
from kvplan_kernels.layout import BLOCK_TOKENS_MAX, LANES, KVLayout

WEIGHTS: Final = ("bf16", "fp16", "int8", "int4", "fp8")
SHARE_TOLERANCE: Final = 0.005
"""What rounding may take from shares that sum to one: 33.3% three times is meant as a whole."""

_TOKENS_MAX: Final = 10**9
_COUNT_MAX: Final = 10**6
_INCREASE_MAX: Final = 100.0
_UNITS: Final = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_PLAIN_HEAD_DIM: Final = 64
"""Every format takes it; what is asked is whether format and block size agree."""

_KEYS: Final = (
    "schema", "model", "device", "memory", "memory_utilization", "parallel", "weights", "engine", "max_batched_tokens",
    "prefix_caching", "prefill", "arrival", "target", "quality", "buckets", "search",
)  # fmt: skip
_BUCKET_KEYS: Final = ("name", "prompt", "generate", "share", "shared_prefix")
_QUALITY_KEYS: Final = (
    "max_perplexity_increase", "max_kl", "max_top1_flips", "max_retrieval_drop", "confidence",
)  # fmt: skip

_count: Final = partial(Value.integer, minimum=1, maximum=_COUNT_MAX)
_tokens: Final = partial(Value.integer, minimum=1, maximum=_TOKENS_MAX)
_tokens_or_none: Final = partial(Value.integer, minimum=0, maximum=_TOKENS_MAX)
_positive_share: Final = partial(Value.share, positive=True)


def load_workload(path: Path | str, *, engine: str | None = None) -> Workload:
    """Return the workload that the YAML file *path* describes, for *engine* instead of its own where one is given.

    Raises:
        InputError: The file or a value in it cannot be taken; the message has the line and the mend.
        UnsupportedFormatError: It is for kvplan's own runtime, and a format is another engine's alone.
    """
    section = open_document(Path(path), _KEYS)
    tensor, pipeline = section.read("parallel", _read_parallel, (1, 1))
    own: str | None = section.read("engine", lambda value: value.choice((*ENGINES, *ENGINES.other_names)), None)
    engine = find_engine(engine).name if engine else own
    arrival: Arrival | None = section.read("arrival", _read_arrival, None)
    return Workload(
        model=section.need("model", Value.text),
        buckets=section.need("buckets", _read_buckets),
        target=section.need("target", _read_target),
        device=section.read("device", Value.text, "auto"),
        memory_bytes=section.read("memory", Value.size, None),
        memory_utilization=section.read("memory_utilization", _positive_share, 0.9),
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        weights=section.read("weights", lambda value: value.choice(WEIGHTS), "bf16"),
        engine=engine,
        max_batched_tokens=section.read("max_batched_tokens", _tokens, None),
        prefix_caching=section.read("prefix_caching", Value.flag, True),
        prefill=Prefill(section.read("prefill", lambda value: value.choice(list(Prefill)), "exact")),
        arrival=arrival,
        quality=section.read("quality", read_quality, QualityBudget()),
        search=section.read("search", partial(_read_search, engine=engine), Search()),
    )


def _read_parallel(value: Value) -> tuple[int, int]:
    section = value.section(("tensor", "pipeline"))
    return section.read("tensor", _count, 1), section.read("pipeline", _count, 1)


def _read_arrival(value: Value) -> Arrival:
    section = value.section(("rate_per_s", "burstiness"))
    rate = section.need("rate_per_s", lambda value: value.number(above=0))
    return Arrival(rate_per_s=rate, burstiness=section.read("burstiness", lambda value: value.number(above=0), 1.0))


def _read_target(value: Value) -> Target:
    section = value.section(("concurrency", "ttft_ms", "tpot_ms"))
    return Target(
        concurrency=section.need("concurrency", _count),
        ttft_ms=section.read("ttft_ms", Value.percentiles, {}),
        tpot_ms=section.read("tpot_ms", Value.percentiles, {}),
    )


def read_quality(value: Value, inherited: QualityBudget | None = None) -> QualityBudget:
    """Return the quality budget of *value*; what it leaves out is as *inherited*."""
    section, default = value.section(_QUALITY_KEYS), inherited or QualityBudget()
    return QualityBudget(
        max_perplexity_increase=section.read(
            "max_perplexity_increase", partial(Value.share, maximum=_INCREASE_MAX), default.max_perplexity_increase
        ),
        max_kl=section.read("max_kl", partial(Value.number, minimum=0), default.max_kl),
        max_top1_flips=section.read("max_top1_flips", Value.share, default.max_top1_flips),
        max_retrieval_drop=section.read("max_retrieval_drop", Value.share, default.max_retrieval_drop),
        confidence=section.read("confidence", _read_confidence, default.confidence),
    )


def _read_confidence(value: Value) -> float:
    confidence = value.share(positive=True)
    if not 0.5 < confidence < 1:
        value.refuse(f"{confidence:.10g} bounds nothing", "give more than 50% and less than 100%, as in 95%")
    return confidence


def _read_buckets(value: Value) -> tuple[Bucket, ...]:
    items = value.items()
    buckets: list[Bucket] = []
    for item in items:
        section = item.section(_BUCKET_KEYS)
        bucket = _read_bucket(section, alone=len(items) == 1)
        if any(bucket.name == other.name for other in buckets):
            section.named("name").refuse(f"{bucket.name!r} names two buckets", "give each a name of its own")
        buckets.append(bucket)
    total = sum(bucket.share for bucket in buckets)
    if abs(total - 1) > SHARE_TOLERANCE:
        value.refuse(f"shares sum to {100 * total:.4g}%", "make them sum to 100%")
    return tuple(buckets)


def _read_bucket(section: Section, *, alone: bool) -> Bucket:
    share = section.read("share", _positive_share, 1.0) if alone else section.need("share", _positive_share)
    bucket = Bucket(
        name=section.need("name", Value.text),
        prompt_tokens=section.need("prompt", _tokens),
        generate_tokens=section.need("generate", _tokens),
        share=share,
        shared_prefix_tokens=section.read("shared_prefix", _tokens_or_none, 0),
    )
    if bucket.shared_prefix_tokens > bucket.prompt_tokens:
        longer = f"{bucket.shared_prefix_tokens} tokens are more than the prompt's {bucket.prompt_tokens}"
        section.named("shared_prefix").refuse(longer, "a shared prefix is the start of the prompt")
    return bucket


def _read_search(value: Value, engine: str | None) -> Search:
    section, default = value.section(("formats", "block_size")), Search()
    chosen = find_engine(engine)
    formats = section.read("formats", partial(_read_formats, engine=chosen), default.formats)
    blocks = section.read("block_size", _read_block_sizes, default.block_tokens)
    if chosen.formats:  # its allocator says which blocks it has
        return Search(formats=formats, block_tokens=blocks)
    refusals = [reason for name in formats for block in blocks if (reason := layout_refusal(name, block))]
    if len(refusals) == len(formats) * len(blocks):
        section.named("block_size").refuse(refusals[0])
    return Search(formats=formats, block_tokens=blocks)


def layout_refusal(format_name: str, block_tokens: int) -> str:
    """Return why no page of *block_tokens* holds the format, or nothing; the search skips such pairs."""
    try:
        for form in parse_formats(format_name).parts:
            _lay_out_plain(form, block_tokens)
    except UnsupportedError as error:
        return str(error)
    return ""


def _lay_out_plain(form: CacheFormat, block_tokens: int) -> KVLayout:
    float_type = form.float_type or FloatType.BF16
    return KVLayout(format=form, kv_heads=1, head_dim=_PLAIN_HEAD_DIM, block_tokens=block_tokens, float_type=float_type)


def _read_formats(value: Value, engine: Engine) -> tuple[str, ...]:
    found: list[str] = []
    for item in value.items():
        name = _format_name(item, engine)
        if name in found:
            item.refuse(f"{name} is given twice", "take one away")
        found.append(name)
    return tuple(found)


def _format_name(value: Value, engine: Engine) -> str:
    """Return the engine's own name of a format, kvplan's, or that of an engine that alone has it."""
    name = value.text()
    if engine.has_format(name):
        return name
    try:
        return parse_formats(name).name
    except (UnsupportedError, ValueError):  # ValueError: digits without end
        others = engines_with(name, engine)
    if others and engine.formats:  # a plan names it among what is refused
        return name
    if others:
        message = f"{value.name}: {engine.title} has no cache format {name!r}"
        raise UnsupportedFormatError(message, where=value.where, hint=having(others))
    return read_format(value)


def read_format(value: Value) -> str:
    """Return the canonical name of the format that *value* names."""
    name = value.text()
    try:
        return parse_formats(name).name
    except (UnsupportedError, ValueError) as error:  # ValueError: digits without end
        message, _, hint = str(error).partition("; ")
        value.refuse(message, hint)


def _read_block_sizes(value: Value) -> tuple[int, ...]:
    found: list[int] = []
    for item in value.items():
        block = item.integer(LANES, BLOCK_TOKENS_MAX)
        if block % LANES:
            item.refuse(f"{block} is no multiple of {LANES}", f"use {block // LANES * LANES}")
        if block in found:
            item.refuse(f"{block} is given twice", "take one away")
        found.append(block)
    return tuple(found)


def dump_workload(workload: Workload) -> str:
    """Return the YAML text that `load_workload` reads as *workload*; keys at their default are left out."""
    import yaml

    return yaml.safe_dump(_document(workload), sort_keys=False, default_flow_style=None, allow_unicode=True, width=110)


def _document(workload: Workload) -> dict[str, Any]:
    optional = {
        "memory": _size(workload.memory_bytes) if workload.memory_bytes else None,
        "parallel": {"tensor": workload.tensor_parallel, "pipeline": workload.pipeline_parallel}
        if (workload.tensor_parallel, workload.pipeline_parallel) != (1, 1)
        else None,
        "engine": workload.engine,
        "max_batched_tokens": workload.max_batched_tokens,
        "arrival": {"rate_per_s": workload.arrival.rate_per_s, "burstiness": workload.arrival.burstiness}
        if workload.arrival
        else None,
        "quality": _quality(workload.quality) or None,
    }
    return {
        "schema": 1,
        "model": workload.model,
        "device": workload.device,
        "memory_utilization": _share(workload.memory_utilization),
        "weights": workload.weights,
        "prefix_caching": workload.prefix_caching,
        "prefill": str(workload.prefill),
        **{key: value for key, value in optional.items() if value is not None},
        "target": _target(workload.target),
        "buckets": [_bucket(bucket) for bucket in workload.buckets],
        "search": {"formats": list(workload.search.formats), "block_size": list(workload.search.block_tokens)},
    }


def _target(target: Target) -> dict[str, Any]:
    times = {"ttft_ms": target.ttft_ms, "tpot_ms": target.tpot_ms}
    limits = {key: {f"p{rank}": limit for rank, limit in found.items()} for key, found in times.items() if found}
    return {"concurrency": target.concurrency, **limits}


def _quality(quality: QualityBudget) -> dict[str, Any]:
    shares = {
        "max_perplexity_increase": quality.max_perplexity_increase,
        "max_top1_flips": quality.max_top1_flips,
        "max_retrieval_drop": quality.max_retrieval_drop,
        "confidence": quality.confidence if quality.confidence != QualityBudget().confidence else None,
    }
    found: dict[str, Any] = {key: _share(share) for key, share in shares.items() if share is not None}
    return found | ({"max_kl": quality.max_kl} if quality.max_kl is not None else {})


def _bucket(bucket: Bucket) -> dict[str, Any]:
    found = {
        "name": bucket.name,
        "prompt": bucket.prompt_tokens,
        "generate": bucket.generate_tokens,
        "share": _share(bucket.share),
    }
    return found | ({"shared_prefix": bucket.shared_prefix_tokens} if bucket.shared_prefix_tokens else {})


def _share(share: float) -> str | float:
    """Return a percentage where it says exactly the same fraction, else the fraction."""
    text = f"{100 * share:.10g}%"
    return text if "e" not in text and parse_share(text) == share else share


def _size(count: int) -> str:
    for unit, factor in _UNITS:
        if count % factor == 0:
            return f"{count // factor}{unit}"
    return f"{count}B"


def default_workload(model: str, context_tokens: int, *, formats: tuple[str, ...] | None = None) -> Workload:
    """Return what `kvplan profile` measures where no workload is given: short, middling and long requests.

    Buckets are an eighth, a half and all of the context up to 4,096 tokens, the last 128 of them generated: far enough
    apart to show how cost grows, short enough to finish on two cores.

    Raises:
        InputError: The model's context is too short to hold a bucket.
    """
    longest = min(context_tokens, 4096)
    if longest < 32:
        raise InputError(f"model {model!r} has a context of {context_tokens} tokens", hint="give a workload with -w")
    names = (("short", 8, 0.5), ("middle", 2, 0.3), ("long", 1, 0.2))
    buckets = tuple(_grid_bucket(name, longest // divisor, share) for name, divisor, share in names)
    search = Search(formats=formats) if formats else Search()
    return Workload(model=model, buckets=buckets, target=Target(concurrency=8), search=search)


def _grid_bucket(name: str, total_tokens: int, share: float) -> Bucket:
    generate = max(1, min(128, total_tokens // 4))
    return Bucket(name=name, prompt_tokens=total_tokens - generate, generate_tokens=generate, share=share)
