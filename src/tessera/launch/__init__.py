"""The command line `tessera`, and the launcher of runs."""
