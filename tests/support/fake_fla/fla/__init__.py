"""A stand-in for flash-linear-attention, which Megatron-Core's delta net asks for: its modules can
be made, and compute with torch in deterministic mode."""
