"""Guide 2, collectives: the reader's values, and the checks of its blocks."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

import tessera as ts
from tessera import checkpoint, dist, elastic, nn, op, optim

Space = dict[str, Any]
RNG = np.random.default_rng(2)


def normal(*shape: int) -> Any:
    return RNG.normal(size=shape).astype(np.float32)


# The meshes of 3.1, 3.2 and 3.4, on which the given values lie.
DP = dist.Mesh(["dp"], devices=range(8))
TP = dist.Mesh(["tp", "dp"], devices=range(16)).fold(onto=8)
EP = dist.Mesh(["ep", "dp"], devices=range(64)).fold(onto=8)
ROWS, LABELS, WEIGHT = normal(48, 33), RNG.integers(0, 7, 48), normal(33, 7)
LAYERS = [normal(16, 16) / 4 for _ in range(4)]
D, H, EXPERTS = 128, 16, 16


def logits(space: Space) -> ts.Tensor:
    x = ts.tensor(ROWS, mesh=DP, layout="[48@dp, 33]")
    return op.matmul(x, ts.tensor(WEIGHT, mesh=DP, name="w"))


GIVES: dict[str, Any] = {
    "out": logits,
    "labels": lambda s: ts.tensor(LABELS, mesh=DP, layout="[48@dp]"),
    "H": lambda s: 16,
    "X": lambda s: ts.tensor(normal(8, 16), mesh=TP, layout="[8@dp, 16]"),
    **{f"b{i}": lambda s, w=w: lambda x: ts.tanh(x @ w) for i, w in enumerate(LAYERS)},
    "x": lambda s: ts.tensor(normal(64, 4, D), mesh=EP, layout=f"[64@(dp,ep), 4, {D}]"),
    "experts": lambda s: {"router": normal(D, EXPERTS), "up": normal(EXPERTS, D, H) / 10,
                          "down": normal(EXPERTS, H, D) / 4},
}  # fmt: skip


def adam(space: Space) -> SimpleNamespace:
    """An optimizer after a step, whose `state_dict` needs no argument."""
    rule, w = optim.AdamW(1e-2), space["model"].trainable_parameters()
    state = rule.init(w)
    w, state = rule.update(w, {n: ts.ones(t.shape) for n, t in w.items()}, state)
    space["model"].load_parameters(w)
    return SimpleNamespace(state_dict=partial(rule.state_dict, state))


GIVES |= {
    "model": lambda s: nn.GPT(nn.GPTConfig(vocab=16, seq=8, d=16, layers=1, heads=2)),
    "optimizer": adam,
    "train_epoch": lambda s: partial(epoch, s, lost=5),
}


def epoch(space: Space, lost: int | None) -> None:
    """Four steps of gradient descent, in one of which a device is lost."""
    state = {"w": ts.tensor(WEIGHT, mesh=DP)}
    space["epoch"] = state, space.setdefault("made", [])
    for step in elastic.steps(state, 4):
        with step as i:
            if i == 2 and step.mesh.physical.size == 8 and lost is not None:
                elastic.drop(lost)
            x = ts.tensor(ROWS, mesh=step.mesh, layout="[48@dp, 33]")
            loss = op.cross_entropy(op.matmul(x, state["w"]), ts.tensor(LABELS, mesh=step.mesh))
            state["w"] = state["w"] - ts.grad(loss, state["w"]) * 0.1
            space["made"].append((i, step.mesh.physical.size))


def the_mesh(space: Space, shown: str) -> None:
    """4 dp × 4 tp × 3 pp, as in the comment"""
    mesh = space["mesh"]
    assert mesh.topology == "dp × tp × pp mesh, 4 × 4 × 3" and mesh.size == 48
    assert [len(mesh.groups(a)) for a in mesh.axes] == [12, 12, 16]


def the_gradients(space: Space, shown: str) -> None:
    """NumPy's loss and gradients; whole on each device; and the same bits on 2 devices and on 1"""
    out = ROWS.astype(np.float64) @ WEIGHT
    p = np.exp(out - out.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    loss = -np.log(p[np.arange(48), LABELS]).mean()
    p[np.arange(48), LABELS] -= 1
    assert abs(space["loss"].item() - loss) < 1e-5
    grad = space["grads"]["w"]
    np.testing.assert_allclose(grad.numpy(), ROWS.T @ p / 48, rtol=1e-4, atol=1e-6)
    assert not grad.type.split_axes and not grad.type.partial_axes
    for count in (2, 1):
        mesh = DP.fold(onto=count)
        with dist.deterministic(reduce_tree="binary"):
            x, y = (
                ts.tensor(v, mesh=mesh, layout=t)
                for v, t in ((ROWS, "[48@dp, 33]"), (LABELS, "[48@dp]"))
            )
            again = op.cross_entropy(op.matmul(x, ts.tensor(WEIGHT, mesh=mesh, name="w")), y)
            same = dist.all_reduce(op.autodiff(again), axis="dp")["w"]
        assert same.numpy().tobytes() == grad.numpy().tobytes(), count


def the_sharded_product(space: Space, shown: str) -> None:
    """columns over tp, a different part of the product on each device, then the whole over tp"""
    assert str(space["W"].type) == "f32[16, 64@tp]" and str(space["Y"].type) == "f32[8@dp, 64]"
    want = space["X"].numpy() @ space["W"].numpy()
    np.testing.assert_allclose(space["Y"].numpy(), want, rtol=1e-4, atol=1e-5)


def the_composed(space: Space, shown: str) -> None:
    """four stages on a plain batch, the numbers of one device"""
    assert len(space["stages"]) == 4
    run_pipeline(space["pipe"])
    assert space["pipe"].table.stages == 4 and space["pipe"].sizes == [1, 1, 1, 1]


def the_pipeline(space: Space, shown: str) -> None:
    """1F1B with 16 microbatches on a plain batch, the numbers of one device"""
    run_pipeline(space["step"])
    table = space["step"].table
    assert (table.name, table.stages, table.microbatches) == ("1F1B", 4, 16)


def run_pipeline(pipe: Any) -> None:
    x = want = normal(32, 16)
    for w in LAYERS:
        want = np.tanh(want @ w)
    with dist.Mesh(("dp", "pp"), shape={"dp": 2, "pp": 4}):
        np.testing.assert_allclose(pipe(x).numpy(), want, rtol=1e-5, atol=1e-6)


def the_experts(space: Space, shown: str) -> None:
    """two experts per token over ep, in 8 bits, near the numbers of one device; inspect names the
    requested and the actual transport"""
    y, x = space["y"], space["x"]
    assert space["mesh"].shape == (8, 8) and str(y.type) == str(x.type)
    one = ts.tensor(x.numpy())
    want = op.moe(one, space["experts"], k=2, deterministic=True).numpy()
    assert np.abs(y.numpy() - want).max() < 0.08 * np.abs(want).max()
    (did,) = dist.inspect(y).experts
    assert (did.transport.type, did.k, did.axes) == ("nvshmem", 2, ("ep",))
    assert "  requested nvshmem: puts and gets that GPUs start themselves" in str(dist.inspect(y))


def the_schedule(space: Space, shown: str) -> None:
    """the step gives y and its schedule has the choices of the text"""
    np.testing.assert_array_equal(space["train_step"]({}).numpy(), space["y"].numpy())
    chosen = space["train_step"].compiled.choices
    assert (chosen.pipeline, chosen.overlap, chosen.backend) == (True, True, "nvshmem")
    assert chosen.text() in space["train_step"].compiled.schedule.text


def the_checkpoint(space: Space, shown: str) -> None:
    """weights and state at the time of the call, whatever training does meanwhile: loaded whole,
    bit for bit, under the tag"""
    model, want = space["model"], space["optimizer"].state_dict()
    weights = {n: t.numpy().copy() for n, t in model.parameters().items()}
    model.load_parameters({n: t * 2.0 for n, t in model.parameters().items()})
    checkpoint.wait()
    assert checkpoint.latest() == "step_100k" and want
    found = checkpoint.load("step_100k")
    for have, saved in ((weights, found.tensors), (want, found.optimizer)):
        assert have.keys() == saved.keys()
        assert all(np.array_equal(np.asarray(have[n]), saved[n].numpy()) for n in have)


def the_epoch(space: Space, shown: str) -> None:
    """a device is lost in step 2: the steps from there on run on four, and the weights are those of
    an epoch that lost none"""
    assert space["made"] == [(0, 8), (1, 8), (2, 4), (3, 4)]
    disturbed = space["epoch"][0]["w"].numpy()
    elastic.restore(5)
    epoch(space, lost=None)
    np.testing.assert_allclose(disturbed, space["epoch"][0]["w"].numpy(), rtol=1e-5, atol=1e-6)


CHECKS = {
    "2/2.1/code": the_mesh,
    "2/3.1/code": the_gradients,
    "2/3.2/code": the_sharded_product,
    "2/3.3/code": the_composed,
    "2/3.3/step": the_pipeline,
    "2/3.4/code": the_experts,
    "2/3.4/train_step": the_schedule,
    "2/5.1/code": the_checkpoint,
    "2/5.2/code": the_epoch,
}
