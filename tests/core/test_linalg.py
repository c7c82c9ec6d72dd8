"""Linear algebra and einsum against NumPy, and their gradients against differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tessera as ts
from tessera.core.dtypes import f32
from tessera.core.errors import DTypeError, ShapeError, TesseraError, UsageError
from tessera.core.layout import parse_type, plain
from tessera.core.mesh import Mesh
from tessera.ir.graph.build import Builder
from tessera.ir.graph.node import Node
from tessera.ir.graph.oracle import computed
from tessera.ir.graph.verify import verify
from tessera.ops.op import op_named
from tessera.passes.differentiate import differentiate
from tests.core.numpy_engine import Oracle
from tests.core.table import apart, positive

MESH = Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
RNG = np.random.default_rng(9)


def real(*shape: int) -> Any:
    return RNG.uniform(-2, 2, shape).astype(np.float32)


def close(got: ts.Tensor, want: Any, tol: float = 1e-4) -> None:
    assert got.shape == np.shape(want)
    np.testing.assert_allclose(got.numpy(), want, rtol=tol, atol=tol)


# ---- einsum ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("index", "shapes"),
    [
        ("ij,jk", [(2, 3), (3, 4)]),
        ("ji", [(2, 3)]),
        ("ii", [(3, 3)]),
        ("ii->i", [(3, 3)]),
        ("iij->j", [(3, 3, 2)]),
        ("iji->j", [(3, 4, 3)]),
        ("aaa", [(3, 3, 3)]),
        ("...ii->...", [(2, 5, 3, 3)]),
        ("i...i", [(3, 4, 3)]),
        ("i...j,j...k->...ik", [(2, 5, 3), (3, 5, 4)]),
        ("...i,i...", [(2, 3, 4), (4, 1)]),
        ("...,...", [(3, 1), (1, 4)]),
        ("b...a,...a", [(2, 3, 4), (3, 4)]),
        ("...ij->...ji", [(2, 3, 4)]),
        ("ij,j->i", [(2, 3), (1,)]),
        ("bii,ij,...j->b", [(2, 3, 3), (3, 4), (4,)]),
    ],
)
def test_einsum_is_numpys(index: str, shapes: list[tuple[int, ...]], oracle: Oracle) -> None:
    xs = [real(*s) for s in shapes]
    if index.startswith("bii"):  # NumPy rejects an empty `...` beside a named result
        close(ts.einsum(index, *xs), np.einsum("bii,ij,j->b", *xs))
    else:
        close(ts.einsum(index, *xs), np.einsum(index, *xs))


def test_a_plain_einsum_is_recorded_as_written(oracle: Oracle) -> None:
    graph = ts.graph.trace(
        lambda x, y: ts.einsum("... i, i j -> ... j", x, y), real(2, 3), real(3, 4)
    )
    (node,) = (n for n in graph.nodes if n.op != "input")
    assert node.attrs["index"] == "... i, i j -> ... j"


def test_the_gradient_of_a_diagonal(oracle: Oracle) -> None:
    x, y = ts.tensor(real(3, 3)), ts.tensor(real(3))
    gx, gy = ts.grad(ts.einsum("ii,i", x, y), [x, y])
    close(gx, np.diag(y.numpy()))
    close(gy, np.diagonal(x.numpy()))


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ("ij,jk", "einsum: 'ij,jk' is for 2 arguments, got 1"),
        ("ijk", "einsum: 'ijk' names 3 dims of an argument with 2"),
        ("ij...k", "einsum: 'ij...k' names 3 dims of an argument with 2"),
        ("...i...", "einsum: '...i...' has two ... in a group"),
        ("ii", "einsum: 'ii': the two dims 'i' have sizes 2 and 3"),
        ("ij->z", "einsum: 'ij->z': result letter 'z' is in no argument"),
        ("ij->ii", "einsum: 'ij->ii': 'i' stands twice"),
    ],
)
def test_what_einsum_refuses(index: str, says: str, oracle: Oracle) -> None:
    with pytest.raises(ShapeError) as error:
        ts.einsum(index, real(2, 3))
    assert str(error.value).startswith(says)


# ---- entries -----------------------------------------------------------------------------------
def test_triangles_and_diagonals(oracle: Oracle) -> None:
    x = real(2, 4, 5)
    for k in (-9, -2, 0, 1, 9):
        close(ts.tril(x, k), np.tril(x, k))
        close(ts.triu(x, k), np.triu(x, k))
    for k in (-9, -3, 0, 2, 4, 5):
        close(ts.diagonal(x, k), np.diagonal(x, k, 1, 2))
    close(ts.diagonal(x, 1, 2, 0), np.diagonal(x, 1, 2, 0))
    close(ts.diag(x[0, 0]), np.diag(x[0, 0]))
    close(ts.diag(x), np.diagonal(x, 0, 1, 2))
    close(ts.linalg.trace(x), np.trace(x, 0, 1, 2))
    close(ts.eye(3, 4), np.eye(3, 4))
    assert ts.eye(2, dtype=ts.int32).dtype is ts.int32
    assert ts.tril(x > 0).dtype is ts.bool
    assert (ts.tril(x > 0).numpy() == np.tril(x > 0)).all()
    with pytest.raises(ShapeError, match="tril: "):
        ts.tril(x[0, 0])


def test_sorted_values_and_their_places(oracle: Oracle) -> None:
    x = np.round(real(4, 6))
    for down in (False, True):
        t = ts.tensor(x)
        values, ids = ts.sort(t, 0, descending=down)
        close(values, -np.sort(-x, 0) if down else np.sort(x, 0))
        close(values, np.take_along_axis(x, ids.numpy(), 0))
        weight = real(4, 6)
        (g,) = ts.grad((values * weight).sum(), [t])
        close(ts.gather(g, ids, 0), weight)
    values, ids = ts.topk(x, 2, dim=0)
    close(values, -np.sort(-x, 0)[:2])
    close(values, np.take_along_axis(x, ids.numpy(), 0))


def test_slices_are_added_where_ids_say(oracle: Oracle) -> None:
    x, u = real(3, 4), real(3, 2)
    want = x.copy()
    np.add.at(want, (slice(None), [1, 1]), u)
    close(ts.scatter_add(x, [1, 1], u), want)
    rows = real(2, 4)
    close(ts.scatter_add(x, [2, 0], rows, dim=0), x + np.stack([rows[1], np.zeros(4), rows[0]]))


def test_logsumexp(oracle: Oracle) -> None:
    x = np.array([[1000.0, 1000.0], [-1000.0, -np.inf], [-np.inf, -np.inf]], np.float32)
    close(ts.logsumexp(x, 1), [1000 + np.log(2), -1000, -np.inf])
    y = real(3, 4)
    close(ts.logsumexp(y), np.log(np.exp(y).sum()))
    close(ts.logsumexp(y, 0, keepdims=True), np.log(np.exp(y).sum(0, keepdims=True)))
    t = ts.tensor(y)
    (g,) = ts.grad(ts.logsumexp(t), [t])
    close(g, np.exp(y) / np.exp(y).sum())


# ---- matrices ----------------------------------------------------------------------------------
def test_solves_and_determinants(oracle: Oracle) -> None:
    a, y = apart(3, 4, 4), real(3, 4, 2)
    close(ts.linalg.solve(a, y), np.linalg.solve(a, y))
    close(ts.linalg.solve(a[0], y), np.linalg.solve(a[:1], y))
    close(ts.linalg.solve(a, y[0, :, 0]), np.linalg.solve(a, y[:1, :, :1])[..., 0])
    close(ts.linalg.solve_triangular(a, y, lower=False), np.linalg.solve(np.triu(a), y))
    close(ts.linalg.inv(a), np.linalg.inv(a))
    close(ts.linalg.det(a), np.linalg.det(a), 1e-3)
    assert ts.linalg.det(np.ones((2, 2))).item() == 0
    for got, want in zip(ts.linalg.slogdet(a), np.linalg.slogdet(a), strict=True):
        close(got, want)


def test_factors_multiply_to_the_matrix(oracle: Oracle) -> None:
    a = positive(2, 4, 4)
    low = ts.linalg.cholesky(a)
    close(low @ low.transpose(-2, -1), a)
    values, vectors = ts.linalg.eigh(a)
    close(vectors * values.reshape(2, 1, 4) @ vectors.transpose(-2, -1), a)
    for shape in ((2, 5, 3), (2, 3, 5), (4, 4)):
        x = real(*shape)
        k = min(shape[-2:])
        q, r = ts.linalg.qr(x)
        close(q @ r, x)
        close(q.transpose(-2, -1) @ q, np.broadcast_to(np.eye(k), (*shape[:-2], k, k)))
        assert (ts.diagonal(r).numpy() > 0).all()
        u, s, vt = ts.linalg.svd(x)
        close(u * s.reshape(*shape[:-2], 1, k) @ vt, x)
        assert (np.diff(s.numpy()) <= 0).all()


def test_a_matrix_without_an_answer_gives_nan(oracle: Oracle) -> None:
    both = np.stack([np.eye(2), -np.eye(2)])
    good, bad = ts.linalg.cholesky(both).numpy()
    assert (good == np.eye(2)).all()
    assert np.isnan(bad[0, 0])
    assert np.isnan(ts.linalg.svd(np.full((2, 3), np.nan))[1].numpy()).all()
    assert not np.isfinite(ts.linalg.inv(np.ones((2, 2))).numpy()).any()


@pytest.mark.parametrize("order", [0, 1, 2, 3.0, 0.5, -1, -2.5, np.inf, -np.inf])
def test_norms_of_vectors(order: float, oracle: Oracle) -> None:
    x, flat = real(3, 4), real(5)
    close(ts.linalg.norm(x, order, 1), np.linalg.norm(x, order, 1))
    close(ts.linalg.norm(flat, order, keepdims=True), np.linalg.norm(flat, order, keepdims=True))
    close(ts.linalg.vector_norm(x, order), np.linalg.norm(x.ravel(), order))
    cube = real(2, 3, 4)
    want = np.linalg.norm(cube.transpose(1, 0, 2).reshape(3, 8), order, 1)
    close(ts.linalg.vector_norm(cube, order, (0, 2)), want)
    assert ts.linalg.vector_norm(cube, order, (0, 2), True).shape == (1, 3, 1)
    for t in (ts.zeros(3), ts.tensor([0.0, 1.0])):
        value = ts.linalg.norm(t, order)
        with np.errstate(divide="ignore"):
            close(value, np.linalg.norm(t.numpy(), order))
        assert np.isfinite(ts.grad(value, t).numpy()).all()


@pytest.mark.parametrize("order", [None, "fro", "nuc", 1, -1, 2, -2, np.inf, -np.inf])
def test_norms_of_matrices(order: Any, oracle: Oracle) -> None:
    x, cube = real(3, 4), real(2, 3, 4)
    close(ts.linalg.norm(x, order), np.linalg.norm(x, order))
    for dims in ((0, 1), (2, 0), (-1, 1)):
        for keep in (False, True):
            want = np.linalg.norm(cube, order, dims, keep)
            close(ts.linalg.norm(cube, order, dims, keep), want)
            if order is not None:
                close(ts.linalg.matrix_norm(cube, order, dims, keep), want)
    t, steps = ts.tensor(x), 1e-3 * real(3, 4)
    (g,) = ts.grad(ts.linalg.norm(t, order), [t])
    ends = [np.linalg.norm(x.astype(float) + sign * steps, order) for sign in (1, -1)]
    np.testing.assert_allclose((g.numpy() * steps).sum() * 2, ends[0] - ends[1], rtol=1e-3)


def test_narrow_matrices_are_worked_on_in_f32(oracle: Oracle) -> None:
    a = ts.tensor(positive(3, 3), dtype=ts.bf16)
    low = ts.linalg.cholesky(a)
    assert low.dtype is ts.bf16
    np.testing.assert_allclose(
        low.to(ts.f32).numpy(), np.linalg.cholesky(a.to(ts.f32).numpy()), rtol=0.01, atol=0.01
    )


# ---- gradients of every result -----------------------------------------------------------------
def slopes(build: Callable[[Builder, list[Node]], list[Node]], ins: list[Any]) -> None:
    """Compares the gradient of Σ w · out over all results with finite differences in f64."""
    b = Builder()
    args = [b.input(plain(f32, x.shape)) for x in ins]
    outs = build(b, args)
    weights = [b.input(o.type) for o in outs]
    grads = differentiate(b, list(zip(outs, weights, strict=True)), args)
    assert all(g is not None for g in grads)
    graph = b.graph([*outs, *(g for g in grads if g is not None)])
    verify(graph, "differentiate")
    w = [RNG.uniform(0.5, 1.5, o.type.shape) for o in outs]
    exact = [x.astype(np.float64) for x in ins]
    got = computed(graph, [*exact, *w])[len(outs) :]
    for i, g in enumerate(got):
        want = np.zeros(g.shape)
        for at in np.ndindex(g.shape):
            sides = []
            for step in (1e-6, -1e-6):
                moved = [x.copy() for x in exact]
                moved[i][at] += step
                now = computed(graph, [*moved, *w])
                sides.append(sum(np.sum(a * c) for a, c in zip(w, now)))
            want[at] = (sides[0] - sides[1]) / 2e-6
        np.testing.assert_allclose(g, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("op", "a", "results"),
    [
        ("slogdet", apart(2, 3, 3), (1,)),
        ("eigh", positive(2, 3, 3), (0, 1)),
        ("eigh", positive(3, 3), (1,)),
        ("qr", apart(2, 4, 3), (0, 1)),
        ("qr", apart(3, 3), (1,)),
        ("svd", apart(2, 4, 3), (0, 1, 2)),
        ("svd", apart(3, 4), (0, 1, 2)),
        ("svd", apart(3, 3), (2,)),
    ],
)
def test_gradients_of_all_results(op: str, a: Any, results: tuple[int, ...]) -> None:
    def build(b: Builder, args: list[Node]) -> list[Node]:
        node = b(op, *args)
        return [b("item", node, index=i) for i in results]

    slopes(build, [a])


def test_gradients_of_composites(oracle: Oracle) -> None:
    a = apart(3, 3)
    t = ts.tensor(a)
    back = np.linalg.inv(a).T
    close(ts.grad(ts.linalg.det(t), [t])[0], np.linalg.det(a) * back, 1e-3)
    (g,) = ts.grad(ts.linalg.inv(t).sum(), [t])
    close(g, -back @ np.ones((3, 3)) @ back, 1e-3)
    (g,) = ts.grad(ts.linalg.norm(t), [t])
    close(g, a / np.linalg.norm(a))
    wide = ts.tensor(apart(2, 4))
    q, r = ts.linalg.qr(wide)
    (g,) = ts.grad((q @ r).sum(), [wide])
    close(g, np.ones((2, 4)))


SINGULAR = [
    [[1, 2], [2, 4]], [[0, 1, 2], [3, 4, 5], [6, 7, 8]], np.diag([1, 2, 0]), np.eye(5, k=1),
    np.zeros((2, 2)), np.zeros((3, 3)), [[0]], [[[1, 2], [2, 4]], [[3, 1], [1, 2]]],
]  # fmt: skip


@pytest.mark.parametrize("matrix", SINGULAR)
def test_the_gradient_of_a_determinant_is_the_cofactors(matrix: Any, oracle: Oracle) -> None:
    a = np.array(matrix, np.float32)
    want = np.ones_like(a)
    for *at, i, j in np.ndindex(a.shape) if a.shape[-1] > 1 else ():
        minor = np.delete(np.delete(a[tuple(at)], i, 0), j, 1)
        want[(*at, i, j)] = (-1) ** (i + j) * np.linalg.det(minor)
    t = ts.tensor(a)
    close(ts.grad(ts.sum(ts.linalg.det(t)), [t])[0], want)


def test_the_second_gradient_of_a_determinant(oracle: Oracle) -> None:
    for a in ([[1.0, 2.0], [2.0, 4.0]], [[1.0, 0.0], [0.0, 1.0]]):
        t = ts.tensor(a)
        (g,) = ts.grad(ts.linalg.det(t), [t])
        close(ts.grad(ts.sum(g * g), [t])[0], 2 * np.array(a))


def test_eigenvalues_are_of_the_lower_triangle(oracle: Oracle) -> None:
    a, weights = real(2, 4, 4), (real(2, 4), real(2, 4, 4))
    t, theirs = ts.tensor(a), torch.tensor(a, requires_grad=True)
    found, want = ts.linalg.eigh(t), torch.linalg.eigh(theirs)
    close(found[0], want[0].detach().numpy())
    signs = np.sign((found[1].numpy() * want[1].detach().numpy()).sum(-2, keepdims=True))
    close(found[1] * signs, want[1].detach().numpy())
    loss = ts.sum(found[0] * weights[0]) + ts.sum(found[1] * signs * weights[1])
    same = (want[0] * torch.tensor(weights[0])).sum() + (want[1] * torch.tensor(weights[1])).sum()
    same.backward()
    assert theirs.grad is not None
    close(ts.grad(loss, [t])[0], theirs.grad.numpy(), 1e-3)


# ---- layouts and what is refused ---------------------------------------------------------------
def test_a_batch_of_matrices_stays_split() -> None:
    b = Builder()
    a, y = (b.input(parse_type(t, MESH)) for t in ("f32[8@dp, 4@tp, 4]", "f32[8@dp, 4, 2]"))
    x = b("solve", a, y)
    assert x.type.text == "f32[8@dp, 4, 2]"
    assert [n.op for n in b.nodes] == ["input", "input", "all_gather", "solve"]
    q, r = b("qr", a).types
    assert (q.text, r.text) == ("f32[8@dp, 4, 4]", "f32[8@dp, 4, 4]")


SQUARE, FLAT = np.eye(3, dtype=np.float32), np.ones((2, 3), np.float32)
WRONG: list[tuple[Any, type[TesseraError], str]] = [
    (lambda: ts.linalg.inv(FLAT), ShapeError, "inv: needs square matrices in the last two dims"),
    (lambda: ts.linalg.qr(FLAT[0]), ShapeError, "qr: needs matrices in the last two dims"),
    (lambda: ts.linalg.solve(SQUARE, FLAT), ShapeError,
     "solve: the right side has not as many rows as the matrix"),
    (lambda: ts.linalg.solve(np.ones((2, 3, 3)), np.ones((4, 3, 1))), ShapeError,
     "solve: the leading dims (2,) and (4,) do not broadcast"),
    (lambda: ts.linalg.norm(FLAT[0], float("nan")), UsageError, "norm: ord cannot be nan"),
    (lambda: ts.linalg.norm(FLAT[0], "fro"), UsageError, "norm: ord cannot be 'fro'"),
    (lambda: ts.linalg.norm(FLAT, 3), UsageError, "matrix_norm: ord cannot be 3"),
    (lambda: ts.linalg.norm(np.ones((2, 2, 2)), 2), ShapeError, "norm: ord=2 is of one dim"),
    (lambda: ts.linalg.matrix_norm(FLAT, dim=(1, 1)), ShapeError,
     "matrix_norm: (1, 1) does not name the rows and the columns"),
    (lambda: ts.linalg.solve_triangular(SQUARE, SQUARE, "low"), UsageError,  # type: ignore[arg-type]
     "solve_triangular: lower cannot be 'low'"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "says"), WRONG)
def test_what_is_refused(call: Any, kind: type[TesseraError], says: str, oracle: Oracle) -> None:
    with pytest.raises(kind) as error:
        call()
    assert str(error.value).startswith(says)
    assert "\n  fix" in str(error.value)


@pytest.mark.parametrize(
    ("op", "ins", "kind", "says"),
    [
        ("cholesky", ["f32[3, 4]"], ShapeError, "cholesky: needs square matrices"),
        ("cholesky", ["f32[3]"], ShapeError, "cholesky: needs square matrices"),
        ("qr", ["f32[3, 4]"], ShapeError, "qr: needs at least as many rows as columns"),
        ("solve", ["f32[2, 3, 3]", "f32[3, 1]"], ShapeError, "solve: needs a square matrix"),
        ("solve", ["f32[3, 3]", "bf16[3, 1]"], DTypeError, "solve: arguments have different"),
    ],
)
def test_what_the_ops_refuse(op: str, ins: list[str], kind: type[TesseraError], says: str) -> None:
    with pytest.raises(kind) as error:
        op_named(op).rule(tuple(parse_type(t) for t in ins), {})
    assert str(error.value).startswith(says)
