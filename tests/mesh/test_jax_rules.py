"""Each rule for a primitive of JAX, held against JAX: values, dtypes and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera.lang.foreign.jax_program import RULES
from tessera.lang.foreign.program import Program
from tessera.runtime.jaxprs import program_of
from tests.mesh.jax_rows import ROWS, Row
from tests.quickly import quickly

CASES = [pytest.param(name, r, id=f"{name}-{i}")
         for name, rows in ROWS.items() for i, r in enumerate(rows)]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with quickly():
        yield


def names(program: Any) -> Iterator[str]:
    """The names of the calls of a program, and of those inside of it."""
    if isinstance(program, Program):
        for call in program.calls:
            yield call.name
            for x in (*call.args, *call.params.values()):
                yield from names(x)
    elif type(program) in (list, tuple):
        for x in program:
            yield from names(x)


def test_every_rule_has_a_row() -> None:
    ours = {n for n, rule in RULES.table.items() if rule.__module__.startswith("tessera.")}
    assert ours == set(ROWS)  # a page of the docs adds a rule of its own


@pytest.mark.parametrize(("name", "case"), CASES)
def test_rule(name: str, case: Row) -> None:
    def flat(*args: Any) -> list[Any]:
        return jax.tree.leaves(case.fn(*args))

    program = program_of("test", flat, [(np.shape(a), a.dtype, "") for a in case.args])
    assert name in set(names(program))
    want = [np.asarray(y) for y in flat(*map(jnp.asarray, case.args))]
    got = ts.from_jax_function(flat)(*map(ts.tensor, case.args))
    for g, w in zip(got, want, strict=True):
        assert (g.shape, g.dtype.numpy) == (w.shape, w.dtype)
        np.testing.assert_allclose(
            g.numpy().astype(np.float64), w.astype(np.float64), rtol=case.rtol, atol=case.rtol
        )
    if not case.smooth:
        return

    def loss(x: Any, *rest: Any) -> Any:
        parts = [y for y in flat(x, *rest) if jnp.issubdtype(y.dtype, jnp.floating)]
        return sum(jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)) for y in parts)

    slope = jax.grad(loss)(*map(jnp.asarray, case.args))
    x, *rest = map(ts.tensor, case.args)
    ours = ts.grad(ts.from_jax_function(loss)(x, *rest), x)
    np.testing.assert_allclose(ours.numpy(), slope, rtol=10 * case.rtol, atol=10 * case.rtol)
