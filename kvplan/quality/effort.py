"""How much to score for a workload: as long as its requests are, and as many trials as its budget can be told from."""

from typing import Final

from kvplan.core.quality_bounds import trials_needed
from kvplan.core.workloads import Workload

CONTEXT_TOKENS: Final = 2048
QUICK_CONTEXT_TOKENS: Final = 1024
QUICK_DOCUMENTS: Final = 6
TRIALS: Final = 16
QUICK_TRIALS: Final = 8
TRIALS_MAX: Final = 64


def context_tokens(workload: Workload, longest_tokens: int, *, quick: bool) -> int:
    """Return the tokens of a document: those of the longest request, within what the model takes and time allows."""
    longest = max(bucket.total_tokens for bucket in workload.buckets)
    return min(longest, longest_tokens - 1, QUICK_CONTEXT_TOKENS if quick else CONTEXT_TOKENS)


def documents(*, quick: bool) -> int | None:
    """Return the documents to score; None is as many as the text holds, within reason."""
    return QUICK_DOCUMENTS if quick else None


def trials(workload: Workload, *, quick: bool) -> int:
    """Return the retrieval trials: enough to show a drop within the budget where not one key is lost."""
    usual = QUICK_TRIALS if quick else TRIALS
    limit = workload.quality.max_retrieval_drop
    if limit is None or limit <= 0:
        return usual
    return min(TRIALS_MAX, max(usual, trials_needed(limit, workload.quality.confidence)))
