"""Mistakes with loops and with functions of functions. A row: name, error, mistake, message."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

import tessera as ts
from tessera import dist, op
from tests.mesh.errors import MESH, ONES, row

# fmt: off

def a_value_read_in_a_loop() -> Any:
    def body(total, x):
        return total + (x if float(x) > 0 else 0.0), ()
    return ts.scan(body, ts.tensor(0.0), ts.ones((3,)))


row("a value read in a loop", ts.UsageError, a_value_read_in_a_loop, """
a value cannot be read here: the function is recorded without running
  tensor : f32[]
  at     : AT
  fix    : read values inside ts.jit only, and outside of loop bodies
""")

def a_loop_that_changes_its_carry() -> Any:
    return ts.scan(lambda c, x: (ts.stack([c, x]), ()), ts.tensor(0.0), ts.ones((3,)))


row("a loop that changes its carry", ts.ShapeError, a_loop_that_changes_its_carry, """
scan: the carry changes its shape, dtype or structure
  before : f32[]
  after  : f32[2]
  at     : AT
  fix    : return a carry like the one that came in
""")

def a_while_loop_that_changes_its_carry() -> Any:
    return ts.while_loop(lambda v: v < 9, lambda v: v * 1.5, ts.tensor(1))


row("a while loop that changes its carry", ts.ShapeError, a_while_loop_that_changes_its_carry, """
while_loop: the body gives other shapes, dtypes or another structure than it takes
  takes : i32[]
  gives : f32[]
  at    : AT
  fix   : return values like those that came in, e.g. x.to(ts.f32) where a dtype differs
""")

def a_while_loop_over_many_bools() -> Any:
    return ts.while_loop(lambda v: v < 9.0, lambda v: v * 2.0, ts.ones((3,)))


row("a while loop over many bools", ts.ShapeError, a_while_loop_over_many_bools, """
while_loop: the condition is not one bool
  it gave : bool[3]
  at      : AT
  fix     : compare, and join several with ts.all or ts.any
""")

def a_gradient_of_a_while_loop() -> Any:
    x = ts.tensor(2.0)
    return ts.grad(ts.while_loop(lambda v: v < 9.0, lambda v: v * x, x), x)


row("a gradient of a while loop", ts.GraphError, a_gradient_of_a_while_loop, """
while_loop: it has no gradient, as nothing says how often its body runs
  result : f32[]
  at     : AT
  fix    : use ts.scan over the most turns, with ts.where to keep the carry once it is done; \
or ts.stop_gradient where no gradient is meant
""")

def random_numbers_in_a_while_loop() -> Any:
    return ts.while_loop(lambda v: v < 9.0, lambda v: v + ts.random.uniform(()), ts.tensor(0.0))


row("random numbers in a while loop", ts.UsageError, random_numbers_in_a_while_loop, """
while_loop: its body or condition draws random numbers
  at  : AT
  fix : draw them before the loop, or use ts.scan over a number of turns
""")

def a_value_shown_in_a_while_loop() -> Any:
    def body(v):
        ts.debug.print("{}", v)
        return v + 1.0
    return ts.while_loop(lambda v: v < 9.0, body, ts.tensor(0.0))


row("a value shown in a while loop", ts.UsageError, a_value_shown_in_a_while_loop, """
while_loop: its body or condition shows or records a value
  at  : AT
  fix : carry the value out of the loop, or use ts.scan over a number of turns
""")

def devices_that_wait_in_a_while_loop() -> Any:
    def body(x):
        return ts.while_loop(lambda v: v[0] < 9.0, lambda v: dist.all_reduce(v, "dp") + v, x)
    return op.kernel(body)(ts.tensor(ONES[:, 0], mesh=MESH, layout="[8@dp]"))


row("devices that wait in a while loop", ts.LayoutError, devices_that_wait_in_a_while_loop, """
while_loop: devices go on for different numbers of turns, and wait for each other in the body
  goes on : bool[] varying dp
  at      : AT
  fix     : decide together, e.g. dist.all_reduce(go, axis, op='max')
""")

def a_loop_without_a_pair() -> Any:
    return ts.scan(lambda c, x: c + x, ts.tensor(0.0), ts.ones((3,)))


row("a loop without a pair", ts.UsageError, a_loop_without_a_pair, """
scan: the body gave a Tensor, not a pair
  at  : AT
  fix : return (carry, y); y may be ()
""")

def a_loop_over_two_lengths() -> Any:
    return ts.scan(lambda c, x: (c, ()), ts.tensor(0.0), (ts.ones((3,)), ts.ones((4,))))


row("a loop over two lengths", ts.ShapeError, a_loop_over_two_lengths, """
scan: the tensors need one leading length
  x0  : f32[3]
  x1  : f32[4]
  at  : AT
  fix : give tensors whose first dims are equal
""")

def a_loop_of_an_unknown_policy() -> Any:
    return ts.scan(lambda c, x: (c, ()), ts.tensor(0.0), ts.ones((3,)), policy="none")


row("a loop of an unknown policy", ts.UsageError, a_loop_of_an_unknown_policy, """
scan: policy cannot be 'none'
  at  : AT
  fix : use save, recompute, products, together
""")

row("a map over chunks of what has no rows", ts.ShapeError,
    lambda: ts.map_chunks(ts.sum, ts.ones((4, 2)), rows=2), """
map_chunks: the function gives another number of rows than it is given
  block : f32[2, 2]
  gives : f32[]
  at    : AT
  fix   : it gets a block of rows: compute along the other dims, such as x.sum(-1); a function of \
one row is ts.vmap(fn)
""")
row("a map over one chunk of what has other rows", ts.ShapeError,
    lambda: ts.map_chunks(lambda r: r[:1], ts.ones((4, 2)), rows=4), """
map_chunks: the function gives another number of rows than it is given
  block : f32[4, 2]
  gives : f32[1, 2]
  at    : AT
  fix   : it gets a block of rows: compute along the other dims, such as x.sum(-1); a function of \
one row is ts.vmap(fn)
""")
row("a map over chunks that draws in a shape without a dim for the rows", ts.UsageError,
    lambda: ts.map_chunks(lambda r: r + ts.random.uniform((r.size,)).reshape(r.shape),
                          ts.ones((4, 3)), rows=2), """
map_chunks: the function does not draw random numbers for each row
  for 2 rows : of shape (6,)
  for 4 rows : of shape (12,)
  at         : AT
  fix        : draw as often for any number of rows, in shapes with one dim for the rows
""")
row("a map over chunks that draws as often as there are rows", ts.UsageError,
    lambda: ts.map_chunks(lambda r: r + sum(ts.random.uniform(()) for _ in range(r.shape[0])),
                          ts.ones((4, 3)), rows=2), """
map_chunks: the function does not draw random numbers for each row
  for 2 rows : nothing
  for 4 rows : of shape ()
  at         : AT
  fix        : draw as often for any number of rows, in shapes with one dim for the rows
""")
row("more than a loss without has_aux", ts.UsageError,
    lambda: ts.value_and_grad(lambda x: (ts.sum(x), 1))(ts.ones((4,))), """
value_and_grad: the scalar of the function cannot be (<Tensor f32[]>, 1)
  at  : AT
  fix : say has_aux=True of (loss, more)
""")
row("a name of NumPy that is another here", ts.UsageError,
    lambda: np.take_along_axis(ts.ones((4,)), np.array([0]), 0), """
np.take_along_axis: it is no op of tensors
  at  : AT
  fix : use ts.gather, or take the value alone, without a gradient: x.numpy()
""")
row("a slice from where a loop has come to", ts.UsageError,
    lambda: ts.scan(lambda c, i: (c, c[i : i + 2]), ts.ones((4,)), ts.arange(2)), """
index: an object of type slice is no slice of dim 0
  x   : f32[4]
  at  : AT
  fix : where it begins is computed, its size is not: x[ts.arange(size) + start]
""")
row("a key of jax.random among the arguments", ts.DTypeError,
    lambda: ts.jit(lambda key, x: x + ts.random.normal((4,)))(jax.random.key(0), ts.ones((4,))), """
dtype 'key<fry>' is not known
  at  : AT
  fix : leave keys of jax.random out: ts.random draws anew at each call, after ts.seed(0)
""")
