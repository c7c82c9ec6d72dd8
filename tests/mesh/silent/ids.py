"""Ids out of range: an error if the host knows them, otherwise NaN."""

from __future__ import annotations

import numpy as np

import tessera as ts
from tessera import dist, nn
from tests.mesh.silent.rows import row

RNG = np.random.default_rng(3)
LOGITS = RNG.normal(size=(4, 8)).astype(np.float32)
TABLE = RNG.normal(size=(8, 4)).astype(np.float32)
LOST = np.array([3, 0, 8, -1, 7], np.int32)  # ids into a dim of 8, some out of range


def computed(ids: np.ndarray) -> ts.Tensor:
    """Ids that the host does not know."""
    return ts.tensor(ids) + ts.zeros(1, ts.tensor(ids).dtype)


def split(x: np.ndarray, layout: str) -> ts.Tensor:
    return ts.tensor(x, mesh=dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4}), layout=layout)


row("a label above the classes", error=ts.ShapeError, says="label 99 at [1] is outside 0 to 7")(
    lambda: nn.cross_entropy(LOGITS, [1, 99, 2, 3])
)
row("a label of -1", error=ts.ShapeError, says="or -100")(
    lambda: nn.cross_entropy(LOGITS, [1, -1, 2, -100])
)
row("a label above the classes of a head", error=ts.ShapeError, says="label 4 at [7]")(
    lambda: nn.linear_cross_entropy(TABLE, ts.tensor(LOGITS[:, :4]), [0, 1, 2, 3, 0, 1, 2, 4])
)
GPT = nn.GPTConfig(vocab=8, seq=4, d=8, layers=1, heads=2)
row("a float mask of tokens, 0 or minus infinity", error=ts.DTypeError, says="mask == 0")(
    lambda: nn.GPT(GPT)([[1, 2, 3]], attention_mask=np.array([[0.0, 0.0, -np.inf]], np.float32))
)
row("the numbers of documents as a mask", error=ts.ShapeError, says="attention mask 2 at [0, 2]")(
    lambda: ts.jit(lambda model, ids, mask: model.loss(ids, ids, mask))(
        nn.GPT(GPT), np.array([[1, 2, 3]]), np.array([[1, 1, 2]])
    )
)
row("a token above the vocabulary", error=ts.ShapeError, says="id 8 at [0, 1] is outside 0 to 7")(
    lambda: nn.Embedding(8, 4)(ts.tensor([[1, 8], [2, 3]]))
)
row("a token of -1", error=ts.ShapeError, says="embedding: id -1")(
    lambda: nn.embedding([0, -1], ts.tensor(TABLE))
)
row("take of a row that is not there", error=ts.ShapeError, says="take: id 8")(
    lambda: ts.take(TABLE, [0, 8])
)
row("indexing with an id before the first", error=ts.ShapeError, says="index: id -9")(
    lambda: ts.tensor(TABLE)[[-9]]
)
row("gather at -1", error=ts.ShapeError, says="gather: id -1")(
    lambda: ts.gather(TABLE, [[0, -1]] * 8)
)
row("scatter_add past the end", error=ts.ShapeError, says="scatter_add: id 4 at [2]")(
    lambda: ts.scatter_add(ts.zeros(4), [0, 1, 4], ts.ones(3))
)
row("one_hot of a class too many", error=ts.ShapeError, says="one_hot: id 3")(
    lambda: ts.one_hot([0, 3], 3)
)


@row("a label above the classes inside a compiled loss is NaN, backwards too")
def _() -> None:
    def losses(x: ts.Tensor, w: ts.Tensor, y: ts.Tensor) -> list[ts.Tensor]:
        made = [nn.cross_entropy(x @ w, y), nn.linear_cross_entropy(x, w, y, rows=2)]
        return [*made, *(ts.grad(loss, [x, w])[i] for loss in made for i in (0, 1))]

    x, w = RNG.normal(size=(4, 4)).astype(np.float32), TABLE.T.copy()
    program = ts.jit(losses)
    for label, fine in ((7, True), (-100, True), (8, False), (-1, False)):
        y = np.array([1, label, 2, 3], np.int32)
        got = program(split(x, "[4@dp, 4]"), split(w, "[4, 8@tp]"), split(y, "[4@dp]") + 0)
        assert all(np.isfinite(t.numpy()).all() == fine for t in got), label


@row("an id outside a compiled lookup is a row of NaN, and one in another device's part is not")
def _() -> None:
    lookups = {
        "embedding": (lambda t, i: nn.embedding(i, t), LOST, [2, 3]),
        "take": (lambda t, i: ts.take(t, i), LOST, [2]),
        "index": (lambda t, i: t[i], np.array([-8, 7, -9, 8, 0], np.int32), [2, 3]),
        "gather": (lambda t, i: ts.gather(t, i[:, None], 0), LOST, [2, 3]),
    }
    for layout in ("[8, 4]", "[8@tp, 4]", "[8@(dp,tp), 4]", "[8, 4@tp]"):
        for name, (fn, ids, lost) in lookups.items():
            got = ts.jit(fn)(split(TABLE, layout), computed(ids)).numpy()
            rows = TABLE[np.where((ids >= -8) & (ids < 8), ids, 0)][:, : got.shape[1]]
            kept = [i for i in range(5) if i not in lost]
            assert np.isnan(got[lost]).all(), (name, layout)
            np.testing.assert_array_equal(got[kept], rows[kept], err_msg=f"{name} {layout}")


@row("the gradient of a lookup with an id outside is no number at the nearest row")
def _() -> None:
    def slope(t: ts.Tensor, i: ts.Tensor) -> ts.Tensor:
        return ts.grad(nn.embedding(i, t).sum(), t)

    for layout in ("[8, 4]", "[8@tp, 4]"):
        for lost, row_ in ((8, 7), (-1, 0), (2**31 - 1, 7)):
            got = ts.jit(slope)(
                split(TABLE, layout), computed(np.array([3, lost], np.int32))
            ).numpy()
            assert np.isnan(got[row_]).all() and np.isfinite(np.delete(got, row_, 0)).all()


@row("whole numbers at an id outside are the lowest of their dtype, not zero")
def _() -> None:
    whole = np.arange(32, dtype=np.int32).reshape(8, 4)
    for layout in ("[8, 4]", "[8@tp, 4]"):
        got = ts.jit(ts.take)(split(whole, layout), computed(np.array([1, 8, 7], np.int32))).numpy()
        assert got.tolist() == [whole[1].tolist(), [-(2**31)] * 4, whole[7].tolist()]
    counts = ts.jit(lambda i: ts.scatter_add(ts.zeros(4, ts.int32), i, ts.ones(3, ts.int32)))
    assert counts(computed(np.array([0, 2, 4], np.int32))).numpy().tolist() == [-(2**31)] * 4
    hot = ts.jit(lambda i: ts.one_hot(i, 2, ts.uint8))(computed(np.array([1, 2], np.int32))).numpy()
    assert hot.tolist() == [[0, 1], [255, 255]]


@row("scatter_add past the end inside a program adds NaN")
def _() -> None:
    add = ts.jit(lambda i: ts.scatter_add(ts.zeros(4), i, ts.ones(3)))
    np.testing.assert_array_equal(
        add(computed(np.array([0, 2, 4], np.int32))).numpy(), [1, 0, 1, np.nan]
    )


@row("negative ids in a list or an array count from the end, as one number does")
def _() -> None:
    x = ts.tensor(TABLE)
    ids = np.array([-1, 2, -8], np.int32)
    np.testing.assert_array_equal(x[[-1]].numpy(), TABLE[[-1]])
    np.testing.assert_array_equal(ts.take(x, ids).numpy(), TABLE[ids])
    np.testing.assert_array_equal(ts.jit(lambda x, i: x[:, i])(x.T, ids).numpy(), TABLE.T[:, ids])
    slope = ts.jit(lambda x, i: ts.grad(x[i].sum(), x))
    assert slope(x, ids).numpy()[:, 0].tolist() == [1, 0, 1, 0, 0, 0, 0, 1]


@row("ts.debug.nan_origin names the op that had an id outside, and the id")
def _() -> None:
    def loss(x: ts.Tensor, y: ts.Tensor) -> ts.Tensor:
        return nn.cross_entropy(nn.embedding(y, x), y)

    x = ts.tensor(np.zeros((8, 12), np.float32))
    found = str(ts.debug.nan_origin(loss, x, ts.tensor([3, 9])))
    assert found.startswith("take makes NaN of an id: 9 is outside 0 to 7"), found
    found = str(ts.debug.nan_origin(nn.cross_entropy, x, ts.tensor([-100, 1, 2, 3, 4, 5, 6, 12])))
    assert found.startswith("inside makes NaN of an id: 12 is outside 0 to 11"), found


@ts.jit
def step(tokens: ts.Tensor) -> ts.Tensor:
    x = nn.embedding(tokens[:, :-1], ts.tensor(TABLE))
    return nn.cross_entropy(x @ ts.ones((4, 8)), tokens[:, 1:])


@row("a batch with a token outside is an error at each call of a compiled step, not at the first")
def _() -> None:
    for given in (np.array, ts.tensor):
        assert np.isfinite(step(given([[1, 2, 7]])).item())
        for batch, says in (([[1, 8, 2]], "embedding: id 8 at [0, 1]"),
                            ([[1, 2, -1]], "cross_entropy: label -1 at [0, 2]")):  # fmt: skip
            try:
                step(given(batch))
            except ts.ShapeError as error:
                assert says in str(error), error
            else:
                raise AssertionError(says)


@row("ids of a branch that is not taken, or behind a condition, are no error")
def _() -> None:
    def some(ids: ts.Tensor, table: ts.Tensor) -> ts.Tensor:
        if ids.max() > 7:
            return ts.zeros(4)
        return nn.embedding(ids, table).sum(0)

    ids = np.array([1, 9])
    assert ts.jit(some)(np.array([1, 2]), TABLE).numpy().any()
    assert not ts.jit(some)(ids, TABLE).numpy().any()
