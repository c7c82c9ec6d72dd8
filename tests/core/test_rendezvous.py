"""Rendezvous of a run's processes, and errors that each of them receives."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tessera import BackendError
from tessera.runtime.processes import rendezvous
from tessera.runtime.processes.rendezvous import LOST, Member, Rendezvous, listen, reach

TOKEN = "token"
CAME: list[Member] = []  # connections, which the fixture closes after the test
Start = Callable[..., tuple[Rendezvous, str]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Yields a function that starts a coordinator and returns it with its address."""
    monkeypatch.setattr(rendezvous, "LOST_S", 0.1)
    monkeypatch.setattr(rendezvous, "HELLO_S", 1.0)
    sockets = []

    def begin(size: int, limit_s: float = 30, service: Any = lambda: "there:1") -> Any:
        sock = listen("127.0.0.1", 0)
        sockets.append(sock)
        made = Rendezvous(size, TOKEN, limit_s, service)
        made.start(sock)
        return made, f"127.0.0.1:{sock.getsockname()[1]}"

    yield begin
    while CAME:
        CAME.pop().close()
    for sock in sockets:
        sock.close()


def come(address: str, rank: int, size: int, token: str = TOKEN, **hello: Any) -> Member | str:
    """Returns the connection of rank `rank`, or the error's text."""
    member = reach(address, token, 5, hosted=True)
    said = {"rank": rank, "size": size, "versions": "jax 1", "who": f"process {rank}", **hello}
    CAME.append(member)
    try:
        assert member.meet(said, 20) == "there:1"
    except BackendError as error:
        lines = [x for x in str(error).splitlines() if not x.startswith("  at ")]
        return "\n".join(lines).replace(address, "ADDRESS")
    return member


def all_come(*calls: Callable[[], Any]) -> list[Any]:
    """Runs each call in its own thread, and returns their results."""
    found: list[Any] = [None] * len(calls)

    def run(k: int) -> None:
        found[k] = calls[k]()

    threads = [threading.Thread(target=run, args=(k,)) for k in range(len(calls))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
        assert not t.is_alive()
    return found


def test_each_rank_hears_where_the_service_is(start: Start) -> None:
    _, address = start(20)
    found = all_come(*(lambda k=k: come(address, k, 20) for k in range(20)))
    assert all(isinstance(f, Member) for f in found), found


def test_a_rank_that_does_not_come_is_named(start: Start) -> None:
    _, address = start(4, limit_s=1)
    found = all_come(lambda: come(address, 0, 4), lambda: come(address, 2, 4))
    assert set(found) == {
        "join: ranks 1, 3 did not come within 1 s\n"
        "  came : ranks 0, 2\n"
        "  fix  : see what these ranks did instead; to wait longer, set TESSERA_JOIN_LIMIT"
        " (seconds)"
    }


def test_versions_that_differ_are_named_on_all_ranks(start: Start) -> None:
    _, address = start(3)
    found = all_come(
        *(lambda k=k: come(address, k, 3, versions=f"jax {k // 2 + 1}") for k in range(3))
    )
    assert set(found) == {
        "join: the processes have different versions\n"
        "  ranks 0, 1 : jax 1\n"
        "  rank 2     : jax 2\n"
        "  fix        : install the same versions on all hosts"
    }


ONE = "start all processes of a run with one launcher, and one run on one port"


def test_ranks_that_do_not_fit_are_refused_and_the_others_meet(start: Start) -> None:
    made, address = start(2)
    first = threading.Thread(target=lambda: kept.append(come(address, 0, 2)))
    kept: list[Any] = []
    first.start()
    while 0 not in made.writers:
        pass
    assert come(address, 0, 2, who="another") == (
        "join: rank 0 has come before\n  there : process 0\n  new   : another\n  fix   : " + ONE
    )
    assert come(address, 1, 3) == (
        "join: the processes differ in how many they are\n  coordinator : 2 processes\n"
        "  rank 1      : 3\n  fix         : " + ONE
    )
    other = (
        "join: the coordinator there is that of another run\n"
        "  fix : two runs share a port: name another one for this run"
    )
    assert come(address, 1, 2, token="another") == other
    assert isinstance(come(address, 1, 2), Member)
    first.join(20)
    assert isinstance(kept[0], Member)
    assert come(address, 1, 2, who="late").startswith("join: rank 1 has come before\n")  # type: ignore[union-attr]


def test_a_rank_that_comes_again_before_all_are_there_takes_its_place(start: Start) -> None:
    made, address = start(2)
    sock = reach(address, TOKEN, 5, hosted=True)
    theirs = str(sock._next()["nonce"])
    sock.say({"rank": 0, "size": 2, "versions": "jax 1", "who": "first", "nonce": "n",
              "proof": rendezvous.proof(TOKEN, theirs, "rank")})  # fmt: skip
    sock._next()
    sock.close()
    while made.writers:
        pass
    found = all_come(*(lambda k=k: come(address, k, 2) for k in range(2)))
    assert all(isinstance(f, Member) for f in found), found


def test_strangers_disturb_nobody(start: Start) -> None:
    _, address = start(1)
    host, port = address.split(":")
    for said in (b"", b"\n", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100_000, b"[]\n", b"{}\n",
                 b'{"proof": 1}\n', b'{"rank": 0}\n'):  # fmt: skip
        with socket.create_connection((host, int(port))) as s:
            assert set(json.loads(s.makefile().readline())) == {"nonce"}
            s.sendall(said)
    silent = socket.create_connection((host, int(port)))
    assert isinstance(come(address, 0, 1), Member)
    silent.settimeout(10)
    assert silent.recv(1000) and not silent.recv(1000)  # its connection is closed
    silent.close()


def test_a_coordinator_of_others_is_found_out() -> None:
    with listen("127.0.0.1", 0) as sock:
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        answers = [b'{"nonce": "a"}\n{"proof": "b"}\n{"service": "there:1"}\n', b"SSH-2.0\n", b""]

        def serve() -> None:
            for answer in answers:
                s, _ = sock.accept()
                s.sendall(answer)
                if answer:
                    s.recv(10_000)
                s.close()

        thread = threading.Thread(target=serve)
        thread.start()
        found = [come(address, 0, 1) for _ in answers]
        thread.join(20)
    ended = (
        "join: the coordinator at ADDRESS ended, or does not speak as one\n"
        "  fix : see what the launcher, or rank 0, says"
    )
    assert found == [
        "join: what answers at ADDRESS is not the coordinator of this run\n"
        "  fix : two runs share a port: name another one for this run",
        ended,
        ended,
    ]


def test_a_rank_that_is_lost_is_named_and_one_that_leaves_is_not(start: Start) -> None:
    made, address = start(3)
    members = all_come(*(lambda k=k: come(address, k, 3) for k in range(3)))
    members[1].say({"bye": True})
    members[1].close()
    members[2].close()
    members[0].sock.settimeout(20)
    assert members[0].wait() == "rank 2 (process 2) ended"
    assert made.empty.wait(10)
    assert LOST == 113


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_is_told_to_all_others_at_once(rank: int, start: Start) -> None:
    made, address = start(3)
    members = all_come(*(lambda k=k: come(address, k, 3) for k in range(3)))
    members[rank].say({"failed": "ValueError: text"})
    for k in {0, 1, 2} - {rank}:
        members[k].sock.settimeout(20)
        assert members[k].wait() == f"rank {rank} (process {rank}) failed: ValueError: text"
    members[rank].close()  # this adds no other error
    for k in {0, 1, 2} - {rank}:
        members[k].sock.settimeout(0.5)
        assert members[k].wait() == f"the coordinator at {address} ended"  # no error
    for k in {0, 1, 2} - {rank}:
        members[k].close()
    assert made.empty.wait(10)


def test_a_service_that_does_not_start_is_told(start: Start) -> None:
    def service() -> str:
        raise RuntimeError("no memory\nat all")

    _, address = start(1, service=service)
    assert come(address, 0, 1) == "join: the engine's service does not start\n  service : no memory"


def test_nobody_answers() -> None:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    with pytest.raises(BackendError) as raised:
        reach(f"127.0.0.1:{port}", TOKEN, 0.5, hosted=False)
    assert re.sub("here : .*", "here : HOST", str(raised.value)) == (
        f"join: the coordinator at 127.0.0.1:{port} cannot be reached within 0.5 s\n"
        "  here : HOST\n"
        "  said : Connection refused\n"
        "  fix  : that address is of this host alone; for other hosts, name one that they can"
        " reach: tessera run --coordinator HOST"
    )
    with pytest.raises(BackendError, match="no firewall is between"):
        reach("no-such-host.invalid:1", TOKEN, 0.5, hosted=False)


def test_a_port_in_use_and_an_address_of_others() -> None:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        for wherever in (False, True):
            with pytest.raises(BackendError) as raised:
                listen("127.0.0.1", port, wherever)
            assert str(raised.value) == (
                f"join: the coordinator cannot listen at 127.0.0.1:{port}: Address already in use\n"
                "  fix : another program has the port: name a free one"
            )
    with pytest.raises(BackendError, match="name an address of this machine"):
        listen("192.0.2.1", 0)
    with listen("192.0.2.1", 0, wherever=True) as sock:
        assert sock.getsockname()[0] == "0.0.0.0"


def test_a_host_that_calls_itself_by_a_loopback_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", port))]

    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", found)
    for host, expected in (("n1", "0.0.0.0"), ("localhost", "127.0.1.1"), ("127.0.1.1",) * 2):
        with listen(host, 0) as sock:
            assert sock.getsockname()[0] == expected
