"""Mistakes with functions, gradients, settings. A row: name, error, mistake, message."""

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


row("a donated tensor read", ts.DonatedError, a_donated_tensor_read, """
a tensor is used after its buffer was donated to a function
  tensor : f32[64]
  at     : AT
  fix    : use what the function returned, copy.deepcopy it before, or leave out donate=
""")

def a_donated_tensor_used() -> Any:
    w = ts.ones((64,))
    ts.jit(donate=0)(lambda w: w * 2.0)(w)
    return w + 1.0


row("a donated tensor used", ts.DonatedError, a_donated_tensor_used, """
a tensor is used after its buffer was donated to a function
  tensor : f32[64]
  at     : AT
  fix    : use what the function returned, copy.deepcopy it before, or leave out donate=
""")

def a_tensor_donated_and_used_in_one_call() -> Any:
    w = ts.ones((64,))
    return ts.jit(donate="a")(lambda a, b: a + b)(w, w)


row("a tensor donated and used in one call", ts.DonatedError,
    a_tensor_donated_and_used_in_one_call, """
<lambda>: a tensor that is donated is given a second time
  at  : AT
  fix : pass it once, or leave out donate= for it
""")

def determinism_set_inside_a_compiled_function() -> Any:
    @ts.jit
    def step(x: Any) -> Any:
        with dist.deterministic("ring"):
            return x.sum()

    return step(ts.ones((4,)))


row("determinism set inside a compiled function", ts.UsageError,
    determinism_set_inside_a_compiled_function, """
deterministic: the options of a recorded function are settled before it is recorded
  recorded under : the defaults
  asked for      : determinism=mesh_invariant order=ring
  at             : AT
  fix            : write it around the call of the compiled function, or before it
""")

def a_choice_of_schedule_inside_a_compiled_function() -> Any:
    @ts.jit
    def step(x: Any) -> Any:
        ts.schedule.bucket_bytes(1 << 20)
        return x.sum()

    return step(ts.ones((4,)))


row("a choice of schedule inside a compiled function", ts.UsageError,
    a_choice_of_schedule_inside_a_compiled_function, """
schedule: the options of a recorded function are settled before it is recorded
  recorded under : the defaults
  asked for      : bucket_bytes=1048576
  at             : AT
  fix            : write it around the call of the compiled function, or before it
""")

def a_donated_argument_that_is_not_there() -> Any:
    return ts.jit(donate="weights")(lambda w: w)


row("a donated argument that is not there", ts.UsageError, a_donated_argument_that_is_not_there, """
jit: <lambda> has no argument 'weights' to donate
  arguments : w
  at        : AT
  fix       : name one of them
""")

def a_tensor_that_leaked() -> Any:
    kept = []
    ts.jit(lambda x: kept.append(x * 2.0))(X)
    return kept[0] + 1.0


row("a tensor that leaked", ts.UsageError, a_tensor_that_leaked, """
a tensor of a recorded function is used after that function ended
  tensor  : f32[2, 3]
  made_at : AT
  at      : AT
  fix     : return it from its function and use what the call gives back
""")

def a_leaked_tensor_read() -> Any:
    kept = []
    graph.trace(lambda x: kept.append(x * 2.0), X)
    return kept[0].numpy()


row("a leaked tensor read", ts.UsageError, a_leaked_tensor_read, """
a tensor of a recorded function is used after that function ended
  tensor  : f32[2, 3]
  made_at : AT
  at      : AT
  fix     : return it from its function and use what the call gives back
""")
row("a value read in a trace", ts.UsageError,
    lambda: graph.trace(lambda x: float(ts.sum(x)), X), """
a value cannot be read here: the function is recorded without running
  tensor  : f32[]
  made_at : AT
  at      : AT
  fix     : read values inside ts.jit only, and outside of loop bodies
""")

row("a call with too few arguments", ts.UsageError, lambda: ts.jit(lambda x, y: x)(X), """
<lambda>: y is missing
  arguments : x, y
  at        : AT
  fix       : call it with (x, y)
""")
row("jit of no function", ts.UsageError, lambda: ts.jit(3), """
jit: the function cannot be 3
  at  : AT
  fix : put @ts.jit above a function, or call ts.jit(function)
""")
def trace_of_stages() -> Any:
    mesh = dist.Mesh(("pp", "dp"), shape={"pp": 2, "dp": 2})
    a, b = (ts.tensor([[1.0, 2.0]] * 2, mesh=mesh.slice(pp=i)) for i in range(2))
    return graph.trace(lambda a, b: a @ b, a, b)


row("a trace of weights on stages", ts.MeshError, trace_of_stages, """
trace: the arguments lie on 2 meshes, and one graph lies on one
  a   : f32[2, 2] on dp=2, devices 0, 1
  b   : f32[2, 2] on dp=2, devices 2, 3
  at  : AT
  fix : of a pipeline take the schedule, ts.jit(f).plan(...), or dist.place(x, mesh=...)
""")
row("a graph before the first call", ts.UsageError, lambda: ts.jit(lambda x: x).graph, """
jit: <lambda> has not been called yet
  at  : AT
  fix : call it once
""")

def annotations_that_do_not_fit() -> Any:
    @ts.function
    def attend(q: SEQUENCE, k: SEQUENCE, mask: MASK) -> Any:
        return q
    return attend(ts.ones((2, 3, 4)), ts.ones((2, 5, 4)), ts.ones((3, 3)))


row("annotations that do not fit", ts.ShapeError, annotations_that_do_not_fit, """
attend: 2 arguments do not fit the annotations
  k     : dim 1 ('S') is 5, not 3; annotated Tensor['B', 'S', 'D']
  mask  : dtype is f32, not i32; annotated Tensor['S', ts.int32]
  mask  : has 2 dims (3, 3), not 1; annotated Tensor['S', ts.int32]
  bound : B=2 S=3 D=4
  at    : AT
  fix   : change the tensors or the annotations
""")

def arguments_in_stars_that_do_not_fit() -> Any:
    @ts.function
    def add(x: SEQUENCE, *more: MASK, **named: MASK) -> Any:
        return x
    fits = ts.ones((3,), ts.int32)
    add(ts.ones((2, 3, 4)), fits, fits, other=fits)
    return add(None, fits, fits[:2], other=fits, last=None)


row("arguments in stars that do not fit", ts.ShapeError, arguments_in_stars_that_do_not_fit, """
add: 3 arguments do not fit the annotations
  x          : is a NoneType, not a tensor; annotated Tensor['B', 'S', 'D']
  more.1     : dim 0 ('S') is 2, not 3; annotated Tensor['S', ts.int32]
  named.last : is a NoneType, not a tensor; annotated Tensor['S', ts.int32]
  bound      : S=3
  at         : AT
  fix        : change the tensors or the annotations
""")

def a_result_that_does_not_fit() -> Any:
    @ts.function
    def half(x: MATRIX) -> MATRIX:
        return x[:1]
    return half(X)


row("a result that does not fit", ts.ShapeError, a_result_that_does_not_fit, """
half: the result does not fit the annotations
  result : dim 0 ('B') is 1, not 2; annotated Tensor['B', 'D']
  bound  : B=2 D=3
  at     : AT
  fix    : change the tensors or the annotations
""")
QKV, OUT = ts.Tensor["3*D*H"], ts.Tensor["D*H"]

def a_product_that_nothing_makes() -> Any:
    @ts.function
    def split(qkv: QKV, out: OUT) -> Any:
        return qkv
    return split(ts.ones(96), ts.ones(33))


row("a product that nothing makes", ts.ShapeError, a_product_that_nothing_makes, """
split: 2 arguments do not fit the annotations
  qkv   : dim 0 ('3*D*H') is 96, which no sizes of the names make; annotated Tensor['3*D*H']
  out   : dim 0 ('D*H') is 33, which no sizes of the names make; annotated Tensor['D*H']
  bound : nothing
  at    : AT
  fix   : change the tensors or the annotations
""")
row("an annotation that says nothing", ts.UsageError, lambda: ts.Tensor["B", 1.5], """
Tensor[...]: 1.5 is neither a dim nor a dtype
  at  : AT
  fix : write Tensor["B", "S", ts.int32]; a dim is a name, a number or a product
""")

# -- gradients -------------------------------------------------------------------------------------
row("the gradient of many", ts.ShapeError, lambda: ts.grad(X * 2.0, X), """
grad: the loss is not a scalar
  loss : f32[2, 3]
  at   : AT
  fix  : reduce it first: loss.mean()
""")
row("the gradient of a number", ts.UsageError, lambda: ts.grad(3.0, X), """
grad: the loss cannot be 3.0
  at  : AT
  fix : pass the scalar tensor that the model gives: ts.grad(loss, weights)
""")
row("the gradient of a function", ts.UsageError, lambda: ts.grad(abs)(X), """
grad: the loss cannot be <built-in function abs>
  at  : AT
  fix : of a function: loss, gradient = ts.value_and_grad(f)(weights, ...)
""")
row("the gradient of an int", ts.DTypeError, lambda: ts.grad(ts.sum(IDS), X), """
grad: the loss is not a float
  loss : i32[]
  at   : AT
  fix  : compute it from float tensors, without a cast to integers on the way
""")
row("the gradient by an int", ts.UsageError, lambda: ts.grad(ts.sum(X), {"ids": IDS}), """
grad: weight 'ids' is not a float tensor
  weight : i32[2]
  at     : AT
  fix    : leave it out of the weights
""")
row("the gradient by a stranger", ts.GraphError, lambda: ts.grad(ts.sum(X * 2.0), Y), """
grad: the loss does not depend on any of the weights
  loss    : f32[]
  weights : f32[4, 5]
  at      : AT
  fix     : compute the loss from these, all in ts.jit or all outside; .item() cuts a gradient
""")
row("the gradient by nothing named", ts.UsageError, lambda: ts.grad(ts.sum(X * 2.0)), """
grad: the loss reaches no named weight
  loss : f32[]
  at   : AT
  fix  : name them: dist.tensor(..., name=...), or pass them: ts.grad(loss, weights)
""")
row("the gradient of an order", ts.UsageError,
    lambda: ts.grad(ts.sum(X * ts.tensor(1.0)), X, layout=[Y]), """
trees: the second does not have the leaves of the first
  missing  : none
  too many : 0
  at       : AT
  fix      : give trees of one structure
""")

# -- ambient ---------------------------------------------------------------------------------------
row("autocast to an int", ts.DTypeError, lambda: ts.autocast(ts.int8), """
autocast: cannot compute in i8
  at  : AT
  fix : use ts.bf16 or ts.f16
""")
row("a negative seed", ts.UsageError, lambda: ts.seed(-1), """
seed: the seed cannot be -1
  at  : AT
  fix : give a whole number from 0 to 4294967295
""")

def a_switch_that_is_neither() -> Any:
    with environment(TESSERA_COMM_TRACE="maybe"):
        return is_on(COMM_TRACE)


row("a switch that is neither", ts.UsageError, a_switch_that_is_neither, """
TESSERA_COMM_TRACE: 'maybe' is neither on nor off
  at  : AT
  fix : set it to 1 or 0
""")

def a_number_of_devices_in_words() -> Any:
    with environment(TESSERA_DEVICES="eight"):
        return number(DEVICES, 8)


row("a number of devices in words", ts.UsageError, a_number_of_devices_in_words, """
TESSERA_DEVICES: 'eight' is not a number of at least 1
  at  : AT
  fix : set TESSERA_DEVICES=8
""")
