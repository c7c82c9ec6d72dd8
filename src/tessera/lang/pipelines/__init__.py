"""Pipelines as they are written: stages marked, composed, cut into microbatches."""
