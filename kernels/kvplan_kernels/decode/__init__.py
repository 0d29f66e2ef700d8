"""Attention of a few query tokens over a cache."""
