"""What are the weights of experts? Checked against the tokens; where they work; replicas tied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...core.checks import floats, one_of, ranked, unfit
from ...core.errors import ShapeError, fail
from ...core.layout import Factor, TensorType, dim_axes, unknown_axis
from ...core.mesh import Mesh
from ...lang import functions as F
from ...lang.custom import custom_gradient
from ...lang.operands import as_tensor
from ...lang.tensor import Tensor
from .placement import Placement

NAMES = ("router", "up", "down", "gate", "bias", "shared")
NETWORK = ("up", "down", "gate")


@dataclass(frozen=True, slots=True)
class Weights:
    """`up`, `gate` [R, d, h], `down` [R, h, d], `router` [d, E], `bias` [E]; those of the shared
    expert, (up, down, gate), have no first dim."""

    router: Tensor
    up: Tensor
    down: Tensor
    gate: Tensor | None = None
    bias: Tensor | None = None
    shared: tuple[Tensor, Tensor, Tensor | None] | None = None

    def over(self, axes: tuple[str, ...], mesh: Mesh | None) -> Weights:
        """With the rows of experts split over `axes`."""
        if not axes and not self.up.type.rest:
            return self

        def moved(x: Tensor) -> Tensor:
            t = x.type if x.type.mesh is not None else x.type.on(mesh)
            if dim_axes(t.dims[0]) == axes:
                return x
            return F.relayout(x, t.with_dims(((Factor(x.shape[0], axes),), *t.dims[1:])))

        gate = None if self.gate is None else moved(self.gate)
        return replace(self, up=moved(self.up), down=moved(self.down), gate=gate)

    def tied(self, placement: Placement | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """(up, down, gate), where replicas of one expert get one gradient."""
        if placement is None or len(placement.rows) == placement.experts:
            return self.up, self.down, self.gate
        gate = None if self.gate is None else tied(self.gate, placement)
        return tied(self.up, placement), tied(self.down, placement), gate


def has_weights(given: Any) -> bool:
    """Whether `given` is a dict with what every network of experts has."""
    return isinstance(given, Mapping) and {"router", "up", "down"} <= set(given)


def weights_of(given: Any, x: TensorType) -> Weights:
    """The weights of `experts`, checked against x [.., d]. Raises UsageError, ShapeError,
    DTypeError."""
    if not has_weights(given):
        raise unfit(
            "moe",
            "experts",
            given,
            'give {"router": [d, E], "up": [E, d, h], "down": [E, h, d]}, an nn.MoE, or a'
            " number of experts",
        )
    for name in given:
        one_of("moe", "a name in experts", name, NAMES)
    ranked("moe", "x", x, 2, "give tokens of d channels", more=True)
    floats("moe", "x", x, "embed token ids first")
    found = {n: as_tensor(w) for n, w in given.items() if w is not None and n != "shared"}
    router, up, d = found["router"], found["up"], x.shape[-1]
    e, h = (up.shape[0], up.shape[2]) if up.ndim == 3 else (0, 0)
    count = router.shape[1] if router.ndim == 2 else 0
    wants = {"router": (d, count), "up": (e, d, h), "down": (e, h, d), "gate": (e, d, h)}
    for n, w in found.items():
        _need_shape(n, w, wants.get(n, (count,)))
    shared = given.get("shared")
    return Weights(**found, shared=None if shared is None else _shared(shared, d))


def _shared(given: Any, d: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """(up, down, gate or None) of the experts that all tokens use, with their shapes checked."""
    if not isinstance(given, Mapping) or not {"up", "down"} <= set(given) <= set(NETWORK):
        raise unfit(
            "moe",
            "shared",
            given,
            'give {"up": [d, h], "down": [h, d]}, and "gate" [d, h] where it is gated',
        )
    found = {n: as_tensor(w) for n, w in given.items() if w is not None}
    h = found["up"].shape[-1] if found["up"].ndim == 2 else 0
    for n, w in found.items():
        _need_shape(f"shared {n}", w, (h, d) if n == "down" else (d, h))
    return found["up"], found["down"], found.get("gate")


def _need_shape(name: str, w: Tensor, want: tuple[int, ...]) -> None:
    if w.shape != want or not w.dtype.is_float:
        sizes = ", ".join(str(n) if n else "?" for n in want)
        raise fail(
            ShapeError,
            f"moe: {name} is not of floats [{sizes}]",
            [(name, w.type)],
            fix="router is [d, E], up and gate [E, d, h], down [E, h, d], for x [.., d]",
        )


def expert_axes(up: TensorType, axis: tuple[str, ...] | None, mesh: Mesh | None) -> tuple[str, ...]:
    """The mesh axes of the experts: `axis`, else what splits `up` [R, d, h], else "ep" where the
    mesh has it. Raises LayoutError."""
    if axis is None:
        return dim_axes(up.in_use.dims[0]) or (("ep",) if mesh is not None and "ep" in mesh else ())
    for a in axis:
        if mesh is None or a not in mesh:
            raise unknown_axis(a, mesh)
    return axis


def tied(w: Tensor, placement: Placement) -> Tensor:
    """`w` [R, ...], whose replicas all get the sum of their gradients, the same bits in each."""
    rows = np.array(placement.rows)
    of = as_tensor((rows == np.arange(placement.experts)[:, None]).astype(np.float32))
    home = w.type.complete()

    @custom_gradient
    def same(w: Tensor) -> Any:
        def backward(g: Tensor) -> Tensor:
            flat = g.reshape(g.shape[0], -1)
            whole = F.complete(F.einsum("e r, r n -> e n", of.to(g.dtype), flat))
            return F.relayout(
                F.einsum("e r, e n -> r n", of.to(g.dtype), whole).reshape(g.shape), home
            )

        return w, backward

    out: Tensor = same(w)
    return out
