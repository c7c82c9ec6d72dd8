"""Mixture of experts: routing, dispatch over a mesh, combination of the results."""
