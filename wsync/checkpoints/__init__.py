"""Checkpoint files and the folder of a run's weight versions."""
