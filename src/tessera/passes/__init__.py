"""Passes from graph to graph, and to the schedule that runs: pure functions, verified after
each."""
