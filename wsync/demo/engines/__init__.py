"""Engines for demonstrations, tests and notebooks."""
