"""The collectives under the name that training scripts use: `ts.distributed.all_gather(...)`."""

from .lang.collectives import (
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

allreduce = all_reduce
__all__ = [
    "all_gather", "all_reduce", "all_to_all", "allreduce", "barrier", "broadcast", "gather",
    "permute", "recv", "recv_from", "reduce_scatter", "scatter", "send", "shift",
]  # fmt: skip
