"""Folding of a mesh onto its remaining devices.

>>> from tessera import dist
>>> mesh = dist.Mesh.parse("dp=4 tp=2")
>>> folded_to_fit(mesh, [0, 1, 2, 4, 7]).physical.text()  # four of them: five would be no faster
'dp=2 tp=2'
>>> folded_to_fit(mesh, range(100)) == mesh
True
>>> folded_to_fit(dist.Mesh.parse("dp=24"), [2, 3, 4, 5, 6, 7]).physical
Mesh(('dp',), devices=range(2, 8), shape=(6,))
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from math import prod

from ..core.errors import MeshError
from ..core.mesh import Mesh


def folded_to_fit(mesh: Mesh, devices: Iterable[int]) -> Mesh:
    """The logical mesh `mesh`, folded onto its devices in `devices`, as many as can share its
    places evenly. Leading axes are folded first. Raises MeshError if no device is left."""
    logical = mesh.unfolded
    left = [i for i in logical.ids if i in {*devices}]
    if len(left) == logical.size:
        return logical
    if not left:
        raise MeshError(
            "elastic: no device of the mesh is left",
            mesh=logical,
            fix="start the program again where there are devices",
        )
    ways = [[n for n in range(1, size + 1) if size % n == 0] for size in logical.shape]
    fits = [sizes for sizes in product(*ways) if prod(sizes) <= len(left)]
    sizes = max(fits, key=lambda sizes: (prod(sizes), sizes[::-1]))
    return logical.fold(onto=Mesh(logical.axes, left[: prod(sizes)], sizes))
