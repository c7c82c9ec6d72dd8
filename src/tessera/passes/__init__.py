"""Graph to graph, and to the schedule that runs: each pass is a pure function, verified after."""
