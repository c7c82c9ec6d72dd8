"""How does the result of a collective lie on the mesh? The axis along which it acts is relabelled.

A label says what the devices' parts make together. Some results no label describes: parts in an
order that is not row by row. These keep the operand's label, as in TT-NN, and are an error with
`ttnn.CONFIG.strict_ccl_topology = True`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .faults import wrong
from .hardware import CONFIG
from .mapping import Placement, PlacementReplicate, PlacementShard, TensorTopology
from .shapes import MeshShape


def relabelled(
    name: str, have: TensorTopology, grid: MeshShape, axes: Sequence[int], rank: int,
    new: Placement, gathered: int | None = None,
) -> TensorTopology:  # fmt: skip
    """The topology after a collective along `axes` of a mesh `grid`, which are `new` then.

    `gathered` is the dim that was gathered. Raises TTNNError for what no label describes, where
    that is asked for.
    """
    moving = [i for i, n in enumerate(grid) if n > 1]
    acts = [i for i in moving if i in axes]
    labels = [_from_the_front(p, rank) for p in have.placements()]
    # One dim over all devices, row by row, lies along each axis of the mesh.
    line = len(labels) == 1 and len(have.mesh_coords()) == grid.mesh_size()
    if line and acts == moving:
        return replace(have, _placements=(new,))
    if have.distribution_shape() != grid:
        one = labels[0] if len(labels) == 1 else PlacementReplicate()
        labels = [one if i in moving else PlacementReplicate() for i in range(len(grid))]
    inner = [labels[i] for i in moving if acts and i > acts[0] and i not in acts]
    cut = PlacementShard(gathered) if gathered is not None else None
    if cut in inner and cut in [labels[i] for i in acts]:
        return _refused(name, have, f"parts of dim {gathered} along axis {acts[0]} would"
                        " interleave with those along the next axis")  # fmt: skip
    for i in acts:
        labels[i] = new
    same = [i for i in moving if labels[i] == new]
    if isinstance(new, PlacementShard) and acts and len(same) > 1:
        if same != moving or new in inner:
            return _refused(name, have, f"parts of dim {new.dim} in this order no TensorTopology"
                            " can express")  # fmt: skip
        return TensorTopology(MeshShape(grid.mesh_size()), (new,), tuple(have.mesh_coords()))
    return TensorTopology(grid, tuple(labels), tuple(have.mesh_coords()))


def _refused(name: str, have: TensorTopology, why: str) -> TensorTopology:
    if not CONFIG.strict_ccl_topology:
        return have
    raise wrong(
        f"{name}: {why}",
        [("grid", have.distribution_shape()), ("placements", have.placements())],
        fix="act along the last axis that cuts the dim, or leave ttnn.CONFIG.strict_ccl_topology"
        " False: the label stays",
    )


def _from_the_front(p: Placement, rank: int) -> Placement:
    return PlacementShard(p.dim % rank) if isinstance(p, PlacementShard) else p


__all__ = ["relabelled"]
