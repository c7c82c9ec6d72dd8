"""Weights of experts: checks against the tokens, layout over the experts' axes, tied replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...core.checks import unfit
from ...core.errors import ShapeError
from ...core.layout import Factor, TensorType, dim_axes, unknown_axis
from ...core.mesh import Mesh
from ...core.reshard import gathered
from ...core.tensor_checks import floats, ranked
from ...lang.autodiff.custom import custom_gradient
from ...lang.math import functions as F
from ...lang.record.operands import as_tensor
from ...lang.record.recorder import current
from ...lang.value.tensor import Tensor
from .placement import Placement

NAMES = ("router", "up", "down", "gate", "bias", "shared")
NETWORK = ("up", "down", "gate")


@dataclass(frozen=True, slots=True)
class Weights:
    """`router` [d, E], `bias` [E], and the `network` by name: `up`, `gate` [R, d, h], `down` [R, h,
    d], or the weights of a user-defined network. The weights of the shared expert have no first
    dim."""

    router: Tensor
    network: dict[str, Tensor]
    bias: Tensor | None = None
    shared: dict[str, Tensor] | None = None

    @property
    def first(self) -> Tensor:
        """The first weight of the network; its layout gives the experts' devices."""
        return next(iter(self.network.values()))

    def over(self, axes: tuple[str, ...], mesh: Mesh | None) -> Weights:
        """The weights with the rows of experts split over `axes`."""
        if not axes and not self.first.type.rest_axes:
            return self

        def moved(x: Tensor) -> Tensor:
            t = x.type if x.type.mesh is not None else x.type.on(mesh)
            if dim_axes(t.dims[0]) == axes:
                return x
            rest = gathered(t, axes).dims[1:]  # another dim of it may be split over them
            return F.relayout(x, t.with_dims(((Factor(x.shape[0], axes),), *rest)))

        return replace(self, network={n: moved(w) for n, w in self.network.items()})

    def tied(self, placement: Placement | None) -> dict[str, Tensor]:
        """The network, in which the replicas of an expert share one gradient."""
        if placement is None or len(placement.rows) == placement.experts:
            return self.network
        return {n: tied(w, placement) for n, w in self.network.items()}


_USER_NETWORK = (
    "other names with a function that computes with them: network=lambda rows, weights: ..."
)


def has_weights(weights: Any, user_defined: bool = False) -> bool:
    """Returns whether `weights` is a dict with the entries that every network of experts has, or
    with `user_defined` those of a user-defined network."""
    need = {"router"} if user_defined else {"router", "up", "down"}
    return isinstance(weights, Mapping) and need <= set(weights) and len(weights) > 1


def weights_of(weights: Any, x: TensorType, user_defined: bool = False) -> Weights:
    """The weights of `experts`, checked against x [.., d]; with `user_defined` a user-defined
    network may have any names. Raises UsageError, ShapeError or DTypeError if they do not fit."""
    if not has_weights(weights, user_defined):
        raise unfit(
            "moe",
            "experts",
            weights,
            'give {"router": [d, E]} and the weights of the network, [E, ...] each'
            if user_defined
            else 'give {"router": [d, E], "up": [E, d, h], "down": [E, h, d]}, an nn.MoE, or a'
            f" number of experts; {_USER_NETWORK}",
        )
    odd = [] if user_defined else [n for n in weights if n not in NAMES]
    if odd:
        raise unfit("moe", "a name in experts", odd[0], f"use {', '.join(NAMES)}; {_USER_NETWORK}")
    ranked("moe", "x", x, 2, "give tokens of d channels", more=True)
    floats("moe", "x", x, "embed token ids first")
    tensors = {
        n: _recorded_tensor(w) for n, w in weights.items() if w is not None and n != "shared"
    }
    router, bias, d = tensors.pop("router"), tensors.pop("bias", None), x.shape[-1]
    count = router.shape[1] if router.ndim == 2 else 0
    _need_shape("router", router, (d, count))
    if bias is not None:
        _need_shape("bias", bias, (count,))
    shared = weights.get("shared")
    if user_defined:
        if shared is not None and not isinstance(shared, Mapping):
            fix = "give a dict of what the network takes, without the dim of experts"
            raise unfit("moe", "shared", shared, fix)
        return Weights(router, _stacked(tensors), bias, None if shared is None else
                       {n: _recorded_tensor(w) for n, w in shared.items()})  # fmt: skip
    up = tensors["up"]
    e, h = (up.shape[0], up.shape[2]) if up.ndim == 3 else (0, 0)
    wants = {"up": (e, d, h), "down": (e, h, d), "gate": (e, d, h)}
    for n, w in tensors.items():
        _need_shape(n, w, wants[n])
    tensors = {n: tensors[n] for n in NETWORK if n in tensors}
    return Weights(router, tensors, bias, None if shared is None else _shared(shared, d))


def _recorded_tensor(w: object) -> Tensor:
    """`w` as a tensor of this recording."""
    made, recorder = as_tensor(w), current()
    return made if recorder is None else recorder.on_whole_mesh(made)


def _stacked(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a network, one row per expert. Raises ShapeError if their numbers of rows
    differ."""
    rows = {n: w.shape[:1] for n, w in weights.items()}
    if len(set(rows.values())) != 1 or () in rows.values():
        raise ShapeError(
            "moe: the weights of the network have not one row an expert each",
            rows=[(n, w.type) for n, w in weights.items()],
            fix="stack what the experts have: [E, ...] each",
        )
    return weights


def _shared(weights: Any, d: int) -> dict[str, Tensor]:
    """The network of the shared expert, with its shapes checked."""
    if not isinstance(weights, Mapping) or not {"up", "down"} <= set(weights) <= set(NETWORK):
        raise unfit(
            "moe",
            "shared",
            weights,
            'give {"up": [d, h], "down": [h, d]}, and "gate" [d, h] where it is gated',
        )
    found = {n: _recorded_tensor(w) for n, w in weights.items() if w is not None}
    h = found["up"].shape[-1] if found["up"].ndim == 2 else 0
    for n, w in found.items():
        _need_shape(f"shared {n}", w, (h, d) if n == "down" else (d, h))
    return found


def _need_shape(name: str, w: Tensor, want: tuple[int, ...]) -> None:
    if w.shape != want or not w.dtype.is_float:
        sizes = ", ".join(str(n) if n else "?" for n in want)
        raise ShapeError(
            f"moe: {name} is not of floats [{sizes}]",
            rows=[(name, w.type)],
            fix="router is [d, E], up and gate [E, d, h], down [E, h, d], for x [.., d]",
        )


def expert_axes(up: TensorType, axis: tuple[str, ...] | None, mesh: Mesh | None) -> tuple[str, ...]:
    """The mesh axes of the experts: `axis`, or else the axes that split `up` [R, d, h], or else
    "ep" if the mesh has it. Raises LayoutError if the mesh lacks an axis."""
    if axis is None:
        return dim_axes(up.in_use.dims[0]) or (("ep",) if mesh is not None and "ep" in mesh else ())
    for a in axis:
        if mesh is None or a not in mesh:
            raise unknown_axis(a, mesh)
    return axis


def tied(w: Tensor, placement: Placement) -> Tensor:
    """`w` [R, ...]; the gradient of each replica is the sum over its expert's replicas, with equal
    bits."""
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
