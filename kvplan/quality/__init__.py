"""What a format costs a model: text and retrieval trials scored through the packed cache, against 16 bits."""
