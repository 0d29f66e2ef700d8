"""Store new keys and values in a cache, quantizing those that leave the 16-bit residual."""
