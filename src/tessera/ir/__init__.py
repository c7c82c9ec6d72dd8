"""The programs between a user's function and the machine, each with a text and a verifier."""
