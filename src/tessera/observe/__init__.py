"""Looking inside: stages of a graph, who holds what, statistics, origins of NaN, comparisons."""
