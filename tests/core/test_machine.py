"""Machine descriptors: read exactly, or refused with every fault and its line."""

from __future__ import annotations

import dataclasses
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import tessera as ts
from tessera import dist, schedule
from tessera.core.machine import cluster_yaml, mesh_graph, mesh_graph_text
from tessera.core.machine.load import load, save
from tessera.core.machine.machine import Machine
from tessera.core.machine.mesh_ids import ONLY
from tessera.core.machine.presets import LINKS, PRESETS, preset
from tessera.core.machine.schema import ENUMS, MESSAGES
from tessera.core.topology import Level, Link, Topology, cluster
from tessera.launch.cli import app
from tessera.show.machine_picture import machine_text
from tessera.show.mesh_picture import mesh_text
from tests.core.machine_files import (
    ALL,
    BAD_CLUSTERS,
    BAD_GRAPHS,
    CLUSTER,
    GOOD_CLUSTERS,
    GOOD_GRAPHS,
    GRAPH_TOP,
    MESH,
    PAIR,
    TOP,
    graph,
    instances,
    joined,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "machines"


def levels(machine: Machine) -> str:
    return " x ".join(f"{v.size} {v.wiring}" for v in machine.topology.levels)


def told(error: BaseException, example: str) -> list[tuple[int, str]]:
    """The lines and messages of an error, without its constant parts."""
    head, *rows = str(error).splitlines()
    fix = rows.pop()
    assert rows.pop().strip().startswith("at")
    faults = []
    for row in rows:
        line, _, what = row.strip().partition(" : ")
        faults.append((int(line.split()[1]), what))
    count = len(faults)
    assert head == f"a file: {count} fault{'s' * (count > 1)}"
    these = "this line" if count == 1 else "these lines"
    assert fix.split(" : ")[1] == (
        f"mend {these}; tessera mesh show {example} --write FILE gives one that is right"
    )
    return faults


# ---- what is right -----------------------------------------------------------------------------
@pytest.mark.parametrize("name", GOOD_GRAPHS)
def test_a_descriptor_is_read_and_comes_back(name: str) -> None:
    text, wired, hosts = GOOD_GRAPHS[name]
    machine = mesh_graph.read(text)
    assert (levels(machine), machine.hosts) == (wired, hosts)
    assert machine.device == "wormhole_b0" and machine.size == machine.mesh().size
    assert mesh_graph.read(mesh_graph_text.write(machine)) == machine
    assert cluster_yaml.read(cluster_yaml.write(machine)) == machine


@pytest.mark.parametrize("name", GOOD_CLUSTERS)
def test_a_cluster_is_read_and_comes_back(name: str) -> None:
    text, wired, hosts = GOOD_CLUSTERS[name]
    machine = cluster_yaml.read(text)
    assert (levels(machine), machine.hosts) == (wired, hosts)
    assert cluster_yaml.read(cluster_yaml.write(machine)) == machine


def test_bandwidths_are_channels_times_their_bandwidth() -> None:
    machine = mesh_graph.read(MESH + PAIR + GRAPH_TOP)
    assert [v.link.bytes_per_s for v in machine.topology.levels] == [50e9, 25e9, 25e9]
    assert [v.shared for v in machine.topology.levels] == [True, False, False]
    black = mesh_graph.read(MESH.replace("WORMHOLE_B0", "BLACKHOLE") + TOP)
    assert black.topology.levels[0].link.bytes_per_s == 100e9


def test_a_wire_between_meshes_is_one_for_all_their_devices() -> None:
    t = mesh_graph.read(MESH + graph(instances(0, 1, 2) + ALL) + GRAPH_TOP).topology
    assert [str(p) for p in t.route(3, 8)] == [
        "4 x chip ethernet 100G from unit 0 to unit 1",
        *(f"2 x chip ethernet 100G from {a} to {a - 1}" for a in (11, 10, 9)),
    ]
    assert t.route(0, 8)[0].place == t.route(5, 13)[0].place != t.route(0, 16)[0].place
    assert len(t.route(0, 16)) == 1, "each pair of meshes has a wire of its own"


def test_unequal_channels_are_priced_as_the_fewest_and_said() -> None:
    machine = mesh_graph.read(
        MESH
        + graph(instances(0, 1, 2) + joined(0, 1) + joined(1, 2, "channels { count: 8 }"))
        + GRAPH_TOP
    )
    assert machine.topology.levels[0].link.name == "2 x chip ethernet 100G"
    assert machine.notes == ("G0: 2 to 8 channels between instances, priced as 2",)


def test_one_mesh_of_a_graph_whose_meshes_differ() -> None:
    text, _ = BAD_GRAPHS["meshes that differ"]
    other = text.replace("mesh_id: 0", "mesh_id: 5", 1)
    assert mesh_graph.read(other, mesh_id=5).shape == (2, 4)
    assert mesh_graph.read(other, mesh_id=0).shape == (2, 2)
    with pytest.raises(ts.MeshError, match="there is no mesh 3"):
        mesh_graph.read(other, mesh_id=3)


def test_one_mesh_of_a_graph_that_is_wired_in_any_way() -> None:
    square = [joined(a, b) for a, b in ((0, 1), (2, 3), (0, 2), (1, 3))]
    text = MESH + graph(instances(0, 1, 2, 3) + "".join(square)) + GRAPH_TOP
    assert mesh_graph.read(text, mesh_id=2) == mesh_graph.read(MESH + TOP)
    with pytest.raises(ts.MeshError, match="are no line, no ring"):
        mesh_graph.read(text)


def test_a_descriptor_of_several_meshes_has_no_only_one() -> None:
    assert mesh_graph.read(MESH + graph(instances(3) + ALL) + GRAPH_TOP, mesh_id=ONLY) == (
        mesh_graph.read(MESH + TOP)
    )
    with pytest.raises(ts.MeshError) as caught:
        mesh_graph.read(MESH + PAIR + GRAPH_TOP, "a file", mesh_id=ONLY)
    assert str(caught.value).splitlines()[:2] == [
        "a file: it has 2 meshes, and nothing says which is meant",
        "  meshes : 0, 1",
    ]
    twice = MESH + MESH.replace("M0", "M1") + graph(instances(0) + instances(0, mesh="M1") + ALL)
    with pytest.raises(ts.MeshError, match="mesh_id 0 is that of several meshes"):
        mesh_graph.read(twice + GRAPH_TOP, mesh_id=0)


@pytest.mark.parametrize("ways", ["[ E, W ]", "[N, S]", "Z"])
def test_directions_are_fields_of_a_connection(ways: str) -> None:
    more = f"routing_direction : {ways} assign_z_direction: true"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        machine = mesh_graph.read(
            MESH + graph(instances(0, 1) + joined(0, 1, more=more)) + GRAPH_TOP
        )
    assert machine.shape == (2, 2, 4)


@pytest.mark.parametrize("name", ["M0", "t3000", "anything"])
@pytest.mark.parametrize("hosts", ["[1, 1]", "[1, 2]"])
def test_cards_come_from_the_chips_and_their_grid(name: str, hosts: str) -> None:
    text = (MESH + TOP).replace("M0", name).replace("[1, 1]", hosts)
    machine = mesh_graph.read(text)
    assert machine.cards == preset("t3000").cards
    turned = mesh_graph.read(text.replace("[2, 4]", "[4, 2]").replace("[1, 2]", "[2, 1]"))
    places = [[machine.topology.coords(d)[::-1] for d in c] for c in machine.cards]
    assert [[turned.topology.coords(d) for d in c] for c in turned.cards] == places
    assert mesh_graph.read(text.replace("WORMHOLE_B0", "BLACKHOLE")).cards == ()


def test_unknown_fields_are_left_out_and_said() -> None:
    text = MESH.replace("arch", 'adress: "x"\n  arch').replace("count", "pin: 1 count") + TOP
    with pytest.warns(ts.OptionWarning) as caught:
        machine = mesh_graph.read(text, "a file")
    assert machine == mesh_graph.read(MESH + TOP)
    assert str(caught[0].message) == (
        "a file: 2 fields that no descriptor has, left out\n"
        "  line 3 : adress (the nearest: channels)\n"
        "  line 7 : pin (the nearest: policy)"
    )


# ---- what is wrong -----------------------------------------------------------------------------
@pytest.mark.parametrize("name", BAD_GRAPHS)
def test_every_fault_of_a_descriptor_is_said_with_its_line(name: str) -> None:
    text, faults = BAD_GRAPHS[name]
    with pytest.raises(ts.MeshError) as caught:
        mesh_graph.read(text, "a file")
    assert told(caught.value, "t3000") == faults


@pytest.mark.parametrize("name", BAD_CLUSTERS)
def test_every_fault_of_a_cluster_is_said_with_its_line(name: str) -> None:
    text, faults = BAD_CLUSTERS[name]
    with pytest.raises(ts.MeshError) as caught:
        cluster_yaml.read(text, "a file")
    assert told(caught.value, "dgx_h100") == faults


WORDS = [w for fields in MESSAGES.values() for f in fields.split() for w in f.split(":")[:1]]
WORDS += [w for words in ENUMS.values() for w in words]
PIECES = st.sampled_from(
    [*WORDS, *"{}<>[]:,;#-\"'\n", "0", "1", "2", "-3", "4", "99999999999", '"M0"', '"G0"', "\x00"]
)
LINES = (MESH + PAIR + TOP).splitlines(keepends=True)


def answered(read: Any, text: str) -> None:
    """Asserts that `read` returns a machine or raises an error of ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ts.OptionWarning)
        try:
            machine = read(text)
        except ts.MeshError as error:
            assert "  fix" in str(error)
        else:
            assert cluster_yaml.read(cluster_yaml.write(machine)) == machine
            assert machine_text(machine)


@given(st.lists(PIECES, max_size=40).map(" ".join))
def test_any_words_are_answered(text: str) -> None:
    answered(mesh_graph.read, text)


@given(st.lists(st.sampled_from(LINES), max_size=24).map("".join))
def test_any_lines_are_answered(text: str) -> None:
    answered(mesh_graph.read, text)


@given(st.data())
def test_a_descriptor_with_a_slip_is_answered(data: Any) -> None:
    text = data.draw(st.sampled_from([t for t, *_ in GOOD_GRAPHS.values()]))
    parts = text.split(" ")
    at = data.draw(st.integers(0, len(parts) - 1))
    parts[at] = data.draw(PIECES)
    answered(mesh_graph.read, " ".join(parts))


SIGNS = [*"{}[]:,#-&*!|>\"'\n\t", "  ", ": ", "- ", "? ", "~", "<<: *a", "!!set"]
WORDS_OF_YAML = [*cluster_yaml.KEYS, *cluster_yaml.LEVEL_KEYS, "2", "1e400", ".nan", "2001-99-99"]
YAML_PIECES = st.sampled_from([*SIGNS, *WORDS_OF_YAML, "nvlink 4"])


@given(st.lists(YAML_PIECES, max_size=30).map("".join))
def test_any_yaml_is_answered(text: str) -> None:
    answered(cluster_yaml.read, text)


@given(st.data())
def test_a_cluster_with_a_slip_is_answered(data: Any) -> None:
    text = data.draw(st.sampled_from([t for t, *_ in GOOD_CLUSTERS.values()]))
    at, end = sorted(data.draw(st.integers(0, len(text))) for _ in range(2))
    answered(cluster_yaml.read, text[:at] + data.draw(YAML_PIECES) + text[end:])


@pytest.mark.parametrize("deep", ["graph_descriptors { instances { graph { ", "[", "{a: "])
def test_what_is_nested_deeply_is_answered(deep: str) -> None:
    answered(mesh_graph.read, deep + "graph { " * 5000)
    answered(cluster_yaml.read, deep * 5000)


@st.composite
def machines(draw: Any) -> Machine:
    """Draws machines with links of any bandwidth and latency."""
    figures = st.floats(1e-3, 1e6).map(lambda x: round(x, 6))
    count = draw(st.integers(1, 4))
    each = []
    for _ in range(count):
        link = draw(st.sampled_from([None, *LINKS.values()]))
        if link is None:
            link = Link("own", round(draw(figures) / 1e6, 15), round(draw(figures) * 1e9, 3))
        wiring = draw(st.sampled_from(["all", "ring", "line", "pairs"]))
        each.append(Level(draw(st.integers(1, 6)), link, wiring, draw(st.booleans())))
    hosts = tuple(
        draw(st.sampled_from([h for h in range(1, v.size + 1) if v.size % h == 0])) for v in each
    )
    name = draw(st.from_regex(r"[\w.-]{1,8}", fullmatch=True))
    return Machine(
        draw(st.text(max_size=5)), Topology(name, tuple(each)),
        tuple("abcd"[:count]), hosts, sources=tuple(draw(st.lists(st.text(max_size=9)))),
    )  # fmt: skip


@given(machines())
def test_any_machine_comes_back_from_its_file(machine: Machine) -> None:
    assert cluster_yaml.read(cluster_yaml.write(machine)) == machine


# ---- files, presets, pictures ------------------------------------------------------------------
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_where_its_figures_come_from(name: str, request: Any) -> None:
    machine = preset(name)
    assert machine.sources and machine.topology is cluster(name)
    picture = machine_text(machine) + "\n"
    golden = GOLDEN / f"{name}.txt"
    if request.config.getoption("--refresh-golden"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(picture, encoding="utf-8")
    assert picture == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["two hosts", "express", "graphs in a graph"])
def test_a_picture_shows_hosts_and_meshes(name: str, request: Any) -> None:
    picture = machine_text(mesh_graph.read(GOOD_GRAPHS[name][0])) + "\n"
    golden = GOLDEN / f"{name.replace(' ', '_')}.txt"
    if request.config.getoption("--refresh-golden"):
        golden.write_text(picture, encoding="utf-8")
    assert picture == golden.read_text(encoding="utf-8")


def test_a_file_is_written_and_loaded(tmp_path: Path) -> None:
    for name in ("t3000", "galaxy"):
        for suffix in (".textproto", ".yaml"):
            path = tmp_path / f"{name}{suffix}"
            save(preset(name), path)
            assert load(path).topology == preset(name).topology
            assert ts.mesh.from_descriptor(path).links == preset(name).topology
    with pytest.raises(ts.MeshError, match="there is no arch for NVIDIA H100 SXM"):
        save(preset("dgx_h100"), tmp_path / "a.textproto")
    slow = dataclasses.replace(cluster("t3000"), add_bytes_per_s=50e9)
    with pytest.raises(ts.MeshError, match="its devices add otherwise than wormhole_b0"):
        save(dataclasses.replace(preset("t3000"), topology=slow), tmp_path / "a.textproto")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("nothing.textproto", "descriptor: nothing.textproto: No such file or directory"),
        ("a/b.json", "descriptor: a/b.json is neither a mesh graph descriptor nor YAML, by its"),
        ("t300", "preset: 't300' is no described machine\n  nearest : t3000, n300, t3k, "),
        (3, "descriptor: int is no file and no preset"),
        (".", "preset: '.' is no described machine"),
    ],
)
def test_what_is_no_file_and_no_preset_is_refused(source: Any, says: str) -> None:
    with pytest.raises(ts.MeshError) as caught:
        load(source)
    assert str(caught.value).startswith(says) and "  fix" in str(caught.value)


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"name: \xff")
    with pytest.raises(ts.MeshError, match="byte 6 is not UTF-8"):
        load(path)


# ---- meshes ------------------------------------------------------------------------------------
def test_a_mesh_carries_the_links_and_its_parts_do() -> None:
    mesh = ts.mesh.preset("dgx_h100", ("dp", "tp"), nodes=2)
    assert mesh.links == cluster("dgx_h100").of(2)
    plain = dist.Mesh(("dp", "tp"), shape=(2, 8))
    assert mesh != plain == mesh.wired(None) and plain.wired(mesh.links) == mesh
    parts = (mesh["tp"], mesh.slice(dp=1), mesh.fold(onto=8), pickle.loads(pickle.dumps(mesh)))
    assert all(part.links == mesh.links for part in parts)
    assert mesh.wired(None).links is None
    with pytest.raises(ts.UsageError, match="there is no device 15"):
        mesh.wired(cluster("dgx_h100"))


def test_inside_a_mesh_its_links_price_the_program() -> None:
    mesh = ts.mesh.preset("t3000")
    with mesh:
        assert schedule.current().text() == "topology=t3000(8)"
        with mesh["x"]:
            assert schedule.current().topology == mesh.links
        with dist.Mesh(("dp",), devices=4):
            assert schedule.current().topology is None
        schedule.algorithm("cheapest")
        assert schedule.current().text() == "algorithm=cheapest topology=t3000(8)"
        schedule.algorithm("cheapest", topology="h100")
        with mesh["y"]:
            assert schedule.current().topology == cluster("h100"), "what is said outright holds"
        schedule.algorithm(None)
        assert schedule.current().text() == "topology=t3000(8)"
    assert schedule.current().text() == ""


def test_axes_are_named_anew() -> None:
    machine = preset("t3000")
    assert machine.mesh(("dp",)).text() == "dp=8"
    assert machine.mesh(("a", "b", "c"), shape=(2, 2, 2)).links == machine.topology
    with pytest.raises(ts.MeshError, match="3 axes for 2 levels of links"):
        machine.mesh(("a", "b", "c"))
    with pytest.raises(ts.MeshError, match="1000000000 × 8 are more than 1,048,576 devices"):
        ts.mesh.preset("dgx_h100", nodes=10**9)
    with pytest.raises(ts.MeshError, match="2 × 3 × 4 is no whole number of hosts"):
        preset("tpu_v4").of(2, 3)
    assert preset("gb200_nvl72").of(2).host_count == 36


def test_the_shell_draws_checks_and_writes(tmp_path: Path) -> None:
    run = CliRunner().invoke
    drawn = run(app, ["mesh", "show", "t3000"])
    assert drawn.exit_code == 0 and " 0 ═══ 1 ═══ 2 ═══ 3" in drawn.output
    path = tmp_path / "two.yaml"
    wrote = run(app, ["mesh", "show", "dgx_h100", "--nodes", "2", "--write", str(path)])
    assert wrote.exit_code == 0 and load(path) == preset("dgx_h100").of(2)
    path.write_text(CLUSTER.replace("size: 8", "size: 0"))
    bad = run(app, ["mesh", "show", str(path)])
    assert bad.exit_code == 2 and bad.output.splitlines() == [
        "two.yaml: 1 fault",
        "  line 4 : size cannot be 0; give a whole number from 1 to 1048576",
        "  fix    : mend this line; tessera mesh show dgx_h100 --write FILE gives one that is"
        " right",
    ]
    text = run(app, ["mesh", "show", "galaxy", "--format", "textproto"])
    assert mesh_graph.read(text.output).topology == cluster("galaxy")
    both = run(app, ["mesh", "show", "n300", "--format", "yaml", "--write", str(path)])
    assert both.exit_code == 2 and both.output.splitlines() == [
        "--format yaml has no effect with --write: the name of the file says it",
        "  fix : leave --format out, and end the name in .yaml or .textproto",
    ]
    listed = run(app, ["mesh", "presets"])
    assert [line.split()[0] for line in listed.output.splitlines()] == list(PRESETS)


def test_the_picture_of_a_mesh_says_its_links() -> None:
    lines = mesh_text(ts.mesh.preset("n300")).splitlines()
    assert lines[0] == "y × x mesh, 1 × 2 · 2 devices"
    assert " ".join(lines[1:3]) == (
        "on n300, 2 devices: 1 line (chip ethernet 100G, 1.0 µs, 12.5 GB/s) x 2 line (chip ethernet"
        " 100G, 1.0 µs, 12.5 GB/s)"
    )
