"""Optimizers against optax, on one device and on a mesh. One table of rows.

optax runs in 64 bits, so that the differences are Tessera's rounding alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
import pytest

import tessera as ts
from tessera import dist, optim

Tree = dict[str, np.ndarray[Any, Any]]
STEPS = 10
SHAPES = {
    "embed": (12, 8),
    "blocks.up": (2, 8, 16),
    "blocks.norm.weight": (2, 8),
    "head": (8, 10),
    "head.bias": (10,),
    "gain": (),
}
DECAYED = ("embed", "blocks.up", "head")  # the weights chosen by the default mask
# dp=2 tp=4: even splits, splits of two axes, an uneven one (10 over 4), replicated ones.
LAYOUTS = {
    "embed": "[12@(dp,tp), 8]",
    "blocks.up": "[2, 8@dp, 16@tp]",
    "blocks.norm.weight": "[2, 8@tp]",
    "head": "[8@dp, 10@tp]",
    "head.bias": "[10@tp]",
    "gain": "[]",
}


@dataclass(frozen=True)
class Row:
    """An optimizer, the optax program that it must equal, and a gradient clip."""

    name: str
    ours: optim.Optimizer
    theirs: Callable[[Any], optax.GradientTransformation]  # given the mask of decayed weights
    clip: float | None = None
    atol: float = 1e-6  # absolute, for weights near zero


def chained(*parts: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.chain(*parts)


COSINE = optim.warmup_cosine(0.1, 3, 9, end=0.01, start=0.02)
OPTAX_COSINE = optax.warmup_cosine_decay_schedule(0.02, 0.1, 3, 9, 0.01)
LINEAR = optim.linear(0.1, 0.02, 8)
OPTAX_LINEAR = optax.linear_schedule(0.1, 0.02, 8)
ROWS = [
    Row("sgd", optim.SGD(0.1), lambda mask: optax.sgd(0.1)),
    Row(
        "sgd scheduled, decayed, clipped",
        optim.SGD(COSINE, weight_decay=0.1),
        lambda mask: chained(optax.add_decayed_weights(0.1, mask), optax.sgd(OPTAX_COSINE)),
        clip=1.0,
    ),
    Row("momentum", optim.Momentum(0.1, momentum=0.8), lambda mask: optax.sgd(0.1, 0.8)),
    Row(
        "nesterov decayed",
        optim.Momentum(LINEAR, nesterov=True, weight_decay=0.1),
        lambda mask: chained(
            optax.add_decayed_weights(0.1, mask), optax.sgd(OPTAX_LINEAR, 0.9, nesterov=True)
        ),
    ),
    Row("adam", optim.Adam(0.05), lambda mask: optax.adam(0.05)),
    Row(
        "adam with a penalty, clipped",
        optim.Adam(LINEAR, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1),
        lambda mask: chained(
            optax.add_decayed_weights(0.1, mask), optax.adam(OPTAX_LINEAR, 0.8, 0.99, 1e-6)
        ),
        clip=2.0,
    ),
    Row(
        "adamw scheduled, clipped",
        optim.AdamW(COSINE, weight_decay=0.2),
        lambda mask: optax.adamw(OPTAX_COSINE, 0.9, 0.95, 1e-8, weight_decay=0.2, mask=mask),
        clip=1.0,
    ),
    Row("adamw without momentum", optim.AdamW(0.01, betas=(0.0, 0.9), weight_decay=0.0),
        lambda mask: optax.adamw(0.01, 0.0, 0.9, 1e-8, weight_decay=0.0)),
    Row(
        "lion",
        optim.Lion(LINEAR, weight_decay=0.1),
        lambda mask: optax.lion(OPTAX_LINEAR, 0.9, 0.99, weight_decay=0.1, mask=mask),
        clip=100.0,
    ),
    Row(
        "adafactor",
        optim.Adafactor(LINEAR, factor_from=8),
        lambda mask: optax.adafactor(OPTAX_LINEAR, min_dim_size_to_factor=8),
    ),
    Row(
        "adafactor with all options",
        optim.Adafactor(0.05, decay=0.7, factor_from=2, clip=0.5, relative=False, momentum=0.9,
                        weight_decay=0.01),
        lambda mask: optax.adafactor(
            0.05, min_dim_size_to_factor=2, decay_rate=0.7, clipping_threshold=0.5, momentum=0.9,
            multiply_by_parameter_scale=False, weight_decay_rate=0.01, weight_decay_mask=mask),
        clip=1.0,
    ),
    Row(
        "adafactor unfactored, unclipped",
        optim.Adafactor(0.05, factor_from=128, clip=None),
        lambda mask: optax.adafactor(0.05, clipping_threshold=None),
    ),
]  # fmt: skip
BY_NAME = pytest.mark.parametrize("row", ROWS, ids=lambda r: r.name)


def random_tree(seed: int) -> Tree:
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}


def tensors(
    tree: Tree, mesh: dist.Mesh | None = None, layouts: dict[str, str] | None = None
) -> dict[str, ts.Tensor]:
    layouts = layouts or {}
    return {k: ts.tensor(np.asarray(v), mesh=mesh, layout=layouts.get(k)) for k, v in tree.items()}


def step_of(opt: optim.Optimizer, clip: float | None = None) -> Any:
    @ts.jit
    def step(params: Any, grads: Any, state: Any) -> Any:
        if clip is not None:
            grads, _ = optim.clip_by_global_norm(grads, clip)
        return opt.update(params, grads, state)

    return step


@functools.cache
def step_of_row(row: Row) -> Any:
    """Returns one function for all tests of a row, so that each kind of layout is compiled once."""
    return step_of(row.ours, row.clip)


@functools.cache
def run_ours(row: Row) -> tuple[dict[str, ts.Tensor], dict[str, Any]]:
    return run(row)


def run(
    row: Row, mesh: dist.Mesh | None = None, layouts: dict[str, str] | None = None
) -> tuple[dict[str, ts.Tensor], dict[str, Any]]:
    params = tensors(random_tree(0), mesh, layouts)
    state = row.ours.init(params)
    step = step_of_row(row)
    before = step._recordings
    for i in range(STEPS):
        params, state = step(params, tensors(random_tree(1 + i), mesh, layouts), state)
    assert step._recordings <= before + 1, (
        "types of weights and state must not change from step to step"
    )
    return params, state


def run_optax(row: Row) -> Tree:
    with jax.enable_x64(True):
        opt = row.theirs({k: k in DECAYED for k in SHAPES})
        if row.clip is not None:
            opt = optax.chain(optax.clip_by_global_norm(row.clip), opt)

        @jax.jit
        def step(params: Any, grads: Any, state: Any) -> Any:
            updates, state = opt.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        def wide(seed: int) -> Tree:
            return {k: v.astype(np.float64) for k, v in random_tree(seed).items()}

        params = wide(0)
        state = opt.init(params)
        for i in range(STEPS):
            params, state = step(params, wide(1 + i), state)
        return {k: np.asarray(v) for k, v in params.items()}


def close(got: dict[str, ts.Tensor], want: dict[str, Any], rtol: float, atol: float) -> None:
    for k, w in want.items():
        w = w.numpy() if isinstance(w, ts.Tensor) else w
        np.testing.assert_allclose(got[k].numpy(), w, rtol=rtol, atol=atol, err_msg=k)


# -- values ---------------------------------------------------------------------------------------
@BY_NAME
def test_equals_optax(row: Row) -> None:
    params, state = run_ours(row)
    assert state["step"].item() == STEPS
    close(params, run_optax(row), rtol=1e-5, atol=row.atol)


@BY_NAME
def test_on_a_mesh_equals_no_mesh(row: Row, mesh: dist.Mesh) -> None:
    alone, alone_state = run_ours(row)
    params, state = run(row, mesh, LAYOUTS)
    close(params, alone, rtol=1e-5, atol=row.atol)
    close(row.ours.state_dict(state), row.ours.state_dict(alone_state), rtol=1e-5, atol=row.atol)
    assert {k: t.layout for k, t in params.items()} == LAYOUTS


@BY_NAME
def test_state_survives_numpy(row: Row, mesh: dist.Mesh) -> None:
    """Three steps, state to NumPy and onto another mesh, three more: equal to six in a row."""
    step = step_of_row(row)
    params = tensors(random_tree(0))
    state = row.ours.init(params)
    for i in range(3):
        params, state = step(params, tensors(random_tree(1 + i)), state)
    kept = {k: t.numpy() for k, t in row.ours.state_dict(state).items()}
    there = tensors({k: t.numpy() for k, t in params.items()}, mesh, LAYOUTS)
    moved = row.ours.load_state_dict(row.ours.init(there), kept)
    for name, t in row.ours.state_dict(moved).items():
        np.testing.assert_array_equal(t.numpy(), kept[name])
    for i in range(3, 6):
        params, state = step(params, tensors(random_tree(1 + i)), state)
        there, moved = step(there, tensors(random_tree(1 + i), mesh, LAYOUTS), moved)
    close(there, params, rtol=1e-5, atol=row.atol)


def test_state_of_one_layout_loads_into_another(mesh: dist.Mesh) -> None:
    """State loads from tensors too: from another layout of the mesh, and from no mesh."""
    opt = optim.Momentum(0.1)
    split, whole, alone = (
        opt.init(tensors({"w": np.ones((8, 4), np.float32)}, m, {"w": layout}))
        for m, layout in ((mesh, "[8@dp, 4@tp]"), (mesh, "[8, 4]"), (None, "[8, 4]"))
    )
    values = {"step": ts.tensor(7), "m.w": ts.tensor(np.arange(32.0).reshape(8, 4))}
    alone = opt.load_state_dict(alone, values)
    split = opt.load_state_dict(split, opt.state_dict(alone))
    whole = opt.load_state_dict(whole, opt.state_dict(split))
    assert (split["m"]["w"].layout, whole["m"]["w"].layout) == ("[8@dp, 4@tp]", "[8, 4]")
    for state in (alone, split, whole):
        assert state["step"].item() == 7
        np.testing.assert_array_equal(state["m"]["w"].numpy(), values["m.w"].numpy())


def test_every_optimizer_has_a_row() -> None:
    every = [c for c in map(optim.__dict__.get, optim.__all__) if isinstance(c, type)]
    kinds = {c for c in every if issubclass(c, optim.Optimizer) and c is not optim.Optimizer}
    assert {type(r.ours) for r in ROWS} == kinds


def test_update_outside_jit_equals_inside() -> None:
    opt = optim.AdamW(0.01)
    params, grads = tensors(random_tree(0)), tensors(random_tree(1))
    at_once, _ = opt.update(params, grads, opt.init(params))
    jitted, _ = step_of(opt)(params, grads, opt.init(params))
    close(at_once, jitted, rtol=1e-6, atol=1e-7)


def test_donated_state_is_made_of_buffers_of_its_own() -> None:
    opt = optim.Adam(0.01)
    params = tensors({"a": np.ones((4, 4), np.float32), "b": np.ones((4, 4), np.float32)})

    @ts.jit(donate=("params", "state"))
    def step(params: Any, state: Any) -> Any:
        return opt.update(params, {k: p * 2.0 for k, p in params.items()}, state)

    state = opt.init(params)
    for _ in range(3):
        params, state = step(params, state)
    assert state["step"].item() == 3
    np.testing.assert_allclose(params["a"].numpy(), np.full((4, 4), 0.97), atol=1e-4)


def test_names_match_trees_not_order() -> None:
    """Gradients, weights and state in different orders are matched by name."""
    opt = optim.Momentum(1.0)
    params = {"a": ts.tensor([1.0]), "b": ts.tensor([2.0])}
    state = opt.init({"b": params["b"], "a": params["a"]})
    new, state = opt.update(params, {"b": ts.tensor([0.25]), "a": ts.tensor([0.5])}, state)
    assert {k: t.item() for k, t in new.items()} == {"a": 0.5, "b": 1.75}
    assert list(state["m"]) == ["b", "a"] and state["m"]["b"].item() == 0.25


def test_nested_trees_and_state_made_inside_a_function() -> None:
    opt = optim.Momentum(0.5)
    tree = {"layers": [{"w": ts.tensor([1.0, 2.0])}, {"w": ts.tensor([3.0])}]}

    @ts.jit
    def once(tree: Any) -> Any:
        return opt.update(tree, tree, opt.init(tree))

    new, state = once(tree)
    assert sorted(opt.state_dict(state)) == ["m.layers.0.w", "m.layers.1.w", "step"]
    assert new["layers"][1]["w"].numpy().tolist() == [1.5]
    assert state["m"]["layers.0.w"].numpy().tolist() == [1.0, 2.0]


# -- narrow weights -------------------------------------------------------------------------------
def test_narrow_weights_have_wide_masters(mesh: dist.Mesh) -> None:
    """A step too small for bf16 is not lost: the master weight moves, and the weight is its
    rounding."""
    opt = optim.SGD(1e-4)
    params = {"w": ts.tensor(np.ones((8, 8)), mesh=mesh, layout="[8@dp, 8]", dtype=ts.bf16)}
    grads = {"w": ts.tensor(np.ones((8, 8)), mesh=mesh, layout="[8@dp, 8]", dtype=ts.bf16)}
    state = opt.init(params)
    assert str(state["master"]["w"].type) == "f32[8@dp, 8]"
    step = step_of(opt)
    for _ in range(40):
        params, state = step(params, grads, state)
    assert str(params["w"].type) == "bf16[8@dp, 8]"
    np.testing.assert_allclose(state["master"]["w"].numpy(), 1 - 40e-4, rtol=1e-6)
    assert params["w"].numpy().astype(np.float32)[0, 0] == np.float32(0.99609375)


def test_without_master_the_narrow_weight_is_all_there_is() -> None:
    opt = optim.SGD(1e-4, master=False)
    params = {"w": ts.tensor(np.ones((4,)), dtype=ts.bf16)}
    state = opt.init(params)
    assert list(state) == ["step"]
    new, _ = opt.update(params, {"w": ts.tensor(np.ones((4,)))}, state)
    assert new["w"].dtype is ts.bf16 and new["w"].numpy().astype(np.float32)[0] == 1.0


def test_state_and_masters_wait_until_used() -> None:
    """State for a mesh larger than this machine uses no memory before its use."""
    big = dist.Mesh(("dp",), devices=4096)
    w = dist.tensor((8192, 65536), layout="[8192@dp, 65536]", mesh=big, dtype=ts.bf16, name="w")
    state = optim.AdamW().init({"w": w})
    sizes = {k: t.type.local_bytes for k, t in optim.AdamW().state_dict(state).items()}
    assert sizes == {"step": 4, "m.w": 524288, "v.w": 524288, "master.w": 524288}
    with pytest.raises(ts.BackendError):
        state["m"]["w"].numpy()


# -- weight decay ---------------------------------------------------------------------------------
MASKS = [
    ("default", None, {"embed", "blocks.up", "head"}),
    ("expression", r"bias$|^gain", {"head.bias", "gain"}),
    ("predicate", lambda name: name.startswith("blocks"), {"blocks.up", "blocks.norm.weight"}),
]


@pytest.mark.parametrize(("mask", "decayed"), [m[1:] for m in MASKS], ids=[m[0] for m in MASKS])
def test_mask(mask: optim.base.Mask, decayed: set[str]) -> None:
    opt = optim.SGD(1.0, weight_decay=0.5, mask=mask)
    params = tensors(random_tree(0))
    zeros = tensors({k: np.zeros_like(v) for k, v in random_tree(0).items()})
    new, _ = step_of(opt)(params, zeros, opt.init(params))
    for k, w in params.items():
        np.testing.assert_array_equal(new[k].numpy(), w.numpy() * (0.5 if k in decayed else 1.0))


# -- clipping and loss scaling --------------------------------------------------------------------
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clip_by_global_norm(max_norm: float, mesh: dist.Mesh) -> None:
    grads = random_tree(3)
    want, _ = optax.clip_by_global_norm(max_norm).update(grads, optax.EmptyState())
    norm = math.sqrt(sum(float(np.sum(g.astype(np.float64) ** 2)) for g in grads.values()))
    for where, layouts in ((None, None), (mesh, LAYOUTS)):
        clip = ts.jit(lambda g: optim.clip_by_global_norm(g, max_norm))
        got, found = clip(tensors(grads, where, layouts))
        close(got, want, rtol=1e-6, atol=1e-7)
        assert found.item() == pytest.approx(norm, rel=1e-6)
        assert found.shape == ()


def test_global_norm_reduces_once_over_each_axis(mesh: dist.Mesh) -> None:
    norm = ts.jit(optim.global_norm)
    norm(tensors(random_tree(0), mesh, LAYOUTS))
    kinds = [(n.op, n.attrs["axes"]) for n, _ in norm.graph.collectives()]
    # Sums over (dp, tp), over tp alone and over no axis: the first is completed over dp, joins the
    # second, and both are completed over tp together.
    assert kinds == [("all_reduce", ("dp",)), ("all_reduce", ("tp",))]
    assert norm.graph.wire_bytes == 4 + 6


def test_clip_keeps_dtypes_and_zero() -> None:
    grads = {"w": ts.tensor([0.0, 0.0], dtype=ts.bf16)}
    got, norm = optim.clip_by_global_norm(grads, 1.0)
    assert got["w"].dtype is ts.bf16 and got["w"].numpy().astype(np.float32).tolist() == [0, 0]
    assert norm.item() == 0.0


def test_loss_scale_halves_on_overflow_and_doubles_after_an_interval(mesh: dist.Mesh) -> None:
    scaler = optim.LossScale(
        init_scale=1024.0, growth_interval=2, max_scale=2048.0, min_scale=512.0
    )
    opt = optim.SGD(1.0)

    @ts.jit
    def step(params: Any, state: Any, scale: Any, x: ts.Tensor) -> Any:
        loss = scaler.scale(ts.sum(params["w"] * x), scale)
        grads, finite = scaler.unscale(ts.grad(loss, params), scale)
        new = opt.update(params, grads, state)
        params, state = optim.apply_if_finite(finite, new, (params, state))
        return params, state, scaler.update(finite, scale), grads

    w = ts.tensor(np.zeros(8), mesh=mesh, layout="[8@tp]", dtype=ts.f16)
    params, scale = {"w": w}, scaler.init(mesh)
    state = opt.init(params)
    seen = []
    for x in (1e-6, 1e-6, 1e-6, 1e-6, 6e4, 6e4, 6e4, 1e-6):
        now = ts.tensor(np.full(8, x), mesh=mesh, layout="[8@tp]", dtype=ts.f16)
        params, state, scale, grads = step(params, state, scale, now)
        seen.append((scale["scale"].item(), scale["good"].item(), state["step"].item()))
    assert seen == [
        (1024.0, 1, 1), (2048.0, 0, 2), (2048.0, 1, 3), (2048.0, 0, 4),  # grows up to `most`
        (1024.0, 0, 4), (512.0, 0, 4), (512.0, 0, 4),  # falls to `least`; these steps are skipped
        (512.0, 1, 5),
    ]  # fmt: skip
    assert grads["w"].dtype is ts.f32
    np.testing.assert_allclose(state["master"]["w"].numpy(), -5e-6, rtol=0.05)
    assert step._recordings == 1
