"""What kvplan knows of an engine that serves with a quantized cache."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """One engine.

    Attributes:
        allocator: How it hands out cache memory, in a few words.
        default_format: What it caches in where nothing is said.
        default_block_tokens: Tokens of one page where nothing is said.
    """

    name: str
    allocator: str
    default_format: str
    default_block_tokens: int
