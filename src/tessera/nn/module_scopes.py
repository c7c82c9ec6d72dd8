"""Scope of a module's call in a recorded function: its path of attributes from the module that was
called first, the root.

A call of a root begins the scope with the root's name: in a call of a GPT, `gpt/blocks.3.mlp` has
the nodes of its attribute `blocks[3].mlp`. A module that has several paths has the first of those
inside of the module that calls it. A module that is in no module of the call is a root.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property

from ..ir.graph.node import entered
from ..lang.record.recorder import current, in_scope
from .module_tree import Holder, modules_of


class _Call:
    """A call of `module`, whose nodes have the scope `scope`; `outer` is the call around it."""

    def __init__(self, module: Holder, scope: str, is_root: bool, outer: _Call | None) -> None:
        self.module, self.scope, self.is_root, self.outer = module, scope, is_root, outer
        self.copies: list[tuple[object, str]] = []  # that stand for the part with this path

    @cached_property
    def paths(self) -> dict[int, str]:
        """The first path of each module inside of this one, by id."""
        found: dict[int, str] = {}
        for path, module in modules_of(self.module, ""):
            found.setdefault(id(module), path)
        return found

    def path(self, module: object) -> str | None:
        named = [path for copy, path in self.copies if copy is module]
        return named[-1] if named else self.paths.get(id(module))


_CALL: ContextVar[_Call | None] = ContextVar("tessera_module_call", default=None)


@contextmanager
def module_scope(module: Holder, root_name: str = "") -> Iterator[None]:
    """A context for the call of `module`: the nodes of a recorded function are in the scope of its
    path, or of `root_name` if it is a root ("": no scope of its own)."""
    recorder = current()
    if recorder is None:
        yield
        return
    outer = call = _CALL.get()
    path = None
    while call is not None and (path := call.path(module)) is None:
        call = call.outer
    scope, is_root = recorder.builder.scope, call is None or (not path and call.is_root)
    if call is None:
        scope = entered(scope, root_name) if root_name else scope
    elif path:  # without one it is a method of the module itself
        scope = scope if call is outer else call.scope
        inside = scope == call.scope and not call.is_root  # the scope ends with the module's path
        scope = entered(scope, path, "." if inside else "/")
    token = _CALL.set(_Call(module, scope, is_root, outer))
    try:
        with in_scope(recorder, scope):
            yield
    finally:
        _CALL.reset(token)


def name_part(module: Holder, path: str) -> None:
    """Gives `module`, a copy that the module being called makes of a part of itself, the `path` of
    that part."""
    call = _CALL.get()
    if call is not None:
        call.copies.append((module, path))
