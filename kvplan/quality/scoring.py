"""Quality results of several formats from one pass over the data: the 16-bit reference is computed once."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from kvplan import __version__
from kvplan.core.formats import read_format
from kvplan.core.layouts import lay_out
from kvplan.core.records import Quality, QualityKey, RetrievalTrial
from kvplan.core.specs import ModelSpec
from kvplan.core.workloads import Prefill, Search
from kvplan.errors import InputError, UnsupportedFormatError
from kvplan.quality.calibrating import check_unseen
from kvplan.quality.compare import score_documents, score_trials
from kvplan.quality.lane import FormatLane, Lane, Room, read_lane, reference_format
from kvplan.quality.lanes import Lanes
from kvplan.quality.passages import Passage, cut_documents, data_digest, opening_ids, tokenize
from kvplan.quality.retrieval import TEXT_FORM, make_trials, read_form
from kvplan.runtime.loading import LoadedModel
from kvplan.runtime.ops import QUERIES_MAX, Kernel
from kvplan.store.calibrations import Calibration

_BATCH: Final = 8
_SEED: Final = 20260801

NOISE_FLOOR: Final = (
    "the 16-bit row is the noise floor: the kernel against torch's attention over the same 16-bit cache"
)

Progress = Callable[[float], None]
"""Hears the share of the work that is done, 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QualityOptions:
    """How quality is scored.

    Attributes:
        context_tokens: Of a document and of a retrieval trial; the last quarter of a document is scored.
        documents: None takes what the text holds, up to 16.
        chunk_tokens: The most tokens of one forward pass, 1 to 32; fewer where a format's flushes demand it.
        prefill: Whether prompts are computed in 16 bits and then packed, or read the cache in chunks.
        batch: Passages computed at once.
    """

    block_tokens: int = 64
    context_tokens: int = 1024
    documents: int | None = None
    trials: int = 16
    chunk_tokens: int = QUERIES_MAX
    prefill: Prefill = Prefill.EXACT
    kernel: Kernel = Kernel.CPU
    threads: int | None = None
    batch: int = _BATCH
    seed: int = _SEED


@dataclass(frozen=True, kw_only=True, slots=True)
class QualityData:
    """What is scored; the same for every format."""

    documents: tuple[Passage, ...]
    trials: tuple[Passage, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of all token ids."""
        return data_digest([*self.documents, *self.trials])


def prepare(loaded: LoadedModel, options: QualityOptions, text: str | None = None) -> QualityData:
    """Cut *text* into documents and retrieval trials for a model's tokenizer.

    Args:
        loaded: The model.
        options: Lengths and counts.
        text: None is the held-out text that ships with kvplan: Python documentation.

    Raises:
        InputError: The model has no tokenizer, the context is longer than it takes, or the text is too short.
    """
    context = options.context_tokens
    if loaded.tokenizer is None:
        raise InputError(f"{loaded.spec.name} holds no tokenizer, and quality is scored on text")
    if context >= loaded.spec.context_tokens:
        raise InputError(f"a context of {context} tokens; {loaded.spec.name} takes {loaded.spec.context_tokens - 1}")
    stream = tokenize(loaded.tokenizer, _held_out_text() if text is None else text)
    opening = opening_ids(loaded.tokenizer)
    documents = cut_documents(stream, opening, context_tokens=context, documents=options.documents)
    form = _trial_form(loaded)
    trials: list[Passage] = []
    if options.trials:
        longest = min(context, form.longest_tokens or context)
        trials = make_trials(
            loaded.tokenizer, stream, opening, form, context_tokens=longest, trials=options.trials, seed=options.seed
        )
    return QualityData(documents=tuple(documents), trials=tuple(trials))


def score(
    loaded: LoadedModel,
    formats: Sequence[str],
    options: QualityOptions | None = None,
    *,
    text: str | None = None,
    calibration: Calibration | None = None,
    progress: Progress = lambda _: None,
) -> list[Quality]:
    """Return what each of *formats* costs the model, in order.

    The model's own 16-bit format is the reference. Where it is among *formats* its row is the noise floor: torch's
    attention over the same 16-bit cache, which differs only in how it rounds.

    Raises:
        InputError: No scored position of some format attends to a quantized token: the result would be of nothing; a
            format learns from the model and *calibration* has not, or was learned from text that is to be scored.
        MissingPartError: A format is of a library that is not installed.
        UnsupportedFormatError: No kernel takes a format, it names layers that the model does not have, or the library
            whose it is fails on it.
    """
    options = options or QualityOptions()
    data = prepare(loaded, options, text)
    lanes = [read_lane(name, loaded.spec) for name in formats]
    room = _room(data, options, calibration)
    for lane in lanes:
        lane.check(loaded.spec, data.documents, room)
    if calibration is not None:
        check_unseen(calibration, (*data.documents, *data.trials))
    reference = FormatLane(reference_format(loaded.spec))
    work = Lanes(loaded, [reference, *lanes], room, chunk_tokens=options.chunk_tokens, prefill=options.prefill)
    heard = _heard(progress, data, len(work.servers), options.prefill)
    trials: Sequence[tuple[RetrievalTrial, ...]] = [()] * len(lanes)
    with _torch_threads(options.threads):
        documents = score_documents(work.run(data.documents, heard), data.documents, lanes, loaded.spec)
        if data.trials:
            trials = score_trials(work.run(data.trials, heard), data.trials, len(work.servers))
    _check_poisoned(lanes, work.poisoned_groups[1:])
    names = [server.name for server in work.servers[1:]]
    return [
        Quality(
            key=_key(loaded, lane, options, data.digest, names[i], calibration),
            documents=documents[i],
            trials=trials[i],
        )
        for i, lane in enumerate(lanes)
    ]


def default_formats(spec: ModelSpec, options: QualityOptions) -> list[str]:
    """Return the formats that a search looks at, without those that do not lay out on this model and block size."""
    found = []
    for name in Search().formats:
        try:
            lay_out(spec, read_format(name), options.block_tokens)
        except UnsupportedFormatError:
            continue
        found.append(name)
    return found


def _room(data: QualityData, options: QualityOptions, calibration: Calibration | None) -> Room:
    return Room(
        block_tokens=options.block_tokens,
        tokens=max(passage.tokens for passage in (*data.documents, *data.trials)),
        batch=min(options.batch, max(len(data.documents), len(data.trials))),
        kernel=options.kernel,
        threads=options.threads,
        calibration=calibration,
    )


def _held_out_text() -> str:
    from kvplan_profiles import held_out_text

    return held_out_text()


def _trial_form(loaded: LoadedModel) -> Any:
    if loaded.spec.name != "demo":
        return TEXT_FORM
    from kvplan_profiles import demo_retrieval_path

    return read_form(demo_retrieval_path())


@contextmanager
def _torch_threads(threads: int | None) -> Iterator[None]:
    """Let torch use *threads* threads for a while; None leaves it alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _heard(progress: Progress, data: QualityData, lanes: int, prefill: Prefill) -> Callable[[int], None]:
    passages = [*data.documents, *data.trials]
    prefills = 1 if prefill is Prefill.EXACT else lanes
    total = sum(prefills * len(passage.prompt) + lanes * len(passage.fed) for passage in passages)
    done = 0

    def add(tokens: int) -> None:
        nonlocal done
        done += tokens
        progress(done / total)

    return add


def _check_poisoned(lanes: Sequence[Lane], poisoned_groups: Sequence[int]) -> None:
    for lane, groups in zip(lanes, poisoned_groups, strict=True):
        if groups:
            raise UnsupportedFormatError(
                f"format {lane.name}: {groups} groups of this model's keys and values are not finite, or overflow "
                "their fp16 scale and minimum"
            )


def _key(
    loaded: LoadedModel, lane: Lane, options: QualityOptions, digest: str, kernel: str, calibration: Calibration | None
) -> QualityKey:
    return QualityKey(
        model_digest=loaded.spec.digest,
        format=lane.name,
        block_tokens=options.block_tokens,
        prefill=options.prefill,
        chunk_tokens=options.chunk_tokens,
        data_digest=digest,
        kernel=kernel,
        kvplan_version=__version__,
        calibration=lane.learned_digest(calibration),
    )
