"""Learns from a model's own load_weights which elements of a checkpoint each worker keeps."""
