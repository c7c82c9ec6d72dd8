"""`dist.elastic`, the context in which a run survives lost devices."""

from __future__ import annotations

import sys
import warnings
from contextvars import ContextVar, Token
from types import TracebackType

from ..core.checks import one_of, whole
from ..core.declared import Flag
from ..core.errors import EngineWarning, lines_up, warn_no_effect
from ..core.value_checks import is_whole


class elastic:
    """A context in which a training loop continues when devices are lost, and when they come back.

    The loop is one of `elastic.steps`. At each safe point the state of the loop is copied to host
    memory. When a device is lost, the loop goes back to the last safe point: its mesh is folded
    onto the remaining devices, and the state is restored there. With `rejoin` a device that is
    available again is taken back at the next safe point. A safe point is the end of a step, where
    no stage of a pipeline holds a microbatch: "pipeline_boundary", or "step". A number `n` means
    each n-th step, which copies less, and repeats up to n steps. Raises UsageError if `rejoin` is
    no bool or `safe_point` no such word or number; warns if no loop of `elastic.steps` ran in it
    (guide 2, 5.2).
    """

    def __init__(self, rejoin: Flag = True, safe_point: str | int = "pipeline_boundary") -> None:
        self.rejoin = rejoin
        if is_whole(safe_point):
            self.every = whole("dist.elastic", "safe_point", safe_point, 1)
        else:
            one_of("dist.elastic", "safe_point", safe_point, ("pipeline_boundary", "step"))
            self.every = 1
        self.loops = 0
        self._entered = False
        self._tokens: list[Token[elastic | None]] = []

    def __del__(self) -> None:
        if not (getattr(self, "_entered", True) or self.loops or sys.is_finalizing()):
            warn_no_effect(
                "dist.elastic(...)",
                "it was called without `with`",
                means="a lost device ends the program, as ever",
                fix="write with dist.elastic(): for step in elastic.steps(state, 100): ...",
            )

    def __enter__(self) -> elastic:
        self._entered = True
        self._tokens.append(_POLICY.set(self))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _POLICY.reset(self._tokens.pop())
        if kind is None and not self.loops:
            warnings.warn(
                "dist.elastic: no loop in it can go back, so a lost device ends the program: write"
                " it as `for step in elastic.steps(state, 100): with step as i: ...`",
                EngineWarning,
                stacklevel=lines_up(),
            )


_POLICY: ContextVar[elastic | None] = ContextVar("elastic", default=None)


def policy() -> elastic | None:
    """The innermost active context, or None."""
    return _POLICY.get()
