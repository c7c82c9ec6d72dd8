"""Global norm and gradient clipping."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..core.checks import number
from ..core.dtypes import f32
from ..core.errors import UsageError
from ..core.layout import Partial
from ..core.tensor_checks import shaped
from ..lang.math import functions as F
from ..lang.parallel.collectives import over_blocks
from ..lang.parallel.strategy import finest
from ..lang.record.operands import scalar
from ..lang.record.parameter import Parameter, trained
from ..lang.record.recorder import current_options
from ..lang.record.tree import flatten, unflatten
from ..lang.value.tensor import Tensor
from .trees import named, one_line


def global_norm(tree: Any) -> Tensor:
    """The Euclidean norm of all elements of all float tensors in `tree`: f32[], or f64[] if one of
    them is f64. In the body of a `ts.distribute` with a strategy it is the norm of whole weights,
    of which a device has blocks."""
    with one_line("global_norm"):
        every = named("global_norm", tree).values()
        wide = [to_add_up(F.abs(t) if t.dtype.is_complex else F.wide(t)) for t in every]
        return F.sqrt(total(over_blocks("global_norm", F.sum(t * t)) for t in wide))


def to_add_up(x: Tensor) -> Tensor:
    """`x`, a weight or a value of its shape, before a sum over its elements. At the level
    "mesh_invariant" it is in the finest blocks, so that the order of additions is the same in every
    layout at rest."""
    return F.relayout(x, finest(x.type)) if current_options().mesh_invariant else x


def clip_by_global_norm(grads: Any, max_norm: float | Tensor) -> tuple[Any, Tensor]:
    """Returns (`grads` scaled down to a global norm of at most `max_norm`, the norm before).

    The gradients keep dtype and layout (Pascanu et al. 2013). A NaN in any gradient makes the norm
    and all gradients NaN. An infinity makes the norm infinite, finite gradients 0 and itself NaN,
    as in PyTorch; `LossScale` or a check of the norm then skips the step. Raises UsageError if
    `max_norm` is not above 0, or `grads` holds parameters; ShapeError if it is no scalar.

    >>> import tessera as ts
    >>> grads = {"a": ts.tensor([3.0]), "b": ts.tensor([float("nan")])}
    >>> clipped, norm = clip_by_global_norm(grads, 1.0)
    >>> norm.item(), clipped["a"].item()
    (nan, nan)
    """
    if not isinstance(max_norm, Tensor):
        number("clip_by_global_norm", "max_norm", max_norm, above=0)
    else:
        shaped("clip_by_global_norm", "max_norm", max_norm.type, ())
    if any(isinstance(g, Parameter) for g in flatten(grads)[0]):
        raise UsageError(
            "clip_by_global_norm: the gradients are parameters",
            fix="gradients are values: grads = ts.grad(loss, model);"
            " grads, norm = optim.clip_by_global_norm(grads, max_norm)",
        )
    norm = global_norm(grads)
    with one_line("clip"):
        factor = F.where(norm <= max_norm, 1.0, max_norm / norm)  # no NaN is below anything
        leaves, spec = flatten(trained(grads))
        return unflatten(spec, [scaled(g, factor).to(g.dtype) for g in leaves]), norm


def scaled(x: Tensor, factor: Tensor) -> Tensor:
    """`x` times the scalar `factor`, in f32 or wider."""
    return F.wide(x) * factor


def total(parts: Iterable[Tensor]) -> Tensor:
    """The sum of scalars f32[], with one collective for each axis over which any is partial.

    Scalars with equal partial axes are added first, and those with most axes come first: axes that
    they share with the next are completed with it.
    """
    groups: dict[Partial, Tensor] = {}
    for t in parts:
        have = groups.get(t.type.partial)
        groups[t.type.partial] = t if have is None else have + t
    out: Tensor | None = None
    for t in sorted(groups.values(), key=lambda t: -len(t.type.partial)):
        out = t if out is None else out + t
    return scalar(0.0, f32) if out is None else F.relayout(out, out.type.complete())
