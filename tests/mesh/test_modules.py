"""Tied parameters: one in norms, state and bytes, after steps and in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn, optim
from tessera.compile import Engine

torch = pytest.importorskip("torch")
V, D = 16, 8
RNG = np.random.default_rng(0)
E, W = (RNG.normal(size=s).astype(np.float32) for s in ((V, D), (D, D)))
IDS = RNG.integers(0, V, (8, 4)).astype(np.int32)
LABELS = RNG.integers(0, V, 32).astype(np.int32)


class Head(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        self.weight = weight

    def __call__(self, x: Any) -> Any:
        return x @ self.weight.T


class Tied(nn.Module):
    def __init__(self) -> None:
        self.embed = nn.Embedding(V, D)
        self.mid = nn.Linear(D, D, bias=False)
        self.head = Head(self.embed.weight)

    def __call__(self, ids: Any) -> Any:
        return self.head(nn.relu(self.mid(self.embed(ids))))


class Peer(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mid = torch.nn.Embedding(V, D), torch.nn.Linear(D, D, bias=False)
        self.head = torch.nn.Linear(D, V, bias=False)
        self.head.weight = self.embed.weight
        with torch.no_grad():
            self.embed.weight.copy_(torch.tensor(E))
            self.mid.weight.copy_(torch.tensor(W.T))

    def forward(self, ids: Any) -> Any:
        return self.head(torch.relu(self.mid(self.embed(ids))))


@pytest.mark.parametrize("load", ["load_parameters", "load_state_dict"])
def test_a_load_keeps_the_dtype_of_the_model(load: str) -> None:
    for ours, theirs, other in ((ts.bf16, torch.bfloat16, ts.f32), (ts.f32, None, ts.bf16)):
        model, peer = nn.Linear(D, D, bias=False).to(ours), torch.nn.Linear(D, D, bias=False)
        given = ts.tensor(W).to(other)
        getattr(model, load)({"weight": given})
        peer.to(theirs).load_state_dict({"weight": torch.tensor(given.to(ts.f32).numpy())})
        assert model.weight.dtype is ours
        want = peer.weight.detach().float().numpy()
        np.testing.assert_array_equal(model.weight.to(ts.f32).numpy(), want)
    getattr(model, load)({"weight": W.astype(np.float16)})  # a host array
    assert model.weight.dtype is ts.f32
    norm = nn.BatchNorm(2).to(ts.bf16)
    norm.load_state_dict({n: t.to(ts.f32) for n, t in norm.state_dict().items()})
    assert norm.running_mean.dtype is ts.bf16


def test_modules_are_those_of_the_peer() -> None:
    class Ours(nn.Module):
        def __init__(self) -> None:
            self.first = nn.Linear(D, D)
            self.layers = [nn.Sequential(nn.Linear(D, D), nn.Dropout(0.1)), self.first]

    class Theirs(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(D, D)
            inner = torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Dropout(0.1))
            self.layers = torch.nn.ModuleList([inner, self.first])

    def kinds(found: Any) -> list[Any]:
        return [(n, type(m).__name__) for n, m in found if type(m).__name__ != "ModuleList"]

    for prefix in ("", "model"):
        ours = kinds(Ours().named_modules(prefix))
        want = kinds(Theirs().named_modules(prefix=prefix))
        assert [kind for _, kind in ours[1:]] == [kind for _, kind in want[1:]]
        assert len(ours) == 5
        assert ours[0][0] == prefix and ours[2][0] == f"{prefix}.layers.0".strip(".")
    assert [type(m).__name__ for m in Ours().modules()] == [kind for _, kind in ours]


def by_the_peer(steps: int) -> tuple[list[float], Any]:
    model, norms = Peer(), []
    adam = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    for _ in range(steps):
        adam.zero_grad()
        out = model(torch.tensor(IDS).long()).reshape(-1, V)
        torch.nn.functional.cross_entropy(out, torch.tensor(LABELS).long()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        adam.step()
    return norms, model


ROWS = dist.strategy("tensor_parallel", rules=[(r"weight$", 0)])
PLANS = [
    ({}, None),
    ({"dp": 2, "tp": 2}, dist.strategy("data_parallel") + ROWS),
    ({"dp": 4}, dist.strategy("zero_redundancy_optimizer", stage=3)),
]


@pytest.mark.parametrize("axes, plan", PLANS, ids=["one", "dp tp", "zero3"])
def test_tied_weights_train_as_the_peers_do(axes: dict[str, int], plan: Any) -> None:
    model, data = Tied(), (IDS, LABELS)
    model.load_parameters({"head.weight": E, "mid.weight": W})
    if axes:
        mesh = dist.Mesh(tuple(axes), shape=axes)
        dist.place(model, plan, mesh)
        data = dist.place(data, plan, mesh, kind="batch")
    adam = optim.AdamW(0.02, weight_decay=0.1, betas=(0.9, 0.999))
    state = adam.init(model, plan)
    assert [*model.parameters()] == [*state["m"]] == [*model.state_dict()]
    assert [*model.parameters()] == ["embed.weight", "mid.weight"]

    @ts.jit(donate=("model", "state"))
    def step(model: Any, state: Any, ids: Any, labels: Any) -> Any:
        loss = nn.cross_entropy(model(ids).reshape(-1, V), labels)
        grads, norm = optim.clip_by_global_norm(ts.grad(loss, model, layout=plan), 0.5)
        weights, new = adam.update(model, grads, state)
        model.load_parameters(weights)
        state.update(new)
        return norm

    expect, peer = by_the_peer(3)
    norms = [step(model, state, *data).item() for _ in range(3)]
    np.testing.assert_allclose(norms, expect, rtol=1e-4)
    assert model.head.weight is model.embed.weight
    kept = {name: t.numpy() for name, t in model.state_dict().items()}
    np.testing.assert_allclose(kept["embed.weight"], peer.embed.weight.detach(), atol=1e-4)
    np.testing.assert_allclose(kept["mid.weight"], peer.mid.weight.detach().T, atol=1e-4)
    # PyTorch's file has both names.
    both = {**kept, "head.weight": kept["embed.weight"]}
    again = Tied()
    again.load_state_dict(both)
    assert again.head.weight is again.embed.weight
    with pytest.raises(ts.UsageError, match="are one parameter, the values differ"):
        again.load_state_dict({**both, "head.weight": kept["embed.weight"] + 1})


def test_weights_of_one_kind_are_drawn_by_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_ = Engine.compile
    monkeypatch.setattr(
        Engine, "compile", lambda *a, **k: (compiled.append(a[1].name), compile_(*a, **k))[1]
    )
    ts.seed(0)
    layers = [nn.Linear(5, 7) for _ in range(6)]
    drawn = [x.weight.numpy() for x in layers]
    assert [x.bias.numpy().any() for x in layers] == [False] * 6
    assert len(compiled) <= 1  # none, if an earlier test has compiled the program
    compiled.clear()
    assert len({x.tobytes() for x in drawn}) == 6
    ts.seed(0)
    scaled = lambda shape: ts.random.normal(shape) / 5**0.5  # noqa: E731
    by_hand = [nn.Parameter(5, 7, init=scaled).numpy() for _ in range(3)]
    np.testing.assert_allclose(by_hand[0], drawn[0], rtol=1e-6)
    assert compiled == ["init"] and (by_hand[0] != by_hand[1]).any()


def test_tied_weights_through_safetensors(tmp_path: Path) -> None:
    """Saved once, loaded under either name, tied afterwards; and as PyTorch saves them: twice."""
    files, step = pytest.importorskip("safetensors.numpy"), optim.SGD(0.1)
    model = Tied()
    model.load_parameters({"head.weight": E, "mid.weight": W})
    saved = {name: t.numpy() for name, t in model.state_dict().items()}
    assert sum(a.nbytes for a in saved.values()) == E.nbytes + W.nbytes
    files.save_file(saved, tmp_path / "once.safetensors")
    twice = {name: t.detach().numpy().copy() for name, t in Peer().state_dict().items()}
    assert {"embed.weight", "head.weight"} <= set(twice)
    files.save_file(twice, tmp_path / "twice.safetensors")
    for name, want in (("once", E), ("twice", twice["embed.weight"])):
        other = Tied()
        other.load_state_dict(files.load_file(tmp_path / f"{name}.safetensors"))
        assert other.head.weight is other.embed.weight
        np.testing.assert_array_equal(other.embed.weight.numpy(), want)
        weights = other.parameters()
        loss = nn.cross_entropy(other(IDS).reshape(-1, V), LABELS)
        new, _ = step.update(weights, ts.grad(loss, weights), step.init(weights))
        other.load_parameters(new)
        np.testing.assert_array_equal(other.head.weight.numpy(), other.embed.weight.numpy())
        assert np.abs(other.head.weight.numpy() - want).max() > 0
    twice["head.weight"] += 1
    with pytest.raises(ts.UsageError, match="are one parameter, the values differ"):
        Tied().load_state_dict(twice)


@pytest.mark.parametrize("stacked", [True, False])
def test_a_gpt_for_inference_draws_no_dropout(stacked: bool) -> None:
    """As with PyTorch's modules: `eval()` reaches the dropout inside of a model."""
    ids = np.zeros((2, 4), np.int32)
    model = nn.GPT(nn.GPTConfig(8, 4, 8, 2, 2, dropout=0.5, stacked=stacked))
    plain = nn.GPT(nn.GPTConfig(8, 4, 8, 2, 2, stacked=stacked))
    plain.load_parameters(model.parameters())
    want = ts.jit(lambda: plain(ids))().numpy()
    np.testing.assert_array_equal(ts.jit(lambda: model.eval()(ids))().numpy(), want)
    assert not np.allclose(ts.jit(lambda: model.train()(ids))().numpy(), want)


@pytest.mark.parametrize("layout", [None, "[6@dp, 4@tp, 5]", "[6, 4@(dp,tp), 5]"])
def test_norms_of_several_dims_are_those_of_pytorch(layout: str | None) -> None:
    """`nn.LayerNorm((4, 5))`: value and gradients, also with the dims split over devices."""
    x, g, w, b = (
        RNG.normal(size=s).astype(np.float32) for s in ((6, 4, 5), (6, 4, 5), (4, 5), (4, 5))
    )
    mesh = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 2}) if layout else None
    for ours, theirs in (
        (nn.LayerNorm((4, 5), eps=1e-3), torch.nn.LayerNorm((4, 5), eps=1e-3)),
        (nn.RMSNorm([4, 5], eps=1e-3), torch.nn.RMSNorm([4, 5], eps=1e-3)),
    ):
        given = {"weight": w, "bias": b} if hasattr(ours, "bias") else {"weight": w}
        ours.load_parameters(given)
        theirs.load_state_dict({name: torch.tensor(a) for name, a in given.items()})
        tx = torch.tensor(x, requires_grad=True)
        want = theirs(tx)
        (want * torch.tensor(g)).sum().backward()

        @ts.jit
        def run(norm: Any, x: Any, g: Any) -> Any:
            y = norm(x)
            return y, ts.grad((y * g).sum(), (x, norm.parameters()))

        y, (dx, dw) = run(ours, *(ts.tensor(a, mesh=mesh, layout=layout) for a in (x, g)))
        found = {"y": y, "x": dx, **dw}
        peers = {"y": want, "x": tx.grad, **{n: p.grad for n, p in theirs.named_parameters()}}
        assert found.keys() == peers.keys()
        for name, t in found.items():
            np.testing.assert_allclose(
                t.numpy(), peers[name].detach().numpy(), rtol=1e-4, atol=1e-5, err_msg=name
            )


def test_a_norm_of_no_dim_or_of_other_sizes_is_refused() -> None:
    for kind in (nn.LayerNorm, nn.RMSNorm):
        with pytest.raises(ts.UsageError, match=r"give the size of the last dim, or of several"):
            kind(())
        with pytest.raises(ts.ShapeError, match="sizes of the last dims"):
            kind((4, 5))(ts.ones((2, 5, 4)))


def test_a_module_is_stored_in_another_dtype_and_trained_by_masters() -> None:
    """`model.to(ts.bf16)`: PyTorch's rounding; tied and frozen weights stay so, buffers are cast
    too."""
    model = Tied()
    model.load_parameters({"embed.weight": E, "mid.weight": W})
    model.mean, model.count = ts.ones((2,)), ts.tensor([3])
    model.freeze("mid.*")
    assert model.to(ts.bf16) is model and model.head.weight is model.embed.weight
    peer = Peer().to(torch.bfloat16).state_dict()
    np.testing.assert_array_equal(
        model.embed.weight.to(ts.f32).numpy(), peer["embed.weight"].float().numpy()
    )
    kept = {name: t.dtype for name, t in model.state_dict().items()}
    assert kept["mid.weight"] is kept["mean"] is ts.bf16 and kept["count"] is ts.int32
    assert not model.mid.weight.requires_grad
    step = optim.SGD(1e-3)  # a step too small for bf16 alone
    state = step.init(model)
    for _ in range(2):
        loss = nn.cross_entropy(model(IDS).reshape(-1, V), LABELS)
        grads = ts.grad(loss, model)
        assert {g.dtype for g in grads.values()} == {ts.bf16}
        new, state = step.update(model, grads, state)
        model.load_parameters(new)
    assert model.embed.weight.dtype is ts.bf16
    moved = state["master"]["embed.weight"].numpy() - model.embed.weight.to(ts.f32).numpy()
    assert state["master"]["embed.weight"].dtype is ts.f32 and np.abs(moved).max() > 0
