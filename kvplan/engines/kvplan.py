"""kvplan's own runtime: `kvplan.runtime.session.Runtime`."""

from typing import Final

from kvplan.engines.engine import Engine

KVPLAN: Final = Engine(name="kvplan", allocator="kvplan's runtime", default_format="bf16", default_block_tokens=64)

_DEFAULT_KERNEL: Final = "cpu"


def start_text(form: str, block_tokens: int, *, blocks: int, slots: int, kernel: str = "") -> str:
    """Return the Python call that makes the runtime hold *slots* sequences in *blocks* pages a layer.

    *kernel* is the implementation and path that was measured; the runtime's own choice is not written.

    >>> start_text("int8", 64, blocks=9, slots=2, kernel="triton/sm_90")
    'Runtime(loaded, parse("int8"), block_tokens=64, blocks=9, slots=2, kernel="triton")'
    """
    implementation = kernel.partition("/")[0]
    chosen = "" if implementation in ("", _DEFAULT_KERNEL) else f', kernel="{implementation}"'
    return f'Runtime(loaded, parse("{form}"), block_tokens={block_tokens}, blocks={blocks}, slots={slots}{chosen})'
