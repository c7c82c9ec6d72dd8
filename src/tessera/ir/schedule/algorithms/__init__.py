"""Collective algorithms as tables of rounds: sender, receiver and chunks of each transfer."""
