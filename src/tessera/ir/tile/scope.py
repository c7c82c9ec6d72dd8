"""Types of the values of a kernel, and the checks that need no run: names, scopes, types."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import assert_never

from ...core.dtypes import int32, uint32
from ...core.errors import DTypeError, ShapeError
from ...core.wording import nearest
from .body import (
    Enter,
    Load,
    Loop,
    Op,
    Put,
    Quiet,
    Ref,
    Signal,
    Statement,
    Store,
    Wait,
    When,
    naming,
    where,
)
from .index import Index, Test, sizes_of, wrong
from .op import Type
from .ops import op_of

VALUE = re.compile(r"%[A-Za-z0-9_]+")


class Scope:
    """Infers the types of all values of a body; `types` has them by name.

    `names` are the sizes by name, `free` the other index names, `unread` names that no expression
    may read, with the reason.
    """

    def __init__(
        self,
        names: Mapping[str, int],
        free: Iterable[str],
        unread: Mapping[str, str],
        refs: Mapping[str, Ref],
        signals: Mapping[str, Signal],
        axes: tuple[str, ...],
        has_grid: bool,
    ) -> None:
        self.names, self.free, self.unread = names, set(free), unread
        self.refs, self.signals, self.axes, self.has_grid = refs, signals, axes, has_grid
        self.types: dict[str, Type] = {}

    def body(self, body: Iterable[Statement], seen: frozenset[str] = frozenset()) -> frozenset[str]:
        """Checks statements in a scope in which the values `seen` exist. Returns those that exist
        after them."""
        for s in body:
            if isinstance(s, Loop | When):
                seen = self._nested(s, seen)
                continue
            with naming(where(s)):
                seen = self._simple(s, seen)
        return seen

    # ---- statements ----------------------------------------------------------------------------
    def _nested(self, s: Loop | When, seen: frozenset[str]) -> frozenset[str]:
        if not s.body:
            with naming(where(s)):
                raise wrong("the block has no statements", "leave it out")
        if isinstance(s, When):
            with naming(where(s)):
                self._known(s.test)
            self.body(s.body, seen)
            return seen
        with naming(where(s)):
            for bound in (s.low, s.high):
                self._known(bound)
            if s.index in self.free or s.index in self.names or s.index in self.unread:
                fix = "give the loop's index a name of its own"
                raise wrong(f"{s.index!r} has a meaning already", fix)
            carried = [self._of(v, seen) for v in s.carries]
            if len(set(s.carries)) < len(s.carries):
                raise wrong("a value is carried twice", "make a second value for it")
            if len(s.results) != len(s.carries):
                fix = "name one result for each carried value"
                raise wrong(f"{len(s.carries)} values are carried, {len(s.results)} named", fix)
        self.free.add(s.index)
        inner = self.body(s.body, seen)
        self.free.remove(s.index)
        with naming(where(s)):
            if len(s.next) != len(s.carries):
                what = f"next gives {len(s.next)} values" if s.next else "next is missing"
                fix = f"end the loop with next and {len(s.carries)} values"
                raise wrong(f"{what}, and {len(s.carries)} are carried", fix)
            for name, new, old in zip(s.carries, s.next, carried, strict=True):
                if (t := self._of(new, inner)) != old:
                    error = ShapeError if t.dtype is old.dtype else DTypeError
                    fix = "make the first value and the next one of one type"
                    raise wrong(f"{name} is carried as {old}, and next is {t}", fix, error)
            for result, t in zip(s.results, carried, strict=True):
                seen = self._define(result, t, seen)
        return seen

    def _simple(self, s: Statement, seen: frozenset[str]) -> frozenset[str]:
        match s:
            case Op():
                args = [self._of(a, seen) if a.startswith("%") else a for a in s.args]
                attrs = dict(s.attrs)
                self._known(Index(attrs.get("start", "0")))
                t = op_of(s.op, attrs).infer(args, attrs, self.names)
                return self._define(s.result, t, seen)
            case Load():
                return self._define(s.result, self._loaded(s, seen), seen)
            case Store():
                r = self._ref(s.ref, s.at)
                if r.kind == "in":
                    raise wrong(f"{s.ref} is an input", "store to an output")
                have, need = self._of(s.value, seen), self.tile(r)
                if have != need:
                    error = ShapeError if have.dtype is need.dtype else DTypeError
                    fix = "cast it, or make it the shape of the tile"
                    raise wrong(f"{s.value} is {have}, a tile of {s.ref} is {need}", fix, error)
            case Enter():
                self._on_mesh()
                if not s.axes or len({*s.axes} & {*self.axes}) != len(s.axes):
                    fix = f"use {' '.join(self.axes)}"
                    raise wrong("enter takes axes of the mesh, each once", fix)
            case Put():
                self._on_mesh()
                self._put(s)
            case Wait():
                self._on_mesh()
                self._slot(s.sig, s.slot)
            case Quiet():
                self._on_mesh()
            case Loop() | When():
                raise AssertionError(s)
            case _:
                assert_never(s)
        return seen

    def _loaded(self, s: Load, seen: frozenset[str]) -> Type:
        r = self._ref(s.ref, s.at)
        if s.rows is None:
            return self.tile(r)
        dim, ids = s.rows
        t = self._of(ids, seen)
        if r.kind != "in":
            raise wrong(f"rows of {s.ref}, which is no input", "gather rows of inputs")
        if t.dtype not in (int32, uint32) or len(t.shape) != 1:
            fix = "give rows a value of one dim, of i32 or u32"
            raise wrong(f"rows cannot be {t}", fix, DTypeError)
        tile = sizes_of(r.tiles, self.names)
        kept = [t.shape[0] if i == dim else n for i, n in enumerate(tile) if i in (dim, *r.kept)]
        return Type(r.dtype, tuple(kept))

    def _put(self, s: Put) -> None:
        src, dst = self._ref(s.src, s.src_at), self._ref(s.dst, s.dst_at)
        if dst.kind != "sym":
            raise wrong(f"{s.dst} is not symmetric memory", "put to a sym reference")
        if (a := self.tile(src)) != (b := self.tile(dst)):
            raise wrong(
                f"a tile of {s.src} is {a}, of {s.dst} {b}", "put tiles of one type", ShapeError
            )
        if len(s.rank) != len(self.axes):
            fix = f"give the coordinates along {', '.join(self.axes)}"
            raise wrong(f"the rank has {len(s.rank)} coordinates", fix)
        for part in s.rank:
            self._known(part)
        self._slot(s.sig, s.slot)

    # ---- names ---------------------------------------------------------------------------------
    def tile(self, r: Ref) -> Type:
        """The type of a loaded tile."""
        sizes = sizes_of(r.tiles, self.names)
        return Type(r.dtype, tuple(sizes[i] for i in r.kept))

    def _ref(self, name: str, at: tuple[Index, ...]) -> Ref:
        if name not in self.refs:
            fix = f"use one of {nearest(name, self.refs)}"
            raise wrong(f"there is no reference {name!r}", fix)
        r = self.refs[name]
        self._indices(name, at, len(r.shape))
        return r

    def _slot(self, name: str, at: tuple[Index, ...]) -> None:
        if name not in self.signals:
            fix = f"use one of {nearest(name, self.signals)}; declare it: sig {name} [n]"
            raise wrong(f"there is no signal {name!r}", fix)
        self._indices(name, at, len(self.signals[name].slots))

    def _indices(self, name: str, at: tuple[Index, ...], dims: int) -> None:
        if len(at) != dims:
            fix = f"give {dims} indices, one for each dim"
            raise wrong(f"{name} has {dims} dims, {len(at)} indices are given", fix, ShapeError)
        for part in at:
            self._known(part)

    def _known(self, e: Index | Test) -> None:
        for name in sorted(e.names):
            if name in self.unread:
                raise wrong(f"{name!r} in {e.text!r} {self.unread[name]}", "use another name")
            if name not in self.free and name not in self.names:
                names = nearest(name, [*sorted(self.free), *self.names])
                raise wrong(f"{name!r} in {e.text!r} is not a known name", f"use one of {names}")

    def _of(self, value: str, seen: frozenset[str]) -> Type:
        if value in seen:
            return self.types[value]
        if value in self.types:
            fix = "carry it out of the loop: %y = loop ... carry, and next; or store it there"
            raise wrong(f"{value} is used outside of the block that defines it", fix)
        raise wrong(f"{value} is used before it is defined", "define it above")

    def _define(self, name: str, t: Type, seen: frozenset[str]) -> frozenset[str]:
        if not VALUE.fullmatch(name):
            raise wrong(f"{name!r} is not the name of a value", "name it as in %3 or %acc")
        if name in self.types:
            raise wrong(f"{name} is defined twice", "give each value a name of its own")
        self.types[name] = t
        return seen | {name}

    def _on_mesh(self) -> None:
        if not self.axes:
            fix = "name its axes in the first line: mesh x=4"
            raise wrong("the kernel has no mesh", fix)
        if self.has_grid:
            fix = "write loops in place of the grid: the steps of a grid have no order"
            raise wrong("a kernel with a grid does not communicate", fix)
