"""What does a reader put beside each guide's text, and what is each of its blocks for?

A file for each guide that is typed so. `GIVES` has the values that the text leaves, made before
the block that uses them. `CHECKS` has a function for each block that runs: it is given the names
after the block and what the block printed, and its docstring says what it holds.
"""
