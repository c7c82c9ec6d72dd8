"""A first program for a cluster: the sum over all processes, which each of them checks."""

import numpy as np

import tessera as ts
from tessera import dist

size = dist.process_count()
mesh = ts.mesh.auto(("dp",))  # all devices of all processes
x = ts.tensor(np.arange(2.0 * mesh.size), mesh=mesh, layout=f"[{2 * mesh.size}@dp]")
total = dist.all_reduce(x.sum()).item()
assert total == mesh.size * (2 * mesh.size - 1), total
if dist.process_index() == 0:
    print(f"{total:g} on {mesh.size} devices of {size} processes")
