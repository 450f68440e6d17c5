"""Bytes between trainer ranks, and where they meet."""
