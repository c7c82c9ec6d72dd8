"""A buffer with several names, in lists, tuples and dicts too: loaded, cast, placed and saved
once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import checkpoint, dist, nn


class Block(nn.Module):
    def __init__(self, rates: Any) -> None:
        self.rates = rates

    def __call__(self, x: Any) -> Any:
        return x * self.rates


class Rotated(nn.Module):
    """Blocks that share a table, and buffers in a tuple, a list and a dict with a dot in its
    key."""

    def __init__(self, value: float = 0.0) -> None:
        rates = ts.full((4,), value)
        self.blocks = [Block(rates), Block(rates)]
        self.pair = (ts.full((2,), value), {"x.y": ts.full((2,), value)})
        self.rows = [ts.full((2,), value)]

    def __call__(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


NAMES = ["blocks.0.rates", "pair.0", "pair.1.x.y", "rows.0"]


def every(model: nn.Module) -> dict[str, Any]:
    return dict(model.named_buffers(remove_duplicate=False))


def holds(model: Rotated, value: float) -> bool:
    same = model.blocks[0].rates is model.blocks[1].rates
    return same and all((t.numpy() == value).all() for t in every(model).values())


def test_all_names_of_a_buffer_get_what_is_loaded() -> None:
    model = Rotated()
    assert list(model.state_dict()) == NAMES and list(every(model)) == [
        "blocks.0.rates", "blocks.1.rates", *NAMES[1:],
    ]  # fmt: skip
    model.load_state_dict(Rotated(1.0).state_dict())
    assert holds(model, 1.0)
    model.load_state_dict({name: np.full(t.shape, 2.0) for name, t in every(model).items()})
    assert holds(model, 2.0)  # under both names, as PyTorch saves them
    with pytest.raises(ts.UsageError, match="are one buffer, the values differ"):
        model.load_state_dict({"blocks.0.rates": np.zeros(4), "blocks.1.rates": np.ones(4)}, False)
    assert holds(model, 2.0)


def test_all_names_of_a_buffer_are_placed_and_rounded() -> None:
    model, mesh = Rotated(1.0), dist.Mesh(("dp",), devices=2)
    dist.place(model, "data_parallel", mesh)
    assert holds(model, 1.0) and {t.mesh for t in every(model).values()} == {mesh}
    model.to(ts.bf16)
    assert holds(model, 1.0) and {t.dtype for t in every(model).values()} == {ts.bf16}
    two = nn.functional_call(model, {"blocks.1.rates": np.full(4, 3.0)}, ts.ones((1, 4)))
    assert two.numpy().tolist() == [[9.0] * 4] and holds(model, 1.0)


def test_all_names_of_a_buffer_are_saved_once(tmp_path: Path) -> None:
    checkpoint.save("one", Rotated(5.0), root=str(tmp_path), quiet=True)
    checkpoint.wait()
    model = Rotated()
    for _ in range(2):
        checkpoint.load("one", model, root=str(tmp_path))
        assert holds(model, 5.0)
        model.load_state_dict(Rotated().state_dict())
    apart = Rotated(6.0)  # a model with a separate table in each block
    apart.blocks[1] = Block(ts.full((4,), 6.0))
    checkpoint.save("two", apart, root=str(tmp_path), quiet=True)
    checkpoint.wait()
    checkpoint.load("two", model, root=str(tmp_path))
    assert holds(model, 6.0)


def test_an_array_that_is_assigned_to_a_buffer_is_one() -> None:
    model = nn.BatchNorm(3)
    model.running_mean = np.ones(3)
    assert model.state_dict()["running_mean"].numpy().tolist() == [1.0] * 3


def test_a_prefix_is_that_of_pytorch() -> None:
    torch = pytest.importorskip("torch")
    peer = [name for name, _ in torch.nn.Linear(2, 3).named_parameters("head")]
    assert peer == [name for name, _ in nn.Linear(2, 3).named_parameters("head")]


class Twice(nn.Module):
    """One norm in three places, or three norms."""

    def __init__(self, one: bool) -> None:
        self.first = nn.BatchNorm(3)
        self.rest = [self.first if one else nn.BatchNorm(3), {"last": nn.BatchNorm(3)}]
        if one:
            self.rest[1]["last"] = self.first

    def __call__(self, x: Any) -> Any:
        for norm in (self.first, self.rest[0], self.rest[1]["last"]):
            x = norm(x) * 2.0 + 1.0
        return x


@pytest.mark.parametrize("how", [{}, {"donate": "model"}])
def test_a_module_in_several_places_is_one_in_a_compiled_function(how: Any) -> None:
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    call = ts.jit(lambda model, x: model(x), **how)
    for one in (True, False, True):  # the two structures have separate recordings
        ours, alone, peer = Twice(one), Twice(one), torch.nn.BatchNorm1d(3)
        for _ in range(2):
            want, y = alone(ts.tensor(x)).numpy(), torch.tensor(x)
            for _ in range(3):
                y = peer(y) * 2.0 + 1.0
            np.testing.assert_allclose(call(ours, x).numpy(), want, rtol=1e-5, atol=1e-5)
        for name, t in alone.state_dict().items():
            found = ours.state_dict()[name].numpy()
            np.testing.assert_allclose(found, t.numpy(), rtol=1e-5, atol=1e-6)
        assert (ours.rest[0] is ours.first) is one
        if one:
            found = ours.first.running_mean.numpy()
            np.testing.assert_allclose(found, peer.running_mean.numpy(), rtol=1e-4, atol=1e-6)


@ts.jit(donate="model")
def step(model: nn.Module, x: Any) -> Any:
    loss = (model(x) ** 2).mean()
    for name, g in ts.grad(loss, model).items():
        setattr(model, name, model.parameters()[name] - 0.1 * g)
    return loss


def test_a_model_that_was_loaded_from_another_outlives_its_steps() -> None:
    x = ts.tensor(np.random.default_rng(0).normal(size=(8, 3)))
    online, target = nn.BatchNorm(3), nn.BatchNorm(3)
    for _ in range(2):  # also values that are not computed yet
        target.load_state_dict(online.state_dict())
        before = target.eval()(x).numpy()
        step(online, x)
        assert (target(x).numpy() == before).all()


def test_tensors_that_were_given_up_are_not_loaded() -> None:
    model, x = nn.BatchNorm(3), ts.ones((8, 3))
    model(x)
    best = model.state_dict()
    step(model, x)
    now = {name: t.numpy() for name, t in model.state_dict().items()}
    for load in (model.load_state_dict, lambda b: setattr(model, "weight", b["weight"])):
        with pytest.raises(ts.DonatedError):
            load(best)
        kept = model.state_dict()
        assert all((kept[name].numpy() == value).all() for name, value in now.items())


def test_a_scalar_buffer_that_is_set_to_a_number_stays_a_buffer() -> None:
    model = Shifted()
    model.by = 2
    assert model.state_dict()["by"].numpy() == np.float32(2.0)


class Shifted(nn.Module):
    def __init__(self) -> None:
        self.by = ts.tensor(1.0)
