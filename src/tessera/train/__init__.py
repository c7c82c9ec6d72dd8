"""The training loop and what it tells while it runs."""
