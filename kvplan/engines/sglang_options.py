"""What SGLang's own options say of its pools: by flags of srt/server_args.py and srt/arg_groups, sglang 0.5.23."""

from collections.abc import Sequence
from typing import Final

from kvplan.core.allocation import CacheGroup, Setup
from kvplan.engines.sglang_pools import PoolRules
from kvplan.errors import UnsupportedSettingError
from kvplan_kernels.layout import round_up

_SLOT_CHARGED: Final = (0, 5, 17)
"""The release from which the slot that padding writes to is taken out of the memory of states."""
_REQUEST_CAP: Final = (0, 5, 21)
"""The release from which the windows of a known number of requests are counted where no prefix is kept."""
_EXTRA_BUFFER: Final = (0, 5, 15)
"""The release from which states that prefixes share are kept beside those that requests write."""
CHUNK_TOKENS: Final = 8192
"""Of a prefill on devices of 60 to 160 GiB; 2,048 to 16,384 on others (handle_gpu_memory_settings)."""
STRATEGIES: Final = {"no_buffer": 3, "extra_buffer_lazy": 4, "extra_buffer": 5}
"""How states are kept for prefixes, with the slots that a request is counted for."""
_WINDOW_RATIO, _STATE_RATIO = 0.8, 0.9
"""Tokens of the pool of windows to those of the full pool; memory of states to that of tokens."""


def sequence_ranks(setup: Setup) -> int:
    """Return the ranks that share a sequence's heads: those of tensor parallelism without data parallel attention."""
    if "enable-dp-attention" not in setup.options:
        return setup.tensor_parallel
    replicas = count_option(setup, "dp-size", setup.tensor_parallel)
    if setup.tensor_parallel % replicas:
        message = f"{replicas} replicas of attention do not divide {setup.tensor_parallel} ranks"
        raise UnsupportedSettingError(message, where="--engine-option dp-size", hint="give a divisor of --tp")
    return setup.tensor_parallel // replicas


def count_option(setup: Setup, name: str, default: int) -> int:
    """Return the count that the option *name* says, or *default*.

    Raises:
        UnsupportedSettingError: It is none.
    """
    text = setup.option(name)
    if text is None:
        return default
    if not text.isdecimal() or int(text) < 1:
        raise UnsupportedSettingError(
            f"{name}={text[:40]} is no count", where="--engine-option", hint=f"write it as {name}=8"
        )
    return int(text)


def share_option(setup: Setup, name: str, default: float) -> float:
    """Return the share, above 0 and at most 1, that the option *name* says, or *default*.

    Raises:
        UnsupportedSettingError: It is none.
    """
    text = setup.option(name)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = -1
    if not 0 < value <= 1:
        raise UnsupportedSettingError(
            f"{name}={text} is no share", where="--engine-option", hint=f"write it as {name}=0.5"
        )
    return value


def state_spares(setup: Setup) -> int:
    """Return the slots that a request takes beside its own state (_calculate_mamba_ratio).

    Where prefixes are kept that is two of those that a prefix hit may branch from, and with `extra_buffer` two that the
    next states of a prefix are written to; a request that drafts has a state for each token of a step beside them.
    """
    drafted = setup.draft_tokens + 1 if setup.draft_tokens else 0
    return state_slots(setup) - 1 + drafted


def state_slots(setup: Setup) -> int:
    """Return the slots of the pool that a request is counted for."""
    if setup.prefix_caching is False:
        return 1
    strategy = setup.option("mamba-radix-cache-strategy")
    if strategy is None:
        strategy = "extra_buffer" if setup.version is None or setup.version >= _EXTRA_BUFFER else "no_buffer"
    return STRATEGIES[strategy]


def pool_rules(setup: Setup, groups: Sequence[CacheGroup], slot_bytes: float) -> PoolRules:
    """Return how the memory of a stage is shared among its pools; a slot of states takes *slot_bytes*."""
    stated = setup.option("max-mamba-cache-size")
    slots = None if stated is None else count_option(setup, "max-mamba-cache-size", 1)
    if setup.prefix_caching is False and setup.sequences is not None and slots is None:
        slots = setup.sequences
    newer = setup.version is None or setup.version >= _SLOT_CHARGED
    return PoolRules(
        window_ratio=share_option(setup, "swa-full-tokens-ratio", _WINDOW_RATIO),
        window_tokens=_request_cap(setup, groups),
        state_ratio=share_option(setup, "mamba-full-memory-ratio", _STATE_RATIO),
        slot_bytes=slot_bytes,
        slots=slots,
        request_slots=state_slots(setup),
        draft_slots=setup.draft_tokens + 1 if setup.draft_tokens else 0,
        charged_slots=1 if newer else 0,
        tokens_max=None if setup.option("max-total-tokens") is None else count_option(setup, "max-total-tokens", 1),
    )


def _request_cap(setup: Setup, groups: Sequence[CacheGroup]) -> int | None:
    """Return the tokens of the pool of windows where the most requests are known and no prefix is kept."""
    newer = setup.version is None or setup.version >= _REQUEST_CAP
    if setup.prefix_caching is not False or setup.sequences is None or not newer or len(groups) < 2:
        return None
    window = next((group for group in groups if group.held_tokens_max is not None), None)
    if window is None:
        return None
    page = window.units_per_block
    each = (window.held_tokens_max or 0) + 2 * page
    return round_up(each * setup.sequences + 2 * (setup.max_batched_tokens or CHUNK_TOKENS) + page, page)
