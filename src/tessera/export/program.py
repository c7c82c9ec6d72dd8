"""`Exported`: a program of a file, called like the function that it was saved of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core.context import settings
from ..core.errors import ShapeError, UsageError
from ..core.layout import TensorType
from ..core.mesh import Mesh
from ..ir.graph.node import Graph
from ..lang.jit.taken_out import Lowered
from ..lang.math import functions, random
from ..lang.record.operands import as_tensor, emit_many
from ..lang.record.recorder import KEY_TYPE, current
from ..lang.record.tree import Spec, flatten, path_name, spec_paths, unflatten
from ..lang.value.eager import EAGER, current_trace, program_of, run_graph
from ..lang.value.engine import engine
from ..lang.value.tensor import Past, Tensor
from .structure import decoded, encoded

Source = int | Tensor | None  # the number of a leaf of the arguments, a weight, a random key


@dataclass(frozen=True, eq=False)
class Exported:
    """A program of a file, called like the function that it was saved of.

    Its arguments have the shapes and dtypes of those that it was saved for, in any layout; numbers
    and strings among them are the same. In a compiled function its ops become part of that
    function, so a gradient goes through. `graph` is the program, `version` the version of Tessera
    that saved it.
    """

    graph: Graph
    version: str
    _sources: Sequence[Source]
    _arguments: Any
    _fixed: dict[int, Any]
    _result: tuple[Spec, list[Any], list[int]]

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.graph.name

    @property
    def mesh(self) -> Mesh | None:
        """The mesh that it runs on."""
        return self.graph.mesh

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program. Raises UsageError if the arguments have another structure or another
        fixed value, ShapeError for another shape or dtype."""
        values = self._values(args, kwargs)
        if current_trace() is EAGER and not settings().op_by_op:
            outs = run_graph(self.graph, values)
            for t in outs:
                t._past = Past([], False, self.name)
        else:
            outs = self._again(values)
        spec, leaves, slots = self._result
        leaves = list(leaves)
        for i, t in zip(slots, outs, strict=True):
            leaves[i] = t
        return unflatten(spec, leaves)

    def lower(self) -> Lowered:
        """The program's text, cost and memory, as `lower` of a compiled function gives them."""
        return Lowered(program_of(self.graph))

    def _values(self, args: Any, kwargs: Any) -> list[Tensor]:
        leaves, spec = flatten((args, kwargs))
        if _shape_of(spec) != self._arguments:
            raise UsageError(
                f"{self.name}: the arguments have another structure than those it was saved for",
                saved=_text(self._arguments),
                given=_text(_shape_of(spec)),
                fix="give them as they were given to export.save, after the path",
            )
        given, saved = dict(zip(spec_paths(spec), leaves)), spec_paths(decoded(self._arguments))
        leaves = [given[p] for p in saved]  # keys of dicts may come in another order
        names = [path_name(p[1:]) for p in saved]
        for i, value in self._fixed.items():
            if type(leaves[i]) is not type(value) or repr(leaves[i]) != repr(value):
                raise UsageError(
                    f"{self.name}: argument {names[i]} is fixed in the file",
                    saved=repr(value),
                    given=repr(leaves[i]),
                    fix="save another program for another value",
                )
        rows = zip(self._sources, self.graph.inputs, strict=True)
        return [self._value(s, n.type, leaves, names) for s, n in rows]

    def _value(
        self, source: Source, want: TensorType, leaves: Sequence[Any], names: Sequence[str]
    ) -> Tensor:
        if source is None:
            if current() is not None:  # a key of the function that is being recorded
                return functions.reshape(random.keys(1), KEY_TYPE.shape)
            return Tensor(engine().place(random.next_key(), KEY_TYPE), KEY_TYPE)
        if isinstance(source, Tensor):
            return source
        t = as_tensor(leaves[source])
        if t.shape != want.shape or t.dtype is not want.dtype:
            raise ShapeError(
                f"{self.name}: argument {names[source]} is not as it was saved",
                saved=want,
                given=t.type,
                fix="give this shape and dtype, or save another program for others",
            )
        same = t.type == want or (t.mesh is None and t.type.on(want.mesh) == want)
        return t if same else functions.relayout(t, want)

    def _again(self, values: Sequence[Tensor]) -> list[Tensor]:
        """The results of the program's ops, applied in the function that is being recorded."""
        made = {n: [v] for n, v in zip(self.graph.inputs, values, strict=True)}
        for n in self.graph.nodes:
            if n.op == "item":
                made[n] = [made[n.args[0]][n.attrs["index"]]]
            elif n.op != "input":
                made[n] = emit_many(n.op, *(made[a][0] for a in n.args), **n.attrs)
        return [made[n][0] for n in self.graph.outputs]


def _shape_of(spec: Spec) -> Any:
    return encoded("call", "the call", spec)


def _text(stored: Any) -> str:
    args, kwargs = stored["tuple"]
    rows = [*map(_part, args["tuple"])]
    rows += [f"{k}={_part(v)}" for k, v in kwargs["dict"].items()]
    return f"({', '.join(rows)})"


def _part(stored: Any) -> str:
    if not isinstance(stored, dict):
        return "value" if stored else "None"
    ((kind, inner),) = stored.items()
    if kind == "dict":
        return "{" + ", ".join(f"{k}: {_part(v)}" for k, v in inner.items()) + "}"
    return ("[{}]" if kind == "list" else "({})").format(", ".join(map(_part, inner)))
