"""Mistakes with functions, gradients, settings. A row: name, error, mistake."""

from __future__ import annotations

from typing import Any

import tessera as ts
from tessera import dist, graph
from tessera.core.environment import COMM_TRACE, DEVICES, is_on, number
from tests.mesh.errors import IDS, MASK, MATRIX, SEQUENCE, X, Y, environment, row

# fmt: off

# -- functions -------------------------------------------------------------------------------------

def a_donated_tensor_read() -> Any:
    w = ts.ones((64,))
    ts.jit(donate="w")(lambda w: w * 2.0)(w)
    return w.numpy()


row("a donated tensor read", ts.DonatedError, a_donated_tensor_read)

def a_donated_tensor_used() -> Any:
    w = ts.ones((64,))
    ts.jit(donate=0)(lambda w: w * 2.0)(w)
    return w + 1.0


row("a donated tensor used", ts.DonatedError, a_donated_tensor_used)

def a_tensor_donated_and_used_in_one_call() -> Any:
    w = ts.ones((64,))
    return ts.jit(donate="a")(lambda a, b: a + b)(w, w)


row("a tensor donated and used in one call", ts.DonatedError,
    a_tensor_donated_and_used_in_one_call)

def determinism_set_inside_a_compiled_function() -> Any:
    @ts.jit
    def step(x: Any) -> Any:
        with dist.deterministic("ring"):
            return x.sum()

    return step(ts.ones((4,)))


row("determinism set inside a compiled function", ts.UsageError,
    determinism_set_inside_a_compiled_function)

def a_choice_of_schedule_inside_a_compiled_function() -> Any:
    @ts.jit
    def step(x: Any) -> Any:
        ts.schedule.bucket_bytes(1 << 20)
        return x.sum()

    return step(ts.ones((4,)))


row("a choice of schedule inside a compiled function", ts.UsageError,
    a_choice_of_schedule_inside_a_compiled_function)

def a_donated_argument_that_is_not_there() -> Any:
    return ts.jit(donate="weights")(lambda w: w)


row("a donated argument that is not there", ts.UsageError, a_donated_argument_that_is_not_there)

def a_tensor_that_leaked() -> Any:
    kept = []
    ts.jit(lambda x: kept.append(x * 2.0))(X)
    return kept[0] + 1.0


row("a tensor that leaked", ts.UsageError, a_tensor_that_leaked)

def a_leaked_tensor_read() -> Any:
    kept = []
    graph.trace(lambda x: kept.append(x * 2.0), X)
    return kept[0].numpy()


row("a leaked tensor read", ts.UsageError, a_leaked_tensor_read)
row("a value read in a trace", ts.UsageError,
    lambda: graph.trace(lambda x: float(ts.sum(x)), X))

row("a call with too few arguments", ts.UsageError, lambda: ts.jit(lambda x, y: x)(X))
row("jit of no function", ts.UsageError, lambda: ts.jit(3))
def trace_of_stages() -> Any:
    mesh = dist.Mesh(("pp", "dp"), shape={"pp": 2, "dp": 2})
    a, b = (ts.tensor([[1.0, 2.0]] * 2, mesh=mesh.slice(pp=i)) for i in range(2))
    return graph.trace(lambda a, b: a @ b, a, b)


row("a trace of weights on stages", ts.MeshError, trace_of_stages)
row("a graph before the first call", ts.UsageError, lambda: ts.jit(lambda x: x).graph)

def annotations_that_do_not_fit() -> Any:
    @ts.function
    def attend(q: SEQUENCE, k: SEQUENCE, mask: MASK) -> Any:
        return q
    return attend(ts.ones((2, 3, 4)), ts.ones((2, 5, 4)), ts.ones((3, 3)))


row("annotations that do not fit", ts.ShapeError, annotations_that_do_not_fit)

def arguments_in_stars_that_do_not_fit() -> Any:
    @ts.function
    def add(x: SEQUENCE, *more: MASK, **named: MASK) -> Any:
        return x
    fits = ts.ones((3,), ts.int32)
    add(ts.ones((2, 3, 4)), fits, fits, other=fits)
    return add(None, fits, fits[:2], other=fits, last=None)


row("arguments in stars that do not fit", ts.ShapeError, arguments_in_stars_that_do_not_fit)

def a_result_that_does_not_fit() -> Any:
    @ts.function
    def half(x: MATRIX) -> MATRIX:
        return x[:1]
    return half(X)


row("a result that does not fit", ts.ShapeError, a_result_that_does_not_fit)
QKV, OUT = ts.Tensor["3*D*H"], ts.Tensor["D*H"]

def a_product_that_nothing_makes() -> Any:
    @ts.function
    def split(qkv: QKV, out: OUT) -> Any:
        return qkv
    return split(ts.ones(96), ts.ones(33))


row("a product that nothing makes", ts.ShapeError, a_product_that_nothing_makes)
row("an annotation that says nothing", ts.UsageError, lambda: ts.Tensor["B", 1.5])

# -- gradients -------------------------------------------------------------------------------------
row("the gradient of many", ts.ShapeError, lambda: ts.grad(X * 2.0, X))
row("the gradient of a number", ts.UsageError, lambda: ts.grad(3.0, X))
row("the gradient of a function", ts.UsageError, lambda: ts.grad(abs)(X))
row("the gradient of an int", ts.DTypeError, lambda: ts.grad(ts.sum(IDS), X))
row("the gradient by an int", ts.UsageError, lambda: ts.grad(ts.sum(X), {"ids": IDS}))
row("the gradient by a stranger", ts.GraphError, lambda: ts.grad(ts.sum(X * 2.0), Y))
row("the gradient by nothing named", ts.UsageError, lambda: ts.grad(ts.sum(X * 2.0)))
row("the gradient of an order", ts.UsageError,
    lambda: ts.grad(ts.sum(X * ts.tensor(1.0)), X, layout=[Y]))

# -- ambient ---------------------------------------------------------------------------------------
row("autocast to an int", ts.DTypeError, lambda: ts.autocast(ts.int8))
row("a negative seed", ts.UsageError, lambda: ts.seed(-1))

def a_switch_that_is_neither() -> Any:
    with environment(TESSERA_COMM_TRACE="maybe"):
        return is_on(COMM_TRACE)


row("a switch that is neither", ts.UsageError, a_switch_that_is_neither)

def a_number_of_devices_in_words() -> Any:
    with environment(TESSERA_DEVICES="eight"):
        return number(DEVICES, 8)


row("a number of devices in words", ts.UsageError, a_number_of_devices_in_words)
