"""Tensors without elements in programs on many devices: arguments and results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tessera as ts
from tessera import dist, nn
from tessera.core.context import replaced
from tests.cases import grid


def placed(mesh: dist.Mesh | None, layout: str, *shape: int) -> ts.Tensor:
    x = np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
    return ts.tensor(x, mesh=mesh, layout=layout if mesh is not None else None)


def program(x: ts.Tensor, w: ts.Tensor, y: ts.Tensor) -> list[ts.Tensor]:
    """A program on x [0, 8], w [8, 4], y [6, 8]: parts of a batch with no row or all rows empty."""
    rows = ts.concat([x, y])[:0]
    h = nn.softmax(ts.concat([rows, y[2:2]]) @ w).reshape(0, 2, 2)
    loss = ts.sum(h) + ts.sum(nn.relu(x @ w)) + ts.sum(w) + ts.sum(y.reshape(6, 8)[:, 8:])
    inner = x.T @ (x @ w)
    grads = ts.grad(loss + ts.sum(inner), [x, w, y])
    found = ts.topk(x @ w, 2)[1]
    return [rows, h, loss, inner, found, ts.mean(x, 1), ts.take(y, found.reshape(-1)), *grads]


WANT: list[Any] = [
    np.zeros((0, 8)), np.zeros((0, 2, 2)), np.float32(528), np.zeros((8, 4)), np.zeros((0, 2)),
    np.zeros(0), np.zeros((0, 8)), np.zeros((0, 8)), np.ones((8, 4)), np.zeros((6, 8)),
]  # fmt: skip
LAYOUTS = [
    ("[0, 8]", "[8, 4]", "[6, 8]"),
    ("[0, 8@tp]", "[8@tp, 4@dp]", "[6@dp, 8]"),
    ("[0@dp, 8]", "[8@dp, 4@tp]", "[6, 8@tp]"),
]


@pytest.mark.parametrize("how", ["one device", "fused", "stepped", "folded"])
def test_a_program_takes_and_gives_them(how: str, mesh: dist.Mesh) -> None:
    on = None if how == "one device" else mesh.fold(onto=2) if how == "folded" else mesh
    options: dict[str, Any] = {"stepped": {"executor": how}}
    for layout in LAYOUTS if on is not None else LAYOUTS[:1]:
        args = [placed(on, t, *s) for t, s in zip(layout, ((0, 8), (8, 4), (6, 8)), strict=True)]
        with replaced(**options.get(how, {})):
            for got, want in zip(ts.jit(program)(*args), WANT, strict=True):
                assert got.shape == want.shape
                np.testing.assert_array_equal(got.numpy(), want)


def test_a_result_of_elements_that_none_went_into(mesh: dist.Mesh) -> None:
    """The engine's partitioner fails on a program whose arguments are all empty."""
    a, b = placed(mesh, "[5@dp, 5, 0]", 5, 5, 0), placed(mesh, "[0, 5@tp]", 0, 5)
    y = ts.jit(lambda a, b: a @ b)(a, b)
    assert str(y.type) == "f32[5@dp, 5, 5@tp]"
    np.testing.assert_array_equal(y.numpy(), np.zeros((5, 5, 5)))


def test_every_layout_becomes_every_other(mesh: dist.Mesh) -> None:
    layouts = ["[0, 8, 8]", "[0, 8@dp, 8@tp]", "[0, 8, 8@(tp,dp)]", "[0@dp, 8@tp, 8]"]
    for a in layouts:
        x = placed(mesh, a, 0, 8, 8)
        for b in layouts:
            for y in (dist.redistribute(x, b), ts.jit(lambda x, b=b: dist.redistribute(x, b))(x)):
                assert (y.numpy().shape, y.layout) == ((0, 8, 8), b.replace("0@dp", "0"))


def test_from_and_to_the_host() -> None:
    for x in ([], np.zeros((0, 3)), torch.zeros(2, 0, dtype=torch.int32), np.zeros((4, 0), bool)):
        t, want = ts.tensor(x), np.asarray(x)
        assert (t.shape, t.numpy().shape, len(t)) == (want.shape, want.shape, want.shape[0])
        assert torch.from_dlpack(t).shape == want.shape == t.jax().shape
        assert ts.tensor(t.jax()).type is t.type
        assert [r.shape for r in t] == [r.shape for r in want]
        assert str(t) == f"Tensor([], {t.type})"
    with pytest.raises(ts.ShapeError, match="item: a tensor of 0 elements"):
        bool(ts.tensor([]))


class Model(nn.Module):
    def __init__(self) -> None:
        self.w = nn.Parameter(4, 3)
        self.extra = nn.Parameter(0, 3)
        self.seen = ts.zeros((0, 2))

    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        return ts.sum(ts.tanh(x @ ts.concat([self.w, self.extra])) ** 2)


OPTIMIZERS = [ts.optim.SGD, ts.optim.Momentum, ts.optim.Adam, ts.optim.AdamW, ts.optim.Lion]


@pytest.mark.parametrize("made", [*OPTIMIZERS, ts.optim.Adafactor])
def test_a_step_with_an_empty_batch_and_an_empty_weight(made: Any) -> None:
    model, opt = Model(), made(lr=0.1)
    state = opt.init(model)

    @ts.jit
    def step(model: Model, state: Any, x: ts.Tensor) -> Any:
        loss = model(x)
        grads, norm = ts.optim.clip_by_global_norm(ts.grad(loss, model), 1.0)
        new, state = opt.update(model, grads, state)
        model.load_parameters(new)
        return loss, norm, state

    for x in (ts.zeros((0, 4)), ts.ones((2, 4)), ts.zeros((0, 4))):
        loss, norm, state = step(model, state, x)
        assert (loss.item() == 0 and norm.item() == 0) == (not x.size)
    assert np.isfinite(model.w.numpy()).all()
    saved = model.state_dict()
    assert (saved["seen"].shape, saved["extra"].shape) == ((0, 2), (0, 3))
    Model().load_state_dict(saved)


# -- models ----------------------------------------------------------------------------------------
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "local": {"positions": "rotary", "windows": (4, 0), "kv_heads": 2},
    "alibi": {"positions": "alibi", "stacked": False, "loop": False},
    "ring": {"context": "ring", "context_axis": "tp"},
    "all to all": {"context": "all_to_all", "context_axis": "tp"},
}


@pytest.mark.parametrize(("name", "shape"), grid(MODELS, [(0, 8), (2, 0)]))
def test_a_model_of_no_tokens(name: str, shape: tuple[int, int]) -> None:
    both = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 2})
    plan = dist.strategy("data_parallel")
    if "context" not in MODELS[name]:
        plan += dist.strategy("tensor_parallel")
    config = nn.GPTConfig(vocab=32, seq=16, d=16, layers=2, heads=4, **MODELS[name])

    def step(model: nn.GPT, ids: ts.Tensor) -> Any:
        loss = model.loss(ids, ids)
        return model(ids), loss, ts.grad(loss, model.parameters())

    for model, ids in (
        (nn.GPT(config), ts.tensor(np.zeros(shape, np.int32))),
        (
            dist.place(nn.GPT(config), plan, both),
            dist.place(np.zeros(shape, np.int32), plan, both, kind="batch"),
        ),
    ):
        assert model(ids).shape == (*shape, 32)
        logits, loss, grads = ts.jit(step)(model, ids)
        assert logits.shape == (*shape, 32) and loss.item() == 0.0
        assert not any(g.numpy().any() for g in grads.values())


def test_attention_without_keys_is_as_in_torch() -> None:
    q, k = np.ones((1, 2, 3, 4), np.float32), np.zeros((1, 2, 0, 4), np.float32)
    want = torch.nn.functional.scaled_dot_product_attention(*map(torch.from_numpy, (q, k, k)))
    for attend in (nn.attention, nn.flash_attention):
        found = attend(*map(ts.tensor, (q, k, k)))
        np.testing.assert_array_equal(found.numpy(), want.numpy())
