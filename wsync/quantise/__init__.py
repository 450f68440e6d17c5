"""Which of a model's tensors are quantised, by which method, and what they become."""
