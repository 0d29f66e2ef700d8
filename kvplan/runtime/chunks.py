"""How tokens are cut into forward passes so that a chunk reads the cache that single tokens would have read."""

from kvplan_kernels.format import Flush
from kvplan_kernels.layer_formats import ModelFormat


def chunk_sizes(form: ModelFormat, start: int, tokens: int, limit: int, *, single: bool = True) -> list[int]:
    """Return the sizes of chunks of *tokens* tokens, the first of which lies at position *start*.

    A chunk appends all of its tokens before any of its queries attends. It equals token by token if nothing but its
    first token makes 16-bit tokens leave the residual: a later flush would be seen by queries before it. So chunks
    begin where a layer flushes groups, and a format that flushes at every token gets chunks of one, unless no token is
    held in 16 bits at all. Where *single* is false, tokens that leave one by one do not end a chunk: up to *limit* - 1
    of them are then seen quantized a little early.

    >>> from kvplan_kernels.format import parse
    >>> chunk_sizes(parse("kivi-k4v4-g64-r128"), 180, 40, 32)
    [11, 29]
    >>> chunk_sizes(parse("int8"), 180, 40, 32), chunk_sizes(parse("int8-r64"), 180, 3, 32)
    ([32, 8], [1, 1, 1])
    """
    sizes = []
    at = 0
    while at < tokens:
        size = 1
        while size < min(limit, tokens - at) and not _flushes(form, start + at + size, single):
            size += 1
        sizes.append(size)
        at += size
    return sizes


def flushes_group(form: ModelFormat, held: int) -> bool:
    """Return whether the token appended to *held* others makes a group of several leave the residual of a layer.

    >>> from kvplan_kernels.format import parse
    >>> [held for held in range(180, 300) if flushes_group(parse("kivi-k4v4-g64-r128"), held)]
    [191, 255]
    """
    return _flushes(form, held, single=False)


def _flushes(form: ModelFormat, held: int, single: bool) -> bool:
    """Whether the token appended to *held* others makes tokens leave the residual of some layer."""
    return any(
        tensor.quantized
        and not _holds_nothing(flush)
        and (single or flush.quantum_tokens > 1)
        and flush.quantized_tokens(max(0, held + 1 - part.sink_tokens))
        > flush.quantized_tokens(max(0, held - part.sink_tokens))
        for part in form.parts
        for tensor, flush in ((part.key, part.key_flush), (part.value, part.value_flush))
    )


def _holds_nothing(flush: Flush) -> bool:
    """Whether every token is quantized as it comes, so that no query ever sees it in 16 bits."""
    return flush.held_tokens_max == 0
