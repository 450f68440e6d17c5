"""The engine's side of an update: receivers, loaders, and small engines to try them with."""
