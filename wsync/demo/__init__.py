"""Demonstrations: real trainers and engines on any machine."""
