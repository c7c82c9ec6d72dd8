"""Graph to graph: simplify, differentiate, loops. Each pass is a pure function, verified after."""
