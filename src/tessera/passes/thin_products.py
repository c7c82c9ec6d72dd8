"""Gradients of products of thin matrices, without the large product between.

With W = A·B and y = x·W, the gradient of W is xᵀ·dy, as large as W, and that of A is (xᵀ·dy)·Bᵀ.
If nothing else reads the gradient of W, xᵀ·(dy·Bᵀ) is formed instead. In low-rank adapters B has
few rows, so this saves almost all FLOPs of xᵀ·dy, a third of a training step. Sizes are global
ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..ir.graph.build import Builder
from ..ir.graph.node import Node, reachable
from ..ops.cast import cast
from ..ops.contract import contract, index_of, spell
from ..ops.index_string import Index, contraction_flops, letter_sizes
from ..ops.movement import reshape
from ..ops.op import op_named
from ..ops.redistribute import NAMES

SAVED = 0.5  # the least part of the FLOPs that must be saved
PASSED = NAMES | {cast.name, reshape.name}  # what may stand between a product and its reader
Step = tuple[tuple[int, ...], Index]  # operands by number; their result becomes the last operand


def thin_gradient(
    b: Builder, node: Node, g: Node, pending: Mapping[tuple[Node, int], Sequence[Node]]
) -> list[Node] | None:
    """The gradients of the arguments of the product `node`, from the factors of its gradient `g`.

    None if `g` is no product of two factors, perhaps with split dims; if something else reads it;
    or if too little is saved. `pending` has the gradients so far of the nodes that come next.
    """
    chain = {g}
    dims = [[i] for i in range(g.type.rank)]  # those of `node` for each dim of g
    while g.op in PASSED:
        if g.op == reshape.name:
            parts = _parts(g.args[0].type.shape, g.type.shape)
            if parts is None:
                return None
            dims = [[j for i in part for j in dims[i]] for part in parts]
        g = g.args[0]
        chain.add(g)
    if g.op != contract.name or len(g.args) != 2 or g not in b.origins:
        return None
    readers = {node}
    for (other, _), grads in pending.items():
        if not chain.isdisjoint(grads):
            if other.op != contract.name or other.type.shape != node.type.shape or len(grads) > 1:
                return None
            readers.add(other)
    products = {r: [_product(r, i, g, dims) for i in range(len(r.args))] for r in readers}
    if any(set(index.out) - set().union(*index.args) for p in products.values() for index, _ in p):
        return None  # a dim of one argument alone is summed
    plans = {r: [_cheapest(*product) for product in p] for r, p in products.items()}
    instead = sum(flops for plan in plans.values() for flops, _ in plan)
    if instead > (1 - SAVED) * (_flops(g) + sum(len(r.args) * _flops(r) for r in readers)):
        return None
    rest = reachable(g for (n, _), grads in pending.items() if n not in readers for g in grads)
    if not chain.isdisjoint(rest):
        return None
    return [
        _built(b, node, i, g, product, steps)
        for i, (product, (_, steps)) in enumerate(zip(products[node], plans[node], strict=True))
    ]


def _parts(whole: Sequence[int], split: Sequence[int]) -> list[list[int]] | None:
    """The dims of `split` that each dim of `whole` was split into; None for another reshape."""
    parts, at = list[list[int]](), 0
    for size in whole:
        parts.append([])
        while not parts[-1] or math.prod(split[i] for i in parts[-1]) < size:
            if at == len(split):
                return None
            parts[-1].append(at)
            at += 1
    same = all(math.prod(split[i] for i in p) == n for p, n in zip(parts, whole, strict=True))
    return parts if same and at == len(split) else None


def _flops(n: Node) -> int:
    flops = op_named(n.op).flops
    assert flops is not None
    return flops(tuple(a.type for a in n.args), n.types, n.attrs)


def _product(
    node: Node, i: int, g: Node, dims: Sequence[Sequence[int]]
) -> tuple[Index, dict[str, int]]:
    """The gradient of argument `i` of `node` as a product of the factors of `g` and the arguments
    of `node` besides `i`, and the sizes of its letters."""
    outer = index_of([a.type for a in node.args], node.attrs)
    inner = index_of([a.type for a in g.args], g.attrs)
    name = {k: [f"{k}'"] for group in inner.args for k in group}
    name |= {k: [outer.out[j] for j in d] for k, d in zip(inner.out, dims, strict=True)}
    args = [tuple(letter for k in group for letter in name[k]) for group in inner.args]
    args += [group for j, group in enumerate(outer.args) if j != i]
    sizes = dict(zip(outer.out, node.type.shape, strict=True))
    for index, n in ((inner, g), (outer, node)):
        found = letter_sizes("contract", index, [a.type for a in n.args])
        sizes |= {name[k][0] if n is g else k: v for k, v in found.items() if k not in index.out}
    return Index(tuple(args), outer.args[i]), sizes


def _cheapest(index: Index, sizes: Mapping[str, int]) -> tuple[int, list[Step]]:
    """The least FLOPs of a product by pairs, and its steps."""
    args, flops, steps = list(index.args), 0, list[Step]()
    nothing = [np.broadcast_to(np.int8(0), [sizes[k] for k in group]) for group in args]
    for places in np.einsum_path(spell(index), *nothing, optimize="optimal")[0][1:]:
        pair = tuple(args[i] for i in places)
        args = [group for i, group in enumerate(args) if i not in places]
        later = set(index.out).union(*args)
        kept = tuple(dict.fromkeys(k for group in pair for k in group if k in later))
        args.append(kept if args else index.out)
        steps.append((tuple(places), Index(pair, args[-1])))
        flops += contraction_flops(steps[-1][1], sizes)
    return flops, steps


def _built(
    b: Builder, node: Node, i: int, g: Node, product: tuple[Index, dict[str, int]],
    steps: Sequence[Step],
) -> Node:  # fmt: skip
    """The nodes of `steps`, in the dtype of the factors of `g`; the last has that of the
    argument."""
    index, sizes = product
    dtype = g.args[0].type.dtype
    operands = list[Node]()
    for a, group in zip((*g.args, *node.args[:i], *node.args[i + 1 :]), index.args, strict=True):
        x = a if a.type.dtype is dtype else b("cast", a, dtype=dtype)
        shape = tuple(sizes[k] for k in group)
        operands.append(x if shape == x.type.shape else b("reshape", x, shape=shape))
    for places, pair in steps:
        two = [operands[j] for j in places]
        operands = [x for j, x in enumerate(operands) if j not in places]
        last = {} if operands else {"dtype": node.args[i].type.dtype}
        operands.append(b("contract", *two, index=spell(pair), **last))
    return operands[0]
