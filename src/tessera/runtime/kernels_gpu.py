"""Kernels of Tile IR on NVIDIA GPUs, by Pallas and its backend Mosaic GPU."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec

from ..ir.tile.body import Enter, Op, every
from ..ir.tile.kernel import Kernel
from .kernels_gpu_body import Run

Array = Any


def gpu_call(
    k: Kernel, *arrays: Array, axes: tuple[Any, ...] = (), interpret: Any = None
) -> tuple[Array, ...]:
    """The outputs of a kernel for the arrays of its inputs, on the device that runs it. For one on
    a mesh, `axes` are those axes of the program's mesh, inside `shard_map`. `interpret` has the
    parameters of the backend's interpreter, which runs on CPUs.

    Raises BackendError, with the line, for what the lowering does not have."""
    ins, made = ([r for r in k.refs if (r.kind == "in") == own] for own in (True, False))
    entries = [s for s in every(k.body) if isinstance(s, Enter)]
    slots = [k.counts(s) for s in k.signals]
    slots += [tuple(dict(k.mesh)[a] for a in s.axes) for s in entries]

    def body(*refs: Any) -> None:
        names: dict[str, Any] = dict(k.sizes)
        names |= {n: lax.axis_index(f"grid {n}") for n in k.extents}
        names |= {f"rank_{a}": lax.axis_index(axis) for (a, _), axis in zip(k.mesh, axes)}
        memory = dict(zip((r.name for r in (*ins, *made)), refs))
        semaphores = refs[len(memory) :]
        signals = dict(zip((s.name for s in k.signals), semaphores))
        entered = dict(zip(map(id, entries), semaphores[len(signals) :]))
        mine = dict(zip((a for a, _ in k.mesh), axes))
        Run(k, memory, signals, entered, mine, interpret is not None).block(k.body, names, {})

    call = plgpu.kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct(k.shape(r), r.dtype.numpy) for r in made),
        scratch_types=tuple(map(plgpu.SemaphoreType.REGULAR, slots)),
        grid=tuple(k.extents.values()),
        grid_names=tuple(f"grid {n}" for n in k.extents),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name=k.name,
        interpret=interpret,
    )
    return tuple(x for x, r in zip(call(*arrays), made) if r.kind == "out")


@lru_cache(maxsize=256)
def why_not(k: Kernel) -> str:
    """Returns why a kernel is not lowered for GPUs, the first line of the error; "" if it is."""
    chip = getattr(jax.devices()[0], "compute_capability", "9.0")
    if not chip.startswith("9.") and any(
        isinstance(s, Op) and s.op == "dot" for s in every(k.body)
    ):
        return f"products are for chips of compute capability 9, not {chip}"
    try:
        lowered(k)
    except Exception as error:  # those of the backend are of many kinds
        return str(error).strip().splitlines()[0] if str(error) else type(error).__name__
    return ""


def lowered(k: Kernel) -> Any:
    """The kernel lowered ahead of time for H100s, which need not be there. On a mesh its arrays
    have a dim for each axis in front."""
    axes, sizes = tuple(a for a, _ in k.mesh), tuple(n for _, n in k.mesh)
    chip = AbstractDevice("NVIDIA H100", 132, platform="gpu")
    mesh = AbstractMesh(
        sizes or (1,), axes or ("device",), abstract_device=chip,
        axis_types=(AxisType.Auto,) * max(1, len(axes)),
    )  # fmt: skip

    def call(*arrays: Array) -> Any:
        outs = gpu_call(k, *(x.reshape(x.shape[len(axes) :]) for x in arrays), axes=axes)
        return [x.reshape((1,) * len(axes) + x.shape) for x in outs]

    spec = PartitionSpec(*axes)
    args = [
        jax.ShapeDtypeStruct((*sizes, *k.shape(r)), r.dtype.numpy) for r in k.refs if r.kind == "in"
    ]
    with jax.sharding.use_abstract_mesh(mesh):
        split = jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return jax.jit(split if axes else call).trace(*args).lower(lowering_platforms=("cuda",))
