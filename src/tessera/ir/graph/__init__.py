"""Graph IR: what is computed, with layouts. Node, builder, text, verifier, oracle."""

from ..tile import node as node  # its ops
