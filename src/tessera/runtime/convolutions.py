"""How does the engine compute a convolution? With its channels last; on a CPU by either library.

The one that the engine prefers takes one core for a convolution whose kernel is small, however
large its images are; the other one takes all, and more of the processor's time. With two cores, a
residual network of 32 to 128 channels takes 0.96 of the time with the other one; with one core, 1.3
of it (`bench/nets.py`, an AMD EPYC with AVX-512).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial, reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..core import flags
from ..core.mesh import Mesh
from ..ir.graph.node import Graph, Node
from ..ir.schedule.schedule import Region, Schedule
from ..ops.conv import conv as op

Array = Any
# As the gradient of a weight, a convolution has an image for its kernel, and sums over the batch.
# With kernels of so many places, a CPU is up to twice as fast with so many images at a time; with
# more of them, where a program would have more than so many parts.
PLACES, IMAGES, PARTS = 64, 16, 8
SMALL = 1 << 17  # elements of a kernel from which the preferred library takes several cores
# A list of what goes to the preferred library: single products, and with them no convolutions.
OTHER = {flags.FUSION: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}


def conv(x: Array, w: Array, *how: Any) -> Array:
    """That of x [N, groups, in, *sizes] with w [groups, out, in, *kernel]. What lies as it is
    wanted already (passes/channels_last.py) is not moved. `how` is the stride, the pads, the
    dilation and the spread of the op."""
    x = lax.transpose(x, (0, *range(3, x.ndim), 1, 2))
    w = lax.transpose(w, (*range(3, w.ndim), 2, 0, 1))
    made = partial(_last, how)
    parts = _parts(x.shape[-1]) if math.prod(w.shape[:-3]) >= PLACES else 1
    if parts > 1:
        out = lax.platform_dependent(x, w, cpu=partial(_in_parts, parts, made), default=made)
    else:
        out = made(x, w)
    return lax.transpose(out, (0, out.ndim - 2, out.ndim - 1, *range(1, out.ndim - 2)))


def _parts(images: int) -> int:
    units, rest = divmod(images, IMAGES)
    return 1 if rest or not units else max(k for k in range(1, PARTS + 1) if units % k == 0)


def _in_parts(parts: int, made: Callable[[Array, Array], Array], x: Array, w: Array) -> Array:
    each = zip(jnp.split(x, parts, -1), jnp.split(w, parts, -3), strict=True)
    return reduce(add, (made(*part) for part in each))


def _last(how: Sequence[Any], x: Array, w: Array) -> Array:
    """That of x [N, *sizes, groups, in] with w [*kernel, in, groups, out]. XLA counts groups
    itself, which lie side by side with the channels."""
    stride, pads, dilation, spread = how
    (groups, outs), rank = w.shape[-2:], x.ndim - 1
    order = (0, rank - 1, *range(1, rank - 1))
    out = lax.conv_general_dilated(
        lax.reshape(x, (*x.shape[:-2], groups * x.shape[-1])),
        lax.reshape(w, (*w.shape[:-2], groups * outs)),
        stride,
        pads,
        lhs_dilation=spread,
        rhs_dilation=dilation,
        dimension_numbers=lax.ConvDimensionNumbers(
            order, (rank - 1, rank - 2, *range(rank - 2)), order
        ),
        feature_group_count=groups,
        preferred_element_type=jnp.float32 if x.dtype.itemsize < 4 else None,
    )
    return lax.reshape(out, (*out.shape[:-1], groups, outs))


# -- the library ----------------------------------------------------------------------------------
def options(schedule: Schedule) -> dict[str, str]:
    """The compiler's options for `schedule`; its bits then depend on how many cores there are."""
    if jax.default_backend() != "cpu" or not flags.fuses() or cores_of_a_device(schedule.mesh) < 2:
        return {}
    sizes = [
        (n.kind.flops(tuple(a.type for a in n.args), n.types, n.attrs), n.args[1].type.local_shape)
        for n in _nodes(schedule)
        if n.op == op.name
    ]
    small = sum(flops for flops, kernel in sizes if math.prod(kernel) < SMALL)
    return OTHER if 2 * small > sum(flops for flops, _ in sizes) else {}


@cache
def cores_of_a_device(mesh: Mesh | None) -> int:
    """How many of this process's cores there are for each of its devices in `mesh`."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    devices = mesh.physical.size if mesh is not None else 1
    return mine // max(1, devices // jax.process_count())


def _nodes(schedule: Schedule) -> Iterator[Node]:
    for step in schedule.steps:
        if isinstance(step, Region):
            yield from _nodes(step.body)
        else:
            yield from _of(step.graph)


def _of(graph: Graph) -> Iterator[Node]:
    """The nodes of `graph`, those of bodies included."""
    for n in graph.nodes:
        yield n
        for body in n.attrs.values():
            if isinstance(body, Graph):
                yield from _of(body)
