"""What trainers and engines send each other."""
