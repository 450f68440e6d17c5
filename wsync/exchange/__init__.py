"""Moves bytes between trainer ranks, and brings ranks together."""
