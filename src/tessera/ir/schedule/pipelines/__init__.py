"""Pipelines: tables of actions, and schedules that are built from them."""
