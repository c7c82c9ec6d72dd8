"""Declared arguments in signatures as types with their bounds, for the site: `(int >= 1)`."""

from __future__ import annotations

import math
import re
from importlib import import_module
from typing import Any, get_args

import griffe

from tessera.core.declared import Check, Number, OneOf, Whole, declares

SIGNS = {"least": "<=", "above": "<", "most": "<=", "below": "<"}


class Declared(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if isinstance(obj, griffe.Function):
            for p in obj.parameters:
                p.annotation = readable(p.annotation, obj)
        elif isinstance(obj, griffe.Attribute):
            obj.annotation = readable(obj.annotation, obj)


def readable(annotation: Any, of: griffe.Object) -> Any:
    """The annotation itself, or the text of a declaration."""
    text = str(annotation or "")
    there = vars(import_module(of.module.path)) if text else {}
    if not any(declares(there.get(word)) for word in re.findall(r"\w+", text)):
        return annotation
    kind = eval(text, there)
    parts = get_args(kind) if not hasattr(kind, "__metadata__") else (kind,)
    return " | ".join(map(shown, parts))


def shown(kind: Any) -> str:
    """A type as it is written, with the bounds of its check."""
    checks: tuple[Check, ...] = getattr(kind, "__metadata__", ())
    plain = get_args(kind)[0] if checks else kind
    name = "None" if plain is type(None) else getattr(plain, "__name__", str(plain))
    name = name if not get_args(plain) else re.sub(r"\b(\w+\.)+", "", str(plain))
    for check in checks:
        if isinstance(check, OneOf):
            return f"Literal[{', '.join(map(repr, check.args))}]"
        if not isinstance(check, Whole | Number):
            continue
        limits = {**dict(zip(("least", "most"), check.args)), **check.bounds}
        limits = {k: x for k, x in limits.items() if math.isfinite(x)}
        low = "".join(f"{x} {SIGNS[k]} " for k, x in limits.items() if k in ("least", "above"))
        high = "".join(f" {SIGNS[k]} {x}" for k, x in limits.items() if k in ("most", "below"))
        if limits:
            above = low.replace("<", ">").split()[::-1]  # (int >= 1), and (0 <= int <= 7)
            said = f"{low}{name}{high}" if high or not low else " ".join([name, *above])
            name = f"({said.replace('=>', '>=')})"
    return name
