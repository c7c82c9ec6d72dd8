"""Invalid mesh arguments, each with its whole error message."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tessera.core import devices
from tessera.core.errors import BackendError, MeshError
from tessera.core.mesh import Mesh, auto, current
from tests.messages import Golden

# ---- errors ------------------------------------------------------------------------------------
M = Mesh.parse("dp=2 tp=4")
BAD: list[tuple[str, Callable[[], object]]] = [
    (
        "no axes",
        lambda: Mesh([], 4),
    ),
    (
        "axes of a wrong kind",
        lambda: Mesh({"dp"}, 4),
    ),
    (
        "axis twice",
        lambda: Mesh(["dp", "tp", "dp"], 4),
    ),
    (
        "axis name",
        lambda: Mesh(["data parallel"], 4),
    ),
    (
        "devices twice",
        lambda: Mesh(["dp", "tp"], [0, 1, 1, 0]),
    ),
    (
        "negative id",
        lambda: Mesh(["dp"], range(-1, 19)),
    ),
    (
        "id of a wrong kind",
        lambda: Mesh(["dp"], [0, True]),
    ),
    (
        "no devices",
        lambda: Mesh(["dp", "tp"], []),
    ),
    (
        "devices of a wrong kind",
        lambda: Mesh(["dp", "tp"], "0-7"),
    ),
    (
        "numbers that may be a shape",
        lambda: Mesh(["dp", "tp"], (2, 4)),
    ),
    (
        "neither devices nor shape",
        lambda: Mesh(["dp", "tp"]),
    ),
    (
        "product",
        lambda: Mesh(["dp", "tp"], range(8), shape=(3, 4)),
    ),
    (
        "product of one",
        lambda: Mesh(["dp", "tp"], range(8), shape=(1, 1)),
    ),
    (
        "nested against shape",
        lambda: Mesh(["dp", "tp"], [[0, 1], [2, 3]], shape=(4, 1)),
    ),
    (
        "ragged",
        lambda: Mesh(["dp", "tp"], [[0, 1, 2], [3, 4]]),
    ),
    (
        "ragged by kind",
        lambda: Mesh(["dp", "tp"], [0, [1, 2]]),
    ),
    (
        "too deep",
        lambda: Mesh(["dp", "tp"], [[[0], [1]], [[2], [3]]]),
    ),
    (
        "too deep for one",
        lambda: Mesh(["dp"], [[0, 1]]),
    ),
    (
        "shape names other axes",
        lambda: Mesh(["dp", "tp"], shape={"dp": 2, "q": 4}),
    ),
    (
        "shape length",
        lambda: Mesh(["dp", "tp"], shape=(2, 2, 2)),
    ),
    (
        "shape of a wrong kind",
        lambda: Mesh(["dp", "tp"], 4, shape="2x2"),
    ),
    (
        "axis size",
        lambda: Mesh(["dp", "tp"], shape={"dp": 2, "tp": 0}),
    ),
    (
        "parse",
        lambda: Mesh.parse("dp=2,tp"),
    ),
    (
        "parse a number",
        lambda: Mesh.parse("dp=-2"),
    ),
    (
        "parse an axis twice",
        lambda: Mesh.parse("dp=2 dp=4"),
    ),
    (
        "unknown axis",
        lambda: M.axis_size("q"),
    ),
    (
        "unknown axis of a sub-mesh",
        lambda: M["dp", "q"],
    ),
    (
        "sub-mesh of nothing",
        lambda: M[()],
    ),
    (
        "sub-mesh twice",
        lambda: M["dp", "dp"],
    ),
    (
        "groups twice",
        lambda: M.groups(("dp", "dp")),
    ),
    (
        "slice outside",
        lambda: M.slice(tp=4),
    ),
    (
        "slice range outside",
        lambda: M.slice(tp=range(2, 6)),
    ),
    (
        "slice of nothing",
        lambda: M.slice(tp=slice(4, 8)),
    ),
    (
        "slice drops all",
        lambda: M.slice(dp=0, tp=0),
    ),
    (
        "device not there",
        lambda: M.coords(8),
    ),
    (
        "coordinate left out",
        lambda: M.device_at({"tp": 1}),
    ),
    (
        "rank",
        lambda: M.rank,
    ),
    (
        "no current mesh",
        current,
    ),
]


@pytest.mark.parametrize("call", [row[1] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_input_is_refused_with_the_whole_message(
    call: Callable[[], object], golden: Golden
) -> None:
    with pytest.raises(MeshError) as caught:
        call()
    golden(caught.value)


def test_counting_devices_needs_an_engine(monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    monkeypatch.setattr(devices, "_providers", [])
    with pytest.raises(BackendError) as caught:
        auto()
    golden(caught.value)
