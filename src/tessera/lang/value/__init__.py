"""Tensors, their annotations, host data, and the ops that run at once. Begin with `tensor`."""
