"""Rank binding files: valid ones with their variables, invalid ones with the reason."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tessera import TesseraError, UsageError
from tessera.launch.bindings import environments, load

CACHE = f"{Path.home()}/.cache/{socket.gethostname()}_rank"
ONE = "rank_bindings: [{rank: 0, mesh_id: 0}]\n"


def rank(k: int, mesh: int = 0, host: int | None = None, **more: str) -> dict[str, str]:
    """The environment variables of rank `k`."""
    place = {} if host is None else {"TT_MESH_HOST_RANK": str(host)}
    return {"TT_METAL_CACHE": f"{CACHE}{k}", "TT_MESH_ID": str(mesh), **place, **more}


# The text of a file, and the variables of each rank.
GOOD: dict[str, tuple[str, list[dict[str, str]]]] = {
    "one rank": (ONE, [rank(0)]),
    "as JSON": ('{"rank_bindings": [{"rank": 0, "mesh_id": 7}]}', [rank(0, 7)]),
    "one mesh of two hosts": (
        """
        rank_bindings:
          - rank: 0
            mesh_id: 0
            mesh_host_rank: 0
            env_overrides:
              TT_VISIBLE_DEVICES: "0,1"
          - rank: 1
            mesh_id: 0
            mesh_host_rank: 1
            env_overrides: {TT_VISIBLE_DEVICES: "2,3"}
        mesh_graph_desc_path: "mesh.textproto"
        global_env: {TT_METAL_LOGGER_LEVEL: "INFO"}
        """,
        [
            rank(k, 0, k, TT_MESH_GRAPH_DESC_PATH="HERE/mesh.textproto",
                 TT_METAL_LOGGER_LEVEL="INFO", TT_VISIBLE_DEVICES=ids)
            for k, ids in enumerate(("0,1", "2,3"))
        ],
    ),
    "two meshes": (
        "rank_bindings: [{rank: 0, mesh_id: 0}, {rank: 1, mesh_id: 1}]",
        [rank(0, 0), rank(1, 1)],
    ),
    "one place in each of two meshes": (
        "rank_bindings: [{rank: 0, mesh_id: 0, mesh_host_rank: 0},"
        " {rank: 1, mesh_id: 1, mesh_host_rank: 0}]",
        [rank(0, 0, 0), rank(1, 1, 0)],
    ),
    "in any order": (
        "rank_bindings: [{rank: 1, mesh_id: 5}, {rank: 0, mesh_id: 4}]",
        [rank(0, 4), rank(1, 5)],
    ),
    "a rank's variable before one of all": (
        "rank_bindings: [{rank: 0, mesh_id: 0, env_overrides: {A: rank}},"
        " {rank: 1, mesh_id: 0}]\nglobal_env: {A: all, B: all}",
        [rank(0, A="rank", B="all"), rank(1, A="all", B="all")],
    ),
    "a default replaced": (ONE + "global_env: {TT_METAL_CACHE: /c}", [
        rank(0) | {"TT_METAL_CACHE": "/c"},
    ]),
    "numbers as they are written": (
        ONE + "global_env: {A: 0777, B: 1.10, C: 12:30:45, D: 1_000, E: 0x10, F: 1e-3, G: +1,"
        " H: 08, I: -3, J: 0.5, K: 0b11}",
        [
            rank(0, A="0777", B="1.10", C="12:30:45", D="1_000", E="0x10", F="1e-3", G="+1", H="08",
                 I="-3", J="0.5", K="0b11")
        ],
    ),
    "an empty value": (ONE + 'global_env: {A: ""}', [rank(0, A="")]),
    "a variable of the launcher": (
        ONE + "global_env: {A: '$FROM_TEST/x', B: '${FROM_TEST}y'}",
        [rank(0, A="here/x", B="herey")],
    ),
    "a dollar": (ONE + "global_env: {A: $$5}", [rank(0, A="$5")]),
    "many lines": (ONE + "global_env:\n  A: |\n    x\n    y\n", [rank(0, A="x\ny\n")]),
    "an anchor": (
        "rank_bindings:\n  - {rank: 0, mesh_id: 0, env_overrides: &a {A: x}}\n"
        "  - {rank: 1, mesh_id: 0, env_overrides: *a}",
        [rank(0, A="x"), rank(1, A="x")],
    ),
    "a merge": (
        "rank_bindings:\n  - &a {rank: 0, mesh_id: 3}\n  - {<<: *a, rank: 1}",
        [rank(0, 3), rank(1, 3)],
    ),
    "a comment": ("# ranks\n" + ONE + "# end", [rank(0)]),
}  # fmt: skip


def one(more: str) -> str:
    return f"rank_bindings: [{{rank: 0, mesh_id: 0, {more}}}]"


def several(*ranks: int) -> str:
    return "rank_bindings: [" + ", ".join(f"{{rank: {r}, mesh_id: 0}}" for r in ranks) + "]"


# The text of a file, and its error: lines after the file's name, or the rows of the message.
BAD: dict[str, tuple[str, str]] = {
    "wrong in its form and in what it says": (
        "rank_bindings:\n"
        "  - {rank: 0, mesh_id: 0, env_overrides: {A: '$NOT_SET', B: [1], RANK: '3'}}\n"
        "  - {rank: 1, mesh_id: x}\n"
        "  - {rank: 0, mesh_id: 0}\n"
        "global_env: {C: {}, D: a$}\n"
        "mesh_graph_desc_path: absent.textproto",
        """rank_bindings[0].env_overrides.B : should be text: put it in quotes
rank_bindings[1].mesh_id         : should be a whole number, not 'x'
global_env.C                     : should be text: put it in quotes
rank_bindings                    : rank 0 more than once
global_env                       : D has a $ that is no variable's: write $$
env_overrides of rank 0          : A asks for $NOT_SET, which is not set here
env_overrides of rank 0          : RANK is set by the launcher: leave it out
mesh_graph_desc_path             : 'absent.textproto' is not there""",
    ),
    "empty": ("", "has no rank_bindings"),
    "a list": ("[1]", "has no rank_bindings"),
    "a word": ("ranks", "has no rank_bindings"),
    "only null": ("~", "has no rank_bindings"),
    "no YAML": ("a: [", "is not YAML, line 1: expected the node content, but found '<stream end>'"),
    "a tab": (
        "a:\n\t- b",
        "is not YAML, line 2: found character '\\t' that cannot start any token",
    ),
    "two documents": (ONE + "---\n" + ONE, "is not YAML, line 2: but found another document"),
    "an object": (
        "!!python/object:os.system x",
        "is not YAML, line 1: could not determine a constructor for the tag"
        " 'tag:yaml.org,2002:python/object:os.system'",
    ),
    "a zero byte": (
        "a: \0",
        "is not YAML: unacceptable character #x0000: special characters are not allowed",
    ),
    "a key twice": ("global_env: {A: 1, A: 2}\n" + ONE, "is not YAML, line 1: 'A' stands twice"),
    "a rank's key twice": (one("mesh_id: 1"), "is not YAML, line 1: 'mesh_id' stands twice"),
    "an unknown alias": ("rank_bindings: *x", "is not YAML, line 1: found undefined alias 'x'"),
    "a list as a key": ("{[1]: 2}", "is not YAML, line 1: found unhashable key"),
    "a date that is none": ("a: 2020-13-45", "is not YAML: month must be in 1..12"),
    "a long number": (
        "a: " + "9" * 5000,
        "is not YAML: Exceeds the limit (4300 digits) for integer string conversion:"
        " value has 5000 digits",
    ),
    "deep": ("a: " + "[" * 3000, "is nested too deeply"),
    "no bindings": ("global_env: {A: x}", "rank_bindings : is missing"),
    "no ranks": ("rank_bindings: []", "rank_bindings : should name at least one rank"),
    "ranks are null": ("rank_bindings:", "rank_bindings : should be a list"),
    "ranks in a map": ("rank_bindings: {rank: 0}", "rank_bindings : should be a list"),
    "a rank is a number": (
        "rank_bindings: [0]",
        "rank_bindings[0] : should be a table of names and values, not '0'",
    ),
    "no rank": ("rank_bindings: [{mesh_id: 0}]", "rank_bindings[0].rank : is missing"),
    "no mesh": ("rank_bindings: [{rank: 0}]", "rank_bindings[0].mesh_id : is missing"),
    "below zero": (
        "rank_bindings: [{rank: -1, mesh_id: 0}]",
        "rank_bindings[0].rank : should be at least 0, not '-1'",
    ),
    "too great": (
        f"rank_bindings: [{{rank: {2**31}, mesh_id: 0}}]",
        "rank_bindings[0].rank : should be below 2147483648, not '2147483648'",
    ),
    "a word as a rank": (
        "rank_bindings: [{rank: zero, mesh_id: 0}]",
        "rank_bindings[0].rank : should be a whole number, not 'zero'",
    ),
    "a number in quotes": (
        "rank_bindings: [{rank: '0', mesh_id: 0}]",
        "rank_bindings[0].rank : should be a whole number, not '0'",
    ),
    "half a rank": (
        "rank_bindings: [{rank: 0.5, mesh_id: 0}]",
        "rank_bindings[0].rank : should be a whole number, not '0.5'",
    ),
    "true as a rank": (
        "rank_bindings: [{rank: true, mesh_id: 0}]",
        "rank_bindings[0].rank : should be a whole number, not 'True'",
    ),
    "mesh below zero": (
        "rank_bindings: [{rank: 0, mesh_id: -2}]",
        "rank_bindings[0].mesh_id : should be at least 0, not '-2'",
    ),
    "host below zero": (
        one("mesh_host_rank: -1"),
        "rank_bindings[0].mesh_host_rank : should be at least 0, not '-1'",
    ),
    "an unknown key": (one("host: n1"), "rank_bindings[0].host : is not known"),
    "an unknown key above": (ONE + "envs: {}", "envs : is not known"),
    "all that is wrong": (
        "rank_bindings: [{rank: -1, mesh_id: 0}, {rank: x, mesh_id: y}]",
        "rank_bindings[0].rank    : should be at least 0, not '-1'\n"
        "rank_bindings[1].rank    : should be a whole number, not 'x'\n"
        "rank_bindings[1].mesh_id : should be a whole number, not 'y'",
    ),
    "a rank twice": (several(0, 1, 1), "rank_bindings : rank 1 more than once"),
    "not from 0": (several(1, 2), "rank_bindings : rank 0 missing: they count from 0"),
    "a gap": (several(0, 3, 1), "rank_bindings : rank 2 missing: they count from 0"),
    "one place for two": (
        "rank_bindings: [{rank: 0, mesh_id: 4, mesh_host_rank: 1},"
        " {rank: 1, mesh_id: 4, mesh_host_rank: 1}]",
        "rank_bindings : ranks 0, 1 both have mesh_host_rank 1 of mesh_id 4",
    ),
    "variables in a list": (
        ONE + "global_env: [A]",
        "global_env : should be a table of names and values",
    ),
    "a null value": (ONE + "global_env: {A: }", "global_env.A : should be text: put it in quotes"),
    "true as a value": (
        ONE + "global_env: {A: true}",
        "global_env.A : should be text: put it in quotes, not 'True'",
    ),
    "yes as a value": (
        one("env_overrides: {A: yes}"),
        "rank_bindings[0].env_overrides.A : should be text: put it in quotes, not 'True'",
    ),
    "a list as a value": (
        ONE + "global_env: {A: [1]}",
        "global_env.A : should be text: put it in quotes",
    ),
    "a number as a name": (
        ONE + "global_env: {1: x}",
        "global_env[1] : should be text: put it in quotes, not '1'",
    ),
    "no name": (ONE + "global_env: {'A B': x}", "global_env : 'A B' is no name of a variable"),
    "an equals sign": (ONE + "global_env: {A=B: x}", "global_env : 'A=B' is no name of a variable"),
    "the launcher's own": (
        one("env_overrides: {WORLD_SIZE: '9'}"),
        "env_overrides of rank 0 : WORLD_SIZE is set by the launcher: leave it out",
    ),
    "a variable that is not set": (
        ONE + "global_env: {A: $NOT_SET_IN_TESTS/x}",
        "global_env : A asks for $NOT_SET_IN_TESTS, which is not set here",
    ),
    "a lone dollar": (
        ONE + "global_env: {A: 5$}",
        "global_env : A has a $ that is no variable's: write $$",
    ),
    "a zero byte in a value": (ONE + r'global_env: {A: "\0"}', "global_env : A has a zero byte"),
    "no descriptor": (
        ONE + "mesh_graph_desc_path: nowhere.textproto",
        "mesh_graph_desc_path : 'nowhere.textproto' is not there",
    ),
    "a descriptor without a name": (
        ONE + "mesh_graph_desc_path: ''",
        "mesh_graph_desc_path : '' is not there",
    ),
    "a folder as a descriptor": (
        ONE + "mesh_graph_desc_path: .",
        "mesh_graph_desc_path : '.' is not there",
    ),
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FROM_TEST", "here")
    (tmp_path / "mesh.textproto").touch()
    return tmp_path / "ranks.yaml"


@pytest.mark.parametrize("name", GOOD)
def test_a_good_file_gives_each_rank_its_variables(name: str, file: Path) -> None:
    text, expected = GOOD[name]
    file.write_text(text)
    there = [{n: v.replace("HERE", str(file.parent)) for n, v in r.items()} for r in expected]
    given = [dict(e) for e in environments(load(file))]
    assert len({e.pop("TESSERA_MESHES") for e in given}) == 1, "each rank knows the meshes of all"
    assert given == there


@pytest.mark.parametrize(
    ("places", "says"),
    [
        (["0, mesh_host_rank: 0", "0, mesh_host_rank: 1"], "0.0,0.1"),
        (["0", "2", "3", "1"], "0.0,2.0,3.0,1.0"),
        (["1, mesh_host_rank: 1", "0", "1, mesh_host_rank: 0", "0"], "1.1,0.0,1.0,0.1"),
        (["0", "0, mesh_host_rank: 0", "0"], "0.1,0.0,0.2"),
        (["0", "0, env_overrides: {TT_MESH_ID: 1}"], "0.0,1.0"),
    ],
)
def test_each_rank_has_a_host_of_its_mesh(places: list[str], says: str, file: Path) -> None:
    rows = [f"  - {{rank: {k}, mesh_id: {place}}}\n" for k, place in enumerate(places)]
    file.write_text("rank_bindings:\n" + "".join(rows))
    assert [e["TESSERA_MESHES"] for e in environments(load(file))] == [says] * len(places)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_says_what_is_wrong(name: str, file: Path) -> None:
    text, expected = BAD[name]
    file.write_text(text)
    with pytest.raises(UsageError) as raised:
        load(file)
    what, *rows = str(raised.value).splitlines()
    assert re.fullmatch(r"  fix *: the form of the file: docs/many-processes.md", rows.pop())
    begin = f"Configuration error: {str(file)!r} "
    if rows:
        assert what == begin + "does not fit"
        assert rows == ["  " + row for row in expected.split("\n")]
    else:
        assert what == begin + expected


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    big, odd = tmp_path / "big", tmp_path / "odd"
    big.write_bytes(b"#" * ((1 << 20) + 1))
    odd.write_bytes(b"\xff\xfe\xfa")
    fix = "\n  fix : the form of the file: docs/many-processes.md"
    for path, said in (
        (tmp_path / "none", "cannot be read: No such file or directory"),
        (tmp_path, "cannot be read: Is a directory"),
        (big, "has 1048577 bytes; 1 MiB are enough for all ranks"),
        (odd, "is not YAML: 'utf-8' codec can't decode byte 0xff in position 0: invalid start"
              " byte"),
    ):  # fmt: skip
        with pytest.raises(UsageError) as raised:
            load(path)
        assert str(raised.value) == f"Configuration error: {str(path)!r} {said}{fix}"


WORDS = st.sampled_from(
    ["rank_bindings", "rank", "mesh_id", "mesh_host_rank", "env_overrides", "global_env",
     "mesh_graph_desc_path", "0", "1", "-1", "1.5", "true", "~", "$A", "$$", "x", "''", ": ", "- ",
     "{", "}", "[", "]", ", ", "\n", "\n  ", "&a ", "*a", "<<", "!!int ", "? ", "| ", '"', "'",
     "---", "0x1F", "1e9", "2001-01-01", "2001-99-01", "%", "@", "#", "\t"],
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
TABLES = st.fixed_dictionaries(
    {"rank_bindings": st.lists(
        st.fixed_dictionaries(
            {"rank": st.integers(0, 2) | VALUES, "mesh_id": st.integers(0, 1) | VALUES},
            optional={"mesh_host_rank": st.integers(0, 1) | VALUES,
                      "env_overrides": st.dictionaries(st.text("AB=$ \0", max_size=3),
                                                       st.text("a$A{}\0", max_size=5))},
        ), max_size=3)},
    optional={"global_env": VALUES, "mesh_graph_desc_path": st.text(max_size=5) | VALUES},
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(WORDS, max_size=40).map("".join) | TABLES.map(str) | st.text() | st.binary())
@example("a: &a [*a]")
@example("rank_bindings: &a [{rank: *a, mesh_id: *a}]")
@example("{<<: [1]}")
@example("=: 1")
@example("a: 1:99999999999999999999:3")
@example("a: !!binary ====")
def test_any_file_is_read_or_refused(file: Path, text: str | bytes) -> None:
    file.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "replace"))
    try:
        found = environments(load(file))
    except TesseraError as error:
        assert str(error).startswith("Configuration error: ")
        return
    assert found
    for variables in found:
        assert all(n and "=" not in n and "\0" not in n + v for n, v in variables.items())
        os.posix_spawn("/bin/true", ["true"], variables)  # a process can start with them
        os.wait()
