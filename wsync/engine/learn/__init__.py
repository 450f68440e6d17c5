"""Learns from a model's own load_weights what each worker keeps of a checkpoint."""
