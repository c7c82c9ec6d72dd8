"""The training loop, its recipe functions, and its output."""
