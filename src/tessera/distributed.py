"""Processes and collectives, under the name that training scripts use:
`ts.distributed.all_gather(...)`."""

from typing import TYPE_CHECKING

from .core.devices import process_count, process_index
from .core.public import public
from .core.transports import Transports
from .lang.parallel.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    permute,
    recv,
    recv_from,
    reduce_scatter,
    scatter,
    send,
    shift,
)
from .lang.record.join import all_gather_object, initialize

allreduce = all_reduce


def transports() -> Transports:
    """Returns the transports between this program's devices, why each is available or not, and the
    choice of "auto".

    Joins the run and starts the engine. Asking for an unavailable transport changes no result: the
    choice of "auto" carries the data. `print` it for a table.
    """
    from .runtime.transports import transports as found  # it loads the engine

    return found()


__all__ = [
    "all_gather", "all_gather_object", "all_reduce", "all_to_all", "allreduce", "barrier",
    "broadcast", "gather",
    "initialize", "permute", "process_count", "process_index", "recv", "recv_from",
    "reduce_scatter", "scatter", "send", "shift", "transports",
]  # fmt: skip
if not TYPE_CHECKING:  # a checker reports an unknown name
    __getattr__ = public("distributed", globals())
