"""A trainer rank's side of an update."""
