"""A function's graph without running it: `graph.trace(model, batch)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from ..core.layout import TensorType
from ..core.reshard import completed
from ..ir.graph.node import Graph
from .checks import bound, function_of, signature_of
from .host import engine_array
from .record import Recorder, recording
from .tensor import Tensor, as_tensor
from .tree import call_paths, flatten, path_name, unflatten


def trace(fn: Callable[..., Any], *args: Any, finish: bool = True, **kwargs: Any) -> Graph:
    """The Graph that `fn(*args, **kwargs)` records. Nothing is computed and no device is needed.

    Arguments are tensors, arrays, or types (`TensorType`) that stand for tensors; the rest is
    static. A read of a value inside `fn` is an error here.
    """
    fn = getattr(function_of("trace", "the function", fn), "fn", fn)
    bound(getattr(fn, "__name__", "trace"), signature_of("trace", fn), args, kwargs)
    recorder = Recorder(getattr(fn, "__name__", type(fn).__name__.lower()))
    leaves, spec = flatten((args, kwargs))
    given = []
    for x, path in zip(leaves, call_paths(inspect.signature(fn), spec), strict=True):
        if isinstance(x, np.ndarray) or engine_array(x):
            x = as_tensor(x)
        if isinstance(x, (Tensor, TensorType)):
            kind = x.type if isinstance(x, Tensor) else x
            t = recorder.input(kind, path_name(path))
            t.name = x.name if isinstance(x, Tensor) else ""
            if t.name:
                recorder.named.append(t)
            x = t
        given.append(x)
    new_args, new_kwargs = unflatten(spec, given)
    with recording(recorder):
        out = fn(*new_args, **new_kwargs)
    outs = [recorder.node(t) for t in flatten(out)[0] if isinstance(t, Tensor)]
    if finish:
        whole = [completed(n.type, n.type.partial_axes) for n in outs]
        outs = [
            recorder.builder.redistribute(n, t, "for the result")
            for n, t in zip(outs, whole, strict=True)
        ]
    return recorder.builder.graph(outs)
