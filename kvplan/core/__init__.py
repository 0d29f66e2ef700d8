"""Numbers in, numbers out: no torch, no files, no clock."""
