"""What are the messages of a mesh graph descriptor (MGD 2.0), and on which line is each field?

The messages are described here in Python and made when they are first needed. A file that protoc
writes would be bound to the version that wrote it, and refuses older runtimes. All fields are
optional to the library, so that what is missing is an error of ours, with its line.

>>> m = message()()
>>> m.mesh_descriptors.add(name="M0").device_topology.dims.extend([2, 4])
>>> text_of(m).split()[:4]
['mesh_descriptors', '{', 'name:', '"M0"']
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, repeat
from typing import Any

# name:kind, in the order in which they are written; * is repeated, | one of several. Files say the
# topology of a graph by a word (GraphTopology), newer ones by a message (GraphLayout).
MESSAGES = {
    "GraphLayout": "layout_type:GraphTopology channels:Channels assign_z_direction:bool",
    "Dims": "dims:*int32",
    "Grid": "dims:*int32 types:*Wiring dim_types:*Wiring",
    "Channels": "count:int32 policy:Policy",
    "Express": "src:int32 dst:int32",
    "Mesh": "name:string arch:Architecture device_topology:Grid channels:Channels "
    "host_topology:Dims express_connections:*Express",
    "MeshRef": "mesh_descriptor:string mesh_id:int32 device_id:int32",
    "GraphRef": "graph_descriptor:string graph_id:int32 mesh:|MeshRef graph:|GraphRef",
    "NodeRef": "mesh:|MeshRef graph:|GraphRef",
    "Connection": "nodes:*NodeRef channels:Channels directional:bool "
    "routing_direction:*Direction assign_z_direction:bool",
    "Graph": "name:string type:string instances:*NodeRef channels:Channels "
    "graph_topology:GraphTopology connections:*Connection",
    "Descriptor": "mesh_descriptors:*Mesh graph_descriptors:*Graph top_level_instance:NodeRef",
}
ENUMS = {
    "Wiring": ("LINE", "RING"),
    "Policy": ("STRICT", "RELAXED"),
    "Architecture": ("WORMHOLE_B0", "BLACKHOLE"),
    "GraphTopology": ("ALL_TO_ALL", "RING"),
    "Direction": ("N", "E", "S", "W", "C", "NONE", "Z"),
}


@cache
def message(layouts: bool = False) -> Any:
    """The class of a whole descriptor; with `layouts` of one with messages of GraphLayout."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(
        name="tessera_mesh_graph.proto", package="tessera", syntax="proto2"
    )
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, words in ENUMS.items():
        # Values of an enum share the scope that it stands in: each has a message of its own.
        made = file.message_type.add(name=f"{name}Of").enum_type.add(name=name)
        for i, word in enumerate(words, 1):
            made.value.add(name=word, number=i)
    for name, fields in MESSAGES.items():
        made = file.message_type.add(name=name)
        if layouts and name == "Graph":
            fields = fields.replace(":GraphTopology", ":GraphLayout")
        for i, (key, kind) in enumerate((f.split(":") for f in fields.split()), 1):
            bare = kind.lstrip("*|")
            repeated = kind.startswith("*")
            one = made.field.add(
                name=key,
                number=i,
                label=kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL,
            )
            if bare in MESSAGES or bare in ENUMS:
                one.type = kinds.TYPE_MESSAGE if bare in MESSAGES else kinds.TYPE_ENUM
                one.type_name = (
                    f".tessera.{bare}" if bare in MESSAGES else f".tessera.{bare}Of.{bare}"
                )
            else:
                one.type = getattr(kinds, f"TYPE_{bare.upper()}")
            if kind.startswith("|"):
                if not made.oneof_decl:
                    made.oneof_decl.add(name="which")
                one.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tessera.Descriptor"))


LAYOUTS = re.compile(r"^[^\"'#]*graph_topology\s*:?\s*[{<]", re.MULTILINE)


def class_for(text: str) -> Any:
    """The class of the descriptor that `text` is."""
    return message(LAYOUTS.search(text) is not None)


def text_of(m: Any) -> str:
    """`m` in the text format."""
    from google.protobuf import text_format

    return str(text_format.MessageToString(m, use_short_repeated_primitives=True))


# ---- lines -------------------------------------------------------------------------------------
_TOKEN = re.compile(
    r"""\#[^\n]*|(?P<token>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[^\s{}<>\[\]:;,\#"']+|\S)"""
)


@dataclass(slots=True)
class Spot:
    """Where a field stands: its line, and the spots of the fields in it by name, in their order."""

    line: int
    fields: dict[str, list[Spot]] = field(default_factory=dict)

    def at(self, *path: str | int) -> int:
        """The line of what `path` leads to (names, each with its number where it is repeated), or
        of the last field on the way that is there.

        >>> spots('a { b: [1,\\n 2] }\\na { c { } }').at("a", 0, "b", 1)
        2
        """
        here, steps = self, list(path)
        while steps:
            found = here.fields.get(str(steps.pop(0)), [])
            k = int(steps.pop(0)) if steps and isinstance(steps[0], int) else 0
            if k >= len(found):
                return found[-1].line if found else here.line
            here = found[k]
        return here.line


def spots(text: str) -> Spot:
    """The lines of all fields of `text`, which the library could read."""
    lines = enumerate(text.split("\n"), 1)
    every = [(m["token"], n) for n, line in lines for m in _TOKEN.finditer(line) if m["token"]]
    root, rest = Spot(1), chain(every, repeat(("", 0)))
    _fields(root, rest)
    return root


Tokens = Iterator[tuple[str, int]]


def _fields(here: Spot, rest: Tokens) -> None:
    """Reads fields into `here`, up to what closes it."""
    token, line = next(rest)
    while token and token not in "}>":
        if token in ",;":
            token, line = next(rest)
            continue
        many = here.fields.setdefault(token, [])
        token, line = next(rest)
        if token == ":":
            token, line = next(rest)
        if token == "[":
            while token and token != "]":
                token, line = next(rest)
                if token not in ",]":
                    token, line = _value(many, token, line, rest)
            token, line = next(rest)
        else:
            token, line = _value(many, token, line, rest)


def _value(many: list[Spot], token: str, line: int, rest: Tokens) -> tuple[str, int]:
    """Adds the value that begins with `token` to `many`; what comes after it."""
    many.append(Spot(line))
    if token in "{<":
        _fields(many[-1], rest)
    elif token == "-":
        next(rest)
    after = next(rest)
    while token[:1] in "\"'" and after[0][:1] in ('"', "'"):  # a string in several pieces
        after = next(rest)
    return after
