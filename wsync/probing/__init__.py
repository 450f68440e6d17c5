"""Learns what a function does with tensors from tensors whose values number their elements."""
