"""Invalid mesh arguments, each with its whole error message."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tessera.core import devices
from tessera.core.errors import BackendError, MeshError
from tessera.core.mesh import Mesh, auto, current

# ---- errors ------------------------------------------------------------------------------------
M = Mesh.parse("dp=2 tp=4")
AXES = "  axes : ('dp', 'tp')\n"
AT = "  at   : test_mesh_errors.py\n"
BAD: list[tuple[str, Callable[[], object], str]] = [
    (
        "no axes",
        lambda: Mesh([], 4),
        "Mesh: a mesh needs at least one axis\n"
        "  at  : test_mesh_errors.py\n"
        "  fix : name the axes, for instance Mesh(['dp', 'tp'], devices=range(8))",
    ),
    (
        "axes of a wrong kind",
        lambda: Mesh({"dp"}, 4),  # type: ignore[arg-type]
        "Mesh: axes cannot be {'dp'}\n"
        "  at  : test_mesh_errors.py\n"
        "  fix : pass a list or tuple of names, for instance ['dp', 'tp']",
    ),
    (
        "axis twice",
        lambda: Mesh(["dp", "tp", "dp"], 4),
        "Mesh: axis 'dp' is named twice\n"
        "  axes : ('dp', 'tp', 'dp')\n" + AT + "  fix  : give each axis a name of its own",
    ),
    (
        "axis name",
        lambda: Mesh(["data parallel"], 4),
        "Mesh: axis name 'data parallel' is not an identifier\n"
        "  axes : ('data parallel',)\n"
        + AT
        + "  fix  : use letters, digits and _, for instance 'dp'",
    ),
    (
        "devices twice",
        lambda: Mesh(["dp", "tp"], [0, 1, 1, 0]),
        "Mesh: devices 0, 1 are named twice\n"
        "  axes    : ('dp', 'tp')\n"
        "  devices : [0, 1, 1, 0]\n"
        "  at      : test_mesh_errors.py\n"
        "  fix     : name each device once",
    ),
    (
        "negative id",
        lambda: Mesh(["dp"], range(-1, 19)),
        "Mesh: device id -1 is negative\n"
        "  axes    : ('dp',)\n"
        "  devices : [-1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, ... 20 in all]\n"
        "  at      : test_mesh_errors.py\n"
        "  fix     : name devices by their ids: 0, 1, 2, ...",
    ),
    (
        "id of a wrong kind",
        lambda: Mesh(["dp"], [0, True]),
        "Mesh: device id True is not a whole number\n"
        "  axes : ('dp',)\n" + AT + "  fix  : name devices by their ids: 0, 1, 2, ...",
    ),
    (
        "no devices",
        lambda: Mesh(["dp", "tp"], []),
        "Mesh: there are no devices\n"
        + AXES
        + AT
        + "  fix  : pass at least one device, for instance devices=range(1)",
    ),
    (
        "devices of a wrong kind",
        lambda: Mesh(["dp", "tp"], "0-7"),
        "Mesh: devices cannot be '0-7'\n"
        + AXES
        + AT
        + "  fix  : pass a count, a range, a list of ids, or a nested list",
    ),
    (
        "numbers that may be a shape",
        lambda: Mesh(["dp", "tp"], (2, 4)),
        "Mesh: are 2, 4 the devices, or their number along each axis?\n"
        + AXES
        + AT
        + "  fix  : pass shape=(2, 4) for numbers; for devices, pass their shape beside them",
    ),
    (
        "neither devices nor shape",
        lambda: Mesh(["dp", "tp"]),
        "Mesh: neither devices nor a shape are given\n"
        + AXES
        + AT
        + "  fix  : pass devices=range(8), or shape={...}, or use ts.mesh.auto()",
    ),
    (
        "product",
        lambda: Mesh(["dp", "tp"], range(8), shape=(3, 4)),
        "Mesh: a shape of 3 × 4 holds 12 devices, 8 given\n"
        + AXES
        + AT
        + "  fix  : pass devices=range(12), or a shape whose product is 8",
    ),
    (
        "product of one",
        lambda: Mesh(["dp", "tp"], range(8), shape=(1, 1)),
        "Mesh: a shape of 1 × 1 holds 1 device, 8 given\n"
        + AXES
        + AT
        + "  fix  : pass devices=range(1), or a shape whose product is 8",
    ),
    (
        "nested against shape",
        lambda: Mesh(["dp", "tp"], [[0, 1], [2, 3]], shape=(4, 1)),
        "Mesh: the device list is nested as 2 × 2, its shape says 4 × 1\n"
        + AXES
        + AT
        + "  fix  : drop shape=, or pass the devices as a flat list",
    ),
    (
        "ragged",
        lambda: Mesh(["dp", "tp"], [[0, 1, 2], [3, 4]]),
        "Mesh: the nested device list is ragged: lengths 2 and 3 at depth 1\n"
        + AXES
        + AT
        + "  fix  : make the lists of one depth equally long",
    ),
    (
        "ragged by kind",
        lambda: Mesh(["dp", "tp"], [0, [1, 2]]),
        "Mesh: the nested device list is ragged: lengths none and 2 at depth 1\n"
        + AXES
        + AT
        + "  fix  : make the lists of one depth equally long",
    ),
    (
        "too deep",
        lambda: Mesh(["dp", "tp"], [[[0], [1]], [[2], [3]]]),
        "Mesh: devices are nested 3 deep for 2 axes\n"
        + AXES
        + AT
        + "  fix  : nest the list once for each axis, or pass a flat list and shape=",
    ),
    (
        "too deep for one",
        lambda: Mesh(["dp"], [[0, 1]]),
        "Mesh: devices are nested 2 deep for 1 axis\n"
        "  axes : ('dp',)\n"
        + AT
        + "  fix  : nest the list once for each axis, or pass a flat list and shape=",
    ),
    (
        "shape names other axes",
        lambda: Mesh(["dp", "tp"], shape={"dp": 2, "q": 4}),
        "Mesh: shape names 'q', which the mesh lacks, and leaves out 'tp'\n"
        "  axes  : ('dp', 'tp')\n"
        "  shape : {'dp': 2, 'q': 4}\n"
        "  at    : test_mesh_errors.py\n"
        "  fix   : give a size for each axis and for nothing else",
    ),
    (
        "shape length",
        lambda: Mesh(["dp", "tp"], shape=(2, 2, 2)),
        "Mesh: shape has 3 sizes for 2 axes\n"
        "  axes  : ('dp', 'tp')\n"
        "  shape : (2, 2, 2)\n"
        "  at    : test_mesh_errors.py\n"
        "  fix   : give one size for each axis",
    ),
    (
        "shape of a wrong kind",
        lambda: Mesh(["dp", "tp"], 4, shape="2x2"),  # type: ignore[arg-type]
        "Mesh: shape cannot be '2x2'\n"
        + AXES
        + AT
        + "  fix  : pass a size for each axis: a dict by name, or a tuple in axis order",
    ),
    (
        "axis size",
        lambda: Mesh(["dp", "tp"], shape={"dp": 2, "tp": 0}),
        "Mesh: axis 'tp' has size 0\n"
        "  axes  : ('dp', 'tp')\n"
        "  shape : (2, 0)\n"
        "  at    : test_mesh_errors.py\n"
        "  fix   : make every size a whole number of at least 1",
    ),
    (
        "parse",
        lambda: Mesh.parse("dp=2,tp"),
        "Mesh: cannot read 'tp' as axis=size\n"
        "  text : 'dp=2,tp'\n"
        + AT
        + "  fix  : write each axis as name=size, for instance dp=2,tp=4",
    ),
    (
        "parse a number",
        lambda: Mesh.parse("dp=-2"),
        "Mesh: cannot read 'dp=-2' as axis=size\n"
        "  text : 'dp=-2'\n" + AT + "  fix  : write each axis as name=size, for instance dp=2,tp=4",
    ),
    (
        "parse an axis twice",
        lambda: Mesh.parse("dp=2 dp=4"),
        "Mesh: axis 'dp' is named twice\n"
        "  text : 'dp=2 dp=4'\n" + AT + "  fix  : give each axis a name of its own",
    ),
    (
        "unknown axis",
        lambda: M.axis_size("q"),
        "Mesh: axis 'q' is not one of ('dp', 'tp')\n"
        "  mesh : dp=2 tp=4\n" + AT + "  fix  : name one of dp, tp",
    ),
    (
        "unknown axis of a sub-mesh",
        lambda: M["dp", "q"],
        "Mesh: axis 'q' is not one of ('dp', 'tp')\n"
        "  mesh : dp=2 tp=4\n" + AT + "  fix  : name one of dp, tp",
    ),
    (
        "sub-mesh of nothing",
        lambda: M[()],
        "mesh[...]: () is not an axis or a tuple of axes\n"
        "  mesh : dp=2 tp=4\n" + AT + "  fix  : name an axis: mesh['dp']",
    ),
    (
        "sub-mesh twice",
        lambda: M["dp", "dp"],
        "mesh[...]: ('dp', 'dp') names an axis twice\n"
        "  mesh : dp=2 tp=4\n" + AT + "  fix  : name each axis once",
    ),
    (
        "groups twice",
        lambda: M.groups(("dp", "dp")),
        "mesh.groups: ('dp', 'dp') names an axis twice\n"
        "  mesh : dp=2 tp=4\n" + AT + "  fix  : name each axis once",
    ),
    (
        "slice outside",
        lambda: M.slice(tp=4),
        "mesh.slice: tp=4 is outside the axis, which has size 4\n"
        "  mesh : dp=2 tp=4\n" + AT + "  fix  : give a number from 0 to 3",
    ),
    (
        "slice range outside",
        lambda: M.slice(tp=range(2, 6)),
        "mesh.slice: tp=4 is outside the axis, which has size 4\n"
        "  mesh : dp=2 tp=4\n" + AT + "  fix  : give a number from 0 to 3",
    ),
    (
        "slice of nothing",
        lambda: M.slice(tp=slice(4, 8)),
        "mesh.slice: tp=slice(4, 8, None) selects nothing\n"
        "  mesh : dp=2 tp=4\n" + AT + "  fix  : select from 0 to 3",
    ),
    (
        "slice drops all",
        lambda: M.slice(dp=0, tp=0),
        "mesh.slice: every axis is dropped, so no mesh is left\n"
        "  mesh  : dp=2 tp=4\n"
        "  where : {'dp': 0, 'tp': 0}\n"
        "  at    : test_mesh_errors.py\n"
        "  fix   : keep one axis, for instance dp=slice(0, 1), or ask mesh.device_at(...)",
    ),
    (
        "device not there",
        lambda: M.coords(8),
        "mesh.coords: device 8 is not in the mesh\n"
        "  mesh    : dp=2 tp=4\n"
        "  devices : [0, 1, 2, 3, 4, 5, 6, 7]\n"
        "  at      : test_mesh_errors.py\n"
        "  fix     : name one of mesh.device_ids",
    ),
    (
        "coordinate left out",
        lambda: M.device_at({"tp": 1}),
        "mesh.device_at: no coordinate for ('dp',)\n"
        "  mesh   : dp=2 tp=4\n"
        "  coords : {'tp': 1}\n"
        "  at     : test_mesh_errors.py\n"
        "  fix    : give a coordinate for every axis, or use mesh.slice(...) for a part",
    ),
    (
        "rank",
        lambda: M.rank,
        "mesh.rank: there is no rank here, because this code runs once for the whole mesh\n"
        "  mesh : dp=2 tp=4\n"
        + AT
        + "  fix  : read it inside a function decorated with @ts.distribute, from "
        "ts.mesh.current()",
    ),
    (
        "no current mesh",
        current,
        "mesh.current: no mesh is open here\n"
        "  at  : test_mesh_errors.py\n"
        "  fix : open one: with ts.mesh.auto(): ..., or pass mesh=...",
    ),
]


@pytest.mark.parametrize(("call", "text"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_input_is_refused_with_the_whole_message(call: Callable[[], object], text: str) -> None:
    with pytest.raises(MeshError) as caught:
        call()
    assert re.sub(r"(test_mesh_errors\.py):\d+", r"\1", str(caught.value)) == text


def test_counting_devices_needs_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_providers", [])
    with pytest.raises(BackendError) as caught:
        auto()
    assert re.sub(r"(test_mesh_errors\.py):\d+", r"\1", str(caught.value)) == (
        "device_count: no engine is loaded, so there are no devices to count\n"
        "  at  : test_mesh_errors.py\n"
        "  fix : import tessera, or name the devices: Mesh(['dp'], devices=range(8))"
    )
