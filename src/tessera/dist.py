"""Meshes, layouts, collectives: `from tessera import dist`."""

from typing import TYPE_CHECKING

from .core.devices import process_count, process_index
from .core.mesh import Mesh
from .core.public import public
from .lang.math.create import ShardSpec, redistribute
from .lang.math.create import dist_tensor as tensor
from .lang.parallel.builtin_strategies import strategy
from .lang.parallel.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    permute,
    recv,
    reduce_scatter,
    scatter,
    send,
    shard,
    shift,
)
from .lang.parallel.strategy import AxisStrategy, Strategy, place
from .lang.record.determinism import deterministic, set_deterministic
from .lang.record.join import all_gather_object
from .lang.record.to_host import to_host
from .lang.value.collective_timeout import set_collective_timeout

if TYPE_CHECKING:
    from .elastic import elastic, resize
    from .observe.inspect import inspect
    from .observe.profile import profile
    from .observe.validate import validate_determinism

allreduce = all_reduce
__all__ = [
    "AxisStrategy", "Mesh", "ShardSpec", "Strategy", "all_gather",
    "all_gather_object", "all_reduce", "all_to_all",
    "allreduce", "barrier", "broadcast", "deterministic", "elastic", "gather", "inspect", "permute",
    "place",
    "process_count", "process_index", "profile", "recv", "redistribute", "reduce_scatter",
    "resize", "scatter", "send",
    "set_collective_timeout", "set_deterministic", "shard", "shift", "strategy", "tensor",
    "to_host", "validate_determinism",
]  # fmt: skip
_LATE = (
    "elastic:elastic", "elastic:resize", "observe.inspect:inspect", "observe.profile:profile",
    "observe.validate:validate_determinism",
)  # fmt: skip
if not TYPE_CHECKING:  # a checker reports an unknown name
    __getattr__ = public("dist", globals(), late=_LATE)
