"""Meshes, layouts, collectives: `from tessera import dist`."""

from .core.mesh import Mesh
from .lang.create import ShardSpec, all_gather, all_reduce, redistribute, reduce_scatter, shard
from .lang.create import dist_tensor as tensor
from .lang.inspect import inspect
from .lang.strategy import place, strategy

allreduce = all_reduce
__all__ = [
    "Mesh", "ShardSpec", "all_gather", "all_reduce", "allreduce", "inspect", "place",
    "redistribute", "reduce_scatter", "shard", "strategy", "tensor",
]  # fmt: skip
