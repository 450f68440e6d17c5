"""Quantising: the choice of a model's tensors, the method, and the tensors that replace them."""
