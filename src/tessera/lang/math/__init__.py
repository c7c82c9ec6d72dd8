"""Functions of tensors: creation, elementwise, reductions, products, shapes, indices, random
numbers."""
