"""Invalid machine descriptors, each with its whole error message: every fault and its line."""

from __future__ import annotations

MESH = """\
mesh_descriptors {
  name: "M0"
  arch: WORMHOLE_B0
  device_topology { dims: [2, 4] }
  host_topology { dims: [1, 1] }
  channels { count: 2 }
}
"""
TOP = 'top_level_instance { mesh { mesh_descriptor: "M0" mesh_id: 0 } }\n'
GRAPH_TOP = 'top_level_instance { graph { graph_descriptor: "G0" graph_id: 0 } }\n'


def instances(*ids: int, mesh: str = "M0") -> str:
    return "".join(
        f'  instances {{ mesh {{ mesh_descriptor: "{mesh}" mesh_id: {i} }} }}\n' for i in ids
    )


def graph(inside: str, name: str = "G0") -> str:
    return f'graph_descriptors {{\n  name: "{name}"\n  type: "POD"\n{inside}}}\n'


def joined(a: int, b: int, channels: str = "channels { count: 2 }", more: str = "") -> str:
    ends = " ".join(f'nodes {{ mesh {{ mesh_descriptor: "M0" mesh_id: {i} }} }}' for i in (a, b))
    return f"  connections {{ {ends} {channels} {more} }}\n"


ALL = "  graph_topology: ALL_TO_ALL\n  channels { count: 4 }\n"
PAIR = graph(instances(0, 1) + ALL)

# Text -> (levels as text, hosts).
GOOD_GRAPHS = {
    "one mesh": (MESH + TOP, "2 line x 4 line", (1, 1)),
    "wires go round": (
        MESH.replace("[2, 4]", "[2, 4] types: [LINE, RING]") + TOP, "2 line x 4 ring", (1, 1),
    ),
    "newer name of the types": (
        MESH.replace("[2, 4]", "[2, 4] dim_types: RING dim_types: RING") + TOP,
        "2 ring x 4 ring", (1, 1),
    ),
    "fewer types": (MESH.replace("[2, 4]", "[2, 4] types: RING") + TOP, "2 ring x 4 line", (1, 1)),
    "two hosts": (MESH.replace("[1, 1]", "[1, 2]") + TOP, "2 line x 4 line", (1, 2)),
    "policy": (MESH.replace("count: 2", "count: 2 policy: RELAXED") + TOP,
               "2 line x 4 line", (1, 1)),
    "colons, commas, other brackets": (
        MESH.replace("mesh_descriptors {", "mesh_descriptors: <").replace("\n}\n", "\n>\n") + TOP,
        "2 line x 4 line", (1, 1),
    ),
    "comments": ("# a mesh\n" + MESH.replace("arch", "# of chips\n  arch") + TOP,
                 "2 line x 4 line", (1, 1)),
    "one dim": (MESH.replace("[2, 4]", "[8]").replace("[1, 1]", "[2]") + TOP, "8 line", (2,)),
    "three dims": (
        MESH.replace("[2, 4]", "[2, 4, 2]").replace("[1, 1]", "[1, 1, 1]") + TOP,
        "2 line x 4 line x 2 line", (1, 1, 1),
    ),
    "express": (
        MESH.replace("channels", "express_connections { src: 0 dst: 7 }\n  channels") + TOP,
        "2 line x 4 line", (1, 1),
    ),
    "two meshes": (MESH + PAIR + GRAPH_TOP, "2 pairs x 2 line x 4 line", (2, 1, 1)),
    "a ring of meshes": (
        MESH + graph(instances(0, 1, 2) + ALL.replace("ALL_TO_ALL", "RING")) + GRAPH_TOP,
        "3 ring x 2 line x 4 line", (3, 1, 1),
    ),
    "a line of meshes": (
        MESH + graph(instances(0, 1, 2) + joined(0, 1) + joined(2, 1)) + GRAPH_TOP,
        "3 line x 2 line x 4 line", (3, 1, 1),
    ),
    "all pairs, one by one": (
        MESH
        + graph(instances(0, 1, 2, 3) + "".join(joined(a, b) for b in range(4) for a in range(b)))
        + GRAPH_TOP,
        "4 pairs x 2 line x 4 line", (4, 1, 1),
    ),
    "graphs in a graph": (
        MESH + PAIR
        + graph(
            '  instances { graph { graph_descriptor: "G0" graph_id: 0 } }\n'
            '  instances { graph { graph_descriptor: "G0" graph_id: 1 } }\n' + ALL, "G1",
        )
        + GRAPH_TOP.replace("G0", "G1"),
        "2 pairs x 2 pairs x 2 line x 4 line", (2, 2, 1, 1),
    ),
    "devices that are joined": (
        MESH
        + graph(instances(0, 1) + joined(0, 1).replace("mesh_id: 0", "mesh_id: 0 device_id: 3"))
        + GRAPH_TOP,
        "2 line x 2 line x 4 line", (2, 1, 1),
    ),
    "a layout as a message": (
        MESH
        + graph(
            instances(0, 1)
            + "  graph_topology: { layout_type: ALL_TO_ALL channels { count: 2 } }\n"
        )
        + GRAPH_TOP,
        "2 pairs x 2 line x 4 line", (2, 1, 1),
    ),
    "one mesh in a graph": (MESH + graph(instances(0)) + GRAPH_TOP,
                            "1 line x 2 line x 4 line", (1, 1, 1)),
}  # fmt: skip

# Text -> the faults, as lines and sentences.
BAD_GRAPHS = {
    "empty": ("", [
        (1, "there is no mesh; add mesh_descriptors { ... }"),
        (1, 'there is no top_level_instance; add top_level_instance { mesh { mesh_descriptor: "M0" '
            "mesh_id: 0 } }"),
    ]),
    "no instance": (MESH, [
        (1, 'there is no top_level_instance; add top_level_instance { mesh { mesh_descriptor: "M0" '
            "mesh_id: 0 } }"),
    ]),
    "no name": (MESH.replace('name: "M0"', "") + TOP, [
        (1, 'there is no name; add name: "M0"'), (8, '"M0" is no mesh; there are none')]),
    "two of a name": (MESH + MESH + TOP, [(9, 'the name "M0" is taken')]),
    "no arch": (MESH.replace("arch: WORMHOLE_B0", "") + TOP, [
        (1, "M0 has no arch; add arch: WORMHOLE_B0 or BLACKHOLE")]),
    "another arch": (MESH.replace("WORMHOLE_B0", "GRAYSKULL") + TOP, [
        (3, "there is no GRAYSKULL; write WORMHOLE_B0 or BLACKHOLE")]),
    "no devices": (MESH.replace("dims: [2, 4]", "") + TOP, [
        (4, "M0 has no device_topology; add device_topology { dims: [1, 2] }")]),
    "no hosts": (MESH.replace("  host_topology { dims: [1, 1] }\n", "") + TOP, [
        (1, "M0 has no host_topology; add host_topology { dims: [1, 2] }")]),
    "no channels": (MESH.replace("count: 2", "") + TOP, [
        (6, "M0 has no channels; add channels { count: 2 }")]),
    "zero channels": (MESH.replace("count: 2", "count: 0") + TOP, [
        (6, "M0: 0 channels; give at least 1")]),
    "a size of zero": (MESH.replace("[2, 4]", "[2, 0]") + TOP, [
        (4, "M0: device_topology cannot have dims 2 × 0: each is at least 1, there are at most 8, "
            "of 1,048,576 devices")]),
    "too many devices": (MESH.replace("[2, 4]", "[2000, 2000]") + TOP, [
        (4, "M0: device_topology cannot have dims 2000 × 2000: each is at least 1, there are at "
            "most 8, of 1,048,576 devices")]),
    "hosts that do not divide": (MESH.replace("[1, 1]", "[1, 3]") + TOP, [
        (5, "M0: hosts 1 × 3 do not divide the devices 2 × 4")]),
    "hosts of other dims": (MESH.replace("[1, 1]", "[1]") + TOP, [
        (5, "M0: hosts 1 do not divide the devices 2 × 4")]),
    "more types than dims": (MESH.replace("[2, 4]", "[2, 4]\n types: [LINE, LINE, RING]") + TOP, [
        (5, "M0 has 3 types for 2 dims; give one a dim")]),
    "types in both names": (MESH.replace("[2, 4]", "[2, 4] types: LINE dim_types: LINE") + TOP, [
        (4, "M0 has types and dim_types; keep one")]),
    "express to nowhere": (
        MESH.replace("channels", "express_connections { src: 0 dst: 8 }\n  channels") + TOP,
        [(6, "M0: an express connection joins two devices from 0 to 7")]),
    "express to itself": (
        MESH.replace("channels", "express_connections { src: 1 dst: 1 }\n  channels") + TOP,
        [(6, "M0: an express connection joins two devices from 0 to 7")]),
    "a mesh that is not there": (MESH + TOP.replace("M0", "M1"), [
        (8, '"M1" is no mesh; there is M0')]),
    "a graph that is not there": (MESH + GRAPH_TOP, [(8, '"G0" is no graph; there are none')]),
    "a device that is not there": (MESH + TOP.replace("mesh_id: 0", "mesh_id: 0 device_id: 8"), [
        (8, "M0 has devices 0 to 7, not 8")]),
    "a mesh_id below 0": (MESH + TOP.replace("mesh_id: 0", "mesh_id: -1"), [
        (8, "mesh_id is below 0")]),
    "an empty instance": (MESH + "top_level_instance { }\n", [
        (8, "it names no mesh and no graph; add mesh { ... }")]),
    "mesh and graph": (MESH + "top_level_instance { mesh { } graph { } }\n", [
        (8, 'Field "graph" is specified along with field "mesh", another member of oneof "which" '
            'for message type "NodeRef"')]),
    "a graph without a type": (MESH + PAIR.replace('  type: "POD"\n', "") + GRAPH_TOP, [
        (8, 'G0 has no type; add type: "POD"')]),
    "a graph without instances": (MESH + graph(ALL) + GRAPH_TOP, [
        (8, "G0 has no instances; add instances { mesh { ... } }")]),
    "an instance twice": (MESH + graph(instances(0, 0) + ALL) + GRAPH_TOP, [
        (12, "G0 has this instance twice; give it an id of its own")]),
    "a graph in itself": (
        MESH + graph('  instances { graph { graph_descriptor: "G0" graph_id: 0 } }\n' + ALL)
        + GRAPH_TOP,
        [(8, "G0 is inside of itself; name another descriptor")]),
    "meshes among graphs": (
        MESH + PAIR
        + graph('  instances { graph { graph_descriptor: "G0" graph_id: 0 } }\n'
                + instances(7) + ALL, "G1")
        + GRAPH_TOP,
        [(16, "G1 mixes meshes and graphs; put the meshes in a graph")]),
    "meshes that differ": (
        MESH + MESH.replace("M0", "M1").replace("[2, 4]", "[2, 2]")
        + graph(instances(0) + instances(0, mesh="M1") + ALL) + GRAPH_TOP,
        [(19, "G0 has instances that differ, which are no levels of one mesh; name one mesh: "
              "mesh_id=0")]),
    "no wires": (MESH + graph(instances(0, 1)) + GRAPH_TOP, [
        (9, "the connections of G0 are no line, no ring and not all pairs of its instances in their"
            " order; write graph_topology: RING or ALL_TO_ALL, or a connection for each pair of "
            "neighbours")]),
    "a star": (MESH + graph(instances(0, 1, 2) + joined(0, 1) + joined(0, 2)) + GRAPH_TOP, [
        (14, "the connections of G0 are no line, no ring and not all pairs of its instances in "
             "their order; write graph_topology: RING or ALL_TO_ALL, or a connection for each pair "
             "of neighbours")]),
    "wires in both ways": (MESH + graph(instances(0, 1) + ALL + joined(0, 1)) + GRAPH_TOP, [
        (8, "G0 has graph_topology and connections; keep one")]),
    "wires without channels": (
        MESH + graph(instances(0, 1) + "  graph_topology: RING\n") + GRAPH_TOP,
        [(8, "G0 has no channels; add channels { count: 2 }")]),
    "a layout without a type and channels": (
        MESH + graph(instances(0, 1) + "  graph_topology { }\n") + GRAPH_TOP,
        [(13, "G0 has no channels; add channels { count: 2 }"),
         (13, "G0 has no layout_type; add layout_type: RING")]),
    "a wire to itself": (MESH + graph(instances(0, 1) + joined(1, 1)) + GRAPH_TOP, [
        (13, "a connection joins two instances of G0"),
        (13, "the connections of G0 are no line, no ring and not all pairs of its instances in "
             "their order; write graph_topology: RING or ALL_TO_ALL, or a connection for each pair "
             "of neighbours")]),
    "a wire of one direction": (
        MESH + graph(instances(0, 1) + joined(0, 1, more="directional: true")) + GRAPH_TOP,
        [(13, "a connection of one direction is no link of a mesh; leave it out"),
         (13, "the connections of G0 are no line, no ring and not all pairs of its instances in "
              "their order; write graph_topology: RING or ALL_TO_ALL, or a connection for each "
              "pair of neighbours")]),
    "no number": (MESH.replace("[2, 4]", "[2, four]") + TOP, [(4, "Couldn't parse integer: four")]),
    "a name twice": (MESH.replace('name: "M0"', 'name: "M0" name: "M1"') + TOP, [
        (2, 'Message type "Mesh" should not have multiple "name" fields')]),
    "an open string": (MESH.replace('"M0"', '"M0') + TOP, [
        (2, "String missing ending quote: '\"M0'")]),
}  # fmt: skip

LEVELS = "levels:\n  - {axis: node, size: 2, link: infiniband 400G}\n"
GPU = "  - {axis: gpu, size: 8, link: nvlink 4}\n"
CLUSTER = "name: two_boxes\n" + LEVELS + GPU

GOOD_CLUSTERS = {
    "links by name": (CLUSTER, "2 all x 8 all", (2, 1)),
    "own figures": (
        "name: own\nlevels:\n"
        "  - {size: 4, link: wire, gb_per_s: 12.3, latency_us: 1.7, wiring: ring}\n",
        "4 ring", (1,),
    ),
    "a rack of hosts": (
        "name: rack\nhosts: [1, 18]\nlevels:\n  - {size: 1, link: infiniband 400G}\n"
        "  - {size: 72, link: nvlink 5}\n",
        "1 all x 72 all", (1, 18),
    ),
    "a card for all": (
        "name: pcie\nlevels:\n  - {axis: node, size: 4, link: ethernet 100G, shared: true}\n"
        "  - {axis: gpu, size: 4, link: pcie 4 x16}\n",
        "4 all x 4 all", (4, 1),
    ),
}  # fmt: skip

KEYS = "name, device, levels, hosts, cards, express, add_gb_per_s, sources, notes, chip"
BAD_CLUSTERS = {
    "empty": ("", [(1, "it is empty; give name and levels")]),
    "a list": ("- 1\n", [
        (1, f"the file is [1]; give keys: {KEYS}")]),
    "no YAML": ("name: [", [
        (1, "it is no YAML: expected the node content, but found '<stream end>'")]),
    "no name": (LEVELS + GPU, [(1, "the file has no name; give a word")]),
    "no levels": ("name: x\n", [(1, "the file has no levels; give a list of levels")]),
    "empty levels": ("name: x\nlevels: []\n", [(2, "levels cannot be []; give a list of levels")]),
    "a slip": (CLUSTER + "host: [2, 1]\n", [
        (5, "the file has no key 'host'; the nearest is hosts")]),
    "a name of two words": (CLUSTER.replace("two_boxes", "two boxes"), [
        (1, "name cannot be 'two boxes'; give a word")]),
    "a key twice": (CLUSTER + "name: y\n", [(5, "'name' is there twice; keep one")]),
    "a size of zero": (CLUSTER.replace("size: 8", "size: 0"), [
        (4, "size cannot be 0; give a whole number from 1 to 1048576")]),
    "no size": (CLUSTER.replace("size: 8, ", ""), [
        (4, "a level has no size; give a whole number from 1 to 1048576")]),
    "a level of one word": ("name: x\nlevels: [nvlink]\n", [
        (2, "a level is 'nvlink'; give keys: axis, size, link, gb_per_s, latency_us, wiring, "
            "shared")]),
    "an unknown link": (CLUSTER.replace("nvlink 4", "nvlink 9"), [
        (4, "the link 'nvlink 9' is not described; give gb_per_s and latency_us, or name nvlink 4, "
            "nvlink 3")]),
    "no bandwidth": (CLUSTER.replace("nvlink 4", "nvlink 4, gb_per_s: 0"), [
        (4, "gb_per_s cannot be 0; give a number above 0")]),
    "below no time": (CLUSTER.replace("nvlink 4", "nvlink 4, latency_us: -1"), [
        (4, "latency_us cannot be -1; give a number of at least 0")]),
    "a number that YAML reads as text": (CLUSTER.replace("nvlink 4", "nvlink 4, gb_per_s: 4e2"), [
        (4, "gb_per_s cannot be '4e2'; give a number above 0; YAML reads this as text: "
            "write 400")]),
    "a size in quotes": (CLUSTER.replace("size: 8", "size: '8'"), [
        (4, "size cannot be '8'; give a whole number from 1 to 1048576; YAML reads this as text: "
            "write 8")]),
    "another unit": (CLUSTER.replace("nvlink 4", "nvlink 4, gbit_per_s: 100, latency_ms: 1"), [
        (4, "a level has no key 'gbit_per_s'; the nearest is gb_per_s, gigabytes a second, in one "
            "direction"),
        (4, "a level has no key 'latency_ms'; the nearest is latency_us, microseconds")]),
    "levels that are merged": (
        "name: x\nlevels:\n  - &a {size: 2, link: nvlink 4}\n  - {<<: *a, size: 3}\n", [
        (4, "<< is not read; write the keys out"),
        (4, "a level has no link; give a string")]),
    "another wiring": (CLUSTER.replace("nvlink 4", "nvlink 4, wiring: star"), [
        (4, "wiring cannot be 'star'; give \"all\", \"ring\", \"line\" or \"pairs\"")]),
    "hosts that do not divide": (CLUSTER + "hosts: [3, 1]\n", [
        (5, "hosts 3 × 1 do not divide levels 2 × 8")]),
    "hosts of other levels": (CLUSTER + "hosts: [2]\n", [
        (5, "hosts 2 do not divide levels 2 × 8")]),
    "one axis twice": (CLUSTER.replace("gpu", "node"), [
        (3, "two levels have one axis: node, node")]),
    "too many devices": (CLUSTER.replace("size: 8", "size: 1048576"), [
        (3, "2 × 1048576 are more than 1,048,576 devices")]),
    "cards of no devices": (CLUSTER + "cards: [[0, 16]]\n", [
        (5, "cards: there are devices 0 to 15 only")]),
    "an alias": ("name: &a x\ndevice: *a\n" + LEVELS, [
        (1, "an alias (*name) is not read; write it out"),
        (1, "device cannot be None; give a string")]),
    "an object": ("name: !!python/object:os.system x\n", [
        (1, "it is no YAML: could not determine a constructor for the tag "
            "'tag:yaml.org,2002:python/object:os.system'")]),
    "all at once": ("name: 3\nlevels:\n  - {size: 0, link: 4}\n  - {sze: 3}\n", [
        (1, "name cannot be 3; give a word"),
        (3, "link cannot be 4; give a string"),
        (3, "size cannot be 0; give a whole number from 1 to 1048576"),
        (4, "a level has no key 'sze'; the nearest is size"),
        (4, "a level has no link; give a string"),
        (4, "a level has no size; give a whole number from 1 to 1048576")]),
}  # fmt: skip
