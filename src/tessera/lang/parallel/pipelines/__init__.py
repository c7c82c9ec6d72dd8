"""Pipelines in the user's code: marked stages, composition, microbatches."""
