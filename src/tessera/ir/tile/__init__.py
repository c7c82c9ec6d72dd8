"""Kernels on tiles: value, text, verifier, NumPy oracle and cost."""
