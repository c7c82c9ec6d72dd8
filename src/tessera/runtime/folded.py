"""A folded mesh: each device takes several places of the logical mesh in turn.

A value is held as one block for each turn in which it differs; what does not differ is computed
once. Local work runs turn by turn, each on a block of the logical mesh's shape. A collective joins
the turns of a device first and the devices after, so results are those of the logical mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..core.layout import TensorType
from ..core.mesh import Mesh
from ..ir.graph.node import Graph, Node
from ..ops.op import OPS, Call, infer
from ..ops.redistribute import COLLECTIVES, NAMES
from . import xp_jax
from .algorithms import by_algorithm
from .arrays import block_shape
from .fixed_order import FixedXp, ordered_scatter, ordered_sum, tree
from .lower import Block, Bodies, masked, run_local

Array = Any
Turn = tuple[int, ...]  # one number for each folded axis that matters
Value = dict[Turn, Any]


class TurnBlock(Block):
    """Where local code runs in one turn: at one place of the logical mesh."""

    def __init__(self, mesh: Mesh, turn: Mapping[str, int]) -> None:
        super().__init__()
        self.mesh, self.turn = mesh, turn

    def at(self, axes: Sequence[str], sizes: Mapping[str, int]) -> Array:
        place: Array = jnp.int32(0)
        for a in axes:
            turns = self.mesh.folds[a]
            here = lax.axis_index(a) * turns + self.turn.get(a, 0)
            place = place * sizes[a] + here
        return place


class Folded:
    """Runs graphs on a device's blocks of a folded mesh."""

    def __init__(self, mesh: Mesh, order: str = "") -> None:
        self.mesh, self.order = mesh, order
        self.turns = {a: n for a, n in mesh.folds.items() if n > 1}
        self._sites: dict[Turn, TurnBlock] = {}

    def devices(self, axis: str) -> int:
        return self.mesh.physical.sizes[axis]

    # -- values -----------------------------------------------------------------------------------
    def axes(self, *types: TensorType) -> tuple[str, ...]:
        """The folded axes along which values of these types differ."""
        used = {a for t in types for a in (*t.split_axes, *t.partial_axes, *t.varying)}
        return tuple(a for a in self.turns if a in used)

    def every(self, axes: Sequence[str]) -> list[Turn]:
        return list(product(*(range(self.turns[a]) for a in axes)))

    def pick(self, value: Value, have: Sequence[str], turn: Mapping[str, int]) -> Any:
        return value[tuple(turn[a] for a in have)]

    def unpack(self, x: Array, t: TensorType) -> Value:
        """The blocks in a device's array of a value of type `t`."""
        axes = self.axes(t)
        order = self._order(t)
        where = [i for i, a in enumerate(order) if a is not None]
        out: Value = {}
        for turn in self.every(axes):
            at = dict(zip(axes, turn, strict=True))
            index = tuple(at.get(a, 0) if a is not None else slice(None) for a in order)
            out[turn] = x[index].reshape(t.local_shape) if where else x.reshape(t.local_shape)
        return out

    def pack(self, value: Value, t: TensorType) -> Array:
        axes = self.axes(t)
        order = self._order(t)
        inner = [a for a in order if a is not None and a in axes]
        shape = block_shape(t)
        local = tuple(n for n, a in zip(shape, order, strict=True) if a is None)
        blocks = [
            value[tuple(dict(zip(inner, turn, strict=True))[a] for a in axes)].reshape(local)
            for turn in product(*(range(self.turns[a]) for a in inner))
        ]
        if not inner:
            return blocks[0].reshape(shape)
        stacked = jnp.stack(blocks).reshape(*(self.turns[a] for a in inner), *local)
        # The turns' dims go to their places among the others.
        turn_at = {a: i for i, a in enumerate(inner)}
        rest = iter(range(len(inner), len(inner) + len(local)))
        perm = [next(rest) if a is None else turn_at[a] for a in order if a is None or a in turn_at]
        return jnp.transpose(stacked, perm).reshape(shape)

    def _order(self, t: TensorType) -> list[str | None]:
        """Per dim of a device's array: the axis whose turns it counts, or None."""
        if self.mesh.onto is None:
            return [None] * len(block_shape(t))
        rows: list[str | None] = []
        for a in (*t.partial_axes, *t.varying):
            rows += [None, a]
        for f in (f for dim in t.dims for f in dim):
            for a in f.axes:
                rows += [None, a]
            rows.append(None)
        return rows

    # -- programs ---------------------------------------------------------------------------------
    def program(
        self, graph: Graph, args: Sequence[Value], bodies: Bodies | None = None
    ) -> list[Value]:
        """The outputs of `graph` from the values of its inputs; `bodies` as in `run_local`."""
        env: dict[Node, Any] = dict(zip(graph.inputs, args, strict=True))
        have: dict[Node, tuple[str, ...]] = {n: self.axes(n.type) for n in graph.inputs}
        for n in graph.nodes:
            if n.op == "input":
                continue
            if n.op == "item":
                have[n] = self.axes(n.type)
                source, axes = env[n.args[0]], have[n.args[0]]
                env[n] = self._narrow(
                    {k: v[n.attrs["index"]] for k, v in source.items()}, axes, have[n]
                )
                continue
            values = [env[a] for a in n.args]
            if n.op == "scan":
                env[n] = self._scan(n, values, bodies or self.program)
                have[n] = tuple(self.turns)
                continue
            ins = [a.type for a in n.args]
            known = [have[a] for a in n.args]
            if n.op in NAMES or n.op in COLLECTIVES:
                env[n] = self._change(n, ins, values, known)
                have[n] = self.axes(n.type)
                continue
            axes = self.axes(*ins, *n.types)
            env[n] = {turn: self._local(n, axes, turn, ins, values, known)
                      for turn in self.every(axes)}  # fmt: skip
            have[n] = axes
            if len(n.types) == 1 and not isinstance(next(iter(env[n].values())), tuple):
                have[n] = self.axes(n.type)
                env[n] = self._narrow(env[n], axes, have[n])
        return [env[o] for o in graph.outputs]

    def _narrow(self, value: Value, have: Sequence[str], want: Sequence[str]) -> Value:
        """`value` by the axes `want` alone; along the others it is the same."""
        out: Value = {}
        for turn, block in value.items():
            at = dict(zip(have, turn, strict=True))
            out.setdefault(tuple(at.get(a, 0) for a in want), block)
        return {t: out[tuple(0 if a not in have else x for a, x in zip(want, t, strict=True))]
                for t in self.every(want)}  # fmt: skip

    def _site(self, axes: Sequence[str], turn: Turn) -> TurnBlock:
        at = dict(zip(axes, turn, strict=True))
        key = tuple(at.get(a, 0) for a in self.turns)
        if key not in self._sites:
            self._sites[key] = TurnBlock(self.mesh, dict(zip(self.turns, key, strict=True)))
        return self._sites[key]

    def _local(
        self,
        n: Node,
        axes: Sequence[str],
        turn: Turn,
        ins: Sequence[TensorType],
        values: Sequence[Value],
        known: Sequence[Sequence[str]],
    ) -> Any:
        at = dict(zip(axes, turn, strict=True))
        site = self._site(axes, turn)
        args = [self.pick(v, k, at) for v, k in zip(values, known, strict=True)]
        op = OPS[n.op]
        if any(t.padded_dims for t in ins):
            for i, dim, kind in infer(op, tuple(ins), n.attrs).reduces:
                args[i] = masked(args[i], site.valid(ins[i], dim), dim, kind)

        xp = FixedXp if self.order else xp_jax

        def inner(body: Graph, given: Sequence[Array]) -> list[Array]:
            return run_local(body, given, TurnBlock(self.mesh, site.turn), xp)

        return op.compute(Call(xp, site, tuple(ins), n.types, n.attrs, inner), *args)

    def _scan(self, n: Node, values: Sequence[Value], run: Bodies) -> Value:
        """All turns' blocks go through the loop together, since its body may join them."""
        body, consts, carries = n.attrs["body"], n.attrs["consts"], n.attrs["carries"]
        types = [i.type for i in body.inputs]
        keys = [self.every(self.axes(t)) for t in types]
        outs = [o.type for o in body.outputs]

        def flat(vs: Sequence[Value], ts: Sequence[TensorType]) -> tuple[Array, ...]:
            return tuple(
                v[k] for v, t in zip(vs, ts, strict=True) for k in self.every(self.axes(t))
            )

        def unflat(xs: Sequence[Array], ts: Sequence[TensorType]) -> list[Value]:
            it = iter(xs)
            return [{k: next(it) for k in self.every(self.axes(t))} for t in ts]

        fixed = list(values[:consts])
        carry_t, xs_t = types[consts : consts + carries], types[consts + carries :]

        def step(carry: tuple[Array, ...], xs: tuple[Array, ...]) -> tuple[Any, Any]:
            given = [*fixed, *unflat(carry, carry_t), *unflat(xs, xs_t)]
            found = run(body, given)
            return flat(found[:carries], outs[:carries]), flat(found[carries:], outs[carries:])

        assert len(keys) == len(values)
        start = flat(values[consts : consts + carries], carry_t)
        rows = flat(values[consts + carries :], xs_t)
        end, ys = lax.scan(step, start, rows, length=n.attrs["length"], reverse=n.attrs["reverse"])
        results = [*unflat(end, outs[:carries]), *unflat(ys, outs[carries:])]
        have = tuple(self.turns)
        return {
            turn: tuple(
                self.pick(v, self.axes(t), dict(zip(have, turn, strict=True)))
                for v, t in zip(results, outs, strict=True)
            )
            for turn in self.every(have)
        }

    # -- changes of layout ------------------------------------------------------------------------
    def _change(
        self,
        n: Node,
        ins: Sequence[TensorType],
        values: Sequence[Value],
        known: Sequence[Sequence[str]],
    ) -> Value:
        if "algorithm" in n.attrs:  # not on a folded mesh, so there is one turn
            table = by_algorithm(n.attrs["algorithm"])
            call = Call(table, Block(), tuple(ins), n.types, n.attrs, lambda body, args: [])
            return {(): OPS[n.op].compute(call, values[0][()])}
        named = tuple(a for a in n.attrs.get("axes", ()) if a in self.turns)
        axes = tuple(a for a in self.turns if a in {*self.axes(*ins, *n.types), *named})
        wide = Turns({
            turn: self.pick(values[0], known[0], dict(zip(axes, turn, strict=True)))
            for turn in self.every(axes)
        })  # fmt: skip
        xp = TurnsXp(self, axes)
        call = Call(xp, Block(), tuple(ins), n.types, n.attrs, lambda body, args: [])
        out = OPS[n.op].compute(call, wide)
        return self._narrow(out.blocks, axes, self.axes(n.type))


class Turns:
    """The blocks of all turns, as one value for the local code of a change of layout."""

    def __init__(self, blocks: Value) -> None:
        self.blocks = blocks

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = next(iter(self.blocks.values())).shape
        return shape

    @property
    def dtype(self) -> Any:
        return next(iter(self.blocks.values())).dtype


class TurnsXp:
    """The array functions that changes of layout use, on the blocks of all turns at once."""

    def __init__(self, folded: Folded, axes: tuple[str, ...]) -> None:
        self.folded, self.axes = folded, axes

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: self._each(getattr(xp_jax, name), *args)

    def _each(self, f: Callable[..., Any], *args: Any) -> Turns:
        def at(x: Any, turn: Turn) -> Any:
            return x.blocks[turn] if isinstance(x, Turns) else x

        return Turns({t: f(*(at(x, t) for x in args)) for t in self.folded.every(self.axes)})

    def axis_index(self, axes: Sequence[str], sizes: Mapping[str, int]) -> Turns:
        every = self.folded.every(self.axes)
        return Turns({t: self.folded._site(self.axes, t).at(axes, sizes) for t in every})

    def _groups(self, axis: str) -> list[list[Turn]]:
        """Turns that differ along `axis` alone, in its order."""
        if axis not in self.axes:
            return [[t] for t in self.folded.every(self.axes)]
        k = self.axes.index(axis)
        groups: dict[Turn, list[Turn]] = {}
        for t in self.folded.every(self.axes):
            groups.setdefault((*t[:k], *t[k + 1 :]), []).append(t)
        return list(groups.values())

    def _by_axis(
        self, x: Turns, axes: Sequence[str], f: Callable[[list[Array], str], list[Array]]
    ) -> Turns:
        for a in axes:
            new: Value = {}
            for group in self._groups(a):
                new.update(zip(group, f([x.blocks[t] for t in group], a), strict=True))
            x = Turns(new)
        return x

    def all_reduce(self, x: Turns, axes: tuple[str, ...], kind: str) -> Turns:
        def one(blocks: list[Array], axis: str) -> list[Array]:
            if self.folded.order and kind == "sum":
                total = ordered_sum(blocks, axis, self.folded.devices(axis), self.folded.order)
            else:
                total = xp_jax.all_reduce(tree(blocks, kind), (axis,), kind)
            return [total] * len(blocks)

        return self._by_axis(x, tuple(reversed(axes)), one)

    def all_gather(self, x: Turns, axes: tuple[str, ...], dim: int) -> Turns:
        def one(blocks: list[Array], axis: str) -> list[Array]:
            here = jnp.concatenate(blocks, dim) if len(blocks) > 1 else blocks[0]
            return [xp_jax.all_gather(here, (axis,), dim)] * len(blocks)

        return self._by_axis(x, tuple(reversed(axes)), one)

    def reduce_scatter(self, x: Turns, axes: tuple[str, ...], dim: int) -> Turns:
        def one(blocks: list[Array], axis: str) -> list[Array]:
            if self.folded.order:
                mine = ordered_scatter(
                    blocks, axis, self.folded.devices(axis), dim, self.folded.order
                )
            else:
                mine = xp_jax.reduce_scatter(tree(blocks, "sum"), (axis,), dim)
            return jnp.split(mine, len(blocks), dim) if len(blocks) > 1 else [mine]

        return self._by_axis(x, axes, one)

    def all_to_all(self, x: Turns, axes: tuple[str, ...], split: int, concat: int) -> Turns:
        def one(blocks: list[Array], axis: str) -> list[Array]:
            n = len(blocks)
            y = jnp.stack(blocks)  # [T, ..., P·T, ...]
            shape = y.shape
            d = split + 1
            y = y.reshape(*shape[:d], shape[d] // n, n, *shape[d + 1 :])
            y = lax.all_to_all(y, axis, d, 0, tiled=False)  # [P, T, ..., T, ...]
            y = jnp.moveaxis(y, d + 1, 0)  # whose turn it is for, in front
            outs = []
            for mine in y:
                mine = mine.reshape(-1, *mine.shape[2:])  # the senders in their order
                outs.append(jnp.moveaxis(mine, 0, concat))
            return outs

        return self._by_axis(x, axes, one)

    def _place(self, axes: Sequence[str], flat: int) -> dict[str, int]:
        """The coordinates of the logical place `flat` along `axes`, major first."""
        out: dict[str, int] = {}
        for a in reversed(axes):
            flat, out[a] = divmod(flat, self.folded.mesh.sizes[a])
        return out

    def broadcast(self, x: Turns, axes: tuple[str, ...], root: int) -> Turns:
        place = self._place(axes, root)

        def one(blocks: list[Array], axis: str) -> list[Array]:
            device, turn = divmod(place[axis], len(blocks))
            return [xp_jax.broadcast(blocks[turn], (axis,), device)] * len(blocks)

        return self._by_axis(x, axes, one)

    def permute(self, x: Turns, axes: tuple[str, ...], pairs: Sequence[tuple[int, int]]) -> Turns:
        sizes, turns = self.folded.mesh.sizes, self.folded.mesh.folds

        def device(at: Mapping[str, int]) -> int:
            flat = 0
            for a in axes:
                flat = flat * (sizes[a] // turns[a]) + at[a] // turns[a]
            return flat

        new = {t: jnp.zeros_like(b) for t, b in x.blocks.items()}
        for t in x.blocks:
            here = dict(zip(self.axes, t, strict=True))
            by_source: dict[Turn, list[tuple[int, int]]] = {}
            for src, to in pairs:
                a, b = self._place(axes, src), self._place(axes, to)
                if any(b[k] % turns[k] != here.get(k, 0) for k in axes):
                    continue
                source = tuple(a[k] % turns[k] if k in a else here[k] for k in self.axes)
                by_source.setdefault(source, []).append((device(a), device(b)))
            for source, moves in by_source.items():
                new[t] = new[t] + lax.ppermute(x.blocks[source], axes, moves)
        return Turns(new)
