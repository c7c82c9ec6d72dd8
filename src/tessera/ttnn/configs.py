"""What can a program of TT-NN say of memories, cores and kernels? It is kept and shown, and has no
effect on results: those are of XLA here.

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
    """An enumeration that says which members it has, where another one is asked for."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in cls.__members__:  # Python 3.11 looks for them here
            return cls.__members__[name]
        raise no_member(cls.__name__, name, cls.__members__)


class Word(enum.Enum, metaclass=Members):
    """A member of an enumeration of TT-NN: it prints as `name.member`."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    __str__ = __repr__


def words(name: str, members: str) -> Any:
    """TT-NN's enumeration `name`: its members print as `name.member`."""
    made = cast(Any, Word)(name, members)
    made.__module__, made.__doc__ = __name__, f"TT-NN's {name}."
    return made


Arch = words("Arch", "INVALID GRAYSKULL WORMHOLE_B0 BLACKHOLE")
BufferType = words("BufferType", "DRAM L1 SYSTEM_MEMORY L1_SMALL TRACE")
TensorMemoryLayout = words(
    "TensorMemoryLayout", "INTERLEAVED HEIGHT_SHARDED WIDTH_SHARDED BLOCK_SHARDED ND_SHARDED"
)
ShardStrategy = words("ShardStrategy", "HEIGHT WIDTH BLOCK")
ShardOrientation = words("ShardOrientation", "ROW_MAJOR COL_MAJOR")
StorageType = words("StorageType", "HOST DEVICE")
MathFidelity = words("MathFidelity", "LoFi HiFi2 HiFi3 HiFi4 Invalid")
Topology = words("Topology", "Ring Linear Mesh Torus")
ReduceType = words("ReduceType", "Sum Mean Max Min Std Var")
LossReductionMode = words("LossReductionMode", "NONE SUM MEAN")
EmbeddingsType = words("EmbeddingsType", "GENERIC PADDED BINARY")
DispatchCoreType = words("DispatchCoreType", "WORKER ETH")
DispatchCoreAxis = words("DispatchCoreAxis", "ROW COL")
FabricConfig = words(
    "FabricConfig",
    "DISABLED FABRIC_1D FABRIC_1D_RING FABRIC_1D_NEIGHBOR_EXCHANGE FABRIC_2D FABRIC_2D_TORUS"
    " FABRIC_2D_TORUS_X FABRIC_2D_TORUS_Y FABRIC_2D_TORUS_XY FABRIC_2D_DYNAMIC CUSTOM",
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
        """How many cores."""
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
        """How many cores; ranges do not overlap."""
        sizes = ((r.end.x - r.start.x + 1) * (r.end.y - r.start.y + 1) for r in self)
        return sum(sizes)


class _Options:
    """What was given, by name."""

    def __init__(self, *given: object, **options: object) -> None:
        for key, value in options.items():
            setattr(self, key, value)
        self._given, self._options = given, options

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        parts = [*map(repr, self._given), *(f"{k}={v!r}" for k, v in self._options.items())]
        return f"{type(self).__name__}({', '.join(parts)})"


def _options(*names: str) -> list[Any]:
    return [type(n, (_Options,), {"__doc__": f"TT-NN's {n}: kept, without effect."}) for n in names]


(
    ShardSpec, NdShardSpec, DispatchCoreConfig, WormholeComputeKernelConfig,
    GrayskullComputeKernelConfig, DeviceComputeKernelConfig, BlackholeComputeKernelConfig,
    MatmulMultiCoreReuseProgramConfig, MatmulMultiCoreReuseMultiCastProgramConfig,
    MatmulMultiCoreReuseMultiCast1DProgramConfig,
    MatmulMultiCoreReuseMultiCastDRAMShardedProgramConfig, LayerNormDefaultProgramConfig,
    LayerNormShardedMultiCoreProgramConfig, SoftmaxDefaultProgramConfig,
    SoftmaxShardedMultiCoreProgramConfig, SDPAProgramConfig, SubDevice,
) = _options(
    "ShardSpec", "NdShardSpec", "DispatchCoreConfig", "WormholeComputeKernelConfig",
    "GrayskullComputeKernelConfig", "DeviceComputeKernelConfig", "BlackholeComputeKernelConfig",
    "MatmulMultiCoreReuseProgramConfig", "MatmulMultiCoreReuseMultiCastProgramConfig",
    "MatmulMultiCoreReuseMultiCast1DProgramConfig",
    "MatmulMultiCoreReuseMultiCastDRAMShardedProgramConfig", "LayerNormDefaultProgramConfig",
    "LayerNormShardedMultiCoreProgramConfig", "SoftmaxDefaultProgramConfig",
    "SoftmaxShardedMultiCoreProgramConfig", "SDPAProgramConfig", "SubDevice",
)  # fmt: skip


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
class MemoryConfig:
    """Where a tensor lies in a device's memories: shown by `get_memory_config`, without effect."""

    memory_layout: Any = TensorMemoryLayout.INTERLEAVED
    buffer_type: Any = BufferType.DRAM
    shard_spec: Any = None
    nd_shard_spec: Any = None

    def is_sharded(self) -> bool:
        """Whether the tensor is cut over the cores of a device."""
        interleaved = self.memory_layout is TensorMemoryLayout.INTERLEAVED
        return not interleaved or self.nd_shard_spec is not None


DRAM_MEMORY_CONFIG = MemoryConfig()
L1_MEMORY_CONFIG = MemoryConfig(buffer_type=BufferType.L1)
L1_HEIGHT_SHARDED_MEMORY_CONFIG = MemoryConfig(TensorMemoryLayout.HEIGHT_SHARDED, BufferType.L1)
L1_WIDTH_SHARDED_MEMORY_CONFIG = MemoryConfig(TensorMemoryLayout.WIDTH_SHARDED, BufferType.L1)
L1_BLOCK_SHARDED_MEMORY_CONFIG = MemoryConfig(TensorMemoryLayout.BLOCK_SHARDED, BufferType.L1)


def create_sharded_memory_config(
    shape: Sequence[int],
    core_grid: object,
    strategy: Any,
    orientation: Any = None,
    use_height_and_width_as_shard_shape: bool = False,
    **options: object,
) -> MemoryConfig:
    """A `MemoryConfig` that cuts a tensor over the cores of a device."""
    layout = TensorMemoryLayout[f"{strategy.name}_SHARDED"]
    spec = ShardSpec(core_grid, list(shape), orientation or ShardOrientation.ROW_MAJOR)
    return MemoryConfig(layout, BufferType.L1, spec)


class UnaryOpType(Word):
    """Functions of one number, which `activation=` names too."""

    RELU = "relu"
    GELU = "gelu"
    SILU = "silu"
    SIGMOID = "sigmoid"
    TANH = "tanh"
    EXP = "exp"
    SQRT = "sqrt"
    RSQRT = "rsqrt"
    RECIP = "reciprocal"
    NEG = "neg"
    ABS = "abs"
    LOG = "log"
    SQUARE = "square"
    RELU6 = "relu6"
    SOFTPLUS = "softplus"


@dataclass(frozen=True)
class UnaryWithParam:
    """A function of one number with a parameter of its own."""

    op_type: UnaryOpType
    param: float | None = None


__all__ = [
    "DEVICE_STORAGE_TYPE",
    "DRAM_MEMORY_CONFIG",
    "L1_BLOCK_SHARDED_MEMORY_CONFIG",
    "L1_HEIGHT_SHARDED_MEMORY_CONFIG",
    "L1_MEMORY_CONFIG",
    "L1_WIDTH_SHARDED_MEMORY_CONFIG",
    "Arch",
    "BlackholeComputeKernelConfig",
    "BufferType",
    "CoreCoord",
    "CoreGrid",
    "CoreRange",
    "CoreRangeSet",
    "DeviceComputeKernelConfig",
    "DispatchCoreAxis",
    "DispatchCoreConfig",
    "DispatchCoreType",
    "EmbeddingsType",
    "FabricConfig",
    "GrayskullComputeKernelConfig",
    "LayerNormDefaultProgramConfig",
    "LayerNormShardedMultiCoreProgramConfig",
    "LossReductionMode",
    "MathFidelity",
    "MatmulMultiCoreReuseMultiCast1DProgramConfig",
    "MatmulMultiCoreReuseMultiCastDRAMShardedProgramConfig",
    "MatmulMultiCoreReuseMultiCastProgramConfig",
    "MatmulMultiCoreReuseProgramConfig",
    "MemoryConfig",
    "NdShardSpec",
    "ReduceType",
    "SDPAProgramConfig",
    "ShardOrientation",
    "ShardSpec",
    "ShardStrategy",
    "SoftmaxDefaultProgramConfig",
    "SoftmaxShardedMultiCoreProgramConfig",
    "StorageType",
    "SubDevice",
    "SubDeviceId",
    "TensorMemoryLayout",
    "Tile",
    "Topology",
    "UnaryOpType",
    "UnaryWithParam",
    "WormholeComputeKernelConfig",
    "create_sharded_memory_config",
]  # fmt: skip
