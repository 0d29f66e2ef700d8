"""The paged quantized cache behind a real Hugging Face model, and its serving loop."""
