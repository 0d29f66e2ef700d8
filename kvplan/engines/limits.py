"""What may be said to an engine: releases, options, blocks; checked in one place before anything is counted."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Final

from kvplan.core.allocation import Setup
from kvplan.errors import UnsupportedSettingError

Release = tuple[int, ...]
_FLAGS: Final = {"block_tokens": "--block-size", "draft_tokens": "--draft-tokens", "prefix_caching": "--prefix-caching"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The settings that an engine takes.

    Attributes:
        oldest: The first release whose rules are known; with `newest` empty where an engine has no releases.
        newest: The last one; what is newer is counted by its rules, with a remark.
        builds: Whether a number alone is a build; the allocator knows the rules of those.
        options: Those that change what it allocates, or that its logs tell: by name, what stands behind `=`. That is
            nothing for a flag, words with `|` between them, or what it stands for in capitals.
        block_multiple: The tokens of a block are a multiple of it.
        power_of_2: Whether they are a power of 2 too.
        unused: Fields of Setup that it has no use for, with the reason.
    """

    oldest: Release = ()
    newest: Release = ()
    builds: bool = False
    options: Mapping[str, str] = field(default_factory=dict)
    block_multiple: int = 1
    power_of_2: bool = False
    unused: Mapping[str, str] = field(default_factory=dict)

    def counted(self, version: Release | None) -> Release | None:
        """Return the release whose rules count *version*: the newest known one for what is newer."""
        if version is None or (self.builds and len(version) == 1):
            return version
        return version if version[: len(self.newest)] <= self.newest else self.newest


def check_setup(engine: str, limits: Limits, setup: Setup) -> tuple[str, ...]:
    """Return what to know of how *engine* takes *setup*.

    Raises:
        UnsupportedSettingError: It does not.
    """
    for name, reason in limits.unused.items():
        if getattr(setup, name):
            flag = _FLAGS[name]
            raise UnsupportedSettingError(f"{engine} {reason}", where=flag, hint="leave it out")
    for text in sorted(setup.options):
        _check_option(engine, limits.options, text)
    if setup.block_tokens is not None:
        _check_block(engine, limits, setup.block_tokens)
    return () if setup.version is None else _check_release(engine, limits, setup.version)


def _check_option(engine: str, options: Mapping[str, str], text: str) -> None:
    name, equals, value = text.partition("=")
    if name not in options:
        written = [spelled(known, takes) for known, takes in options.items()]
        near = get_close_matches(name.lower().replace("_", "-"), options, n=1)
        hint = f"did you mean {spelled(near[0], options[near[0]])}?" if near else f"it has {', '.join(written)}"
        message = f"{text[:60]!r} is no option of {engine} that changes what it allocates"
        raise UnsupportedSettingError(message, where="--engine-option", hint=hint if options else "it has none")
    takes = options[name]
    free = takes.isupper()
    right = bool(value) if free else value in takes.split("|") and bool(equals) == bool(takes)
    if not right:
        message = f"{text[:60]!r} is no value of {engine}'s {name}"
        raise UnsupportedSettingError(message, where="--engine-option", hint=f"write {spelled(name, takes)}")


def spelled(name: str, takes: str) -> str:
    """Return an option as it is written."""
    return f"{name}={takes}" if takes else name


def _check_block(engine: str, limits: Limits, tokens: int) -> None:
    step = limits.block_multiple
    if tokens % step:
        message = f"blocks of {engine} are of multiples of {step} tokens, not of {tokens}"
        raise UnsupportedSettingError(message, where="--block-size", hint=f"use {-(-tokens // step) * step}")
    if limits.power_of_2 and tokens & (tokens - 1):
        message = f"blocks of {engine} are of powers of 2 tokens, not of {tokens}"
        raise UnsupportedSettingError(message, where="--block-size", hint=f"use {1 << tokens.bit_length()}")


def _check_release(engine: str, limits: Limits, version: Release) -> tuple[str, ...]:
    if not limits.newest:
        message = f"{engine} has no releases whose rules differ"
        raise UnsupportedSettingError(message, where="--engine-version", hint="leave it out")
    counted = limits.counted(version)
    if version < limits.oldest:
        message = f"how {engine} {release(version)} allocates is not known here"
        raise UnsupportedSettingError(message, where="--engine-version", hint=_known(limits))
    if counted == version:
        return ()
    newest = release(limits.newest)
    return (f"{engine} {release(version)} is counted by the rules of {newest}, the newest that are known here",)


def _known(limits: Limits) -> str:
    if limits.builds:
        return f"write {release(limits.oldest)}, or a build as b6182"
    if limits.oldest == limits.newest:
        return f"{release(limits.oldest)} is known"
    return f"{release(limits.oldest)} to {release(limits.newest)} are known"


def release(version: Release) -> str:
    """Return a release as it is written.

    >>> release((0, 29, 1))
    '0.29.1'
    """
    return ".".join(map(str, version))
