"""Collective algorithms: tables of rounds, who sends which chunk to whom."""
