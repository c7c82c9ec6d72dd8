"""Every rule for an op of ATen against PyTorch: on the calls that PyTorch's samples make, and on
those of `aten_rows.py`.

Each call is recorded, and computed by the oracle; f32 calls also with their gradients, and in a
random layout of eight devices. A rule without a call fails.
"""

from __future__ import annotations

import math
import operator
import random
import warnings
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tessera as ts
from tessera.interop.aten import ATEN
from tessera.interop.torch_export import PLACES, constant, dtype, from_torch_tensor
from tessera.ir.graph.oracle import evaluate, evaluate_blocks
from tessera.lang.record.recorder import Recorder, recording
from tessera.lang.value.tensor import Tensor
from tests.peer.aten_rows import (
    BY_MODULES,
    DRAWN,
    NO_GRADIENT,
    OPEN,
    OPEN_UNLESS_F32,
    REFUSED,
    ROWS,
    WIDE,
    Draw,
)
from tests.peer.cases import as_f64, laid_out

LEFT_OUT = ("linalg", "fft", "sparse", "signal", "masked", "jiterator", "special", "ops.", "_refs",
            "torch.ops")  # fmt: skip
DTYPES = (torch.float32, torch.int64, torch.bool, torch.bfloat16)
MOST = 8  # calls of an op
TOLERANCE = {"f32": 2e-5, "bf16": 2e-2, "f16": 4e-3}
PARTS = 12


class Case(NamedTuple):
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: Any


def copied(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.detach().clone()
    return type(x)(map(copied, x)) if type(x) in (list, tuple) else x


class Watch(TorchDispatchMode):
    """Keeps the calls of ops that have rules."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, dict[Any, Case]] = defaultdict(dict)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = str(func), kwargs or {}
        before = copied(tuple(args)) if name in ATEN.table else ()
        out = func(*args, **kwargs)
        if before or (name in ATEN.table and not args):
            case = Case(name, before, kwargs, copied(out))
            if all(known(t) for t in tensors((before, tuple(kwargs.values()), out))):
                self.found[name].setdefault(like(case), case)
        return out


def tensors(x: Any) -> list[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return [x]
    return [t for part in x for t in tensors(part)] if isinstance(x, (list, tuple)) else []


def known(t: torch.Tensor) -> bool:
    return not t.dtype.is_complex and t.layout is torch.strided and t.dtype is not torch.float64


def like(case: Case) -> Any:
    """The dtypes, ranks and other arguments of a call: one call of each is enough."""
    plain = [x for x in case.args if not isinstance(x, torch.Tensor)]
    shapes = tuple((t.dtype, t.ndim, t.numel() > 0) for t in tensors(case.args))
    return shapes, repr([x for x in plain if not tensors(x)]), repr(sorted(case.kwargs))


@cache
def sampled() -> dict[str, list[Case]]:
    """Calls of each op: some of those that PyTorch's samples make."""
    from torch.testing._internal.common_methods_invocations import op_db

    watch = Watch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in op_db:
            if info.name.startswith(LEFT_OUT):
                continue
            for kind in DTYPES:
                if kind not in info.supported_dtypes("cpu"):
                    continue
                torch.manual_seed(3)
                np.random.seed(3)
                random.seed(3)
                samples = iter(info.sample_inputs_func(info, "cpu", kind, False))
                for _, sample in zip(range(8), samples):
                    try:
                        with torch.no_grad(), watch:
                            info.op(sample.input, *sample.args, **sample.kwargs)
                    except (RuntimeError, TypeError, NotImplementedError):
                        continue  # what PyTorch refuses, or needs a kernel that is not there
    found = {}
    for name, cases in watch.found.items():
        every = list(cases.values())
        found[name] = random.Random(name).sample(every, min(MOST, len(every)))
    return found


def op_of(name: str) -> Any:
    space, op, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, space), op), overload)


def written(name: str) -> list[Case]:
    cases = []
    for call in ROWS.get(name, ()):
        given = call(Draw())
        kwargs = given[-1] if given and isinstance(given[-1], dict) else {}
        args = given[:-1] if kwargs else given
        cases.append(Case(name, args, kwargs, op_of(name)(*copied(tuple(args)), **kwargs)))
    return cases


def cases_of(name: str) -> list[Case]:
    return [*written(name), *sampled().get(name, ())]


# -- one call -------------------------------------------------------------------------------------
class Result(NamedTuple):
    outs: list[Any]
    grads: list[Any]
    dtypes: list[str]


def run(case: Case, gradient: bool, spread: bool) -> Result:
    """The rule's results and gradients by the oracle, whole or in blocks in a random layout."""
    given = tensors((case.args, tuple(case.kwargs.values())))
    ours = [from_torch_tensor(t) for t in given]
    laid = []
    if spread:
        draw = random.Random(case.name)
        laid = [laid_out(t.numpy(), draw) for t in ours]
        ours = [ts.tensor(p.placed, mesh=p.type.mesh, layout=p.type) for p in laid]
    recorder = Recorder("case")
    with recording(recorder):
        placed = [p.made(t) for p, t in zip(laid, ours, strict=True)] if spread else ours
        by = {id(t): x for t, x in zip(given, placed, strict=True)}

        def mapped(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                return by[id(x)]
            if type(x) in (list, tuple):
                return type(x)(map(mapped, x))
            return constant(x)

        args = [mapped(x) for x in case.args]
        kwargs = {k: mapped(v) for k, v in case.kwargs.items() if k not in PLACES}
        found = ATEN.table[case.name](*args, **kwargs)
        outs = list(found) if isinstance(found, (list, tuple)) else [found]
        grads: list[Tensor] = []
        if gradient:
            loss = None
            for out, want in zip(outs, flat(case.outs), strict=True):
                if differentiable(want):
                    part = ts.sum(out * ts.tensor(weights(want)))
                    loss = part if loss is None else loss + part
            floats = [by[id(t)] for t in given if t.dtype is torch.float32]
            grads = ts.grad(loss, floats)
        if not all(isinstance(x, Tensor) for x in outs):
            return Result(outs, [], [])
        graph = recorder.builder.graph([recorder.node(t) for t in (*outs, *grads)])
    of = {node: t for t, node in recorder.captured}
    known_values = {id(t): p.placed for t, p in zip(ours, laid)} if spread else {}
    values = [value_of(of.get(n), known_values) for n in graph.inputs]
    got = evaluate_blocks(graph, values, padding=np.nan) if spread else evaluate(graph, values)
    return Result(got[: len(outs)], got[len(outs) :], [t.dtype.name for t in outs])


def value_of(t: Tensor | None, known_values: dict[int, Any]) -> Any:
    """The value of an input of a graph; the key of random numbers is no tensor's."""
    if t is None:
        return np.array([1, 2], np.uint32)
    return known_values[id(t)] if id(t) in known_values else t.numpy()


def flat(outs: Any) -> list[Any]:
    return list(outs) if isinstance(outs, (list, tuple)) else [outs]


def differentiable(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype is torch.float32 and x.numel() > 0


def weights(x: torch.Tensor) -> np.ndarray[Any, Any]:
    return np.random.default_rng(5).uniform(0.5, 1.5, tuple(x.shape)).astype(np.float32)


def peer_gradients(case: Case) -> list[torch.Tensor] | None:
    """PyTorch's gradients of the f32 arguments, or None if it has none."""
    args = [copied(x) for x in case.args]

    def asked(x: Any) -> None:
        for t in tensors(x):
            if t.dtype is torch.float32:
                t.requires_grad_(True)

    asked(args)
    floats = [t for t in tensors(args) if t.dtype is torch.float32]
    if not floats or tensors(tuple(case.kwargs.values())):
        return None
    try:
        with torch.enable_grad():
            outs = flat(op_of(case.name)(*args, **case.kwargs))
            reached = [
                (o * torch.from_numpy(weights(o))).sum()
                for o in outs
                if differentiable(o) and o.requires_grad
            ]
            if not reached or len(reached) < sum(map(differentiable, outs)):
                return None
            grads = torch.autograd.grad(sum(reached), floats, allow_unused=True)
    except (RuntimeError, NotImplementedError):  # an op without a derivative there
        return None
    if all(g is None or not g.any() for g in grads):
        return None
    return [torch.zeros_like(t) if g is None else g for t, g in zip(floats, grads, strict=True)]


def difference(got: Any, want: Any, part: str, loose: float = 1.0) -> str:
    """The first difference, or ""."""
    if not isinstance(want, torch.Tensor):
        return "" if got == want else f"{part}: {got}, PyTorch {want}"
    x, y = as_f64(np.asarray(got)), want.detach().double().numpy()
    if x.shape != y.shape:
        return f"{part}: shape {x.shape}, PyTorch {y.shape}"
    limit = TOLERANCE.get(dtype(want.dtype).name, 0.0) * loose
    with np.errstate(invalid="ignore"):
        finite = np.abs(y[np.isfinite(y)]).max(initial=0.0)
        near = np.abs(x - y) <= limit * np.maximum(np.abs(y), max(1.0, finite))
        right = near | (x == y) | (np.isnan(x) & np.isnan(y))
    if right.all():
        return ""
    at = tuple(int(i) for i in np.argwhere(~right)[0])
    return f"{part}: {(~right).sum()} of {right.size} differ, {x[at]:.7g}, PyTorch {y[at]:.7g}"


def faults(case: Case, spread: bool) -> Iterator[str]:
    want = flat(case.outs)
    drawn = any(word in case.name for word in DRAWN)
    all_f32 = any(t.dtype is torch.float32 for t in tensors(case.args))
    asks = all_f32 and not drawn and not spread and case.name not in NO_GRADIENT
    peer = peer_gradients(case) if asks else None
    peer = peer if peer is None or all(bool(g.isfinite().all()) for g in peer) else None
    found = run(case, peer is not None, spread)
    if len(found.outs) != len(want):
        yield f"{len(found.outs)} results, PyTorch {len(want)}"
        return
    for i, (got, w) in enumerate(zip(found.outs, want, strict=True)):
        if i in OPEN.get(case.name, ()) or (i and case.name in OPEN_UNLESS_F32 and not all_f32):
            continue
        if isinstance(w, torch.Tensor) and found.dtypes[i] != dtype(w.dtype).name:
            yield f"result {i}: dtype {found.dtypes[i]}, PyTorch {w.dtype}"
        if drawn:
            if np.asarray(got).shape != tuple(w.shape):
                yield f"result {i}: shape {np.asarray(got).shape}, PyTorch {tuple(w.shape)}"
        elif said := difference(got, w, f"result {i}"):
            yield said
    for i, (got, g) in enumerate(zip(found.grads, peer or (), strict=True)):
        if said := difference(got, g, f"gradient {i}", 16.0):
            yield said


def shown(case: Case) -> str:
    def text(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
        return [text(v) for v in x] if type(x) in (list, tuple) else x

    named = {k: text(v) for k, v in case.kwargs.items()}
    return f"{case.name}{tuple(text(x) for x in case.args)} {named}"


def compared() -> list[str]:
    return sorted(n for n in ATEN.table if n.startswith("aten.") and n not in BY_MODULES)


@pytest.mark.parametrize("part", range(PARTS))
def test_a_rule_gives_what_pytorch_gives(part: int) -> None:
    wrong = []
    for name in compared()[part::PARTS]:
        cases = [c for c in cases_of(name) if name not in WIDE or is_wide(c)]
        if not cases:
            wrong.append(f"{name}: no sample of PyTorch's calls it, give it a row in aten_rows.py")
        spread = next((c for c in cases if is_spread(c)), None)
        for case, laid in [*((c, False) for c in cases), *([(spread, True)] if spread else [])]:
            try:
                wrong += [f"{shown(case)}{' spread' * laid}: {said}" for said in faults(case, laid)]
            except ts.TesseraError as error:
                if REFUSED.get(name, "\n\n") not in str(error):
                    wrong.append(f"{shown(case)}{' spread' * laid}: {error}".replace("\n", " | "))
            except Exception as error:
                wrong.append(
                    f"{shown(case)}{' spread' * laid}: {type(error).__name__} {error}"[:400]
                )
    assert not wrong, "\n".join(wrong)


def is_wide(case: Case) -> bool:
    return any(t.dtype is torch.float32 for t in tensors(case.args))


def is_spread(case: Case) -> bool:
    given = tensors(case.args)
    return (
        bool(given)
        and all(t.numel() for t in given)
        and any(t.dtype is torch.float32 and t.ndim > 1 for t in given)
    )


def test_there_are_rules_for_most_of_the_core_ops() -> None:
    aten = torch.ops.aten
    core = {
        str(overload)
        for op in dir(aten)
        if hasattr(getattr(aten, op), "overloads")
        for overload in (getattr(getattr(aten, op), o) for o in getattr(aten, op).overloads())
        if torch.Tag.core in overload.tags
    }
    missing = sorted(core - ATEN.table.keys())
    assert len(ATEN.table) >= 400
    assert len(missing) <= 20, missing


@pytest.mark.parametrize("name", sorted(n for n in ATEN.table if n.startswith("_operator.")))
def test_numbers(name: str) -> None:
    fn = getattr(operator, name.removeprefix("_operator."))
    args = (7,) if name.endswith(("neg", "not_")) else (7, 3)
    assert ATEN.table[name](*args) == fn(*args)


def test_numbers_of_torch() -> None:
    table = ATEN.table
    assert [table[f"math.{n}"](2.25) for n in ("trunc", "ceil", "floor", "sqrt")] == [2, 3, 2, 1.5]
    assert (table["torch.sym_max"](2, 3), table["torch.sym_min"](2, 3)) == (3, 2)
    assert (table["torch.sym_float"](2), table["torch.sym_int"](2.5)) == (2.0, 2)
    assert (table["torch.sym_not"](True), table["torch.sym_ite"](True, 1, 2)) == (False, 1)
    assert table["torch.sym_sum"]([1, 2, 3]) == 6 and math.isclose(
        table["_operator.truediv"](1, 2), 0.5
    )
