"""Products of bf16 whose left factor does not have its contracted dims last."""

import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tessera.core import flags

CASES = ["ki,kj->ij", "bki,bkj->bij", "kli,klj->ij", "ibk,bkj->bij", "ik,kj->ij", "ik,jk->ij"]
SIZES = {"b": 3, "i": 40, "j": 24, "k": 16, "l": 5}


def operands(case):
    rng = np.random.default_rng(0)
    shapes = [[SIZES[d] for d in dims] for dims in case.partition("->")[0].split(",")]
    return [rng.normal(size=s).astype(ml_dtypes.bfloat16) for s in shapes]


@pytest.mark.parametrize("case", CASES)
def test_a_product_of_bf16_is_the_same_with_its_factor_moved(case, monkeypatch):
    x, y = operands(case)
    want = np.einsum(case, x.astype(np.float64), y.astype(np.float64))
    for moved in (True, False):
        monkeypatch.setattr(flags, "MULTIPLIES_BF16", moved)
        got = ts.einsum(case, ts.tensor(x), ts.tensor(y))
        assert got.dtype is ts.bf16
        np.testing.assert_allclose(got.to(ts.f32).numpy(), want, rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize("case", CASES)
def test_the_left_factor_is_moved_where_the_cpu_multiplies_bf16(case, monkeypatch):
    import jax

    from tessera.runtime import xp_jax

    a, b, out = re.split(",|->", case)
    x, y = map(jnp.asarray, operands(case))

    def text(moved):
        monkeypatch.setattr(flags, "MULTIPLIES_BF16", moved)
        fn = lambda x, y: xp_jax.contract((a, b), out, (x, y), ts.f32)  # noqa: E731 - new each time
        return jax.jit(fn).lower(x, y).as_text()

    assert "LayoutConstraint" not in text(False)
    assert ("LayoutConstraint" in text(True)) == (case not in ("ik,kj->ij", "ik,jk->ij"))


@pytest.mark.parametrize("case", CASES)
def test_factors_are_widened_where_the_cpu_multiplies_no_bf16(case, monkeypatch):
    import jax

    from tessera.runtime import xp_jax

    a, b, out = re.split(",|->", case)
    x, y = (jnp.asarray(v, jnp.float32) for v in operands(case))

    def product(x, y):
        narrow = [v.astype(jnp.bfloat16) for v in (x, y)]
        return xp_jax.contract((a, b), out, narrow, ts.f32)

    want = np.einsum(case, *(np.float64(v.astype(jnp.bfloat16)) for v in (x + 1 / 3, y + 1 / 3)))
    for has, takes in ((True, "bf16"), (False, "f32")):
        monkeypatch.setattr(flags, "MULTIPLIES_BF16", has)
        run = jax.jit(lambda x, y: product(x + 1 / 3, y + 1 / 3))
        found = re.findall(r"dot_general.* : \(tensor<\S+x(\w+)>, tensor<\S+x(\w+)>\)",
                           run.lower(x, y).as_text())  # fmt: skip
        assert found == [(takes, takes)]
        # They are rounded to bf16 even if the compiler sees both casts.
        np.testing.assert_allclose(run(x, y), want, rtol=1e-5, atol=1e-5)


def test_a_product_whose_factor_is_moved_runs_under_every_promise():
    """Such programs are compiled without the simplifier, which the engine's layout constraints
    need."""
    x, y = operands("ki,kj->ij")
    want = np.einsum("ki,kj->ij", x.astype(np.float64), y.astype(np.float64))
    for level in ("run_to_run", "mesh_invariant"):
        with ts.dist.deterministic(level=level):
            got = ts.jit(lambda x, y: ts.einsum("ki,kj->ij", x, y))(ts.tensor(x), ts.tensor(y))
        np.testing.assert_allclose(got.to(ts.f32).numpy(), want, rtol=2**-7, atol=2**-6)
