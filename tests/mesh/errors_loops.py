"""Mistakes with loops and higher-order functions. A row: name, error, mistake."""

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


row("a value read in a loop", ts.UsageError, a_value_read_in_a_loop)

def a_loop_that_changes_its_carry() -> Any:
    return ts.scan(lambda c, x: (ts.stack([c, x]), ()), ts.tensor(0.0), ts.ones((3,)))


row("a loop that changes its carry", ts.ShapeError, a_loop_that_changes_its_carry)

def a_while_loop_that_changes_its_carry() -> Any:
    return ts.while_loop(lambda v: v < 9, lambda v: v * 1.5, ts.tensor(1))


row("a while loop that changes its carry", ts.ShapeError, a_while_loop_that_changes_its_carry)

def a_while_loop_over_many_bools() -> Any:
    return ts.while_loop(lambda v: v < 9.0, lambda v: v * 2.0, ts.ones((3,)))


row("a while loop over many bools", ts.ShapeError, a_while_loop_over_many_bools)

def a_gradient_of_a_while_loop() -> Any:
    x = ts.tensor(2.0)
    return ts.grad(ts.while_loop(lambda v: v < 9.0, lambda v: v * x, x), x)


row("a gradient of a while loop", ts.GraphError, a_gradient_of_a_while_loop)

def random_numbers_in_a_while_loop() -> Any:
    return ts.while_loop(lambda v: v < 9.0, lambda v: v + ts.random.uniform(()), ts.tensor(0.0))


row("random numbers in a while loop", ts.UsageError, random_numbers_in_a_while_loop)

def a_value_shown_in_a_while_loop() -> Any:
    def body(v):
        ts.debug.print("{}", v)
        return v + 1.0
    return ts.while_loop(lambda v: v < 9.0, body, ts.tensor(0.0))


row("a value shown in a while loop", ts.UsageError, a_value_shown_in_a_while_loop)

def devices_that_wait_in_a_while_loop() -> Any:
    def body(x):
        return ts.while_loop(lambda v: v[0] < 9.0, lambda v: dist.all_reduce(v, "dp") + v, x)
    return op.kernel(body)(ts.tensor(ONES[:, 0], mesh=MESH, layout="[8@dp]"))


row("devices that wait in a while loop", ts.LayoutError, devices_that_wait_in_a_while_loop)

def a_loop_without_a_pair() -> Any:
    return ts.scan(lambda c, x: c + x, ts.tensor(0.0), ts.ones((3,)))


row("a loop without a pair", ts.UsageError, a_loop_without_a_pair)

def a_loop_over_two_lengths() -> Any:
    return ts.scan(lambda c, x: (c, ()), ts.tensor(0.0), (ts.ones((3,)), ts.ones((4,))))


row("a loop over two lengths", ts.ShapeError, a_loop_over_two_lengths)

def a_loop_of_an_unknown_policy() -> Any:
    return ts.scan(lambda c, x: (c, ()), ts.tensor(0.0), ts.ones((3,)), policy="none")


row("a loop of an unknown policy", ts.UsageError, a_loop_of_an_unknown_policy)

row("a map over chunks of what has no rows", ts.ShapeError,
    lambda: ts.map_chunks(ts.sum, ts.ones((4, 2)), rows=2))
row("a map over one chunk of what has other rows", ts.ShapeError,
    lambda: ts.map_chunks(lambda r: r[:1], ts.ones((4, 2)), rows=4))
row("a map over chunks that draws in a shape without a dim for the rows", ts.UsageError,
    lambda: ts.map_chunks(lambda r: r + ts.random.uniform((r.size,)).reshape(r.shape),
                          ts.ones((4, 3)), rows=2))
row("a map over chunks that draws as often as there are rows", ts.UsageError,
    lambda: ts.map_chunks(lambda r: r + sum(ts.random.uniform(()) for _ in range(r.shape[0])),
                          ts.ones((4, 3)), rows=2))
row("more than a loss without has_aux", ts.UsageError,
    lambda: ts.value_and_grad(lambda x: (ts.sum(x), 1))(ts.ones((4,))))
row("a name of NumPy that is another here", ts.UsageError,
    lambda: np.take_along_axis(ts.ones((4,)), np.array([0]), 0))
row("a slice from where a loop has come to", ts.UsageError,
    lambda: ts.scan(lambda c, i: (c, c[i : i + 2]), ts.ones((4,)), ts.arange(2)))
row("a key of jax.random among the arguments", ts.DTypeError,
    lambda: ts.jit(lambda key, x: x + ts.random.normal((4,)))(jax.random.key(0), ts.ones((4,))))


def a_branch_chosen_by_each_device() -> Any:
    def body(x):
        return ts.cond(ts.sum(x) > 0, lambda v: dist.all_reduce(v, axis="dp"), lambda v: v, x)
    return op.kernel(body)(ts.tensor(np.ones((4, 4), np.float32), mesh=MESH, layout="[4@dp, 4]"))


row("a branch with a collective, chosen by each device", ts.LayoutError,
    a_branch_chosen_by_each_device)
row("branches of other dtypes", ts.ShapeError,
    lambda: ts.cond(ts.tensor(True), lambda: ts.ones(3), lambda: ts.arange(3)))
row("a branch by many bools", ts.ShapeError, lambda: ts.cond(ONES > 0, lambda: 1.0, lambda: 2.0))
row("a branch by a number", ts.DTypeError, lambda: ts.cond(ts.tensor(1), lambda: 1.0, lambda: 2.0))
row("unrolling of a loop of unknown length", ts.UsageError,
    lambda: ts.fori_loop(0, ts.tensor(3), lambda i, v: v, ONES, unroll=2))
row("prefixes of another shape", ts.ShapeError,
    lambda: ts.associative_scan(lambda a, b: ts.sum(a), ONES))
row("a mask whose size is not known", ts.UsageError, lambda: ts.jit(lambda x: x[x > 0])(ONES))
row("values for a mask whose size is not known", ts.UsageError,
    lambda: ts.jit(lambda x: x.at[x > 0].set(ts.ones(3)))(ONES))
row("a value that does not fit its places", ts.ShapeError,
    lambda: ts.ones((8, 4)).at[0].set(ts.ones(9)))
row("floats written into integers", ts.DTypeError, lambda: ts.arange(3).at[0].set(0.5))
row("a policy that does not exist", ts.UsageError, lambda: ts.remat(lambda x: x, policy="all"))
row("derivatives by integers", ts.DTypeError, lambda: ts.jacfwd(lambda x: x * 1.0)(ts.arange(3)))
row("derivatives by complex numbers", ts.DTypeError, lambda: ts.jacfwd(lambda z: z * z)(ONES * 1j))
row("derivatives of complex numbers", ts.DTypeError, lambda: ts.jacrev(lambda x: x * 1j)(ONES))
row("the gradient of a complex loss", ts.DTypeError,
    lambda: ts.value_and_grad(lambda z: ts.sum(z * z))(ONES * 1j))
