"""How keys and values are stored, and the operations over them."""
