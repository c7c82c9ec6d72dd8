"""`Sequential` against PyTorch's, and module calls with explicit weights: compiled, on a mesh and
with tied weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn

torch = pytest.importorskip("torch")
MESH = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
RNG = np.random.default_rng(4)


def real(*shape: int) -> Any:
    return RNG.normal(size=shape).astype(np.float32)


X, LABELS = real(8, 3, 6, 6), RNG.integers(0, 4, 8).astype(np.int32)


def both() -> tuple[nn.Sequential, Any]:
    """A model, and PyTorch's with the same names and values."""
    ours = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.relu,
        nn.ConvTranspose2d(8, 6, 2, stride=2, groups=2),
        lambda x: nn.adaptive_avg_pool2d(x, 1),
        lambda x: x.flatten(1),
        nn.Sequential({"head": nn.Linear(6, 4)}),
    )
    t = torch.nn
    peer = t.Sequential(
        t.Conv2d(3, 8, 3, padding=1), t.ReLU(), t.ConvTranspose2d(8, 6, 2, stride=2, groups=2),
        t.AdaptiveAvgPool2d(1), t.Flatten(), t.Sequential(),
    )  # fmt: skip
    peer[5].add_module("head", t.Linear(6, 4))
    state = {n: torch.tensor(w.numpy()) for n, w in ours.state_dict().items()}
    state["5.head.weight"] = state["5.head.weight"].T
    peer.load_state_dict(state)
    return ours, peer


def test_a_sequential_is_the_peers() -> None:
    ours, peer = both()
    want = torch.nn.functional.cross_entropy(peer(torch.tensor(X)), torch.tensor(LABELS).long())
    want.backward()

    @ts.jit
    def step(x: ts.Tensor) -> Any:
        loss = nn.cross_entropy(ours(x), LABELS)
        return loss, ts.grad(loss, ours)

    loss, grads = step(ts.tensor(X, mesh=MESH, layout="[8@dp, 3, 6, 6]"))
    np.testing.assert_allclose(loss.item(), want.item(), rtol=1e-5)
    for name, g in peer.named_parameters():
        found = grads[name].numpy()
        found = found.T if name == "5.head.weight" else found
        np.testing.assert_allclose(found, g.grad.numpy(), rtol=1e-3, atol=1e-5)


def test_layers_of_a_sequential() -> None:
    model, _ = both()
    assert len(model) == 6
    assert model[1] is nn.relu
    assert [n for n, _ in model[2:].named_parameters()] == [
        "2.weight", "2.bias", "5.head.weight", "5.head.bias",
    ]  # fmt: skip
    assert model[2:][0] is model[2]
    assert nn.Sequential()(3) == 3
    assert repr(nn.Sequential(nn.relu, nn.Dropout(0.5))) == (
        "Sequential(\n  (0): relu\n  (1): Dropout(p=0.5)\n)"
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_a_call_with_given_weights(compiled: bool) -> None:
    ours, peer = both()
    given = {n: torch.tensor(real(*w.shape)) for n, w in peer.named_parameters()}
    given = {n: w.requires_grad_() for n, w in given.items()}
    want = torch.func.functional_call(peer, given, torch.tensor(X)).square().sum()
    want.backward()
    params = {n: ts.tensor(w.detach().numpy()) for n, w in given.items()}
    params["5.head.weight"] = ts.tensor(given["5.head.weight"].detach().numpy().T)
    before = {n: w.numpy() for n, w in ours.state_dict().items()}

    def loss_of(params: Any, x: Any) -> Any:
        loss = ts.sum(nn.functional_call(ours, params, x) ** 2)
        return loss, ts.grad(loss, params)

    x = ts.tensor(X, mesh=MESH, layout="[8@dp, 3, 6, 6]")
    for _ in range(2):
        loss, grads = (ts.jit(loss_of) if compiled else loss_of)(params, x)
        np.testing.assert_allclose(loss.item(), want.item(), rtol=1e-4)
        for name, g in given.items():
            found = grads[name].numpy()
            found = found.T if name == "5.head.weight" else found
            np.testing.assert_allclose(found, g.grad.numpy(), rtol=1e-3, atol=1e-3)
    for n, w in ours.state_dict().items():
        np.testing.assert_array_equal(w.numpy(), before[n])


class Tied(nn.Module):
    def __init__(self) -> None:
        self.embed = nn.Embedding(5, 4)
        self.parts = {"heads": [self.embed.weight]}

    def __call__(self, ids: Any, scale: float = 1.0) -> Any:
        return scale * self.embed(ids) @ self.parts["heads"][0].T


def test_a_tied_weight_is_given_once() -> None:
    model, table, ids = Tied(), real(5, 4), np.arange(5)
    out = nn.functional_call(model, ({"embed.weight": table},), (ids,), {"scale": 2.0})
    np.testing.assert_allclose(out.numpy(), 2 * table @ table.T, rtol=1e-5)
    with pytest.raises(ts.UsageError, match="are one parameter"):
        nn.functional_call(
            model, {"embed.weight": table, "parts.heads.0": table + 1}, ts.tensor(ids)
        )
    assert model.parts["heads"][0] is model.embed.weight


def test_buffers_of_a_called_module() -> None:
    """A module may set its own buffer; a write to a buffer passed to the call would be lost."""
    model = nn.Sequential(nn.BatchNorm(4))
    x, params = real(6, 4), {"0.weight": np.full(4, 2.0, np.float32)}
    for run in (nn.functional_call, ts.jit(lambda *a: nn.functional_call(*a))):
        before = model[0].running_mean.numpy()
        run(model, params, ts.tensor(x))
        want = before + 0.1 * (x.mean(0) - before)
        np.testing.assert_allclose(model[0].running_mean.numpy(), want, rtol=1e-5, atol=1e-6)
    state = model.state_dict()
    mean = model[0].running_mean
    with pytest.raises(ts.UsageError, match=r"sets '0\.running_mean', and the new value"):
        nn.functional_call(model, state, ts.tensor(x))
    assert model[0].running_mean is mean
    out = nn.functional_call(model.eval(), {"0.running_mean": real(4)}, ts.tensor(x))
    assert out.shape == (6, 4)


def test_weights_that_do_not_fit_are_errors() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    x = ts.ones((1, 4))
    with pytest.raises(ts.UsageError, match="1 are too many"):
        nn.functional_call(model, {"1.weight": real(4, 2)}, x)
    with pytest.raises(ts.ShapeError, match=r"'0\.weight' has another shape"):
        nn.functional_call(model, {"0.weight": real(2, 4)}, x)
    with pytest.raises(ts.UsageError, match="give the layers one by one"):
        nn.Sequential([nn.relu])  # type: ignore[arg-type]
    with pytest.raises(ts.UsageError, match="a name cannot be 'train'"):
        nn.Sequential({"train": nn.relu})


def test_an_attribute_that_is_no_layer_is_none() -> None:
    """As in PyTorch: a module attribute is a layer, any other is not."""

    class Block(nn.Sequential):
        def __init__(self, channels: int):
            super().__init__(nn.Linear(4, channels))
            self.out_channels, self.post = channels, lambda y: y * 0.0

    block = Block(3)
    y = block(ts.ones((1, 4)))
    assert y.shape == (1, 3) and np.abs(y.numpy()).max() > 0 and len(block) == 1
    block.training = False
    block.more = nn.Linear(3, 2)
    assert block(ts.ones((1, 4))).shape == (1, 2) and len(block[:1]) == 1
    assert list(block.parameters()) == ["0.weight", "0.bias", "more.weight", "more.bias"]
