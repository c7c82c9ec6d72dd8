"""Pipelines as they are written: stages marked, microbatches recorded, composed."""
