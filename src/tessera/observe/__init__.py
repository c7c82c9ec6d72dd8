"""Inspection tools: stages of a graph, layouts, statistics, origins of NaN, comparisons,
profiles."""
