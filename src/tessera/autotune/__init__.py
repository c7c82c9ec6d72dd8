"""The autotuner: choices that are open in a program, timed on the program itself, and recorded.

Read `choices` (what a candidate is), `search` (which candidates are timed, and how often), then
`records` (the files). `lang/jit/tuner.py` runs the search for a compiled function.
"""
