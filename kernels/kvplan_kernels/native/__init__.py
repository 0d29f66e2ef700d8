"""The compiled CPU kernels: finding, loading and calling them."""

from kvplan_kernels.native.loader import missing, read_bytes, variants

__all__ = ["missing", "read_bytes", "variants"]
