"""Programs compiled for GPUs on a machine that has none: their text, and their memory.

Inside `described`, programs are recorded and compiled for GPUs that are only described. `compiled`
gives the text after XLA's scheduling and its memory analysis. Nothing can run there, and no kernel
is chosen by its measured time. It needs two wheels beside jax: `make check-gpu-aot` has them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from ..core.errors import BackendError
from ..core.layout import TensorType
from ..core.mesh import Mesh
from ..ir.schedule.donation import donation_aliases
from ..ir.schedule.schedule import Collective, Compute, Loop, Region, Schedule, Send
from . import arrays, devices, offload
from .lower import lower
from .stepped_executor import step_program

# Without it XLA would look for a GPU on which it could time kernels.
NO_TIMES = {"xla_gpu_autotune_level": 0}
FIX = "make check-gpu-aot installs the wheels in .venv-gpu: PYTHONPATH=.venv-gpu JAX_PLATFORMS=cpu"


@dataclass(frozen=True)
class Chip:
    """A GPU as its data sheet describes it; a core is a streaming multiprocessor."""

    name: str
    memory_bytes: int
    bandwidth: int  # bytes a second
    cores: int = 132
    lanes: int = 128
    registers: int = 1 << 16
    cache_bytes: int = 50 << 20
    shared_bytes: int = 228 << 10
    shared_each: int = 48 << 10
    shared_asked: int = 227 << 10
    clock_ghz: float = 1.98
    capability: int = 9

    @property
    def text(self) -> str:
        """The description in the form that XLA reads."""
        about = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "threads_per_core_limit": 2048,
            "block_dim_limit_x": (1 << 31) - 1,
            "block_dim_limit_y": (1 << 16) - 1,
            "block_dim_limit_z": (1 << 16) - 1,
            "core_count": self.cores,
            "fpus_per_core": self.lanes,
            "registers_per_core_limit": self.registers,
            "registers_per_block_limit": self.registers,
            "shared_memory_per_core": self.shared_bytes,
            "shared_memory_per_block": self.shared_each,
            "shared_memory_per_block_optin": self.shared_asked,
            "l2_cache_size": self.cache_bytes,
            "memory_bandwidth": self.bandwidth,
            "device_memory_size": self.memory_bytes,
            "clock_rate_ghz": self.clock_ghz,
        }
        rows = " ".join(f"{key}: {value}" for key, value in about.items())
        return (
            f"gpu_device_info {{ {rows} cuda_compute_capability {{ major: {self.capability} }} }}"
            ' platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 }'
            " runtime_version { major: 12 minor: 8 }"
            f' device_description_str: "{self.name}"'
        )


CHIPS = {
    "h100": Chip("NVIDIA H100", 80 * 10**9, 3_350 * 10**9),
    "h200": Chip("NVIDIA H200", 141 * 10**9, 4_800 * 10**9),
}


def why_not() -> str:
    """Returns why this process cannot compile for GPUs; "" if it can."""
    try:
        _devices(CHIPS["h100"], 1)
    except BackendError as error:
        return str(error).splitlines()[0]
    return ""


@contextmanager
def described(chip: str, count: int = 1) -> Iterator[Sequence[jax.Device]]:
    """Lets programs inside be recorded and compiled for `count` GPUs of the kind `chip`.

    Values stay where they were, so a program inside can be planned and compiled, not called.
    """
    made = _devices(CHIPS[chip], count)
    devices.DESCRIBED.append(made)
    _forget()
    try:
        yield made
    finally:
        devices.DESCRIBED.pop()
        _forget()


def _devices(chip: Chip, count: int) -> Sequence[jax.Device]:
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # no driver is needed
    try:
        found = topologies.get_topology_desc(
            platform="cuda", target_config=chip.text, topology=f"1x1x{count}"
        )
    except (RuntimeError, NotImplementedError, ValueError, KeyError) as error:
        raise BackendError(
            f"ahead of time: the engine has no compiler for GPUs: {str(error).splitlines()[0]}",
            fix=FIX,
        ) from None
    return tuple(found.devices)


def _forget() -> None:
    """Clears the caches that hold devices."""
    devices.jax_mesh.cache_clear()
    arrays.sharding.cache_clear()


@dataclass(frozen=True)
class Compiled:
    """A program compiled ahead of time. `steps` are the places of the steps that it runs, and
    `schedule` has them by themselves. `donate` maps donated arguments to the results in their
    memory, and `bytes` is XLA's memory analysis, as `program_bytes` gives it."""

    name: str
    steps: tuple[int, ...]
    schedule: Schedule
    donate: Mapping[int, int]
    text: str
    bytes: Mapping[str, int]

    @property
    def peak(self) -> int:
        """The bytes of one device while it runs."""
        b = self.bytes
        return b["arguments"] + b["results"] - b["reused"] + b["temporary"]


def compiled(executable: Any, more: Mapping[str, Any] = NO_TIMES) -> list[Compiled]:
    """Returns the program of `executable`, a `Program` of `jit.programs`, compiled for the
    described devices; for a pipeline, a program for each kind of step of each stage. `more` are
    further compiler options."""
    s = executable.schedule
    options, under = executable.options()
    options = {**(options or {}), **more}
    if not s.is_staged:
        program = lower(s, executable.donate, options, under)
        every = tuple(range(len(s.steps)))
        return [_compiled(s.name, every, s, executable.donate, program, executable.wants)]
    alike: dict[object, list[int]] = {}
    aliases = donation_aliases(s)
    for i, step in enumerate(s.steps):
        if not isinstance(step, Send | Loop):
            same = step.graph.key or step.graph
            alike.setdefault((step.mesh, tuple(aliases[i].items()), same), []).append(i)
    found = []
    for places in alike.values():
        step = s.steps[places[0]]
        assert isinstance(step, Compute | Collective | Region)
        program = step_program(s, step, aliases[places[0]], options, under)
        ins = [n.type.on(step.mesh or s.mesh) for n in step.graph.inputs]
        name = f"stage {step.stage}, {step.note or step.kind}"
        alone = _alone(step, s)
        found.append(_compiled(name, tuple(places), alone, aliases[places[0]], program, ins))
    return found


def _alone(step: Compute | Collective | Region, whole: Schedule) -> Schedule:
    """Returns the schedule of one step by itself."""
    if isinstance(step, Region):
        return step.body
    mesh: Mesh | None = step.mesh or whole.mesh
    ins, outs = (tuple(n.type for n in row) for row in (step.graph.inputs, step.graph.outputs))
    reads = tuple(range(len(ins)))
    writes = tuple(range(len(ins), len(ins) + len(outs)))
    made = type(step)(reads, writes, step.graph)
    return Schedule(step.kind, mesh, (*ins, *outs), reads, writes, (made,), whole.options)


def _compiled(
    name: str, steps: tuple[int, ...], s: Schedule, donate: Mapping[int, int], program: Any,
    wants: Sequence[TensorType],
) -> Compiled:  # fmt: skip
    args = [
        jax.ShapeDtypeStruct(arrays.array_shape(t), t.dtype.numpy, sharding=arrays.sharding(t))
        for t in wants
    ]
    made = program.trace(*args).lower(lowering_platforms=("cuda",)).compile()
    return Compiled(name, steps, s, donate, made.as_text(), offload.bytes_of(made))
