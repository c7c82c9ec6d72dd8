"""Transfer of tensors from mesh to mesh, by a schedule of sends that the processes involved run."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.context import settings
from ...core.layout import TensorType
from ...core.mesh import Mesh
from ...ir.schedule.schedule import Schedule, Send
from ..value.eager import redistribute_now, waiting
from ..value.engine import engine
from ..value.tensor import Tensor
from .state_effects import cut_from


def sent(tensors: Sequence[Tensor], to: Sequence[TensorType], mesh: Mesh) -> list[Tensor]:
    """Sends `tensors` to the meshes of the types `to`, and keeps their names. A tensor that is on
    its mesh already is returned as it is. `mesh` has all devices involved."""
    types = [t.type if t.mesh is not None else t.type.on(mesh) for t in tensors]
    steps, outs = list[Send](), list[int]()
    for i, (t, want) in enumerate(zip(tensors, to, strict=True)):
        if t.mesh == want.mesh:
            outs.append(i)
            continue
        outs.append(len(types))
        types.append(want)
        steps.append(Send((i,), (outs[-1],), (want,)))
    if not steps:
        return [*tensors]
    ends = tuple(range(len(tensors))), tuple(outs)
    schedule = Schedule("place", mesh, tuple(types), *ends, tuple(steps), settings().program)
    run = engine().step_by_step(schedule)
    data = run([t.stored for t in tensors], tuple(t.type for t in tensors))
    new = [Tensor(d, types[o]) for d, o in zip(data, outs, strict=True)]
    for t, old in zip(new, tensors, strict=True):
        if t is not old:
            t.name = old.name
            cut_from(t, old)
    return new


def moved(t: Tensor, to: TensorType) -> Tensor:
    """Moves `t` to the layout `to`, at once. From mesh to mesh it is sent split if both meshes cut
    its dims alike, else whole."""
    if t.type is to:
        return t
    later = waiting("redistribute", [t], {"to": to})
    if later is not None:
        if t.mesh not in (None, to.mesh):
            later._history = None
            cut_from(later, t)
        return later
    if t.mesh is None or t.mesh == to.mesh:
        return redistribute_now(t, to)
    if to.mesh is None:
        return cut_from(Tensor(engine().place(t.numpy(), to), to), t)
    goes = t.type.complete()
    if any(_cut(t.mesh, a) != _cut(to.mesh, a) for a in goes.split_axes):
        goes = goes.replicated()
    every = sorted({*t.mesh.physical.device_ids, *to.mesh.physical.device_ids})
    both = Mesh(("devices",), devices=every)
    (sent_tensor,) = sent([redistribute_now(t, goes)], [goes.on(to.mesh)], both)
    return redistribute_now(sent_tensor, to)


def _cut(mesh: Mesh, axis: str) -> tuple[int, int, bool]:
    """Returns (the number of parts that `axis` cuts a dim into, the number of parts on each device,
    whether arrays of the mesh have a dim for the parts that a device runs in turn)."""
    return mesh.sizes.get(axis, 1), mesh.folds.get(axis, 1), mesh.onto is not None
