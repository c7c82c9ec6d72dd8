"""Tensor programs on a named mesh of devices: layouts in, collectives out, one program to run.

>>> import tessera as ts
>>> mesh = ts.dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
>>> x = ts.tensor([[1.0, 2.0], [3.0, 4.0]], mesh=mesh, layout="[2@dp, 2]")
>>> ts.sum(x).type
f32[] +dp
>>> ts.sum(x).item()
10.0
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from . import dist, graph, mesh, nn, op, optim
from .core.dtypes import (
    bf16,
    complex64,
    complex128,
    f16,
    f32,
    f64,
    fp8_e4m3,
    fp8_e5m2,
    int8,
    int32,
    int64,
    uint8,
    uint32,
    uint64,
)
from .core.dtypes import bool_ as bool
from .core.environment import EnvironmentVariableWarning
from .core.errors import (
    BackendError,
    CheckpointError,
    DeviceLostError,
    DonatedError,
    DTypeError,
    EngineWarning,
    GraphError,
    LayoutError,
    MeshError,
    OptionWarning,
    ShapeError,
    StrategyError,
    StrategyWarning,
    TesseraError,
    TraceWarning,
    UnknownNameError,
    UsageError,
)
from .core.flags import prepare
from .core.mesh import Mesh
from .core.public import public
from .core.ranks import rank_of
from .core.version import VERSION
from .ir.graph.node import Graph
from .ir.schedule.schedule import Schedule
from .lang.autodiff import linalg
from .lang.autodiff.associative_scan import associative_scan
from .lang.autodiff.branches import cond, switch
from .lang.autodiff.custom import custom_gradient, value_and_grad, vjp
from .lang.autodiff.forward import jvp
from .lang.autodiff.grad import grad
from .lang.autodiff.jacobians import hessian, jacfwd, jacrev, linearize
from .lang.autodiff.map_chunks import map_chunks
from .lang.autodiff.map_rows import map
from .lang.autodiff.scan import fori_loop, scan
from .lang.autodiff.tape import stop_gradient
from .lang.autodiff.vmap import vmap
from .lang.autodiff.while_loop import while_loop
from .lang.jit.cache_limits import clear_caches, set_program_cache
from .lang.jit.jit import jit
from .lang.math import fft, random
from .lang.math import functions as _functions
from .lang.math.create import tensor
from .lang.math.functions import *  # noqa: F403  # all that it lists
from .lang.math.ragged_padding import Pad
from .lang.math.random import seed
from .lang.parallel.local.distribute import distribute
from .lang.program.annotated_function import function
from .lang.record.contexts import autocast, no_grad, strict
from .lang.record.recorder import named_scope
from .lang.record.static_arguments import StaticWarning
from .lang.value.engine import set_engine
from .lang.value.tensor import Tensor
from .nn.remat import remat
from .runtime.cpu.malloc import share_heap

if TYPE_CHECKING:
    from . import (
        checkpoint,
        data,
        debug,
        distributed,
        elastic,
        export,
        interop,
        kernel,
        pipeline,
        plan,
        schedule,
    )
    from .interop.jax_models import from_jax_model
    from .interop.torch_module import from_torch
    from .lang.foreign.jax_program import from_jax_function
    from .lang.jit.tuner import tune
    from .lang.value.engine import Engine

__version__ = VERSION
__all__ = [
    "BackendError",
    "CheckpointError",
    "DTypeError",
    "DeviceLostError",
    "DonatedError",
    "EngineWarning",
    "EnvironmentVariableWarning",
    "GraphError",
    "LayoutError",
    "MeshError",
    "OptionWarning",
    "Pad",
    "ShapeError",
    "StaticWarning",
    "StrategyError",
    "StrategyWarning",
    "Tensor",
    "TesseraError",
    "TraceWarning",
    "UnknownNameError",
    "UsageError",
    "associative_scan",
    "autocast",
    "bf16",
    "bool",
    "checkpoint",
    "clear_caches",
    "complex64",
    "complex128",
    "cond",
    "custom_gradient",
    "data",
    "debug",
    "dist",
    "distribute",
    "distributed",
    "elastic",
    "export",
    "f16",
    "f32",
    "f64",
    "fft",
    "fori_loop",
    "fp8_e4m3",
    "fp8_e5m2",
    "from_jax",
    "from_jax_function",
    "from_jax_model",
    "from_torch",
    "function",
    "grad",
    "graph",
    "hessian",
    "int8",
    "int32",
    "int64",
    "interop",
    "jacfwd",
    "jacrev",
    "jit",
    "jvp",
    "kernel",
    "linalg",
    "linearize",
    "map",
    "map_chunks",
    "mesh",
    "named_scope",
    "nn",
    "no_grad",
    "op",
    "optim",
    "pipeline",
    "plan",
    "random",
    "remat",
    "scan",
    "schedule",
    "seed",
    "set_program_cache",
    "stop_gradient",
    "strict",
    "switch",
    "tensor",
    "tune",
    "uint8",
    "uint32",
    "uint64",
    "value_and_grad",
    "vjp",
    "vmap",
    "while_loop",
]  # fmt: skip
__all__ += _functions.__all__  # fmt: skip

prepare()
share_heap()


def _html(value: Any) -> str:
    from .show.notebook import html  # its library is slow

    return html(value)


_kinds: tuple[Any, ...] = (Tensor, Mesh, Graph, Schedule)
for _kind in _kinds:
    _kind._repr_html_ = _html


def _load_engine() -> Engine:
    from .compile import Engine as Loaded

    return Loaded()


def _count_devices() -> int:
    from .runtime.devices import device_count

    return device_count()


def _place() -> tuple[int, int]:
    if sys.modules.get("jax") is None:  # the launcher's numbers, until this process joins its run
        own = rank_of()
        return (own.rank, own.size) if own is not None else (0, 1)
    from .runtime.devices import process_place

    return process_place()


def _platform() -> str:
    plugins = [n for n in (12, 13) if find_spec(f"jax_cuda{n}_plugin")]
    if sys.modules.get("jax") is None and not plugins:
        return "cpu"
    from .runtime.devices import platform

    return platform()


set_engine(_load_engine)


def _wire() -> None:
    from .core.devices import set_device_provider

    set_device_provider(_count_devices, _place, _platform)


_wire()


def from_jax(array: Any, on: Mesh | None = None) -> Tensor:
    """Returns a `jax.Array` as a Tensor; the mesh has the axes of its NamedSharding."""
    return tensor(array, mesh=on)


_LATE = (
    "checkpoint", "data", "debug", "distributed", "elastic", "export", "interop", "kernel",
    "pipeline", "plan", "schedule",
    "interop.jax_models:from_jax_model", "interop.torch_module:from_torch",
    "lang.foreign.jax_program:from_jax_function", "lang.jit.tuner:tune",
)  # fmt: skip
if not TYPE_CHECKING:  # a checker reports an unknown name
    __getattr__ = public("ts", globals(), late=_LATE)
