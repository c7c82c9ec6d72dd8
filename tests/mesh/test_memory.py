"""Host offloading: memory freed on devices, values unchanged; and activation recomputation with its
savings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import checkpoint, dist, elastic, nn, optim
from tessera.lang.jit.trace import trace
from tessera.optim import apply_if_finite
from tessera.runtime import offload as host
from tessera.train import memory, recipe
from tessera.train.accumulate import accumulated
from tessera.train.memory import Held, StreamedUpdate, held, offload, program_bytes

Tree = dict[str, Any]


def tree(mesh: dist.Mesh | None = None, seed: int = 0) -> Tree:
    rng = np.random.default_rng(seed)
    layouts = ("[8, 12]", "[24]") if mesh is None else ("[8@dp, 12@tp]", "[24@tp]")
    values = rng.normal(size=(8, 12)).astype(np.float32), rng.normal(size=24).astype(np.float32)
    return {n: ts.tensor(v, mesh, t) for n, v, t in zip("ab", values, layouts, strict=True)}


# -- there and back -------------------------------------------------------------------------------
@pytest.mark.parametrize("on_mesh", [False, True])
@pytest.mark.parametrize("kinds", [True, False], ids=["pinned_host", "numpy"])
def test_a_tensor_goes_to_the_host_and_comes_back_as_it_was(
    on_mesh: bool, kinds: bool, mesh: dist.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kinds:
        monkeypatch.setattr(host, "has_host_memory", lambda data: False)
    before = tree(mesh if on_mesh else None)
    where = {n: t.stored.sharding for n, t in before.items()}
    away = offload({**before, "note": "kept"})
    for n, t in before.items():
        away[n]._pending.wait()
        there = away[n]._pending._host
        if kinds:
            assert there.sharding.memory_kind == "pinned_host"
        else:
            assert isinstance(there, np.ndarray)
        assert away[n].type is t.type
    near = sum(s.data.nbytes for t in before.values() for s in t.stored.addressable_shards)
    assert near >= 4 * (96 + 24)
    assert away["note"] == "kept" and held(away) == Held(0, near if kinds else 4 * (96 + 24))
    for n, t in before.items():
        np.testing.assert_array_equal(away[n].numpy(), t.numpy())
        assert away[n].stored.sharding == where[n]
    assert held(away) == Held(near, 0)


def test_fetching_leaves_the_copy_where_it_is() -> None:
    away = offload(tree())
    near = memory.fetched(away)
    assert held(away) == Held(0, 480) and held(near) == Held(480, 0)
    assert offload(away)["a"]._pending is away["a"]._pending  # nothing is copied twice


def test_a_module_goes_to_the_host_with_all_that_it_knows(mesh: dist.Mesh) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 8))
    model[2].weight = model[0].weight
    model[1].weight.requires_grad = False
    x = ts.ones((2, 4))
    want, size = (
        model(x).numpy(),
        4 * (32 + 8 + 32 + 4 + 8),
    )  # the last layer shares the first one's weight
    assert held(model) == Held(size, 0)
    there = offload(model)
    assert held(there) == Held(0, size) and held(model).host == 0
    assert there[2].weight is there[0].weight and not there[1].weight.requires_grad
    np.testing.assert_array_equal(there(x).numpy(), want)
    assert held(there) == Held(size, 0)  # each was fetched at its use
    assert held(memory.fetched(offload(model))) == Held(size, 0)
    with ts.no_grad():
        there[0].weight.put(model[0].weight * 2.0)
    np.testing.assert_array_equal(there[2].weight.numpy(), 2 * model[0].weight.numpy())


def test_what_is_not_made_yet_is_nowhere() -> None:
    assert held({"w": dist.tensor((4, 4))}) == Held(0, 0)


@pytest.mark.parametrize("layout", ["[6@dp, 4@tp]", "[6, 4@tp]", "[6, 4]", "[5@dp, 4]"])
@pytest.mark.parametrize("onto", [None, "dp=1", "dp=1,tp=2"])
def test_what_is_held_is_what_the_devices_have(layout: str, onto: str | None) -> None:
    mesh = dist.Mesh.parse("dp=2 tp=4")
    mesh = mesh if onto is None else mesh.fold(onto)
    shape = (5 if "5" in layout else 6, 4)
    x = ts.tensor(np.ones(shape, np.float32), mesh=mesh, layout=layout) + 1.0
    assert held(x) == Held(sum(s.data.nbytes for s in x.stored.addressable_shards), 0)


def test_a_tensor_in_two_places_is_moved_once() -> None:
    x = ts.ones((4, 4)) + 1.0
    there = offload({"a": x, "b": [x]})
    assert there["a"] is there["b"][0] and held(there) == Held(0, 64)
    again = memory.fetched(there)
    assert again["a"] is again["b"][0] and held(again) == Held(64, 0)


def test_what_waits_in_host_memory_does_so_after_a_load_a_move_and_a_way_back(
    mesh: dist.Mesh, tmp_path: Path
) -> None:
    state, want = offload(tree(mesh)), {n: t.numpy() for n, t in tree().items()}
    checkpoint.save("a", {}, state, root=tmp_path, async_io=False, quiet=True)
    found = checkpoint.load("a", {}, offload(tree(mesh, 2)), root=tmp_path).optimizer
    there = dist.resize(dist.Mesh.parse("dp=2 tp=2"), found)
    both = {"m": offload(tree(mesh)), "count": dist.tensor((8,), mesh=mesh, init="zeros")}
    with dist.elastic():
        for step in elastic.steps(both, 3):
            with step as i:
                if i == 1 and step.mesh.physical.size == 8:
                    elastic.drop(5)
                both["count"] = both["count"] + 1
    elastic.restore(5)
    assert both["count"].mesh.physical.size < 8
    for waits in (found, there, both["m"]):
        assert held(waits).device == 0 and held(waits).host >= 480
        assert all((t.numpy() == want[n]).all() for n, t in waits.items())


# -- the streamed update --------------------------------------------------------------------------
@pytest.mark.parametrize("on_mesh", [False, True])
@pytest.mark.parametrize("kind", [optim.AdamW, optim.Adafactor, optim.SGD])
def test_the_streamed_update_is_the_whole_update(kind: Any, on_mesh: bool, mesh: dist.Mesh) -> None:
    optimizer = kind(0.1)
    where = mesh if on_mesh else None
    weights, grads = tree(where), tree(where, 1)
    state = optimizer.init(weights)
    want = weights, state
    update = ts.jit(optimizer.update)
    streamed = StreamedUpdate(optimizer, lambda finite, new, old: new)
    now = tree(where), offload(optimizer.init(weights))
    for _ in range(2):
        want = update(want[0], grads, want[1])
        now = streamed(now[0], dict(grads), now[1])
        grads = tree(where, 1)
    assert now[1]["step"].item() == 2
    for n in "ab":
        np.testing.assert_allclose(now[0][n].numpy(), want[0][n].numpy(), atol=1e-7)
        assert now[0][n].type is want[0][n].type
        for slot in now[1]:
            if slot != "step" and n in now[1][slot]:
                np.testing.assert_allclose(
                    now[1][slot][n].numpy(), want[1][slot][n].numpy(), atol=1e-7
                )


def test_the_state_of_one_weight_is_on_the_devices_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = {f"w{i}": ts.full((64, 8 * (i + 1)), 1.0) for i in range(4)}
    optimizer = optim.AdamW(0.1)
    there = most = 0
    back, away = memory.back, memory.away

    def fetch(t: ts.Tensor) -> ts.Tensor:
        nonlocal there, most
        there += t.size * 4 if t.shape else 0
        most = max(most, there)
        return back(t)

    def leave(t: ts.Tensor) -> Any:
        nonlocal there
        there -= t.size * 4 if t.shape else 0
        return away(t)

    state = memory.initial_state(optimizer, weights)
    assert held(state) == Held(0, 2 * 4 * 64 * 80 + 4)
    monkeypatch.setattr(memory, "back", fetch)
    monkeypatch.setattr(memory, "away", leave)
    grads = {name: ts.ones(w.shape) for name, w in weights.items()}
    StreamedUpdate(optimizer, lambda finite, new, old: new)(weights, grads, state)
    assert there == 0 and most == 2 * 4 * 64 * 32  # both moments of the largest weight


def test_a_step_that_overflowed_is_dropped_in_a_streamed_update_too() -> None:
    weights, grads = tree(), tree(None, 1)
    optimizer = optim.AdamW(0.1)
    streamed = StreamedUpdate(
        optimizer,
        lambda finite, new, old: new if finite is None else apply_if_finite(finite, new, old),
    )
    was = {n: t.numpy() for n, t in tree().items()}
    state = memory.initial_state(optimizer, weights)
    weights, state = streamed(weights, grads, state, ts.tensor(False))
    assert state["step"].item() == 0
    for n, t in weights.items():
        np.testing.assert_array_equal(t.numpy(), was[n])
    weights, state = streamed(weights, tree(None, 1), state, ts.tensor(True))
    assert state["step"].item() == 1


def test_an_offloaded_state_is_not_updated_inside_one_program() -> None:
    c = {"vocab_size": 32, "hidden_size": 8, "num_layers": 1, "num_heads": 1, "sequence_length": 8,
         "offload_optimizer_state": True}  # fmt: skip
    weights = {"w": ts.ones((2, 2))}
    state = recipe.initialize_optimizer_state(weights, c)
    step = ts.jit(lambda w, s: recipe.optimizer_step(w, w, s, c))
    with pytest.raises(ts.UsageError, match="use make_step"):
        step(weights, state)


# -- what a program holds -------------------------------------------------------------------------
def test_the_bytes_of_a_program(mesh: dist.Mesh) -> None:
    double = ts.jit(lambda x: x * 2.0)
    double(tree(mesh)["a"])
    assert program_bytes(double).arguments == 4 * 4 * 3  # the block of one device
    assert program_bytes(ts.graph.capture(double, tree(mesh)["a"])) == program_bytes(double)
    give = ts.jit(donate="x")(lambda x: x + 1.0)
    give(ts.zeros((256, 4)))
    found = program_bytes(give)
    assert found.reused == found.results == 4096 and found.peak == 4096 + found.temporary


@pytest.mark.parametrize("split", ["", "@dp"])
def test_what_a_step_gives_up_is_not_copied_out_of_the_way(split: str, mesh: dist.Mesh) -> None:
    @ts.jit(donate=("w", "m", "v"))
    def step(w: ts.Tensor, m: ts.Tensor, v: ts.Tensor, g: ts.Tensor) -> Any:
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        return v, m, w - m / (ts.sqrt(v) + 1e-8)

    w, m, v, g = (ts.tensor(np.ones((256, 64), np.float32), mesh, f"[256{split}, 64]")
                  for _ in range(4))  # fmt: skip
    v, m, w = step(w, m, v, g)
    found = program_bytes(step)
    assert found.reused == 3 * found.arguments // 4
    assert found.temporary < found.arguments // 4
    for x, want in ((v, 1.0), (m, 1.0), (w, 0.0)):
        np.testing.assert_allclose(x.numpy(), want, atol=1e-6)


def test_functions_without_a_program_have_no_bytes() -> None:
    with pytest.raises(ts.UsageError, match="the function cannot be"):
        program_bytes(lambda x: x)
    with pytest.raises(ts.UsageError, match="has no program"):
        program_bytes(ts.jit(lambda x: x))


def test_accumulation_holds_one_microbatch_however_many_there_are() -> None:
    w = {"a": ts.ones((64, 256)), "b": ts.ones((256, 64))}

    def loss(part: Any, w: Any) -> ts.Tensor:
        return (ts.tanh(part["x"] @ w["a"]) @ w["b"]).mean()

    def temporary(rows: int, count: int) -> int:
        run = ts.jit(lambda x, w: accumulated(loss, {"x": x}, w, count))
        run(ts.zeros((rows, 64)), w)
        return program_bytes(run).temporary

    whole, four, eight = temporary(1024, 1), temporary(1024, 4), temporary(2048, 8)
    assert four < 0.6 * whole and eight < 1.1 * four


# -- policies -------------------------------------------------------------------------------------
def layers(policy: str) -> Any:
    def run(x: ts.Tensor, w: ts.Tensor) -> Any:
        def body(h: ts.Tensor, w: ts.Tensor) -> Any:
            z = h @ w
            return ts.tanh(z / ts.sqrt(1.0 + (z * z).mean(-1, True)) * 2.0 + h), ()

        y, _ = ts.scan(body, x, w, policy=policy)
        return ts.grad((y * y).mean(), (x, w))

    return run


def test_a_policy_changes_what_is_kept_and_nothing_else() -> None:
    rng = np.random.default_rng(0)
    x, w = ts.tensor(rng.normal(size=(4, 8))), ts.tensor(rng.normal(size=(3, 8, 8)) / 3)
    want = [g.numpy() for g in ts.jit(layers("save"))(x, w)]
    kept = {}
    for policy in ("save", "products", "recompute"):
        graph = trace(layers(policy), x, w)
        forward = next(n for n in graph.nodes if n.op == "scan")
        kept[policy] = len(forward.types) - 1  # the loop's stacked results, without its carry
        for got, g in zip(ts.jit(layers(policy))(x, w), want, strict=True):
            np.testing.assert_allclose(got.numpy(), g, atol=1e-6)
    # Only the carry; also the product; also the sum: elementwise results are not saved.
    assert kept == {"recompute": 1, "products": 2, "save": 3}


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ts.UsageError, match="use save, recompute, products, together"):
        trace(layers("some"), ts.zeros((4, 8)), ts.zeros((3, 8, 8)))


# -- ZeRO and host memory together ----------------------------------------------------------------
def test_a_split_state_waits_in_host_memory_split(mesh: dist.Mesh) -> None:
    c = {"vocab_size": 32, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "sequence_length": 8,
         "learning_rate": 1e-2}  # fmt: skip
    plan = dist.strategy("zero_redundancy_optimizer", stage=1)
    ids = np.arange(32, dtype=np.int32).reshape(4, 8)
    found = {}
    for away in (False, True):
        keys = c | {"offload_optimizer_state": away}
        weights = dist.place(recipe.initialize_model_weights(keys), plan, mesh)
        state = recipe.initialize_optimizer_state(weights, keys, plan)
        data = dist.place({"input_ids": ids, "labels": ids}, plan, mesh, kind="batch")
        step = recipe.make_step(keys)
        for _ in range(2):
            loss, weights, state = step(data, weights, state)
        found[away] = loss.item(), state["m"]["head"].numpy(), state["m"]["head"].type
    assert found[True][0] == pytest.approx(found[False][0], abs=1e-6)
    np.testing.assert_allclose(found[True][1], found[False][1], atol=1e-7)
    assert found[True][2] is found[False][2] and "dp" in str(found[True][2])
