"""Compiled functions: dispatch, graph breaks at value reads, writes into containers, donation,
warnings."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn, pipeline
from tessera.lang.record.tree import tree_map
from tests.cases import LONG
from tests.compilations import compilations

MESH = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})


def test_a_value_read_cuts_the_function_and_each_way_is_recorded_once() -> None:
    seen: list[str] = []
    note = seen.append

    @ts.jit
    def step(x: ts.Tensor, state: dict[str, ts.Tensor]) -> ts.Tensor:
        y = ts.exp(x) * 2.0
        total = ts.sum(y)
        if ts.isfinite(total):
            note("finite")
            state["scale"] = state["scale"] * 2.0
            return y + 1.0
        note("not")
        state["scale"] *= 0.5
        return y * 0.0

    state = {"scale": ts.tensor(8.0)}
    small, large = ts.tensor([1.0, 2.0]), ts.tensor([1.0, 1000.0])
    for _ in range(3):
        out = step(small, state)
        np.testing.assert_allclose(out.numpy(), 2 * np.exp([1.0, 2.0]) + 1, rtol=1e-6)
    assert state["scale"].item() == 64.0
    step(large, state)
    step(large, state)
    assert state["scale"].item() == 16.0
    step(small, state)
    assert state["scale"].item() == 32.0
    assert seen == ["finite", "not"]


def test_reads_in_a_row_and_numbers_in_text() -> None:
    lines: list[str] = []
    note = lines.append

    @ts.jit
    def walk(x: ts.Tensor) -> ts.Tensor:
        total = ts.sum(x)
        note(f"{total:.1f}")
        n = int(ts.max(x))
        for _ in range(n):
            x = x + 1.0
        return x * total

    a = np.array([1.0, 2.0], np.float32)
    np.testing.assert_allclose(walk(ts.tensor(a)).numpy(), (a + 2) * 3)
    np.testing.assert_allclose(walk(ts.tensor(a)).numpy(), (a + 2) * 3)
    np.testing.assert_allclose(walk(ts.tensor(a * 2)).numpy(), (2 * a + 4) * 6)
    assert lines == ["3.0", "6.0"]


def test_a_read_in_the_middle_of_a_gradient_on_a_mesh() -> None:
    @ts.jit
    def step(x: ts.Tensor, w: ts.Tensor) -> tuple[ts.Tensor, ts.Tensor]:
        loss = ts.mean(ts.tanh(x @ w))
        g = ts.grad(loss, w)
        if ts.sum(g * g) > 1e-12:
            return loss, w - g
        return loss, w

    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(8, 4)).astype(np.float32), rng.normal(size=(4, 8)).astype(np.float32)
    plain = step(ts.tensor(x), ts.tensor(w))
    spread = step(
        ts.tensor(x, mesh=MESH, layout="[8@dp, 4]"), ts.tensor(w, mesh=MESH, layout="[4, 8@tp]")
    )
    for a, b in zip(plain, spread, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-6)
    assert spread[1].layout == "[4, 8@tp]"


def test_lists_and_new_and_removed_keys_are_written_back() -> None:
    @ts.jit
    def change(box: dict[str, ts.Tensor], many: list[ts.Tensor]) -> None:
        box["sum"] = box["a"] + box["b"]
        del box["b"]
        many[0] = many[1] * 3.0
        many.append(box["sum"])

    for _ in range(2):
        box = {"a": ts.tensor(1.0), "b": ts.tensor(2.0)}
        many = [ts.tensor(1.0), ts.tensor(5.0)]
        change(box, many)
        assert {k: v.item() for k, v in box.items()} == {"a": 1.0, "sum": 3.0}
        assert [t.item() for t in many] == [15.0, 5.0, 3.0]


@dataclass
class _Slot:
    w: Any
    more: Any = None


def _set(holder: Any, key: Any, value: Any) -> None:
    setattr(holder, key, value) if isinstance(holder, _Slot) else holder.__setitem__(key, value)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "pop(0)": lambda s: s["q"].pop(0),
    "pop()": lambda s: s["q"].pop(),
    "pop and use": lambda s: _set(s, "x", s["x"] + s["q"].pop(0)),
    "del": lambda s: s["q"].__delitem__(0),
    "clear": lambda s: s["q"].clear(),
    "a shorter slice": lambda s: _set(s["q"], slice(0, 2), [s["q"][3] * 2]),
    "an empty list": lambda s: _set(s, "q", []),
    "insert": lambda s: s["q"].insert(0, s["x"] + 10),
    "reverse": lambda s: s["q"].reverse(),
    "None for a tensor": lambda s: _set(s, "x", None),
    "None for a list": lambda s: _set(s, "q", None),
    "None in a list": lambda s: _set(s["q"], 1, None),
    "a new dict": lambda s: _set(s, "m", {"w": s["x"] * 0, "deep": {"k": [s["x"], None, (1,)]}}),
    "a dict for None": lambda s: _set(s, "none", {"w": s["x"] * 0}),
    "None for a dict": lambda s: _set(s, "inner", None),
    "an empty dict": lambda s: _set(s, "inner", {}),
    "append a dict": lambda s: s["q"].append({"w": s["x"] + 1}),
    "append to an empty list": lambda s: s["empty"].append({"w": s["x"] + 1}),
    "a new tuple": lambda s: _set(s, "pair", (s["x"] + 1, s["pair"][1])),
    "a new dataclass": lambda s: _set(s, "slot", _Slot(s["x"] + 1, {"k": s["x"]})),
    "a dict in a dataclass": lambda s: _set(s["slot"], "more", {"k": s["x"] + 1}),
    "None in a dataclass": lambda s: _set(s["slot"], "w", None),
    "a dict moves": lambda s: s["q"].append(s.pop("inner")),
    "keys in another order": lambda s: _set(s, "q", s.pop("q")),
    "clear a dict": lambda s: s.clear(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_containers_are_changed_as_without_compilation(name: str) -> None:
    def text(x: Any) -> str:
        return str(tree_map(lambda v: v.item() if isinstance(v, ts.Tensor) else v, x))

    def state() -> Any:
        return {
            "q": [ts.tensor(float(i)) for i in range(4)],
            "x": ts.tensor(7.0),
            "inner": {"a": ts.tensor(8.0)},
            "empty": [],
            "none": None,
            "pair": (ts.tensor(5.0), ts.tensor(6.0)),
            "slot": _Slot(ts.tensor(9.0)),
        }

    compiled, ours, theirs = ts.jit(CHANGES[name]), state(), state()
    inner = ours["inner"]
    for _ in range(2):
        try:
            want = CHANGES[name](theirs)
        except (LookupError, TypeError):  # the first call has emptied the container
            break
        assert text((compiled(ours), ours)) == text((want, theirs))
    if name == "a dict moves":
        assert ours["q"][-1] is inner  # the same object, since others may hold it


def test_nothing_is_donated_where_none_is_named() -> None:
    w = ts.ones(2)
    assert ts.jit(lambda w: w + 1, donate=None)(w).sum().item() == 4 and w.sum().item() == 2


def test_donated_buffers_are_gone_and_the_error_says_so() -> None:
    @ts.jit(donate="w")
    def update(w: ts.Tensor, g: ts.Tensor) -> ts.Tensor:
        return w - g

    w, g = ts.ones((64,)), ts.ones((64,))
    new = update(w, g)
    assert new.numpy().sum() == 0
    with pytest.raises(ts.DonatedError, match="donated"):
        w.numpy()
    with pytest.raises(ts.DonatedError, match="donated"):
        update(w, g)
    assert g.numpy().sum() == 64


def test_a_donated_model_keeps_what_a_step_does_not_set() -> None:
    """Frozen weights and buffers keep their memory, beside results of the same types."""
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm(6).train(False), nn.Linear(6, 6))
    model.freeze("0.*")
    x = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)

    @ts.jit(donate="model")
    def step(model: nn.Sequential, x: ts.Tensor) -> Any:
        grads = ts.grad((model(x) ** 2).mean(), model)
        model.load_parameters({n: w - grads[n] for n, w in model.trainable_parameters().items()})
        return grads

    kept = {n: np.array(t) for n, t in model.state_dict().items() if n[0] == "0" or "run" in n}
    trained = model.state_dict()["2.weight"]
    for _ in range(2):
        step(model, x)
    for name, value in kept.items():
        np.testing.assert_array_equal(model.state_dict()[name].numpy(), value)
    with pytest.raises(ts.DonatedError):
        trained.numpy()


def test_python_numbers_are_static_and_the_third_recording_warns() -> None:
    @ts.jit
    def scale(x: ts.Tensor, k: float) -> ts.Tensor:
        return x * k

    x = ts.ones((2,))
    assert [scale(x, k).numpy()[0] for k in (1.0, 2.0, 1.0)] == [1.0, 2.0, 1.0]
    with pytest.warns(ts.TraceWarning, match="third time"):
        scale(x, 3.0)
    assert scale(x, True).numpy()[0] == 1.0


def test_arrays_closures_and_passed_through_values() -> None:
    bias = ts.tensor([10.0, 20.0])

    @ts.jit
    def f(x: ts.Tensor, note: str) -> tuple[ts.Tensor, ts.Tensor, str, int]:
        return x + bias, x, note + "!", 7

    for _ in range(2):
        a, same, text, n = f(np.array([1.0, 2.0], np.float32), "hi")  # type: ignore[arg-type]
        assert a.numpy().tolist() == [11.0, 22.0]
        assert same.numpy().tolist() == [1.0, 2.0]
        assert (text, n) == ("hi!", 7)


def test_random_numbers_change_by_call_and_not_by_layout() -> None:
    @ts.jit
    def noisy(x: ts.Tensor) -> ts.Tensor:
        return ts.nn.dropout(x, 0.5) + ts.random.uniform(x.shape)

    ts.seed(3)
    a, b = noisy(ts.ones((8, 16))).numpy(), noisy(ts.ones((8, 16))).numpy()
    assert (a != b).any()
    ts.seed(3)
    spread = ts.tensor(np.ones((8, 16), np.float32), mesh=MESH, layout="[8@dp, 16@tp]")
    np.testing.assert_array_equal(noisy(spread).numpy(), a)
    np.testing.assert_array_equal(noisy(spread).numpy(), b)


def test_gradients_outside_a_function_equal_those_inside() -> None:
    rng = np.random.default_rng(1)
    x, w = rng.normal(size=(4, 8)).astype(np.float32), rng.normal(size=(8, 3)).astype(np.float32)

    def loss(x: ts.Tensor, w: ts.Tensor) -> ts.Tensor:
        return ts.nn.cross_entropy(x @ w, ts.tensor([0, 1, 2, 0]))

    tx, tw = ts.tensor(x), ts.tensor(w)
    eager = ts.grad(loss(tx, tw), {"w": tw})["w"].numpy()
    inside = ts.jit(lambda x, w: ts.grad(loss(x, w), w))(tx, tw).numpy()
    np.testing.assert_allclose(eager, inside, rtol=1e-5, atol=1e-7)


def test_second_derivatives() -> None:
    @ts.jit
    def curvature(x: ts.Tensor) -> ts.Tensor:
        first = ts.grad(ts.sum(x * x * x), x)
        return ts.grad(ts.sum(first), x)

    np.testing.assert_allclose(curvature(ts.tensor([1.0, 2.0])).numpy(), [6.0, 12.0], rtol=1e-6)


def test_autodiff_stays_partial_and_all_reduce_completes_it() -> None:
    from tessera import op

    x = ts.tensor(np.ones((8, 4), np.float32), mesh=MESH, layout="[8@dp, 4]")
    w = ts.tensor(np.ones((4, 2), np.float32), mesh=MESH, name="w")
    loss = ts.mean(x @ w)
    part = op.autodiff(loss)["w"]
    assert part.layout == "[4, 2] +dp"
    whole = dist.all_reduce({"w": part}, axis="dp")["w"]
    np.testing.assert_allclose(whole.numpy(), np.full((4, 2), 0.5))
    assert ts.grad(loss)["w"].layout == "[4, 2]"


def test_autocast_computes_products_narrow_and_statistics_wide() -> None:
    @ts.jit
    def f(x: ts.Tensor, w: ts.Tensor) -> tuple[ts.Tensor, ts.Tensor]:
        with ts.autocast(dtype=ts.bf16):
            y = x @ w
            return y, ts.nn.cross_entropy(y, ts.tensor([1, 2]))

    y, loss = f(ts.ones((2, 4)), ts.ones((4, 5)))
    assert (y.dtype, loss.dtype) == (ts.bf16, ts.f32)


def test_strict_forbids_what_would_be_inserted() -> None:
    x = ts.tensor(np.ones((8, 4), np.float32), mesh=MESH, layout="[8, 4@tp]")
    with ts.strict(), pytest.raises(ts.LayoutError, match="strict"):
        ts.argmax(x, -1)


@LONG
def test_looped_and_written_out_layers_agree() -> None:
    ids = np.random.default_rng(0).integers(0, 64, (4, 17)).astype(np.int32)

    def losses(**kw: object) -> list[float]:
        ts.seed(5)
        config = ts.nn.GPTConfig(vocab=64, seq=16, d=32, layers=2, heads=4, **kw)  # type: ignore[arg-type]
        model = ts.nn.GPT(config)

        @ts.jit
        def step(model: ts.nn.GPT, x: ts.Tensor, y: ts.Tensor) -> ts.Tensor:
            loss = model.loss(x, y)
            weights = model.parameters()
            grads = ts.grad(loss, weights)
            model.load_parameters({k: weights[k] - grads[k] for k in weights})
            return loss

        x, y = ts.tensor(ids[:, :-1]), ts.tensor(ids[:, 1:])
        return [step(model, x, y).item() for _ in range(3)]

    want = losses(loop=False)
    for kw in ({"loop": True}, {"loop": True, "remat": True}, {"loop": False, "remat": True}):
        np.testing.assert_allclose(losses(**kw), want, rtol=2e-5)
    assert want[2] < want[0]


@pytest.mark.parametrize("devices", [[], [0], [3]], ids=str)
def test_values_from_the_host_and_results_of_programs_share_one_compilation(
    devices: list[int],
) -> None:
    mesh = dist.Mesh(("dp",), devices=devices) if devices else None

    @ts.jit(donate="w")
    def update(w: ts.Tensor, x: ts.Tensor) -> ts.Tensor:
        return w - x

    w = dist.tensor((8, 8), init="ones", mesh=mesh)
    x = ts.tensor(np.ones((8, 8), np.float32), mesh=mesh)
    w = update(w, x)
    with compilations() as compiled:
        for _ in range(2):
            w = update(w, x)
            assert {d.id for d in w.jax().sharding.device_set} == set(devices or [0])
        w = update(ts.tensor(w.numpy(), mesh=mesh), x)
    assert w.numpy()[0, 0] == -3.0
    assert not compiled


def test_a_dataclass_that_holds_tensors_is_a_container() -> None:
    @dataclass
    class Batch:
        ids: ts.Tensor
        name: str

    @ts.jit
    def double(batch: Batch) -> Batch:
        return Batch(batch.ids * 2.0, batch.name)

    for value in (1.0, 5.0):
        out = double(Batch(ts.tensor(value), "train"))
        assert (out.ids.item(), out.name) == (2 * value, "train")


def test_a_plan_is_recorded_once_and_runs_nothing() -> None:
    recorded: list[tuple[int, ...]] = []
    note = recorded.append

    @ts.jit
    def f(x: ts.Tensor) -> ts.Tensor:
        note(x.shape)
        return dist.all_reduce(ts.tanh(x) @ x, "tp")

    x = dist.tensor((8, 8), "[8, 8@tp]", MESH)
    schedule = f.plan(x)
    assert x._data is None  # plan() has not even created its argument
    assert [n.op for n, _ in schedule.collectives()] == ["all_gather"]
    assert f(x).shape == (8, 8) and f.plan(x) is not schedule
    assert recorded == [(8, 8)]


def test_weights_that_are_not_made_yet_are_made_on_their_stages() -> None:
    mesh = dist.Mesh.parse("dp=2 pp=2")

    @pipeline.run(mesh=mesh, microbatches=4)
    def model(weights: dict[str, ts.Tensor], x: ts.Tensor) -> ts.Tensor:
        for name in ("a", "b"):
            x = ts.tanh(x @ weights[name])
        return x

    @ts.jit
    def step(weights: dict[str, ts.Tensor], x: ts.Tensor) -> dict[str, ts.Tensor]:
        return ts.grad(ts.mean(model(weights, x) ** 2), {k: weights[k] for k in ("a", "b")})

    def made() -> dict[str, ts.Tensor]:
        ts.seed(5)
        return {k: dist.tensor((4, 4), mesh=mesh, name=k) for k in ("a", "b", "unused")}

    weights = made()
    x = ts.tensor(np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4))
    sends = [s for s in step.plan(weights, x).steps if s.kind == "send"]
    placed = model.place(weights)
    fewer = [s for s in step.plan(placed, x).steps if s.kind == "send"]
    assert step.schedule.text == model.schedule.text and len(fewer) < len(sends)
    assert all(w._data is None for w in placed.values())
    slices = [mesh.slice(pp=0), mesh.slice(pp=1), mesh]
    assert [w.mesh for w in placed.values()] == slices
    for k, w in made().items():
        np.testing.assert_array_equal(placed[k].numpy(), w.numpy())
    for k, g in step(placed, x).items():
        np.testing.assert_allclose(g.numpy(), step(made(), x)[k].numpy(), rtol=1e-5, atol=1e-7)


def test_arguments_of_any_length_are_padded_to_a_few() -> None:
    def to(value: float) -> ts.Pad:
        return ts.Pad(dim=1, sizes=(16, 4, 8), value=value)

    table = nn.Parameter(20, 6)

    def loss(batch: dict[str, Any]) -> Any:
        batch["seen"] = batch["ids"].sum()
        value = nn.cross_entropy(table[batch["ids"]] @ table.T, batch["labels"])
        return value, ts.grad(value, [table])[0]

    padded = ts.jit(pad={"batch": {"ids": to(0), "labels": to(-100)}})(loss)
    draw = np.random.default_rng(0)
    for n in (1, 3, 4, 5, 8, 11, 16, 12, 2, 7):
        batch = {k: draw.integers(0, 20, (2, n)).astype(np.int32) for k in ("ids", "labels")}
        given = dict(batch)
        got, grad = padded(given)
        assert given["ids"] is batch["ids"] and given["seen"].item() == batch["ids"].sum()
        if n in (3, 11):
            want, wanted = ts.jit(loss)(batch)
            np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-6)
            np.testing.assert_allclose(grad.numpy(), wanted.numpy(), rtol=1e-5, atol=1e-6)
    assert len(padded.programs) == 3


def test_a_tensor_is_padded_where_it_lies() -> None:
    mesh = dist.Mesh(("dp",), devices=2)
    x = ts.tensor(np.ones((4, 5), np.float32), mesh=mesh, layout="[4@dp, 5]")
    last = ts.jit(pad={"x": ts.Pad(dim=1, sizes=[8], value=2)})(lambda x: x)
    assert str(last(x).type) == "f32[4@dp, 8]"
    np.testing.assert_array_equal(last(x).numpy()[:, 5:], 2)
    assert ts.jit(lambda x: last(x) * 1)(x).shape == (4, 8)


def test_before_the_first_call_a_schedule_is_an_attribute_that_is_not_there_yet() -> None:
    f = ts.jit(lambda x: x + 1.0)
    assert not hasattr(f, "schedule") and "graph" not in dict(inspect.getmembers(f))
    with pytest.raises(ts.UsageError, match="call it once"):
        _ = f.program
    f(ts.ones((2,)))
    assert hasattr(f, "schedule") and "graph" in dict(inspect.getmembers(f))
