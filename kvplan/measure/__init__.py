"""Taking figures on a device: times, bandwidth, memory, and what disturbed them."""
