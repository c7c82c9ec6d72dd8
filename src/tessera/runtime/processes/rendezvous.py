"""Rendezvous of the processes of a run, before the engine connects them.

One process listens: the launcher or rank 0. Each rank introduces itself; when all are there with
the same versions, each receives the address of the engine's service, otherwise the error. The
connections stay open: one that closes without a message is a rank that died, and the others are
told.

Both sides prove that they know the run's token (HMAC-SHA256 of the other side's nonce), so neither
a process of another run nor a stranger on the port takes part. Messages are lines of JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from ...core.errors import BackendError
from ...core.ranks import split_address
from ...core.wording import ranks_text

LOST = 113  # exit code of a rank that ends because another one, or the coordinator, ended
Message = dict[str, Any]
HELLO_S = 10.0  # time limit for a connection to introduce itself
LOST_S = (
    5.0  # between the end of a rank and of the others: a supervisor reports it sooner, and better
)


def proof(token: str, nonce: str, of: str) -> str:
    return hmac.new(token.encode(), f"{of} {nonce}".encode(), "sha256").hexdigest()


def listen(host: str, port: int, wherever: bool = False) -> socket.socket:
    """Returns a socket that listens at `host`; at all addresses of this machine if `host` is not
    one of them (a service in front of it) and `wherever` is set.

    It also listens at all addresses if the host's own name is a loopback address, which others
    cannot reach: on Debian it is 127.0.1.1. Raises BackendError if the port is taken or the address
    wrong.
    """
    try:
        family, *_, at = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if str(at[0]).startswith("127.") and host not in (at[0], "localhost"):
            return _listening(socket.AF_INET, ("", port))
        return _listening(family, at)
    except OSError as error:
        if wherever and error.errno not in (errno.EADDRINUSE, errno.EACCES):
            return _listening(socket.AF_INET, ("", port))
        raise BackendError(
            f"join: the coordinator cannot listen at {host}:{port}: {error.strerror}",
            fix="another program has the port: name a free one"
            if error.errno == errno.EADDRINUSE
            else "name an address of this machine",
            at="",
        ) from None


def _listening(family: int, at: Any) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(at)
        made.listen(socket.SOMAXCONN)
    except OSError:
        made.close()
        raise
    return made


class Rendezvous:
    """The listening side. `service` starts the engine's service once all ranks are there, and
    returns its address. `own_process`: no rank is in this process."""

    def __init__(
        self,
        size: int,
        token: str,
        limit_s: float,
        service: Callable[[], str],
        own_process: bool = False,
    ) -> None:
        self.size, self.token, self.limit_s, self.service = size, token, limit_s, service
        self.own_process = own_process
        self.hellos: dict[int, Message] = {}
        self.writers: dict[int, asyncio.StreamWriter] = {}
        self.complete = False
        self.ended: set[int] = set()  # ranks whose program has ended, reported by the launcher
        self.empty = threading.Event()  # set when rank 0 alone is left
        self._tasks: set[asyncio.Task[None]] = set()

    def has_ended(self, rank: int) -> None:
        """Notes, from any thread, that the program of `rank` has ended, so that no rank waits for
        it."""
        self.ended.add(rank)
        asyncio.run_coroutine_threadsafe(self._wait_no_more(), self._loop)

    async def serve(self, sock: socket.socket) -> None:
        """Answers until it is cancelled."""
        server = await asyncio.start_server(self._member, sock=sock)
        async with server:
            await server.serve_forever()

    def start(self, sock: socket.socket) -> None:
        """Answers in a thread of its own, for the lifetime of this process."""
        self._loop = asyncio.new_event_loop()
        serving = self._loop.run_until_complete
        threading.Thread(target=serving, args=(self.serve(sock),), daemon=True).start()

    async def _member(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            rank = await self._greet(reader, writer)
            if rank is None:
                return
            said = await self._line(reader)
            if "failed" in said:
                self._keep(asyncio.create_task(self._tell_lost(rank, f"failed: {said['failed']}")))
                await self._line(reader)  # returns when the rank's program ends
            self._leave(rank, said)
        except (OSError, ValueError, KeyError):
            pass  # not a rank of this program
        finally:
            writer.close()

    async def _line(self, reader: asyncio.StreamReader) -> Message:
        """Returns the next message; an empty one at the end of the connection."""
        try:
            line = await reader.readline()
        except OSError:
            line = b""
        found = json.loads(line) if line.endswith(b"\n") else {}
        if not isinstance(found, dict):
            raise ValueError(line)
        return found

    async def _greet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> int | None:
        """Returns the rank of a new connection; None if it is refused, after sending the error."""
        nonce = secrets.token_hex(16)
        _send(writer, {"nonce": nonce})
        hello = await asyncio.wait_for(self._line(reader), HELLO_S)
        mine = proof(self.token, str(hello.get("nonce")), "coordinator")
        if not hmac.compare_digest(str(hello.get("proof")), proof(self.token, nonce, "rank")):
            _refuse(writer, mine, "the coordinator there is that of another run", [], _OTHER)
            return None
        rank, size = hello["rank"], hello["size"]
        if size != self.size:
            rows = [("coordinator", f"{self.size} processes"), (f"rank {rank}", f"{size}")]
            _refuse(writer, mine, "the processes differ in how many they are", rows, _ONE)
            return None
        if rank in self.writers or self.complete:
            other = self.hellos[rank]
            rows = [("there", other["who"]), ("new", hello["who"])]
            _refuse(writer, mine, f"rank {rank} has come before", rows, _ONE)
            return None
        if not self.hellos:
            self._keep(asyncio.create_task(self._limit()))
        _send(writer, {"proof": mine})
        self.hellos[rank], self.writers[rank] = hello, writer
        if len(self.writers) == self.size:
            await self._all_joined()
        await self._wait_no_more()
        return int(rank)

    async def _all_joined(self) -> None:
        self.complete = True
        kinds: dict[str, list[int]] = {}
        for rank, hello in sorted(self.hellos.items()):
            kinds.setdefault(str(hello["versions"]), []).append(rank)
        if len(kinds) > 1:
            rows = [(ranks_text(ranks), kind) for kind, ranks in kinds.items()]
            self._tell_all(_error("the processes have different versions", rows, _SAME))
            return
        try:
            address = await asyncio.get_running_loop().run_in_executor(None, self.service)
            self._tell_all({"service": address})
        except Exception as error:
            rows = [("service", str(error).splitlines()[0])]
            self._tell_all(_error("the engine's service does not start", rows, ""))

    async def _limit(self) -> None:
        """Ends the wait for missing ranks after the time limit."""
        await asyncio.sleep(self.limit_s)
        if self.complete:
            return
        missing = [r for r in range(self.size) if r not in self.writers]
        what = f"{ranks_text(missing)} did not come within {self.limit_s:g} s"
        self._tell_all(_error(what, [("came", ranks_text(sorted(self.writers)))], _LATE))

    async def _wait_no_more(self) -> None:
        """Ends the wait if a rank has ended before it joined."""
        if self.ended and not self.complete:
            what = f"{ranks_text(sorted(self.ended))} ended before joining the run"
            self._tell_all(_error(what, [("came", ranks_text(sorted(self.writers)))], _EACH))

    def _leave(self, rank: int, farewell: Message) -> None:
        self.writers.pop(rank, None)
        if not self.complete:
            self.hellos.pop(rank)  # a new process may join as this rank
        elif not farewell:
            self._keep(asyncio.create_task(self._tell_lost(rank, "ended")))
        if not set(self.writers) - {0}:
            self.empty.set()

    async def _tell_lost(self, rank: int, how: str) -> None:
        who = f"rank {rank} ({self.hellos[rank]['who']}) {how}"
        if rank or self.own_process:  # else the coordinator ends with rank 0
            await asyncio.sleep(LOST_S)
        self._tell_all({"lost": who}, but=rank)

    def _tell_all(self, message: Message, but: int | None = None) -> None:
        for rank in sorted(self.writers, reverse=True):  # with rank 0 the coordinator may end
            if rank != but:
                _send(self.writers[rank], message)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


_OTHER = "two runs share a port: name another one for this run"
_ONE = "start all processes of a run with one launcher, and one run on one port"
_SAME = "install the same versions on all hosts"
_EACH = (
    "each rank joins as it first uses Tessera, and all of them must: let all run the same program,"
    " and call tessera.distributed.initialize() at its start"
)
_LATE = "see what these ranks did instead; to wait longer, set TESSERA_JOIN_LIMIT (seconds)"


def _send(writer: asyncio.StreamWriter, message: Message) -> None:
    writer.write(json.dumps(message).encode() + b"\n")


def _error(message: str, rows: list[tuple[str, str]], fix: str) -> Message:
    return {"error": [message, rows, fix]}


def _refuse(
    writer: asyncio.StreamWriter, mine: str, message: str, rows: list[tuple[str, str]], fix: str
) -> None:
    _send(writer, {"proof": mine, **_error(message, rows, fix)})


class Member:
    """The side of a rank: a connection that stays open."""

    def __init__(self, address: str, token: str, sock: socket.socket) -> None:
        self.address, self.token, self.sock = address, token, sock
        self.lines = sock.makefile("rwb")

    def meet(self, hello: Message, limit_s: float) -> str:
        """Returns the address of the service. Raises BackendError with the coordinator's error, and
        closes the connection."""
        try:
            return self._meet(hello, limit_s)
        except BackendError:
            self.close()
            raise

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.lines.close()
        self.sock.close()

    def _meet(self, hello: Message, limit_s: float) -> str:
        self.sock.settimeout(limit_s + HELLO_S)
        mine = secrets.token_hex(16)
        try:
            theirs = str(self._next()["nonce"])
            self.say({**hello, "nonce": mine, "proof": proof(self.token, theirs, "rank")})
            answer = self._next()
            if "error" in answer:
                raise self._error(answer)
            expected = proof(self.token, mine, "coordinator")
            if not hmac.compare_digest(str(answer.get("proof")), expected):
                raise BackendError(
                    f"join: what answers at {self.address} is not the coordinator of this run",
                    fix=_OTHER,
                    at="",
                )
            answer = self._next()
            if "error" in answer:
                raise self._error(answer)
            self.sock.settimeout(None)
            return str(answer["service"])
        except (OSError, ValueError, KeyError):
            raise BackendError(
                f"join: the coordinator at {self.address} ended, or does not speak as one",
                fix="see what the launcher, or rank 0, says",
                at="",
            ) from None

    def say(self, message: Message) -> None:
        self.lines.write(json.dumps(message).encode() + b"\n")
        self.lines.flush()

    def wait(self) -> str:
        """Returns a text about the first rank that is lost, or about the coordinator, once that
        happens."""
        try:
            return str(self._next()["lost"])
        except (OSError, ValueError, KeyError):
            return f"the coordinator at {self.address} ended"

    def _next(self) -> Message:
        line = self.lines.readline()
        if not line:
            raise ConnectionResetError
        return dict(json.loads(line))

    def _error(self, answer: Message) -> BackendError:
        what, rows, fix = answer["error"]
        return BackendError(f"join: {what}", rows=[*map(tuple, rows)], fix=fix, at="")


def reach(address: str, token: str, limit_s: float, hosted: bool) -> Member:
    """Returns a connection to the coordinator at `address`. Raises BackendError after `limit_s`
    seconds; after 5 seconds if `hosted`, as a launcher listens before its ranks start."""
    host, port = split_address(address)
    within_s = min(limit_s, 5.0) if hosted else limit_s
    end_s = time.monotonic() + within_s
    while True:
        left_s = end_s - time.monotonic()
        try:
            sock = socket.create_connection((host, port), timeout=max(min(left_s, 10.0), 0.1))
            break
        except OSError as error:
            if left_s <= 0.2:
                raise _unreachable(address, within_s, error) from None
            time.sleep(0.1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Member(address, token, sock)


def _unreachable(address: str, within_s: float, error: OSError) -> BackendError:
    said = error.strerror or str(error) or type(error).__name__
    local = split_address(address)[0] in ("127.0.0.1", "::1", "localhost")
    return BackendError(
        f"join: the coordinator at {address} cannot be reached within {within_s:g} s",
        here=socket.gethostname(),
        said=said,
        fix="that address is of this host alone; for other hosts, name one that they can reach:"
        " tessera run --coordinator HOST"
        if local
        else "see that the host's name is right and that no firewall is between",
        at="",
    )
