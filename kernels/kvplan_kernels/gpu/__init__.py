"""What the Triton kernels share: a layout's numbers, unpacking, and how a call is cut into programs."""
