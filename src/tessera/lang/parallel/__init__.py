"""Layouts by rule, collectives, bodies that see one device (`local`, `per_rank`), and pipelines."""
