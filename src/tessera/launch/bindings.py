"""Rank bindings: a YAML file with the ranks of a run, and the environment variables of each.

    rank_bindings:
      - {rank: 0, mesh_id: 0, mesh_host_rank: 0, env_overrides: {TT_VISIBLE_DEVICES: "0,1"}}
      - {rank: 1, mesh_id: 0, mesh_host_rank: 1, env_overrides: {TT_VISIBLE_DEVICES: "2,3"}}
    global_env: {TESSERA_DETERMINISTIC: "1"}
    mesh_graph_desc_path: mesh.textproto

A variable is taken from the last of: the launcher's variables for each rank, `global_env`,
`env_overrides`. `$NAME` in a value is the launcher's own variable, `$$` a dollar.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, ValidationError

from ..core.environment import MESHES
from ..core.errors import UsageError
from ..core.wording import ranks_text

# Variables that `tessera run` itself sets for each rank.
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TESSERA_COORDINATOR",
       "TESSERA_TOKEN", "TESSERA_JOIN", "TESSERA_ELASTIC", MESHES)  # fmt: skip
_MOST_BYTES = 1 << 20


def _text(value: object) -> object:
    """Returns a number as text, exactly as it is written (`_Loader`)."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Value = Annotated[str, BeforeValidator(_text)]
Number = Annotated[StrictInt, Field(ge=0, lt=1 << 31)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RankBinding(_Table):
    """One rank: its mesh, its host number within that mesh, its variables."""

    rank: Number
    mesh_id: Number
    mesh_host_rank: Number | None = None
    env_overrides: dict[str, Value] = Field(default_factory=dict)


class Bindings(_Table):
    """All ranks of a run, in order."""

    rank_bindings: tuple[RankBinding, ...]
    global_env: dict[str, Value] = Field(default_factory=dict)
    mesh_graph_desc_path: str | None = None


def load(path: Path) -> Bindings:
    """Returns the rank bindings of the file at `path`. Raises UsageError with all faults of the
    file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _wrong(path, f"cannot be read: {error.strerror}") from None
    if len(data) > _MOST_BYTES:
        raise _wrong(path, f"has {len(data)} bytes; 1 MiB are enough for all ranks")
    try:
        document = yaml.load(data.decode(), Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}" if mark else ""
        raise _wrong(path, f"is not YAML{where}: {error.problem}") from None
    except RecursionError:
        raise _wrong(path, "is nested too deeply") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise _wrong(path, f"is not YAML: {str(error).splitlines()[0].partition(';')[0]}") from None
    if not isinstance(document, dict):
        raise _wrong(path, "has no rank_bindings")
    try:
        bindings = Bindings.model_validate(document)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        rows = [(_at(e["loc"]), _error_text(e)) for e in errors]
        rows += _problems(path, _without(document, [e["loc"] for e in errors]), part=True)
        raise _wrong(path, "does not fit", rows) from None
    if rows := _problems(path, bindings):
        raise _wrong(path, "does not fit", rows)
    ranks, descriptor = bindings.rank_bindings, bindings.mesh_graph_desc_path
    return bindings.model_copy(
        update={
            "rank_bindings": tuple(sorted(ranks, key=lambda b: b.rank)),
            "mesh_graph_desc_path": None if descriptor is None else str(_find(descriptor, path)),
        }
    )


def _without(document: dict[Any, Any], places: Sequence[tuple[int | str, ...]]) -> Bindings:
    """Returns the bindings of `document` without the faulty places: without a variable, a rank or a
    key."""
    keys, ranks, variables = set[Any](), set[Any](), set[tuple[int | str, ...]]()
    for at in places:
        if at[0] == "rank_bindings" and len(at) > 1:
            a_variable = len(at) > 3 and at[2] == "env_overrides"
            variables.add(at[:4]) if a_variable else ranks.add(at[1])
        else:
            variables.add(at[:2]) if len(at) > 1 else keys.add(at[0])

    def without_faulty(x: Any, *at: int | str) -> Any:
        return {k: v for k, v in x.items() if (*at, k) not in variables}

    out = {
        k: without_faulty(v, k) if isinstance(v, dict) else v
        for k, v in document.items()
        if k not in keys
    }
    every = enumerate(out.get("rank_bindings", ()))
    out["rank_bindings"] = [
        {
            **b,
            "env_overrides": without_faulty(
                b.get("env_overrides", {}), "rank_bindings", i, "env_overrides"
            ),
        }
        for i, b in every
        if i not in ranks
    ]
    return Bindings.model_validate(out)


def _problems(path: Path, bindings: Bindings, part: bool = False) -> list[tuple[str, str]]:
    """Returns the contradictions in `bindings`. With `part`, some ranks are left out, so missing
    ones are no fault."""
    ranks = sorted(bindings.rank_bindings, key=lambda b: b.rank)
    ranks_given = [b.rank for b in ranks]
    rows = [] if ranks or part else [("rank_bindings", "should name at least one rank")]
    twice = (
        sorted({r for r in ranks_given if ranks_given.count(r) > 1})
        if len(ranks_given) > len({*ranks_given})
        else []
    )
    missing = [r for r in range(len(ranks_given)) if r not in {*ranks_given}]
    if twice:
        rows.append(("rank_bindings", f"{ranks_text(twice)} more than once"))
    elif missing and not part:
        rows.append(("rank_bindings", f"{ranks_text(missing)} missing: they count from 0"))
    places: dict[tuple[int, int], int] = {}
    for b in ranks:
        if b.mesh_host_rank is not None:
            first = places.setdefault((b.mesh_id, b.mesh_host_rank), b.rank)
            if first != b.rank:
                at = f"mesh_host_rank {b.mesh_host_rank} of mesh_id {b.mesh_id}"
                rows.append(("rank_bindings", f"{ranks_text([first, b.rank])} both have {at}"))
    rows += _variables("global_env", bindings.global_env)
    for b in ranks:
        rows += _variables(f"env_overrides of rank {b.rank}", b.env_overrides)
    descriptor = bindings.mesh_graph_desc_path
    if descriptor is not None and _find(descriptor, path) is None:
        rows.append(("mesh_graph_desc_path", f"{descriptor!r} is not there"))
    return rows


def _find(name: str, path: Path) -> Path | None:
    """Returns the file `name`, relative to the working folder or to the folder of the bindings."""
    if not name or "\0" in name:
        return None
    tries = [p for p in (Path(name).expanduser(), path.parent / name) if p.is_file()]
    return tries[0].resolve() if tries else None


def _variables(where: str, variables: Mapping[str, str]) -> list[tuple[str, str]]:
    rows = []
    for name, value in variables.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            rows.append((where, f"{name[:40]!r} is no name of a variable"))
        elif name in LAUNCHER_VARIABLES:
            rows.append((where, f"{name} is set by the launcher: leave it out"))
        elif "\0" in value:
            rows.append((where, f"{name} has a zero byte"))
        else:
            try:
                Template(value).substitute(os.environ)
            except KeyError as error:
                rows.append((where, f"{name} asks for ${error.args[0]}, which is not set here"))
            except ValueError:
                rows.append((where, f"{name} has a $ that is no variable's: write $$"))
    return rows


def environments(bindings: Bindings) -> tuple[dict[str, str], ...]:
    """Returns the variables of each rank: the launcher's defaults, then `global_env`, then the
    rank's `env_overrides`."""
    every = [_environment(bindings, binding) for binding in bindings.rank_bindings]
    places = [(e["TT_MESH_ID"], e.get("TT_MESH_HOST_RANK", "")) for e in every]
    if not all(mesh.isdecimal() and (host or "0").isdecimal() for mesh, host in places):
        return tuple(every)  # the rank with the wrong override reports it
    return tuple(e | {MESHES: _meshes(places)} for e in every)


def _meshes(ranks: Sequence[tuple[str, str]]) -> str:
    """Returns the mesh and host of each rank, "0.0,0.1"; ranks without a host get the free hosts in
    order."""
    taken = {(mesh, host) for mesh, host in ranks if host}
    out = []
    for mesh, host in ranks:
        host = host or next(h for h in map(str, itertools.count()) if (mesh, h) not in taken)
        taken.add((mesh, host))
        out.append(f"{mesh}.{host}")
    return ",".join(out)


def _environment(bindings: Bindings, binding: RankBinding) -> dict[str, str]:
    cache = Path.home() / ".cache" / f"{socket.gethostname()}_rank{binding.rank}"
    out = {"TT_METAL_CACHE": str(cache), "TT_MESH_ID": str(binding.mesh_id)}
    if binding.mesh_host_rank is not None:
        out["TT_MESH_HOST_RANK"] = str(binding.mesh_host_rank)
    if bindings.mesh_graph_desc_path:
        out["TT_MESH_GRAPH_DESC_PATH"] = bindings.mesh_graph_desc_path
    for given in (bindings.global_env, binding.env_overrides):
        out |= {name: Template(value).substitute(os.environ) for name, value in given.items()}
    return out


# -- errors ---------------------------------------------------------------------------------------
def _wrong(path: Path, message: str, rows: Sequence[tuple[str, str]] = ()) -> UsageError:
    fix = "the form of the file: docs/many-processes.md"
    return UsageError(f"Configuration error: {str(path)!r} {message}", rows=rows, fix=fix, at="")


def _at(loc: Sequence[int | str]) -> str:
    """Returns the place of an error as text, such as `rank_bindings[1].rank`."""
    text = "".join(f"[{k}]" if isinstance(k, int) else f".{str(k)[:40]}" for k in loc)
    return text.removeprefix(".").removesuffix(".[key]")


_WORDS = {
    "missing": "is missing",
    "extra_forbidden": "is not known",
    "int_type": "should be a whole number",
    "greater_than_equal": "should be at least {ge}",
    "less_than": "should be below {lt}",
    "string_type": "should be text: put it in quotes",
    "tuple_type": "should be a list",
    "dict_type": "should be a table of names and values",
    "model_type": "should be a table of names and values",
}


def _error_text(error: Any) -> str:
    """Returns the text of one error, with the value that is there."""
    words = _WORDS.get(error["type"], error["msg"]).format(**error.get("ctx", {}))
    given = error["input"]
    plain = isinstance(given, (str, int, float)) and error["type"] != "extra_forbidden"
    return f"{words}, not {str(given)[:40]!r}" if plain else words


_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """YAML without duplicate keys, since the second would silently replace the first. Only plain
    decimal digits are a number: YAML would read 0777 as 511, 1.10 as 1.1 and 10:30 as 630; these
    stay text."""

    yaml_implicit_resolvers = {  # noqa: RUF012  # it is yaml's own
        first: [(tag, form) for tag, form in pairs if tag not in _NUMBERS]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key.value!r} stands twice", key.start_mark
                    )
                seen.add(key.value)
        return dict(super().construct_mapping(node, deep))


_Loader.add_implicit_resolver(_NUMBERS[0], re.compile(r"(0|-?[1-9][0-9]*)\Z"), list("-0123456789"))
