"""A headless browser, driven by its DevTools protocol over two pipes."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
LIMIT_S = 60.0
# The browser reads commands from descriptor 3 and writes answers to 4.
_START = "import os,sys; r,w=map(int,sys.argv[1:3]); os.dup2(r,3); os.dup2(w,4);"
_START += " os.execv(sys.argv[3],sys.argv[3:])"


def browser() -> str | None:
    """The path of a browser, or None."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


class Page:
    """A page in a browser of its own; `problems` are errors and warnings of its console, and
    `requests` the addresses that it asked for."""

    def __init__(self, folder: Path, width: int = 1280, height: int = 900) -> None:
        path = browser()
        assert path is not None
        far_in, self._out = os.pipe()
        self._in, far_out = os.pipe()
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (far_in, far_out)]
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
                   f"--user-data-dir={folder}", f"--window-size={width},{height}"]  # fmt: skip
        command = [sys.executable, "-c", _START, *map(str, ends), path, *options]
        self._process = subprocess.Popen(
            command, pass_fds=ends, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for fd in (far_in, far_out, *ends):
            os.close(fd)
        self._buffer, self._count, self._session = b"", 0, ""
        self._events: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for part in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{part}.enable")

    def close(self) -> None:
        """Ends the browser."""
        os.close(self._out)
        self._process.terminate()
        self._process.wait(10)
        os.close(self._in)

    def send(self, method: str, **params: Any) -> Any:
        """The result of a command."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + LIMIT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            more = os.read(self._in, 1 << 16)
            assert more, "the browser has ended"
            self._buffer += more
        text, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        name, about = message.get("method", ""), message.get("params", {})
        if name == "Runtime.exceptionThrown":
            self.problems.append(str(about["exceptionDetails"]))
        elif name == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning"):
            self.problems.append(str(about["args"]))
        elif name == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.problems.append(str(about["entry"]))
        elif name == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        if name:
            self._events.append(message)

    def open(self, path: Path) -> None:
        """Loads a file, and returns when it is drawn."""
        self._events.clear()
        self.send("Page.navigate", url=path.as_uri())
        while not any(m["method"] == "Page.loadEventFired" for m in self._events):
            self._read()
        self.drawn()

    def run(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def drawn(self) -> None:
        """Returns when two more frames are drawn."""
        self.run("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(() => r(0))))")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """An event of the mouse: mouseWheel, mousePressed, mouseMoved, mouseReleased."""
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.drawn()
