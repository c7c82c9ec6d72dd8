"""Graph IR: what is computed, with layouts. Node, builder, text, verifier, oracle."""
