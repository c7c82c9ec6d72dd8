"""JAX functions as programs of calls, read from their jaxprs.

Calls of functions are inlined; bodies of loops and branches are programs among the operands. A
random key is its data, u32 [..., 2], so that all that JAX draws follows from integer ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from ..core.errors import TesseraError, UsageError, line_of
from ..lang.foreign.program import Call, Program, Ref
from .jax_keys import is_key, key_data, on_data, primitive_of_keys, wrapped
from .jax_private import scan_counts, user_line

# Params that hold the jaxpr of a called function.
_INLINED = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")
_CUSTOM = ("custom_jvp_call", "custom_vjp_call")
_WITH_BODIES = (
    "scan", "while", "cond", "remat2", "reduce", "reduce_window", "pallas_call",
    "custom_linear_solve",
)  # fmt: skip
Types = Sequence[tuple[tuple[int, ...], Any, str]]


def program_of(caller: str, fn: Callable[..., list[Any]], types: Types) -> Program:
    """Returns `fn`, which returns a list, as a program for arguments of these (shape, NumPy dtype,
    key implementation or ""). Raises UsageError, in the name of `caller`, if `fn` fails."""

    def of_data(*args: Any) -> list[Any]:
        return fn(*(wrapped(x, impl) for x, (_, _, impl) in zip(args, types, strict=True)))

    narrow = jax.dtypes.canonicalize_dtype  # programs are of 32 bits
    args = [jax.ShapeDtypeStruct(shape, narrow(dtype)) for shape, dtype, _ in types]
    try:
        closed = jax.make_jaxpr(of_data)(*args)
    except TesseraError:
        raise
    except Exception as error:
        first = (str(error).strip() or "no message").splitlines()[0]
        raise UsageError(
            f"{caller}: the JAX function raised {type(error).__name__}: {first}",
            rows=[(f"arg {i}", f"{x.dtype}{list(x.shape)}") for i, x in enumerate(args)],
            fix="mend it for these arguments: jax.eval_shape(fn, ...) traces it in the same way",
            at=line_of(error) or None,
        ) from error
    return read(closed)


def read(closed: Any, customs: bool = True) -> Program:
    """Returns a traced function as a program, without calls whose results nothing reads. In a
    gradient (`customs` False) functions with a gradient of their own are inlined like others, as
    their gradients may read themselves."""
    program = Program(len(closed.jaxpr.invars))
    writer = _Writer(program, customs)
    program.outs = writer.inlined(closed, [Ref(i) for i in range(program.inputs)])
    used, calls = _refs(program.outs), list[Call]()
    for call in reversed(program.calls):
        if used.intersection(call.outs):
            used |= _refs(call.args)
            calls.append(call)
    program.calls = calls[::-1]
    return program


def _refs(operands: Sequence[Any]) -> set[int]:
    return {x.index for x in operands if isinstance(x, Ref)}


class _Writer:
    """Appends calls to `program`; `free` is the number of the next value."""

    def __init__(self, program: Program, customs: bool) -> None:
        self.program, self.free, self.customs = program, program.inputs, customs

    def add(self, name: str, args: Sequence[Any], params: dict[str, Any], count: int,
            line: str) -> list[Any]:  # fmt: skip
        outs = tuple(range(self.free, self.free + count))
        self.free += count
        self.program.calls.append(Call(name, list(args), params, outs, line))
        return [Ref(i) for i in outs]

    def inlined(self, closed: Any, args: Sequence[Any]) -> list[Any]:
        """Returns the results of a traced function of these operands."""
        jaxpr = closed.jaxpr
        of: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
        of |= {v: _constant(c) for v, c in zip(jaxpr.constvars, closed.consts, strict=True)}

        def operand(v: Any) -> Any:
            if not isinstance(v, jex.Literal):
                return of[v]
            kind: Any = v.aval
            return np.asarray(v.val, kind.dtype)

        for e in jaxpr.eqns:
            outs = self.equation(e, [operand(v) for v in e.invars])
            of |= dict(zip(e.outvars, outs, strict=True))
        return [operand(v) for v in jaxpr.outvars]

    def equation(self, e: Any, ins: list[Any]) -> list[Any]:
        """Returns the results of one equation of these operands."""
        name, params, line = e.primitive.name, dict(e.params), user_line(e)
        inner = next((params[k] for k in _INLINED if k in params), None)
        if name in _CUSTOM and self.customs:
            return self.custom(e, ins, line)
        if inner is not None and name not in _WITH_BODIES:
            return self.inlined(_closed(inner), ins)
        of_keys = primitive_of_keys(e)
        if of_keys is not None:
            return self.inlined(of_keys, ins)
        ins, params = on_data(e, ins, params)
        if name == "scan":
            params["num_consts"], params["num_carry"] = scan_counts(params)
            params = {k: params[k] for k in ("jaxpr", "length", "reverse", "num_consts",
                                             "num_carry")}  # fmt: skip
        if name == "remat2":
            policy = getattr(params["policy"], "__name__", "")
            params = {"jaxpr": params["jaxpr"], "policy": policy}
        params = {k: self.value(v) for k, v in params.items()}
        return self.add(name, ins, params, len(e.outvars), line)

    def value(self, x: Any) -> Any:
        """Returns a param with each jaxpr inside it as a program."""
        if hasattr(x, "eqns") or isinstance(x, jex.ClosedJaxpr):
            return read(_closed(x), self.customs)
        if type(x) in (list, tuple):
            return type(x)(map(self.value, x))
        return x

    def custom(self, e: Any, ins: list[Any], line: str) -> list[Any]:
        """Returns the results of a function with a gradient of its own. The gradient is traced from
        JAX's, which follows the function's own rule."""
        value = _closed(next(e.params[k] for k in _INLINED if k in e.params))
        outs = self.inlined(value, ins)
        variables = list(dict.fromkeys(v for v in e.invars if not isinstance(v, jex.Literal)))
        smooth = [i for i, v in enumerate(variables) if _is_float(v.aval)]
        ends = [i for i, v in enumerate(e.outvars) if _is_float(v.aval)]
        if not smooth or not ends:
            return outs
        unnamed = value.jaxpr.debug_info.with_unknown_names()
        alone = jex.Jaxpr((), variables, e.outvars, [e], e.effects, unnamed)
        function = jex.jaxpr_as_fun(jex.ClosedJaxpr(alone, ()))

        def pulled(*args: Any) -> list[Any]:
            xs, gs = list(args[: len(variables)]), args[len(variables) :]

            def floats(*ys: Any) -> list[Any]:
                for i, y in zip(smooth, ys, strict=True):
                    xs[i] = y
                every = function(*xs)
                return [every[i] for i in ends]

            return list(jax.vjp(floats, *(xs[i] for i in smooth))[1](list(gs)))

        avals = [v.aval for v in (*variables, *(e.outvars[i] for i in ends))]
        backward = jax.make_jaxpr(pulled)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
        given = [ins[e.invars.index(v)] for v in variables]
        params = {
            "backward": read(backward, customs=False),
            "smooth": tuple(smooth),
            "values": len(ends),
        }
        args = [*(outs[i] for i in ends), *given]
        kept = self.add("custom_gradient", args, params, len(ends), line)
        for i, x in zip(ends, kept, strict=True):
            outs[i] = x
        return outs


def _closed(inner: Any) -> Any:
    return inner if isinstance(inner, jex.ClosedJaxpr) else jex.ClosedJaxpr(inner, ())


def _constant(c: Any) -> Any:
    return np.asarray(key_data(c)[0] if is_key(c) else c)


def _is_float(aval: Any) -> bool:
    return not is_key(aval) and bool(jax.numpy.issubdtype(aval.dtype, jax.numpy.floating))
