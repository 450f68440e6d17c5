"""The messages between trainers and engines."""
