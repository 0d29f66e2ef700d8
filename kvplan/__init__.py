"""kvplan measures what a quantized KV cache costs and saves, and recommends a setting or none."""

from typing import Final

__version__: Final = "0.1.0"
