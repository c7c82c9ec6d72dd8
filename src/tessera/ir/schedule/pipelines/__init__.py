"""Pipelines: who runs what when, and the schedule that is made of it."""
