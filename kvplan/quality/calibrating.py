"""What formats learn of a model: from text that is never scored, lesson by lesson.

Each pass over the text teaches one lesson of every format, since what it learns from are keys and values with the
transforms before it done to them. Formats that begin alike share what they learn.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kvplan.core.specs import ModelSpec
from kvplan.errors import InputError, UnsupportedFormatError
from kvplan.quality.passages import Passage, cut_documents, data_digest, opening_ids, tokenize
from kvplan.runtime.learned import given_parameters, require_plain_softmax
from kvplan.runtime.loading import LoadedModel
from kvplan.runtime.observing import observe, observe_gradients
from kvplan.store.calibrations import Array, Calibration
from kvplan_kernels.format import CacheFormat, Lesson, UnsupportedError
from kvplan_kernels.layer_formats import ModelFormat
from kvplan_kernels.learning import Learner, as_stored, learner, needs_gradient
from kvplan_kernels.parameters import LayerParameters, check_learned
from kvplan_kernels.seen import Seen

CONTEXT_TOKENS: Final = 2048
"""Of a document, at most: slowly rotating channels of the keys are near constant in a short one (arXiv 2505.18610)."""
WINDOW_TOKENS: Final = 32
"""Of a stretch of text that scoring looks for; a shorter one may be a phrase that any two texts share."""

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class _Lesson:
    """One lesson that some format learns."""

    form: CacheFormat
    what: Lesson

    @property
    def recipe(self) -> str:
        """The name under which it is kept."""
        return "-".join(self.form.recipe(self.what))

    @property
    def before(self) -> "tuple[_Lesson, ...]":
        """What has to be learned first."""
        recipe = self.form.recipe(self.what)
        return tuple(
            _Lesson(self.form, other) for other in self.form.calibrated if other in recipe and other != self.what
        )


def require_learning(forms: Iterable[ModelFormat]) -> None:
    """Refuse formats that have nothing to learn.

    Raises:
        InputError: One has not.
    """
    for form in forms:
        if not form.calibrated:
            raise InputError(f"format {form} learns nothing from a model", hint="it can be used as it is")


def calibration_documents(
    loaded: LoadedModel, *, text: str | None = None, context_tokens: int | None = None, documents: int | None = None
) -> list[Passage]:
    """Return the documents to learn from.

    Args:
        loaded: The model, with its tokenizer.
        text: None is the calibration text that ships with kvplan: no part of it is ever scored by default.
        context_tokens: Of a document; None is 2048, less where the model or the text is shorter.
        documents: None takes what the text holds, up to 16.

    Raises:
        InputError: The model has no tokenizer, or the text is too short.
    """
    from kvplan_profiles import calibration_text

    if loaded.tokenizer is None:
        raise InputError(f"{loaded.spec.name} holds no tokenizer, and calibration reads text")
    stream = tokenize(loaded.tokenizer, calibration_text() if text is None else text)
    opening = opening_ids(loaded.tokenizer)
    held = max(WINDOW_TOKENS, len(opening) + len(stream) - 1)
    longest = min(CONTEXT_TOKENS, loaded.spec.context_tokens - 1, held)
    return cut_documents(stream, opening, context_tokens=context_tokens or longest, documents=documents)


@torch.inference_mode()
def calibrate(
    loaded: LoadedModel,
    forms: Sequence[CacheFormat],
    documents: Sequence[Passage],
    *,
    versions: Mapping[str, str],
    progress: Progress = lambda _: None,
) -> Calibration:
    """Return what *forms* learn from *documents*.

    Raises:
        InputError: A format learns nothing.
        UnsupportedFormatError: A format would change what the model computes, or its keys are not finite.
    """
    require_learning(forms)
    for form in forms:
        require_plain_softmax(loaded, form)
    stages, given = _stages(forms), given_parameters(loaded, forms)
    known: dict[str, list[dict[str, Tensor]]] = {}
    total, done = len(stages) * len(documents), 0
    for stage in stages:
        course = _Course(loaded.spec, stage, known, given)
        for document in documents:
            course.read(loaded, [*document.prompt, *document.fed])
            done += 1
            progress(done / total)
        known |= course.learned()
    return Calibration(
        model=loaded.spec.name,
        model_digest=loaded.spec.digest,
        data_digest=data_digest(documents),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions,
        windows=text_windows(documents),
        recipes={
            recipe: [{name: tensor.cpu().numpy() for name, tensor in layer.items()} for layer in layers]
            for recipe, layers in known.items()
        },
    )


def _stages(forms: Iterable[CacheFormat]) -> list[list[_Lesson]]:
    """Return the lessons of *forms*, each once, those of a list after all that they build on."""
    stages: list[dict[str, _Lesson]] = []
    for form in forms:
        for what in form.calibrated:
            lesson = _Lesson(form, what)
            depth = len(lesson.before)
            stages += [{} for _ in range(depth + 1 - len(stages))]
            stages[depth].setdefault(lesson.recipe, lesson)
    return [list(stage.values()) for stage in stages]


class _Course:
    """The lessons of one pass over the text, in every layer."""

    def __init__(
        self,
        spec: ModelSpec,
        lessons: Sequence[_Lesson],
        known: Mapping[str, list[dict[str, Tensor]]],
        given: Sequence[LayerParameters],
    ) -> None:
        self._spec = spec
        self._known = known
        self._given = given
        self._learners: dict[_Lesson, list[Learner]] = {
            lesson: [learner(lesson.form, lesson.what) for _ in spec.layers] for lesson in lessons
        }
        self._observe = observe_gradients if any(needs_gradient(lesson.what) for lesson in lessons) else observe

    def read(self, loaded: LoadedModel, token_ids: Sequence[int]) -> None:
        """Run the model over one document, and learn from it."""
        self._observe(loaded, token_ids, self._hear)

    def _hear(self, layer: int, seen: Seen) -> None:
        for lesson, learners in self._learners.items():
            before = [self._known[other.recipe][layer] for other in lesson.before]
            learned = LayerParameters({name: tensor for tensors in before for name, tensor in tensors.items()})
            given = self._given[layer].to(str(seen.key.device))
            learners[layer].observe(as_stored(lesson.form, lesson.what, given | learned, seen))

    def learned(self) -> dict[str, list[dict[str, Tensor]]]:
        """Return the tensors of every recipe, layer by layer."""
        found = {lesson.recipe: [one.learned() for one in learners] for lesson, learners in self._learners.items()}
        for layers in found.values():
            for layer, (tensors, spec) in enumerate(zip(layers, self._spec.layers, strict=True)):
                try:
                    for name, tensor in tensors.items():
                        check_learned(name, tensor, spec.kv_heads, spec.head_dim)
                except UnsupportedError as error:
                    raise UnsupportedFormatError(f"{self._spec.name}: layer {layer}: {error}") from error
        return found


def text_windows(passages: Iterable[Passage]) -> Array:
    """Return hashes, int64, of the stretches of 32 tokens that *passages* are cut into."""
    found = {
        _window(ids[start : start + WINDOW_TOKENS])
        for ids in map(_token_ids, passages)
        for start in range(0, len(ids) - WINDOW_TOKENS + 1, WINDOW_TOKENS)
    }
    return np.asarray(sorted(found), dtype=np.int64)


def check_unseen(calibration: Calibration, passages: Iterable[Passage]) -> None:
    """Refuse to score what formats have learned from: any run of 63 tokens holds a whole stretch of 32.

    Raises:
        InputError: Some passage has a stretch of the calibration's text.
    """
    seen = set(calibration.windows.tolist())
    for ids in map(_token_ids, passages):
        for start in range(len(ids) - WINDOW_TOKENS + 1):
            if _window(ids[start : start + WINDOW_TOKENS]) in seen:
                raise InputError(
                    "the text to score holds text that the formats were calibrated on",
                    hint="give another --data to one of the two",
                )


def _token_ids(passage: Passage) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.asarray([*passage.prompt, *passage.fed, passage.targets[-1]], dtype="<i4")


def _window(ids: np.ndarray[tuple[int], np.dtype[np.int32]]) -> int:
    return int.from_bytes(blake2b(ids.tobytes(), digest_size=8).digest(), "little", signed=True)
