"""User-defined containers as arguments of a compiled function: their type is kept."""

from __future__ import annotations

import copy
import pickle
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

import tessera as ts
from tessera import dist, nn
from tessera.train.memory import offload
from tests.mesh.silent.rows import row

X = ts.tensor([1.0, 2.0])


@dataclass
class State:
    w: Any
    scale = 1.0  # a class attribute, not a field
    last = None

    def __post_init__(self) -> None:
        self.count = 3


class Squared(dict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key) ** 2


class Named(dict[str, Any]):
    __getattr__ = dict.__getitem__


class Noted(dict[str, Any]):
    def __init__(self, by: Any, **rows: Any) -> None:
        super().__init__(**rows)
        self.by = by


class Itself(dict[str, Any]):
    def __init__(self, **rows: Any) -> None:
        super().__init__(**rows)
        self.__dict__ = self


def values(tree: Any) -> list[list[float]]:
    return [t.numpy().tolist() for t in tree]


@row("a dataclass with attributes that are no fields")
def _() -> None:
    def step(s: Any) -> Any:
        s.last = s.w * 10.0
        s.w = s.w * s.scale + s.count
        return s.w

    seen = []
    for run in (step, ts.jit(step)):
        s = State(X)
        s.scale = 5.0
        seen.append([values([run(s), s.w, s.last]) for _ in range(2)])
        assert s.count == 3
    assert seen[0] == seen[1] and seen[0][0] == [[8.0, 13.0], [8.0, 13.0], [10.0, 20.0]]


@row("dicts of kinds of their own")
def _() -> None:
    again = ts.jit(lambda d: d)
    assert ts.jit(lambda d: d["w"] * 1.0)(Squared(w=X)).numpy().tolist() == [1.0, 4.0]
    got = ts.jit(lambda d: (d.w * 2.0, d))(Named(w=X, b={"c": X}))
    assert type(got[1]) is Named and values([got[0], got[1].b["c"]]) == [[2.0, 4.0], [1.0, 2.0]]
    same = again(Itself(w=X))
    assert type(same) is Itself and same.w is same["w"]
    noted = [Noted(w=X, by=np.ones(2)), Noted(w=X, by=np.zeros(2)), Noted(w=X, by=3)]
    for d in noted:
        assert np.all(ts.jit(lambda d: d)(d).by == d.by)
    once = ts.jit(lambda d: d)
    assert [np.sum(once(d).by) for d in noted[:2]] == [2.0, 0.0]
    again = ts.jit(lambda d: d)
    ordered = OrderedDict(b=X, a=X * 2.0)
    ordered.move_to_end("b")
    back = again(ordered)
    assert (
        type(back) is OrderedDict and list(back) == ["a", "b"] and values(back.values())[0][0] == 2
    )
    assert values([ts.jit(lambda x, c: x * c["none"] + c["a"])(X, Counter(a=3))]) == [[3.0, 3.0]]

    def added(d: Any, x: Any) -> Any:
        d["n"] = x + d["none"]
        return d["n"]

    made: Any = defaultdict(lambda: 3.0, w=X)
    assert values([ts.jit(added)(made, X), made["n"]]) == [[4.0, 5.0]] * 2 and made["none"] == 3.0
    weights = OrderedDict(w=X)
    assert values(ts.jit(lambda p: ts.grad((p["w"] ** 2).sum(), p))(weights).values()) == [[2, 4]]


@ts.jit
def doubled(x: Any) -> Any:
    return x * 2.0


class Holds(nn.Module):
    def __init__(self) -> None:
        self.f = doubled
        self.w = nn.Parameter(X)


@row("a copy of a compiled function that was called, and of a module that holds one")
def _() -> None:
    doubled(X)
    other = copy.deepcopy(Holds())
    assert other.f(other.w).numpy().tolist() == [2.0, 4.0]
    assert pickle.loads(pickle.dumps(doubled)) is doubled


def _moved(away: Any, mesh: Any) -> None:
    w, b = ts.tensor(np.ones((4, 2)), mesh=dist.Mesh.parse("dp=2")), ts.tensor(X, mesh=mesh)
    ts.grad((away(w, mesh) * b).sum(), {"w": w, "b": b})


for name, away in {
    "another mesh": lambda w, mesh: dist.place(w, mesh=mesh),
    "the host": lambda w, mesh: offload({"w": w})["w"],
}.items():

    @row(f"a gradient through a move to {name}", error=ts.GraphError, says="or as it was moved")
    def _(name: Any = name, away: Any = away) -> None:
        _moved(away, dist.Mesh.parse("dp=4" if name == "another mesh" else "dp=2"))
