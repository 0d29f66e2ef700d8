"""From logits to records: negative log-likelihood, divergence, flips, answers found."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvplan.core.records import DocumentScore, RetrievalTrial
from kvplan.core.specs import ModelSpec
from kvplan.quality.lane import Lane
from kvplan.quality.lanes import Span
from kvplan.quality.passages import Passage


@torch.inference_mode()
def score_documents(
    spans: Iterator[Span], passages: Sequence[Passage], lanes: Sequence[Lane], spec: ModelSpec
) -> list[tuple[DocumentScore, ...]]:
    """Return the scores of *lanes*: all but the first of the spans, which is the 16-bit reference."""
    tallies = [[_Tally() for _ in passages] for _ in lanes]
    for span in spans:
        for row in range(span.logits[0].shape[0]):
            index = span.first_passage + row
            targets = _targets(passages[index], span)
            reference = span.logits[0][row].float().log_softmax(-1)
            for lane, logits in enumerate(span.logits[1:]):
                tallies[lane][index].add(reference, logits[row].float().log_softmax(-1), targets)
    return [
        tuple(
            tally.score(lane.quantized_positions(spec, passage))
            for tally, passage in zip(tallied, passages, strict=True)
        )
        for tallied, lane in zip(tallies, lanes, strict=True)
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
