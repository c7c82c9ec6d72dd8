"""Values that each guide leaves to its reader, and a check for each of its blocks.

One file per guide. `GIVES` makes the values that the text does not define, before the block that
uses them. `CHECKS` has a function for each block that runs: its arguments are the names after the
block and the block's output, and its docstring states the checked facts.
"""
