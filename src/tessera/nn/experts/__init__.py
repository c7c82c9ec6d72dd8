"""Layers of experts: routing, dispatch over a mesh, and what comes back."""
