"""Functions whose tensors lie on several slices of one mesh, such as a pipeline's stages.

The function is recorded on one of the slices. Then each op runs on the slice of its largest
argument, and the other arguments are sent there. So functions that know nothing of a pipeline can
update, clip and read the weights on its stages. The schedule is that of a pipeline without
microbatches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...core.context import settings
from ...core.layout import TensorType
from ...core.mesh import Mesh
from ...core.reshard import gathered
from ...ir.graph.node import Node
from ...ir.schedule.pipelines.pipeline import spread
from ...ir.schedule.schedule import Schedule
from ..value.tensor import Tensor
from .gradients import Goal, derived
from .mesh_transfer import moved
from .recorder import KEY_TYPE, WHOLE, Frame, Held, Recorder


@dataclass(eq=False)
class Slices(Frame):
    """The frame of a function on several slices: `meshes` are slices of `whole`, and the first of
    them stands for all during the recording."""

    whole: Mesh
    meshes: tuple[Mesh, ...]
    gradient_of: dict[Node, Node] = field(default_factory=dict)  # gradient -> its weight

    is_read = False

    @staticmethod
    def among(meshes: Iterable[Mesh | None]) -> Slices | None:
        """Returns the frame for tensors on these `meshes`. None if there is only one mesh, or if
        they are not slices of one mesh, which may be among them."""
        every = [*dict.fromkeys(m for m in meshes if m is not None)]
        if len(every) < 2:
            return None
        device_ids = {m: set(m.physical.device_ids) for m in every}
        above = max(every, key=lambda m: len(device_ids[m]))
        parts = [m for m in every if m is not above]
        if all(device_ids[m] < device_ids[above] for m in parts):
            wide = with_two_axes(above)
            lines = (_along(wide, a) for a in wide.axes if len(wide.axes) > 1)
            line = next((s for s in lines if set(parts) <= set(s)), None)
            return None if line is None else Slices(wide, line)
        first, devices = every[0], [d for m in every for d in device_ids[m]]
        alike = all((m.axes, m.shape, m.onto) == (first.axes, first.shape, None) for m in every)
        if not alike or len(set(devices)) < len(devices):
            return None
        axis = "slices"
        while axis in first.axes:
            axis += "_"
        return Slices(Mesh((axis, *first.axes), np.stack([m.array() for m in every])), tuple(every))

    def on_recording_mesh(self, t: TensorType) -> TensorType:
        """Returns `t` on the mesh of the recording."""
        return t if t.mesh is None else laid_on(t, self.meshes[0])

    def type_of(self, t: Tensor, place: int | None = None) -> TensorType:
        known = t.mesh is None or t.mesh in self.meshes or with_two_axes(t.mesh) == self.whole
        # an op on another mesh raises MeshError
        return self.on_recording_mesh(t.type) if known else t.type

    def laid(self, to: TensorType, of: TensorType) -> TensorType:
        return to if to.mesh is not None and to.mesh.time else self.on_recording_mesh(to)

    def gradients(
        self,
        recorder: Recorder,
        loss: Node,
        wrt: Sequence[Node],
        weights: Sequence[Tensor],
        goals: Sequence[Goal],
    ) -> list[Node]:
        here = [None if t is None else self.on_recording_mesh(t) for t in goals]
        found = derived(recorder.builder, loss, wrt, here)
        self.gradient_of.update(zip(found, wrt, strict=True))
        return found

    def scheduled(
        self, recorder: Recorder, results: Sequence[Node], held: Held
    ) -> tuple[list[Node], Schedule]:
        b = recorder.builder
        given, graph = [*b.inputs], b.graph(results)
        types = [KEY_TYPE if t is None else t.type for t in map(held, given)]
        wholes = [t if t.mesh in self.meshes else laid_on(t, self.whole) for t in types]
        known = {g: b.replaced.get(g, g) for g, w in self.gradient_of.items() if w in given}
        at = dict(zip(given, wholes, strict=True))
        back = {b.finals.get(n, n): at[self.gradient_of[g]] for g, n in known.items()}
        return given, spread(graph, wholes, back, self.meshes, self.whole)


class NeedsSlices(Exception):
    """The function must be recorded anew in the frame `slices`: its tensors lie on several slices
    of one mesh."""

    def __init__(self, slices: Slices) -> None:
        self.slices = slices


def need_one_mesh(recorder: Recorder) -> None:
    """Raises NeedsSlices if the inputs of `recorder` lie on several slices of one mesh."""
    if recorder.frame is WHOLE and not recorder.builder.strict and recorder.stages is None:
        found = Slices.among(n.type.mesh for n in recorder.builder.inputs)
        if found is not None:
            raise NeedsSlices(found)


def on_one(args: Sequence[Tensor]) -> list[Tensor] | None:
    """Moves the arguments of an eager op that lie on several slices of one mesh to the slice of the
    largest. None if they lie otherwise, or inside `ts.strict`."""
    slices = None if settings().strict else Slices.among(a.mesh for a in args)
    if slices is None:
        return None
    home = max((a.type for a in args if a.mesh in slices.meshes), key=lambda t: t.size).mesh
    assert home is not None
    return [
        a if a.mesh in (None, home) else moved(a, laid_on(a.type.complete(), home)) for a in args
    ]


def _along(mesh: Mesh, axis: str) -> tuple[Mesh, ...]:
    return tuple(mesh.slice(**{axis: i}) for i in range(mesh.sizes[axis]))


def with_two_axes(mesh: Mesh) -> Mesh:
    """Returns `mesh`; a mesh of one axis with a second axis of size 1, so that its slices have an
    axis."""
    if len(mesh.axes) > 1:
        return mesh
    axes = (*mesh.axes, "one")
    wide = Mesh(axes, mesh.array()[..., None])
    return wide if mesh.onto is None else wide.fold(Mesh(axes, mesh.onto.array()[..., None]))


def laid_on(t: TensorType, mesh: Mesh) -> TensorType:
    """Returns `t` on `mesh`, gathered along the axes that `mesh` lacks."""
    apart = [a for a in t.split_axes if a not in mesh]
    t = gathered(t, apart) if apart else t
    return TensorType(t.dtype, t.dims, t.partial, mesh, (), t.rest_axes)
