"""`load` fills the caller's objects, even if its result is not used."""

from __future__ import annotations

import gc
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optax
import pytest
import torch

import tessera as ts
from tessera import checkpoint, dist, nn, optim
from tessera.train.saving import load_checkpoint, save_checkpoint


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass
class State:
    m: Any
    step: int = 0


@dataclass(frozen=True)
class Frozen:
    m: Any


class Net(nn.Module):
    def __init__(self) -> None:
        self.up, self.norm = nn.Linear(3, 4), nn.BatchNorm(4)

    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        return self.norm(self.up(x))


def x(value: float) -> ts.Tensor:
    return ts.tensor(np.full(4, value, np.float32))


def numbers(tree: Any) -> list[Any]:
    return [np.asarray(v).tolist() for v in ts.lang.record.tree.flatten(tree)[0]]


MAKERS: dict[str, Any] = {
    "dict": lambda v: {"m": x(v), "inner": {"v": x(2 * v)}},
    "list": lambda v: [x(v), {"v": x(2 * v)}],
    "dataclass": lambda v: State(x(v), int(v)),
    "tuples in a dict": lambda v: {"a": (x(v), [x(v + 1)]), "b": Pair(x(v), {"c": x(v)})},
    "frozen in a dict": lambda v: {"a": Frozen(x(v)), "rate": v},
    "a step": lambda v: {"w": x(v), "none": None, "flag": v > 1},
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("kind", ["tensors", "optimizer"])
def test_what_is_given_is_filled(name: str, kind: str, tmp_path: Path) -> None:
    there, here, other = MAKERS[name](3.0), MAKERS[name](1.0), {"other": x(0)}
    names = ("tensors", "optimizer")
    checkpoint.save("t", *(there if k == kind else other for k in names), root=tmp_path, quiet=True)
    found = checkpoint.load("t", *(here if k == kind else other for k in names), root=tmp_path)
    assert numbers(here) == numbers(there) and getattr(found, kind) is here


def test_a_step_goes_on_with_the_loaded_state(tmp_path: Path) -> None:
    """The result of `load` is not needed: it fills the dict that the caller holds."""
    rule, mesh = optim.AdamW(0.1), dist.Mesh.parse("dp=2")

    def made() -> tuple[nn.Linear, Any]:
        model = dist.place(
            nn.Linear(2, 2), dist.strategy("zero_redundancy_optimizer", stage=1), mesh
        )
        return model, rule.init(model)

    model, state = made()
    grads = {n: ts.ones_like(t) for n, t in model.parameters().items()}
    for _ in range(3):
        new, state = rule.update(model, grads, state)
        model.load_parameters(new)
    checkpoint.save("t", model, state, root=tmp_path, quiet=True)
    again, fresh = made()
    checkpoint.load(None, again, fresh, root=tmp_path)
    assert fresh["step"].item() == 3 and numbers(fresh) == numbers(state)
    assert numbers(again.state_dict()) == numbers(model.state_dict())


@pytest.mark.parametrize("given", ["module", "in a dict", "parameters", "state_dict"])
def test_a_model_is_filled_by_whatever_names_its_weights(given: str, tmp_path: Path) -> None:
    ts.seed(1)
    saved, model = Net(), Net()
    saved.norm.running_mean = x(5)
    give = {
        "module": lambda m: m,
        "in a dict": lambda m: {"model": m},
        "parameters": lambda m: m.parameters(),
        "state_dict": lambda m: m.state_dict(),
    }[given]
    checkpoint.save("t", give(saved), root=tmp_path, quiet=True)
    weights = model.parameters()
    checkpoint.load("t", give(model), root=tmp_path)
    assert numbers(model.parameters()) == numbers(saved.parameters())
    assert model.up.weight is weights["up.weight"]
    loaded = 0 if given == "parameters" else 5
    assert model.norm.running_mean.numpy().tolist() == [loaded] * 4


def test_the_values_of_another_time_do_not_touch_the_model(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    checkpoint.save("t", layer, root=tmp_path, quiet=True)
    want, before = layer.weight.numpy(), layer.state_dict()
    layer.weight = ts.zeros((2, 2))
    checkpoint.load("t", before, root=tmp_path)
    assert not layer.weight.numpy().any() and (before["weight"].numpy() == want).all()


def test_a_weight_keeps_its_dtype(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    checkpoint.save("t", layer, root=tmp_path, quiet=True)
    with pytest.raises(ts.DTypeError, match="leave dtype= out, or load by name"):
        checkpoint.load("t", layer.parameters(), root=tmp_path, dtype="bf16")
    with pytest.raises(ts.DTypeError, match="leave dtype= out, or load by name"):
        checkpoint.load("t", layer, root=tmp_path, dtype="bf16")
    given = layer.state_dict()
    checkpoint.load("t", given, root=tmp_path, dtype="bf16")
    assert given["weight"].dtype is ts.bf16 and layer.weight.dtype is ts.f32


def test_a_tied_weight_comes_from_a_file_that_has_both_names_or_either(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self, tied: bool) -> None:
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
            if tied:
                self.b.weight = self.a.weight

    both = Two(False).state_dict()
    both["b.weight"] = both["a.weight"]
    other = {n: t for n, t in both.items() if n != "a.weight"}
    for tag, saved in ("both", both), ("other", other):
        model = Two(True)
        checkpoint.save(tag, saved, root=tmp_path, quiet=True)
        checkpoint.load(tag, model, root=tmp_path)
        assert (model.b.weight.numpy() == both["a.weight"].numpy()).all()
        assert model.b.weight is model.a.weight
    checkpoint.save("apart", Two(False), root=tmp_path, quiet=True)
    with pytest.raises(ts.UsageError, match="are one parameter, the values differ"):
        checkpoint.load("apart", Two(True), root=tmp_path)


def test_digits_of_float64_are_not_dropped(tmp_path: Path) -> None:
    for odd in (
        np.array([1 / 3]),
        np.array([1e300]),
        np.float64(0.1),
        torch.tensor([0.1], dtype=torch.float64),
    ):
        with pytest.raises(ts.DTypeError, match=r"x has digits of float64.*\n(.*\n)*.*astype"):
            checkpoint.save("t", {"x": odd, "w": x(1)}, root=tmp_path)
    checkpoint.save("t", {"x": np.array([0.5, np.nan])}, root=tmp_path, quiet=True)
    assert checkpoint.load("t", root=tmp_path).tensors["x"].numpy()[0] == 0.5


def test_a_pattern_that_names_nothing_of_the_optimizers_state_warns(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    state = optim.AdamW(1e-3).init(layer)
    checkpoint.save("t", layer, state, root=tmp_path, quiet=True)
    with pytest.warns(ts.OptionWarning, match=r"optimizer has no effect: only=\['weight'\]"):
        checkpoint.load("t", layer, state, root=tmp_path, only="weight")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.load("t", layer, state, root=tmp_path, only="*weight")


@pytest.mark.parametrize("made", [optim.AdamW(1e-3), optim.from_optax(optax.adam(1e-3))])
def test_a_state_dict_that_is_filled_and_dropped_warns(made: Any, tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    state = made.init(layer)
    old = {n: np.ones(t.shape, t.dtype.numpy) for n, t in made.state_dict(state).items()}
    full = made.load_state_dict(state, old)
    checkpoint.save("t", layer, made.state_dict(full), root=tmp_path, quiet=True)
    with pytest.warns(ts.OptionWarning, match=r"state_dict\(\) of an optimizer has no effect"):
        checkpoint.load("t", layer, made.state_dict(state), root=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = made.state_dict(state)
        checkpoint.load("t", layer, values, root=tmp_path)
        state = made.load_state_dict(state, values)
        assert all((t.numpy() == 1).all() for t in made.state_dict(state).values())
        found = checkpoint.load("t", layer, made.state_dict(state), root=tmp_path)
        made.load_state_dict(state, found.optimizer)
    checkpoint.save("s", layer, full, root=tmp_path, quiet=True)
    made.load_state_dict(state, checkpoint.load("s", root=tmp_path).optimizer)  # by name


def test_a_dict_of_its_own_kind_is_filled(tmp_path: Path) -> None:
    checkpoint.save("t", {"w": x(3)}, root=tmp_path, quiet=True)
    given = OrderedDict(w=x(1))
    checkpoint.load("t", given, root=tmp_path)
    assert given["w"].numpy().tolist() == x(3).numpy().tolist()


def test_the_first_checkpoint_after_a_multiple_stays(tmp_path: Path) -> None:
    keep = checkpoint.Keep(last=1, every=4)
    for step in (0, 2, 4, 6, 9, 10, 12, 14, 19, 23):  # some saves were late
        checkpoint.save(f"s{step}", {"w": np.zeros(1)}, root=tmp_path, step=step, keep=keep,
                        quiet=True)  # fmt: skip
    checkpoint.wait()
    left = {int(p.name[1:]) for p in tmp_path.iterdir()}
    assert left == {0, 4, 9, 12, 19, 23}


@pytest.mark.parametrize("made", [
    lambda v: (x(v), {"v": x(v)}), lambda v: Pair(x(v), x(v)), lambda v: Frozen(x(v)), x,
])  # fmt: skip
def test_what_cannot_be_filled_is_said_if_the_result_is_dropped(made: Any, tmp_path: Path) -> None:
    w = {"w": x(1)}
    checkpoint.save("t", w, made(3.0), root=tmp_path, quiet=True)
    with pytest.warns(ts.OptionWarning, match=r"optimizer = checkpoint\.load") as caught:
        checkpoint.load("t", w, made(1.0), root=tmp_path)
        gc.collect()
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = checkpoint.load("t", w, made(1.0), root=tmp_path)
        assert numbers(found.optimizer) == numbers(made(3.0))
        del found
        checkpoint.load("t", root=tmp_path)  # there was nothing to fill
        gc.collect()


def test_nothing_is_filled_where_a_part_does_not_fit(tmp_path: Path) -> None:
    checkpoint.save("t", {"w": x(3)}, {"m": x(3)}, root=tmp_path, quiet=True)
    w, m = {"w": x(1)}, {"m": x(1), "v": x(1)}
    with pytest.raises(ts.CheckpointError, match=r"v +: is not in the checkpoint"):
        checkpoint.load("t", w, m, root=tmp_path)
    assert numbers(w) == [[1] * 4] and numbers(m) == [[1] * 4] * 2


def test_an_example_of_layouts_stays_as_it_is(tmp_path: Path) -> None:
    """The recipe's `load_checkpoint(like=)` takes an example that it does not change."""
    from tessera.train.config import TrainingConfig
    from tessera.train.recipe import initialize_optimizer_state

    w = {"w": ts.ones((2, 2))}
    state = initialize_optimizer_state(w, TrainingConfig())
    save_checkpoint(w, state, 1, tmp_path)
    example = {"w": ts.zeros((2, 2))}
    found = load_checkpoint(tmp_path, like=(example, state))
    assert not example["w"].numpy().any() and found.weights["w"].numpy().all()
