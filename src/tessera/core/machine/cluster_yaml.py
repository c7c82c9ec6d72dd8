"""Machines in short YAML files: levels of links, outermost first, and hosts.

>>> two = read(EXAMPLE)
>>> print(two.topology)
two_boxes, 16 devices: 2 all (infiniband 400G, ... 50 GB/s) x 8 all (nvlink 4, ... 450 GB/s)
>>> two.hosts, read(write(two)) == two
((2, 1), True)
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, get_args

from ..checks import shown
from ..dtypes import ALL
from ..errors import TesseraError
from ..mesh_input import times
from ..topology import Level, Link, Topology, Wiring
from ..value_checks import (
    FLAG,
    STRING,
    Kind,
    choices,
    is_list,
    is_string,
    is_whole,
    numbers,
    whole_numbers,
)
from ..wording import nearest
from .chip import CHIPS, Chip, Products
from .faults import Faults
from .machine import MOST_DEVICES, Machine
from .presets import LINKS

EXAMPLE = """\
name: two_boxes
levels:
  - {axis: node, size: 2, link: infiniband 400G}
  - {axis: gpu, size: 8, link: nvlink 4}
"""
POSITIVE = numbers(above=0, below=math.inf)
IDENTIFIER: Kind = ("a word of letters, digits and _", lambda x: is_string(x) and x.isidentifier())
KEYS: dict[str, Kind] = {
    "name": ("a word", lambda x: is_string(x) and re.fullmatch(r"[\w.-]+", x) is not None),
    "device": STRING,
    "levels": ("a list of levels", lambda x: isinstance(x, list) and 0 < len(x) <= 8),
    "hosts": (
        "a list of numbers of at least 1, one a level",
        lambda x: is_list(x, lambda n: is_whole(n) and n > 0),
    ),
    "cards": (
        "a list of lists of devices",
        lambda x: is_list(x, lambda c: is_list(c, lambda n: is_whole(n) and n >= 0)),
    ),
    "express": (
        "a list of pairs of devices",
        lambda x: is_list(x, lambda c: is_list(c, lambda n: is_whole(n) and n >= 0, 2)),
    ),
    "add_gb_per_s": POSITIVE,
    "sources": ("a list of strings", lambda x: is_list(x, is_string)),
    "notes": ("a list of strings", lambda x: is_list(x, is_string)),
    "chip": (
        f"a mapping, or one of {', '.join(CHIPS)}",
        lambda x: isinstance(x, dict) or (is_string(x) and x in CHIPS),
    ),
}
LEVEL_KEYS: dict[str, Kind] = {
    "axis": IDENTIFIER,
    "size": whole_numbers(1, MOST_DEVICES),
    "link": STRING,
    "gb_per_s": POSITIVE,
    "latency_us": numbers(least=0, below=math.inf),
    "wiring": choices(*get_args(Wiring)),
    "shared": FLAG,
}
"""The keys of a file and of a level, with the kind of each value. A described link (LINKS) needs no
figures; gb_per_s is one direction."""
CHIP_KEYS: dict[str, Kind] = {
    "name": STRING,
    "products": ("a list of rates", lambda x: isinstance(x, list) and len(x) > 0),
    "memory_gb": POSITIVE,
    "memory_gb_per_s": POSITIVE,
    "memory_efficiency": numbers(above=0, most=1),
    "host_gb_per_s": POSITIVE,
    "attention": numbers(above=0, most=1),
    "gops": POSITIVE,
    "kernel_us": numbers(least=0, below=math.inf),
    "column_ns": numbers(least=0, below=math.inf),
    "program_us": numbers(least=0, below=math.inf),
    "shared": FLAG,
}
PRODUCTS_KEYS: dict[str, Kind] = {
    "dtype": choices(*(d.name for d in ALL)),
    "peak_gflops": POSITIVE,
    "most": numbers(above=0, most=1),
    "area": numbers(least=0, below=math.inf),
    "depth": numbers(least=0, below=math.inf),
}
"""The keys of a chip and of its rates of products, with the kind of each value."""
UNITS = {
    "gb_per_s": "gigabytes a second, in one direction",
    "latency_us": "microseconds",
    "add_gb_per_s": "gigabytes a second",
    "memory_gb": "gigabytes",
    "memory_gb_per_s": "gigabytes a second",
    "host_gb_per_s": "gigabytes a second",
    "gops": "billions of elementwise operations a second",
    "kernel_us": "microseconds",
    "column_ns": "nanoseconds",
    "program_us": "microseconds",
    "peak_gflops": "billions of floating-point operations a second",
}


@dataclass(frozen=True, slots=True)
class Spotted:
    """A value with its line, and the values inside of it."""

    value: Any
    line: int
    inside: dict[Any, Spotted]


def read(text: str, where: str = "cluster") -> Machine:
    """Returns the machine that `text` describes. Raises MeshError with every fault and its line."""
    faults = Faults(where, "dgx_h100")
    root = _values(text, faults)
    given = _checked(root, KEYS, ("name", "levels"), faults, "the file")
    levels = [
        _level(root.inside["levels"].inside[i], faults) for i in range(len(given.get("levels", ())))
    ]
    chip = _chip(root.inside["chip"], faults) if "chip" in given else None
    if not faults.messages:
        return replace(_machine(root, given, levels, faults), chip=chip)
    raise faults.error()


def _chip(at: Spotted, faults: Faults) -> Chip | None:
    """Returns the chip of the key `chip`: one that is described, or one with its own figures. None
    if it has a fault."""
    if isinstance(at.value, str):
        return CHIPS[at.value]
    before = len(faults.messages)
    values = _checked(at, CHIP_KEYS, ("products", "memory_gb", "memory_gb_per_s"), faults, "a chip")
    rates = [
        _checked(one, PRODUCTS_KEYS, ("dtype", "peak_gflops"), faults, "a rate of products")
        for one in (at.inside["products"].inside.values() if "products" in values else ())
    ]
    if len(faults.messages) > before:
        return None
    own = {k: values[k] for k in ("memory_efficiency", "attention", "shared") if k in values}
    return Chip(
        values.get("name", "chip"),
        tuple(
            Products(
                r["dtype"],
                _scaled(r["peak_gflops"], 9),
                *(float(r.get(k, d)) for k, d in (("most", 1), ("area", 0), ("depth", 0))),
            )
            for r in rates
        ),
        _scaled(values["memory_gb"], 9),
        _scaled(values["memory_gb_per_s"], 9),
        ops_per_s=_scaled(values.get("gops", math.inf), 9),
        kernel_s=_scaled(values.get("kernel_us", 0), -6),
        column_s=_scaled(values.get("column_ns", 0), -9),
        program_s=_scaled(values.get("program_us", 0), -6),
        host_bytes_per_s=_scaled(values.get("host_gb_per_s", math.inf), 9),
        **own,
    )


def _scaled(x: float, power: int) -> float:
    """Returns `x` times a power of ten, rounded so that a file that is written and read back gives
    an equal machine."""
    return float(f"{x * 10.0**power:.12g}")


def _machine(root: Spotted, values: dict[str, Any], levels: list[Any], faults: Faults) -> Machine:
    """Returns the machine from values of the right kinds. Raises MeshError if they contradict each
    other."""
    sizes = [level.size for _, level in levels]
    axes = [axis or _named(i, len(levels)) for i, (axis, _) in enumerate(levels)]
    hosts = values.get("hosts", [sizes[0] if len(sizes) > 1 else 1] + [1] * (len(sizes) - 1))
    total = math.prod(sizes)
    at = {key: one.line for key, one in root.inside.items()}
    if len(set(axes)) < len(axes):
        faults.add(at["levels"], f"two levels have one axis: {', '.join(axes)}")
    if total > MOST_DEVICES:
        faults.add(at["levels"], f"{times(sizes)} are more than {MOST_DEVICES:,} devices")
    if len(hosts) != len(sizes) or any(n % h for n, h in zip(sizes, hosts)):
        faults.add(
            at.get("hosts", root.line), f"hosts {times(hosts)} do not divide levels {times(sizes)}"
        )
    for key in ("cards", "express"):
        if any(d >= total for one in values.get(key, ()) for d in one):
            faults.add(at[key], f"{key}: there are devices 0 to {total - 1} only")
    faults.stop()
    adds = values.get("add_gb_per_s")
    return Machine(
        values.get("device", "gpu"),
        Topology(
            values["name"],
            tuple(level for _, level in levels),
            math.inf if adds is None else round(adds * 1e9, 3),
        ),
        tuple(axes),
        tuple(hosts),
        tuple(map(tuple, values.get("cards", ()))),
        tuple((a, b) for a, b in values.get("express", ())),
        tuple(values.get("sources", ())),
        tuple(values.get("notes", ())),
    )


def _named(i: int, count: int) -> str:
    return ("node", "gpu")[i - count] if i >= count - 2 and count <= 2 else f"level{i}"


def _level(at: Spotted, faults: Faults) -> Any:
    """Returns the axis and the Level of one entry of `levels`; None if it has a fault."""
    before = len(faults.messages)
    values = _checked(at, LEVEL_KEYS, ("size", "link"), faults, "a level")
    if len(faults.messages) > before:
        return None
    preset = LINKS.get(values["link"])
    figures = values.get("gb_per_s"), values.get("latency_us")
    if preset is None and None in figures:
        faults.add(
            at.inside["link"].line,
            f"the link {values['link']!r} is not described; give gb_per_s and latency_us, or name "
            + nearest(values["link"], LINKS, 2).partition(", …")[0],
        )
        return None
    rate, latency = figures
    # Rounded, so that a machine written to a file and read back is equal to itself.
    link = Link(
        values["link"],
        round(latency / 1e6, 15) if latency is not None else preset.latency_s if preset else 0.0,
        round(rate * 1e9, 3) if rate is not None else preset.bytes_per_s if preset else 0.0,
    )
    wiring, shared = values.get("wiring", "all"), values.get("shared", False)
    return values.get("axis"), Level(values["size"], link, wiring, bool(shared))


def _checked(
    at: Spotted, keys: dict[str, Kind], needed: tuple[str, ...], faults: Faults, label: str
) -> dict[str, Any]:
    """Returns the values of `at` by key that are of the right kind; adds faults for the others."""
    if not isinstance(at.value, dict):
        faults.add(at.line, f"{label} is {shown(at.value)}; give keys: {', '.join(keys)}")
        return {}
    good = {}
    for key, one in at.inside.items():
        if key not in keys:
            near = nearest(str(key), keys, 1).partition(",")[0]
            unit = f", {UNITS[near]}" if near in UNITS else ""
            faults.add(one.line, f"{label} has no key {shown(key)}; the nearest is {near}{unit}")
        elif not keys[key][1](one.value):
            meant = _number_in(one.value)
            hint = f"; YAML reads this as text: write {meant}" if keys[key][1](meant) else ""
            faults.add(one.line, f"{key} cannot be {shown(one.value)}; give {keys[key][0]}{hint}")
        else:
            good[key] = one.value
    for key in needed:
        if key not in at.inside:
            faults.add(at.line, f"{label} has no {key}; give {keys[key][0]}")
    return good


def _number_in(value: Any) -> float | None:
    """Returns the number in a text such as 1e9, which YAML reads as text; None for other values."""
    try:
        x = float(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return int(x) if x is not None and x.is_integer() else x


# ---- YAML --------------------------------------------------------------------------------------
def _values(text: str, faults: Faults) -> Spotted:
    """Returns all values of `text` with their lines. Raises MeshError if it is not YAML."""
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                faults.add(1, "it is empty; give name and levels")
                raise faults.error()
            return _value(node, loader.construct_object, faults, set())
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        faults.add(mark.line + 1 if mark else 1, f"it is no YAML: {error.problem or error.context}")
    except TesseraError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as error:
        faults.add(1, f"it is no YAML: {str(error).splitlines()[0] if str(error) else 'too deep'}")
    raise faults.error()


def _value(
    node: Any, construct: Callable[[Any], Any], faults: Faults, seen_ids: set[int]
) -> Spotted:
    """Returns the value of one node. An alias, a second reference to a node, is a fault."""
    line = node.start_mark.line + 1
    if id(node) in seen_ids:
        faults.add(line, "an alias (*name) is not read; write it out")
        return Spotted(None, line, {})
    seen_ids.add(id(node))
    if node.id == "scalar":
        return Spotted(construct(node), line, {})
    if node.id == "sequence":
        items = [_value(n, construct, faults, seen_ids) for n in node.value]
        return Spotted([i.value for i in items], line, dict(enumerate(items)))
    inside: dict[Any, Spotted] = {}
    for key, value in node.value:
        if key.tag == "tag:yaml.org,2002:merge":
            faults.add(key.start_mark.line + 1, "<< is not read; write the keys out")
            continue
        name = construct(key) if key.id == "scalar" else shown(key.value)
        if name in inside:
            faults.add(key.start_mark.line + 1, f"{shown(name)} is there twice; keep one")
        inside[name] = _value(value, construct, faults, seen_ids)
    return Spotted({k: v.value for k, v in inside.items()}, line, inside)


# ---- back --------------------------------------------------------------------------------------
def write(machine: Machine) -> str:
    """Returns the file of `machine`, which `read` reads back."""
    import yaml

    levels = []
    for axis, v in zip(machine.axes, machine.topology.levels):
        one: dict[str, Any] = {"axis": axis, "size": v.size, "link": v.link.name}
        if LINKS.get(v.link.name) != v.link:
            one["gb_per_s"] = round(v.link.bytes_per_s / 1e9, 12)
            one["latency_us"] = round(v.link.latency_s * 1e6, 9)
        one |= {"wiring": v.wiring} if v.wiring != "all" else {}
        one |= {"shared": True} if v.shared else {}
        levels.append(one)
    rows: dict[str, Any] = {"name": machine.name, "device": machine.device}
    if math.isfinite(machine.topology.add_bytes_per_s):
        rows["add_gb_per_s"] = round(machine.topology.add_bytes_per_s / 1e9, 12)
    rows["hosts"] = list(machine.hosts)
    for key in ("cards", "express"):
        if found := getattr(machine, key):
            rows[key] = [list(one) for one in found]
    for key in ("sources", "notes"):
        if found := getattr(machine, key):
            rows[key] = list(found)
    if machine.chip is not None:
        rows["chip"] = _chip_rows(machine.chip)
    plain = all(map(str.isprintable, (machine.device, *machine.sources, *machine.notes)))
    style: Any = {"sort_keys": False, "default_flow_style": None, "allow_unicode": plain}
    head, body = (yaml.safe_dump(part, width=95, **style) for part in (rows, levels))
    return f"{head}levels:\n{textwrap.indent(body, '  ')}"


def _chip_rows(chip: Chip) -> Any:
    """Returns the value of the key `chip`: the name of a described chip, or its figures."""
    if CHIPS.get(chip.name) == chip:
        return chip.name
    rows: dict[str, Any] = {
        "name": chip.name,
        "memory_gb": _scaled(chip.memory_bytes, -9),
        "memory_gb_per_s": _scaled(chip.memory_bytes_per_s, -9),
        "memory_efficiency": chip.memory_efficiency,
        "attention": chip.attention,
        "kernel_us": _scaled(chip.kernel_s, 6),
        "column_ns": _scaled(chip.column_s, 9),
        "program_us": _scaled(chip.program_s, 6),
        "shared": chip.shared,
    }
    if math.isfinite(chip.host_bytes_per_s):
        rows["host_gb_per_s"] = _scaled(chip.host_bytes_per_s, -9)
    if math.isfinite(chip.ops_per_s):
        rows["gops"] = _scaled(chip.ops_per_s, -9)
    rows["products"] = [
        {
            "dtype": p.dtype, "peak_gflops": _scaled(p.peak_flops_per_s, -9), "most": p.most,
            "area": p.area, "depth": p.depth,
        }
        for p in chip.products
    ]  # fmt: skip
    return rows
