"""A rank's sessions with workers; each kind of worker has a module."""
