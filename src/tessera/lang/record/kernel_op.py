"""Kernels of Tile IR as operations on tensors, at the sizes that the schedule options set."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ...core.errors import ShapeError
from ...ir.tile.kernel import Kernel, with_sizes
from ..value.tensor import Tensor
from .operands import emit, emit_many
from .recorder import current, current_options, open_choice


def with_options(sizes: Mapping[str, int]) -> dict[str, int]:
    """The tunes and speeds `sizes` of a kernel, with the values that `@schedule(tile=, warps=)`
    sets."""
    o = current_options().schedule
    found = {**dict(o.tile or ()), **({} if o.warps is None else {"warps": o.warps})}
    recorder = current()
    if recorder is not None:
        recorder.root.kernel_sizes.update(sizes)
    return {n: found.get(n, size) for n, size in sizes.items()}


def kernel_op(
    kernel: Kernel,
    *tensors: Tensor,
    split: tuple[str, ...] = (),
    axes: tuple[str, ...] = (),
    chosen: Mapping[str, int] = MappingProxyType({}),
) -> list[Tensor]:
    """The outputs of a kernel for its inputs, at the sizes of `with_options`, but for those that
    are `chosen`. Half and twice each other size of its tiles are open to the autotuner.

    `split` names dims whose blocks devices may compute by themselves; an output without such a dim
    is the sum over the blocks. A kernel that puts takes values of a local body; `axes` are those of
    the mesh that its own axes stand for. Raises the errors of the ops of `ir/tile/node.py`.
    """
    options = with_options(dict([*kernel.tune, *kernel.speed]))
    kernel = with_sizes(kernel, **{**options, **chosen})
    free = [(n, size) for n, size in kernel.tune if n not in chosen]
    other = ((n, k) for n, size in free for k in (size // 2, 2 * size) if k)
    open_choice("tile", [f"{n}:{k}" for n, k in other if _divides(kernel, n, k)])
    where: dict[str, Any] = {"split": split, **({"axes": axes} if kernel.mesh else {})}
    name = "mesh_kernel" if kernel.mesh else "kernel"
    if sum(r.kind == "out" for r in kernel.refs) > 1:
        return emit_many(name, *tensors, kernel=kernel, **where)
    return [emit(name, *tensors, kernel=kernel, **where)]


def _divides(kernel: Kernel, name: str, size: int) -> bool:
    try:
        with_sizes(kernel, **{name: size})
    except ShapeError:
        return False
    return True
