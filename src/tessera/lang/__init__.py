"""What a user writes: tensors, functions, gradients, loops, strategies."""
