"""DeepSeek-V3's router (groups, bias, scale, shared expert), and user-defined expert networks, on
one device and on a mesh."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn, op
from tests.cases import grid
from tests.core.moe_reference import COTANGENT, X, drawn

torch = pytest.importorskip("torch")
deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
MESH = dist.Mesh(("dp", "ep"), shape={"dp": 2, "ep": 4})
D, E = 16, 8


def peer(**how: Any) -> tuple[Any, dict[str, Any]]:
    """Returns transformers' layer with random weights, and the weights by our names."""
    config = deepseek.DeepseekV3Config(
        hidden_size=D, moe_intermediate_size=12, n_routed_experts=E, num_hidden_layers=1, **how
    )
    torch.manual_seed(0)
    layer = deepseek.DeepseekV3MoE(config)
    with torch.no_grad():
        for w in layer.parameters():
            w.copy_(torch.randn(w.shape) * 0.3)
        layer.gate.e_score_correction_bias.copy_(torch.randn(E) * 0.3)
    gate, up = layer.experts.gate_up_proj.detach().chunk(2, 1)
    shared = layer.shared_experts
    found = {
        "router": layer.gate.weight.T,
        "bias": layer.gate.e_score_correction_bias,
        "up": up.transpose(1, 2),
        "gate": gate.transpose(1, 2),
        "down": layer.experts.down_proj.transpose(1, 2),
        "shared": {n: getattr(shared, f"{n}_proj").weight.T for n in ("up", "gate", "down")},
    }
    return layer, found


def tensors(w: Any, mesh: Any = None) -> Any:
    if isinstance(w, dict):
        return {n: tensors(v, mesh if n not in ("router", "bias", "shared") else None)
                for n, v in w.items()}  # fmt: skip
    data = w.detach().numpy() if isinstance(w, torch.Tensor) else w
    split = f"[{E}@ep, {', '.join(map(str, data.shape[1:]))}]"
    return ts.tensor(np.ascontiguousarray(data), mesh=mesh, layout=split if mesh else None)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("groups", "best", "k", "scale", "normalize", "shared"),
    [(4, 2, 3, 2.5, True, 1), (2, 1, 4, 1.0, False, 2), (1, 1, 2, 0.5, True, 1)],
)
def test_the_router_of_deepseek(
    groups: int, best: int, k: int, scale: float, normalize: bool, shared: int, split: bool
) -> None:
    layer, weights = peer(
        n_group=groups, topk_group=best, num_experts_per_tok=k, norm_topk_prob=normalize,
        routed_scaling_factor=scale, n_shared_experts=shared,
    )  # fmt: skip
    x = torch.tensor(X, requires_grad=True)
    want = layer(x)
    (want * torch.tensor(COTANGENT)).sum().backward()
    how = {"router": "sigmoid", "k": k, "normalize": normalize, "scale": scale}
    if groups != best:
        how |= {"expert_groups": groups, "topk_groups": best}

    @ts.jit
    def step(x: ts.Tensor, w: Any) -> Any:
        y = op.moe(x, w, **how)
        grads = ts.grad((y * COTANGENT).sum(), (x, w["router"], w["down"]))
        return y, *grads

    mesh = MESH if split else None
    ours = ts.tensor(X, mesh=mesh, layout="[8@(dp,ep), 12, 16]" if split else None)
    y, dx, router, down = step(ours, tensors(weights, mesh))
    np.testing.assert_allclose(y.numpy(), want.detach().numpy(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dx.numpy(), x.grad.numpy(), rtol=1e-3, atol=1e-4)
    theirs = layer.gate.weight.grad.numpy().T, layer.experts.down_proj.grad.numpy()
    np.testing.assert_allclose(router.numpy(), theirs[0], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(down.numpy(), theirs[1].swapaxes(1, 2), rtol=1e-3, atol=1e-4)


def gated(rows: ts.Tensor, w: dict[str, ts.Tensor]) -> ts.Tensor:
    """The built-in network, with other names of weights."""
    return (nn.silu(rows @ w["w1"]) * (rows @ w["w3"])) @ w["w2"]


@pytest.mark.parametrize(("split", "capacity"), grid([True, False], [1.0, None]))
def test_a_network_of_ones_own(capacity: float | None, split: bool) -> None:
    mesh = MESH if split else None
    known = drawn()
    names = {"gate": "w1", "down": "w2", "up": "w3"}
    mine = {names.get(n, n): w for n, w in known.items() if n != "shared"}
    mine["shared"] = {"w1": known["up"][0], "w2": known["down"][0], "w3": known["gate"][0]}
    known["shared"] = {"gate": known["up"][0], "down": known["down"][0], "up": known["gate"][0]}
    found = []
    for w, network in ((known, None), (mine, gated)):

        @ts.jit
        def step(x: ts.Tensor, w: Any, network: Any = network) -> Any:
            y = op.moe(x, w, capacity=capacity, network=network)
            down = w["down" if network is None else "w2"]
            return y, ts.grad((y * COTANGENT).sum(), (x, down, w["router"]))

        x = ts.tensor(X, mesh=mesh, layout="[8@(dp,ep), 12, 16]" if split else None)
        y, grads = step(x, tensors(w, mesh))
        found.append([y.numpy(), *(g.numpy() for g in grads)])
        if split:
            kinds = {n.op for n, _ in step.graph.collectives()}
            assert "all_to_all" in kinds
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_a_bias_for_each_expert() -> None:
    """Weights of any rank follow their expert, with replicas too."""
    w = {"router": drawn()["router"], "w": np.zeros((E, D, D), np.float32),
         "b": np.arange(E, dtype=np.float32)[:, None] * np.ones(D, np.float32)}  # fmt: skip

    def network(rows: ts.Tensor, w: dict[str, ts.Tensor]) -> ts.Tensor:
        return rows @ w["w"] + w["b"].unsqueeze(-2)

    y = op.moe(X, w, k=1, network=network, normalize=False)
    chosen = np.argmax(X.reshape(-1, D) @ w["router"], -1)
    np.testing.assert_allclose(
        y.numpy().reshape(-1, D)[:, 0], chosen * _gate(X, w["router"]), rtol=1e-4
    )
    twice = nn.place_experts(E, E, E)
    copied = {n: v if n == "router" else v[list(twice.rows)] for n, v in w.items()}
    assert len(copied["b"]) == 2 * E
    again = op.moe(X, copied, k=1, network=network, normalize=False, placement=twice)
    np.testing.assert_allclose(again.numpy(), y.numpy(), rtol=1e-6)


def _gate(x: Any, router: Any) -> Any:
    e = np.exp(x.reshape(-1, D) @ router)
    return e.max(-1) / e.sum(-1)


def test_choices_that_cannot_be() -> None:
    w = {n: v for n, v in drawn().items() if n != "shared"}
    for match, how in (
        ("belong together", {"expert_groups": 4}),
        ("8 experts do not divide into 3 groups", {"expert_groups": 3, "topk_groups": 1}),
        ("topk_groups cannot be 5", {"expert_groups": 4, "topk_groups": 5}),
        ("1 groups have 2 experts", {"expert_groups": 4, "topk_groups": 1, "k": 3}),
        ("network of your own", {"network": gated, "activation": "relu"}),
    ):
        with pytest.raises(ts.UsageError, match=match):
            op.moe(X, w, **how)
    with pytest.raises(ts.ShapeError, match="does not give a row for each row"):
        op.moe(X, w, network=lambda rows, w: rows @ w["up"])
    for odd in (lambda rows: rows, lambda rows, w, more: rows):
        with pytest.raises(ts.UsageError, match=r"of two arguments, network\(rows, weights\)"):
            op.moe(X, w, network=odd)
    for names in ({"a": w["up"], "b": w["up"]}, {**w, "a": w["up"]}):
        with pytest.raises(ts.UsageError, match="computes with them: network=lambda rows, weights"):
            op.moe(X, {"router": w["router"], **names})
    with pytest.raises(ts.ShapeError, match="not one row an expert each"):
        op.moe(X, {**w, "b": np.zeros(3, np.float32)}, network=gated)
    with pytest.raises(ts.UsageError, match="4 experts do not divide into 3 groups"):
        nn.MoE(8, 8, 4, expert_groups=3, topk_groups=1)
