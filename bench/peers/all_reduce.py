"""A worker of `bench/all_reduce.py`: `all_reduce.py SIDE RANK PROCESSES DEVICES PORT`.

SIDE is ours, jax, torch or mpi. For each number of bytes that it reads, it repeats a sum of that
size over all devices, and waits for each sum. MPI's processes are started by mpirun; the first
sends its input to the others.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

HERE = Path(__file__).resolve()
WORK = 64 << 20  # bytes to sum for one line, in 1 to 50 sums
Sum = Callable[[], float]  # one sum; the first element of the result


def ours(rank: int, processes: int, devices: int, port: int) -> Callable[[int], Sum]:
    os.environ["TESSERA_DEVICES"] = str(devices)
    if processes > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": str(port)}  # fmt: skip
    import tessera as ts
    from tessera import dist

    mesh = dist.Mesh(("dp",), devices=processes * devices)

    def of(size: int) -> Sum:
        rows = np.zeros((mesh.size, size // 4), np.float32) + np.arange(1, mesh.size + 1)[:, None]
        given = ts.tensor(
            rows.astype(np.float32), mesh=mesh, layout=f"[{mesh.size}@dp, {size // 4}]"
        )
        part = given.sum(0)  # each device holds its row as a partial sum over dp
        del given
        run = ts.jit(lambda x: dist.all_reduce(x))

        def once() -> float:
            data = run(part).stored
            data.block_until_ready()
            return float(np.asarray(data.addressable_data(0)[:1])[0])

        return once

    return of


def jax(rank: int, processes: int, devices: int, port: int) -> Callable[[int], Sum]:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_num_cpu_devices", devices)
    if processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
    count = processes * devices
    mesh = Mesh(np.array(jax.devices()), ("dp",))
    rows, whole = PartitionSpec("dp"), PartitionSpec()

    def of(size: int) -> Sum:
        def block(at: Any) -> np.ndarray[Any, Any]:
            return np.full((1, size // 4), (at[0].start or 0) + 1, np.float32)

        where = NamedSharding(mesh, rows)
        x = jax.make_array_from_callback((count, size // 4), where, block)
        run = jax.jit(
            jax.shard_map(
                lambda x: jax.lax.psum(x[0], "dp"), mesh=mesh, in_specs=rows, out_specs=whole
            )
        )

        def once() -> float:
            data = run(x)
            data.block_until_ready()
            return float(np.asarray(data.addressable_data(0)[:1])[0])

        return once

    return of


def torch(rank: int, processes: int, devices: int, port: int) -> Callable[[int], Sum]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank,
                            world_size=processes)  # fmt: skip

    def of(size: int) -> Sum:
        x = torch.full((size // 4,), rank + 1.0)
        dist.all_reduce(x)
        first = float(x[0])
        x.zero_()  # the sum is in place, and zeros stay zeros

        def once() -> float:
            dist.all_reduce(x)
            return first + float(x[0])

        return once

    return of


class Mpi:
    """The OpenMPI functions used here, by ctypes, since no header is installed."""

    def __init__(self) -> None:
        name = next(n for n in ("libmpi.so.40", "libmpi.so") if _loads(n))
        self.lib = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        self.lib.MPI_Init(None, None)
        number = ctypes.c_int()
        self.lib.MPI_Comm_rank(self.at("ompi_mpi_comm_world"), ctypes.byref(number))
        self.rank = number.value

    def at(self, name: str) -> ctypes.c_void_p:
        return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(self.lib, name)))

    def hand_on(self, value: int) -> int:
        box = ctypes.c_int(value)
        self.lib.MPI_Bcast(
            ctypes.byref(box), 1, self.at("ompi_mpi_int"), 0, self.at("ompi_mpi_comm_world")
        )
        return box.value

    def sum(self, x: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> None:
        self.lib.MPI_Allreduce(
            x.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p), x.size,
            self.at("ompi_mpi_float"), self.at("ompi_mpi_op_sum"), self.at("ompi_mpi_comm_world"),
        )  # fmt: skip


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True


def mpi(library: Mpi) -> Callable[[int], Sum]:
    def of(size: int) -> Sum:
        x = np.full(size // 4, library.rank + 1, np.float32)
        out = np.empty_like(x)

        def once() -> float:
            library.sum(x, out)
            return float(out[0])

        return once

    return of


def main() -> None:
    side, rank, processes, devices, port = sys.argv[1], *map(int, sys.argv[2:])
    if side == "mpi" and "OMPI_COMM_WORLD_RANK" not in os.environ:
        found = shutil.which("mpirun") or sys.exit("mpirun is not installed here")
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        os.execv(found, [found, *root, "--oversubscribe", "--bind-to", "none", "-np",
                         str(processes), sys.executable, *sys.argv])  # fmt: skip
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # gloo writes there
    library = Mpi() if side == "mpi" else None
    sides = {"ours": ours, "jax": jax, "torch": torch}
    of = mpi(library) if library else sides[side](rank, processes, devices, port)
    sums: dict[int, Sum] = {}
    talks = library is None or library.rank == 0
    if talks:
        print(json.dumps({}), flush=True)
    while True:
        line = sys.stdin.readline() if talks else "0"
        size = int(line or 0) if library is None else library.hand_on(int(line or 0))
        if not size:
            break
        if size not in sums:
            sums.clear()  # only one size is kept at a time
            sums[size] = of(size)
            sums[size]()
        times = min(max(WORK // size, 1), 50)
        begin, worked = time.perf_counter(), time.process_time()
        for _ in range(times):
            value = sums[size]()
        wall_s, cpu_s = time.perf_counter() - begin, time.process_time() - worked
        if talks:
            print(json.dumps([wall_s / times, value, cpu_s / times]), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
