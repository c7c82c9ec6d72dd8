"""A report of missing guides in the last lines of a test run. If `CI` is "true" the run fails,
since nothing else would show it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.guide import runner
from tests.guide.substitutions import RUN


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--guides")
    if folder:
        runner.SEEDS = Path(folder).resolve()


def not_run() -> dict[int, int]:
    """The missing guides, each with its number of blocks to run."""
    guides = sorted({int(name.split("/")[0]) for name in RUN})
    return {
        g: sum(name.startswith(f"{g}/") for name in RUN)
        for g in guides
        if runner.guide_path(g) is None
    }


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lost = not_run()
    if lost:
        terminalreporter.write_line(
            f"guides: {sum(lost.values())} blocks were not run: {runner.SEEDS} lacks guide "
            + ", ".join(map(str, lost)),
            red=True,
        )


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not_run() and os.environ.get("CI") == "true" and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
