"""kvplan's own runtime: `kvplan.runtime.session.Runtime`."""

from typing import Final

from kvplan.engines.engine import Engine

KVPLAN: Final = Engine(name="kvplan", allocator="kvplan's runtime", default_format="bf16", default_block_tokens=64)


def start_text(form: str, block_tokens: int, *, blocks: int, slots: int) -> str:
    """Return the Python call that makes the runtime hold *slots* sequences in *blocks* pages a layer."""
    return f'Runtime(loaded, parse("{form}"), block_tokens={block_tokens}, blocks={blocks}, slots={slots})'
