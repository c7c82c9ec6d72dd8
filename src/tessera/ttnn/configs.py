"""Words of TT-NN for memories, cores and kernels: kept and shown, without effect on results, which
are of XLA here.

>>> DRAM_MEMORY_CONFIG.memory_layout, CoreGrid(y=4, x=8).num_cores
(TensorMemoryLayout.INTERLEAVED, 32)
>>> MatmulMultiCoreReuseMultiCastProgramConfig(in0_block_w=2)
MatmulMultiCoreReuseMultiCastProgramConfig(in0_block_w=2)
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from .names import no_member


class Members(enum.EnumMeta):
    """An enumeration whose error lists its members, where another one is asked for."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in cls.__members__:  # Python 3.11 looks for them here
            return cls.__members__[name]
        raise no_member(cls.__name__, name, cls.__members__)


class Member(enum.Enum, metaclass=Members):
    """A member of an enumeration of TT-NN: it prints as `name.member`."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    __str__ = __repr__


class Options:
    """A class of TT-NN that is kept and shown: its arguments, by name."""

    def __init__(self, *args: object, **options: object) -> None:
        vars(self).update(options)
        self._positional, self._options = args, options

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        parts = [*map(repr, self._positional), *(f"{k}={v!r}" for k, v in self._options.items())]
        return f"{type(self).__name__}({', '.join(parts)})"


def enumeration(name: str, members: str) -> Any:
    """TT-NN's enumeration `name`."""
    made = cast(Any, Member)(name, members)
    made.__module__, made.__doc__ = __name__, f"TT-NN's {name}."
    return made


ENUMERATIONS = {
    name: enumeration(name, members)
    for name, members in {
        "Arch": "INVALID GRAYSKULL WORMHOLE_B0 BLACKHOLE",
        "BufferType": "DRAM L1 SYSTEM_MEMORY L1_SMALL TRACE",
        "DispatchCoreAxis": "ROW COL",
        "DispatchCoreType": "WORKER ETH",
        "EmbeddingsType": "GENERIC PADDED BINARY",
        "FabricConfig": "DISABLED FABRIC_1D FABRIC_1D_RING FABRIC_1D_NEIGHBOR_EXCHANGE FABRIC_2D"
        " FABRIC_2D_TORUS FABRIC_2D_TORUS_X FABRIC_2D_TORUS_Y FABRIC_2D_TORUS_XY FABRIC_2D_DYNAMIC"
        " CUSTOM",
        "FabricReliabilityMode": "STRICT_INIT RELAXED_INIT DYNAMIC_RECONFIG",
        "FabricTensixConfig": "DISABLED MUX",
        "FabricUDMMode": "DISABLED ENABLED",
        "LossReductionMode": "NONE SUM MEAN",
        "MathFidelity": "LoFi HiFi2 HiFi3 HiFi4 Invalid",
        "ReduceType": "Sum Mean Max Min Std Var",
        "ShardOrientation": "ROW_MAJOR COL_MAJOR",
        "ShardStrategy": "HEIGHT WIDTH BLOCK",
        "StorageType": "HOST DEVICE",
        "TensorMemoryLayout": "INTERLEAVED HEIGHT_SHARDED WIDTH_SHARDED BLOCK_SHARDED ND_SHARDED",
        "Topology": "Ring Linear Mesh Torus",
        # Functions of one number, which `activation=` names too (elementwise.py).
        "UnaryOpType": "RELU GELU SILU SIGMOID TANH EXP SQRT RSQRT RECIP NEG ABS LOG SQUARE RELU6"
        " SOFTPLUS",
    }.items()
}  # fmt: skip
OPTIONS = {
    name: cast(Any, type(name, (Options,), {"__doc__": f"TT-NN's {name}: kept, without effect."}))
    for name in (
        "ShardSpec", "NdShardSpec", "DispatchCoreConfig", "WormholeComputeKernelConfig",
        "GrayskullComputeKernelConfig", "DeviceComputeKernelConfig", "BlackholeComputeKernelConfig",
        "MatmulMultiCoreReuseProgramConfig", "MatmulMultiCoreReuseMultiCastProgramConfig",
        "MatmulMultiCoreReuseMultiCast1DProgramConfig",
        "MatmulMultiCoreReuseMultiCastDRAMShardedProgramConfig", "LayerNormDefaultProgramConfig",
        "LayerNormShardedMultiCoreProgramConfig", "SoftmaxDefaultProgramConfig",
        "SoftmaxShardedMultiCoreProgramConfig", "SDPAProgramConfig", "SubDevice",
    )
}  # fmt: skip
globals().update(ENUMERATIONS | OPTIONS)
# Those that this package uses itself, where types are checked.
Arch, BufferType, FabricConfig, LossReductionMode, ReduceType = (
    ENUMERATIONS[n]
    for n in ("Arch", "BufferType", "FabricConfig", "LossReductionMode", "ReduceType")
)
StorageType, TensorMemoryLayout, Topology, UnaryOpType = (
    ENUMERATIONS[n] for n in ("StorageType", "TensorMemoryLayout", "Topology", "UnaryOpType")
)
SubDevice, WormholeComputeKernelConfig = (
    OPTIONS[n] for n in ("SubDevice", "WormholeComputeKernelConfig")
)
DEVICE_STORAGE_TYPE = StorageType.DEVICE


@dataclass(frozen=True)
class CoreCoord:
    """A core, or a size in cores."""

    x: int
    y: int


@dataclass(frozen=True)
class CoreGrid:
    """A grid of cores."""

    y: int
    x: int

    @property
    def num_cores(self) -> int:
        """The number of cores."""
        return self.y * self.x


@dataclass(frozen=True)
class CoreRange:
    """Cores from `start` to `end`, both inclusive."""

    start: CoreCoord
    end: CoreCoord


class CoreRangeSet(frozenset[CoreRange]):
    """Several ranges of cores."""

    def __new__(cls, ranges: Iterable[CoreRange] | CoreRange = ()) -> CoreRangeSet:
        return super().__new__(cls, [ranges] if isinstance(ranges, CoreRange) else ranges)

    def ranges(self) -> list[CoreRange]:
        """The ranges, from the first core on."""
        return sorted(self, key=lambda r: (r.start.y, r.start.x))

    def num_cores(self) -> int:
        """The number of cores; ranges do not overlap."""
        return sum((r.end.x - r.start.x + 1) * (r.end.y - r.start.y + 1) for r in self)


@dataclass(frozen=True)
class Tile:
    """The rows and columns of a tile: shown, without effect."""

    tile_shape: tuple[int, int] = (32, 32)
    transpose_tile: bool = False


@dataclass(frozen=True)
class SubDeviceId:
    """The number of a sub-device: its place in the list that its manager was given."""

    number: int


@dataclass(frozen=True)
class UnaryWithParam:
    """A function of one number with a parameter of its own."""

    op_type: Any
    param: float | None = None


@dataclass(frozen=True)
class MemoryConfig:
    """The place of a tensor in a device's memories: shown by `get_memory_config`, without
    effect."""

    memory_layout: Any = TensorMemoryLayout.INTERLEAVED
    buffer_type: Any = BufferType.DRAM
    shard_spec: Any = None
    nd_shard_spec: Any = None

    def is_sharded(self) -> bool:
        """True if the tensor is cut over the cores of a device."""
        interleaved = self.memory_layout is TensorMemoryLayout.INTERLEAVED
        return not interleaved or self.nd_shard_spec is not None


DRAM_MEMORY_CONFIG = MemoryConfig()
L1_MEMORY_CONFIG = MemoryConfig(buffer_type=BufferType.L1)
L1_HEIGHT_SHARDED_MEMORY_CONFIG, L1_WIDTH_SHARDED_MEMORY_CONFIG, L1_BLOCK_SHARDED_MEMORY_CONFIG = (
    MemoryConfig(TensorMemoryLayout[f"{sharding}_SHARDED"], BufferType.L1)
    for sharding in ("HEIGHT", "WIDTH", "BLOCK")
)


def create_sharded_memory_config(
    shape: Sequence[int], core_grid: object, strategy: Any, orientation: Any = None,
    use_height_and_width_as_shard_shape: bool = False, **options: object,
) -> MemoryConfig:  # fmt: skip
    """A `MemoryConfig` that cuts a tensor over the cores of a device."""
    layout = TensorMemoryLayout[f"{strategy.name}_SHARDED"]
    lies = orientation or ENUMERATIONS["ShardOrientation"].ROW_MAJOR
    return MemoryConfig(layout, BufferType.L1, OPTIONS["ShardSpec"](core_grid, list(shape), lies))


__all__ = [
    *ENUMERATIONS, *OPTIONS, "DEVICE_STORAGE_TYPE", "DRAM_MEMORY_CONFIG",
    "L1_BLOCK_SHARDED_MEMORY_CONFIG", "L1_HEIGHT_SHARDED_MEMORY_CONFIG", "L1_MEMORY_CONFIG",
    "L1_WIDTH_SHARDED_MEMORY_CONFIG", "CoreCoord", "CoreGrid", "CoreRange", "CoreRangeSet",
    "MemoryConfig", "SubDeviceId", "Tile", "UnaryWithParam", "create_sharded_memory_config",
]  # fmt: skip
