"""Plans of programs before they run: simulated times on a machine that need not be there."""
