"""Moves freshly trained weights from sharded trainers into running inference engines."""
