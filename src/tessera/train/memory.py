"""Memory of a step: bytes by program, and optimizer state in host memory.

>>> import tessera as ts
>>> state = offload({"m": ts.zeros((4, 8)), "step": ts.tensor(0)})
>>> held(state)
Held(device=0, host=132)
>>> (state["m"] + 1.0).sum().item()
32.0
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..core.checks import instance
from ..core.errors import UsageError
from ..core.interrupts import whole
from ..lang.jit.jit import Jit, jit
from ..lang.parallel.strategy import Strategy
from ..lang.record.offload import away, back, copy_of
from ..lang.record.tree import flatten, tree_map
from ..lang.value.engine import engine
from ..lang.value.tensor import Tensor
from ..optim import Optimizer

State = dict[str, Any]


@dataclass(frozen=True)
class ProgramBytes:
    """Bytes per device that one run of a program needs, as XLA reports them."""

    arguments: int
    results: int
    temporary: int
    reused: int

    @property
    def peak(self) -> int:
        """The sum of all; results in the memory of donated arguments count once."""
        return self.arguments + self.results + self.temporary - self.reused


def program_bytes(function: object) -> ProgramBytes:
    """The bytes of the last program that the compiled `function`, a training step or a captured
    function ran. Raises UsageError if it has not run.

    >>> import tessera as ts
    >>> double = ts.jit(lambda x: x * 2.0)
    >>> y = double(ts.zeros((256, 4)))
    >>> program_bytes(double).arguments, program_bytes(double).results
    (4096, 4096)
    """
    function = instance(
        "program_bytes", "the function", getattr(function, "compiled", function), Jit,
        "give what ts.jit(...) made",
    )  # fmt: skip
    if not function.programs:
        raise UsageError(
            f"program_bytes: {function.name} has no program, or is cut by a read",
            fix="call it once; return what it reads with .item() or if instead",
        )
    return ProgramBytes(**engine().program_bytes(function.programs[0]))


# -- state in host memory -------------------------------------------------------------------------
def offload(tree: Any) -> Any:
    """The tree with its tensors in host memory. Each comes back to the devices when it is used.

    It starts the copies and does not wait for them; other leaves are unchanged.
    """
    return _each(lambda t: away(t)[0], tree)


def fetched(tree: Any) -> Any:
    """The tree with its tensors on the devices, without the copies in host memory."""
    return _each(back, tree)


def _each(move: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The tree with each tensor moved; a tensor in several places is moved once."""
    moved: dict[int, Tensor] = {}

    def one(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        if id(t) not in moved:
            moved[id(t)] = move(t)
        return moved[id(t)]

    return tree_map(one, tree)


@dataclass(frozen=True)
class Held:
    """Bytes of tensors by place, over all devices."""

    device: int
    host: int


def held(tree: Any) -> Held:
    """The bytes of the tensors of `tree` by place; a tensor with several names counts once. Tensors
    that are not yet created do not count."""
    device = host = 0
    for t in {id(t): t for t in flatten(tree)[0]}.values():
        if isinstance(t, Tensor):
            copy = copy_of(t)
            if copy is not None:
                host += copy.bytes
            elif t._data is not None:
                device += t.type.held_bytes
    return Held(device, host)


def initial_state(
    optimizer: Optimizer, weights: dict[str, Tensor], strategy: Strategy | str | None = None
) -> State:
    """`optimizer.init` in host memory, with the state of one weight at a time on the devices."""
    out: State = {}
    for name, w in weights.items():
        for kind, part in optimizer.init({name: w}, strategy).items():
            if kind == "step":
                out[kind] = part
            else:
                out.setdefault(kind, {})[name], copy = away(part[name])
                copy.wait()
    return {**out, "step": away(out["step"])[0]}


FiniteSelect = Callable[[Tensor | None, Any, Any], Any]


class StreamedUpdate:
    """`optimizer.update` weight by weight, with the state of one weight at a time on the devices.

    `programs` are the compiled updates by weight. `keep(finite, new, old)` chooses the result of a
    step (`optim.apply_if_finite` if `finite` is a tensor). Weights, gradients and fetched state are
    donated.
    """

    def __init__(self, optimizer: Optimizer, keep: FiniteSelect) -> None:
        self.optimizer, self._keep = optimizer, keep
        self.programs: dict[str, Jit[..., Any]] = {}

    @whole
    def __call__(
        self, weights: dict[str, Tensor], grads: dict[str, Tensor], state: State,
        finite: Tensor | None = None,
    ) -> tuple[dict[str, Tensor], State]:  # fmt: skip
        """(new weights, new state in host memory)."""
        kinds = [kind for kind in state if kind != "step"]
        new: State = {kind: {} for kind in kinds}
        out = {}
        before = fetched(state["step"])
        step = before
        for name, w in weights.items():
            slots = {kind: back(state[kind][name]) for kind in kinds if name in state[kind]}
            out[name], slots, step = self._program(name)(w, grads[name], slots, before, finite)
            for kind, t in slots.items():
                new[kind][name], copy = away(t)
                copy.wait()
        return out, {"step": away(step)[0], **new}

    def _program(self, name: str) -> Jit[..., Any]:
        if name not in self.programs:

            def update(w: Any, g: Any, slots: Any, step: Any, finite: Any) -> Any:
                old = {"step": step, **{kind: {name: t} for kind, t in slots.items()}}
                was = {name: w}, old
                new, made = self._keep(finite, self.optimizer.update(*was[:1], {name: g}, old), was)
                return new[name], {kind: made[kind][name] for kind in slots}, made["step"]

            self.programs[name] = jit(donate=("w", "g", "slots"))(update)
        return self.programs[name]


__all__ = ["Held", "ProgramBytes", "StreamedUpdate", "held", "offload", "program_bytes"]
