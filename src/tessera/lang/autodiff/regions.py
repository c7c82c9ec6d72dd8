"""Regions: parts of a function whose values the gradient computes again, by a policy.

A region is a loop of one iteration (passes/regions.py). Its arguments are the tensors that its
function reads, and the values of a module that it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...core.checks import unfit
from ...ir.graph.node import Node
from ..math.functions import reshape
from ..record.tree import flatten, tree_map
from .iteration import Keep, finished, settled

NOTHING = flatten(())[1]
# The names that users know, with the policies of loops.
POLICIES = {"nothing": "recompute", "dots": "products", "everything": "save", "offload": "offload"}


class Chosen(NamedTuple):
    """A policy of loops, and the further results that are kept."""

    policy: str
    keep: Keep


def _none(n: Node) -> bool:
    return False


def chosen(caller: str, policy: str | Keep) -> Chosen:
    """The policy that a user calls `policy`, a name or a function of a node. Raises UsageError for
    other values."""
    if callable(policy):
        return Chosen("recompute", policy)
    if not isinstance(policy, str) or policy not in POLICIES:
        fix = f"use {', '.join(POLICIES)}, or a function of a node: lambda n: n.op == 'tanh'"
        raise unfit(caller, "policy", policy, fix)
    return Chosen(POLICIES[policy], _none)


def region(name: str, call: Callable[[], Any], policy: str, keep: Keep = _none) -> Any:
    """`call()`, a tree of tensors, as a region with this policy of loops."""
    iteration = settled(name, lambda carry, xs: ((), call()), NOTHING, (), ())
    _, rows = finished(iteration, (), (), 1, False, policy, keep)
    return tree_map(lambda t: reshape(t, t.shape[1:]), rows)
