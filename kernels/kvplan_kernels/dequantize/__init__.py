"""A cache read back to dense 16-bit keys and values: the first half of attention without fusion."""
