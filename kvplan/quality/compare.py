"""From logits to records: negative log-likelihood, divergence, flips, answers found."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvplan.core.records import DocumentScore, RetrievalTrial
from kvplan.core.specs import ModelSpec
from kvplan.quality.lanes import Span
from kvplan.quality.passages import Passage
from kvplan_kernels.format import CacheFormat
from kvplan_kernels.layer_formats import ModelFormat


@torch.inference_mode()
def score_documents(
    spans: Iterator[Span], passages: Sequence[Passage], formats: Sequence[ModelFormat], spec: ModelSpec
) -> list[tuple[DocumentScore, ...]]:
    """Return each lane's scores but the first's, which is the 16-bit reference; *formats* are those of the others."""
    tallies = [[_Tally() for _ in passages] for _ in formats]
    for span in spans:
        for row in range(span.logits[0].shape[0]):
            index = span.first_passage + row
            targets = _targets(passages[index], span)
            reference = span.logits[0][row].float().log_softmax(-1)
            for lane, logits in enumerate(span.logits[1:]):
                tallies[lane][index].add(reference, logits[row].float().log_softmax(-1), targets)
    return [
        tuple(
            tally.score(quantized_positions(spec, form, passage)) for tally, passage in zip(lane, passages, strict=True)
        )
        for lane, form in zip(tallies, formats, strict=True)
    ]


def _targets(passage: Passage, span: Span) -> Tensor:
    """Return the tokens that should follow those of *span*, where its logits are."""
    logits = span.logits[0]
    found = passage.targets[span.start : span.start + logits.shape[1]]
    return torch.tensor(found, dtype=torch.int64, device=logits.device)


class _Tally:
    """Sums over one document's positions."""

    def __init__(self) -> None:
        self._nll_16bit = self._nll = 0.0
        self._flips = 0
        self._kl: list[float] = []

    def add(self, reference: Tensor, other: Tensor, targets: Tensor) -> None:
        """Take log-probabilities [positions, vocabulary], float32."""
        at = targets[:, None]
        self._nll_16bit -= float(reference.gather(1, at).sum(dtype=torch.float64))
        self._nll -= float(other.gather(1, at).sum(dtype=torch.float64))
        self._flips += int((reference.argmax(-1) != other.argmax(-1)).sum())
        # Rounding of the two normalizations can leave a divergence of nothing a hair below 0.
        self._kl += (reference.exp() * (reference - other)).sum(-1).clamp_min(0).tolist()

    def score(self, quantized_positions: int) -> DocumentScore:
        return DocumentScore(
            positions=len(self._kl),
            quantized_positions=quantized_positions,
            nll_16bit=self._nll_16bit,
            nll=self._nll,
            kl=sum(self._kl),
            flips=self._flips,
            kl_values=tuple(self._kl),
        )


def quantized_positions(spec: ModelSpec, form: ModelFormat, passage: Passage) -> int:
    """Return how many scored positions of *passage*, a document, attend to a quantized token."""
    first = len(passage.prompt)
    return sum(reads_quantized(spec, form, position) for position in range(first, first + len(passage.fed)))


def reads_quantized(spec: ModelSpec, form: ModelFormat, position: int) -> bool:
    """Whether the token at *position* attends to a quantized token in any layer, in a cache of all up to itself."""
    for layer, stored in dict.fromkeys(zip(spec.layers, spec.layer_formats(form), strict=True)):
        last = _last_quantized(stored, position + 1)
        if last >= 0 and (layer.window_tokens is None or last > position - layer.window_tokens):
            return True
    return False


def _last_quantized(form: CacheFormat, tokens: int) -> int:
    """Return the newest of *tokens* tokens that is quantized in a layer; -1 where none is."""
    paged = max(0, tokens - form.sink_tokens)
    last = -1
    for tensor, flush in ((form.key, form.key_flush), (form.value, form.value_flush)):
        if tensor.quantized and flush.quantized_tokens(paged):
            last = max(last, form.sink_tokens + flush.quantized_tokens(paged) - 1)
    return last


@torch.inference_mode()
def score_trials(spans: Iterator[Span], passages: Sequence[Passage], lanes: int) -> list[tuple[RetrievalTrial, ...]]:
    """Return the trials of each lane but the first, which is the 16-bit reference."""
    found = [[True] * len(passages) for _ in range(lanes)]
    for span in spans:
        for row in range(span.logits[0].shape[0]):
            passage = passages[span.first_passage + row]
            first = max(0, len(passage.fed) - passage.scored - span.start)
            targets = _targets(passage, span)[first:]
            for lane, logits in enumerate(span.logits):
                right = logits[row, first : first + len(targets)].argmax(-1) == targets
                found[lane][span.first_passage + row] &= bool(right.all())
    return [
        tuple(
            RetrievalTrial(context_tokens=passage.tokens, hit_16bit=before, hit=after)
            for passage, before, after in zip(passages, found[0], lane, strict=True)
        )
        for lane in found[1:]
    ]
