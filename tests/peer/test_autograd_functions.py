"""`torch.autograd.Function` in imported modules: the gradient is that of its own backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tessera as ts
from tessera import dist


class Scaled(torch.autograd.Function):
    """Values, places of the largest and the weights; a backward that is not the derivative."""

    @staticmethod
    def forward(ctx: Any, x: Any, factor: int, w: Any) -> Any:
        ctx.save_for_backward(x, w)
        ctx.factor = factor
        places = x.argmax(-1)
        ctx.mark_non_differentiable(places)
        return x.exp() * w, places, w * 1

    @staticmethod
    def backward(ctx: Any, g: Any, _: Any, g_w: Any) -> Any:
        x, _ = ctx.saved_tensors
        slope = torch.zeros_like(x)
        slope[..., :1] += (g * x * ctx.factor)[..., :1]
        return slope, None, g * 5 + g_w


class Negated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return -g


class WithContext(torch.autograd.Function):
    """`setup_context`, and another function in `backward`."""

    @staticmethod
    def forward(x: Any) -> Any:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g * 2 + negated(ctx.saved_tensors[0] * g)


class Constant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 3

    @staticmethod
    def backward(ctx: Any, g: Any) -> None:
        return None


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.mark_dirty(x)
        return x.add_(1)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g


negated = Negated.apply


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = (nn.Parameter(torch.randn(4, 6)) for _ in range(2))

    def forward(self, x: Any) -> Any:
        y, places, w = Scaled.apply(x * self.v, 3, self.w)
        y = WithContext.apply(y) * places[:, None] + w + negated(self.v) + Constant.apply(self.v)
        with torch.no_grad():
            constant = negated(self.w)
        return y + constant


@pytest.mark.parametrize("mode", ["at once", "recorded", "on a mesh"])
def test_the_gradient_is_that_of_backward(mode: str) -> None:
    torch.manual_seed(0)
    peer, x = Model(), torch.randn(4, 6)
    want = peer(x)
    want.square().sum().backward()
    model = ts.from_torch(peer, (x,))
    given: Any = x.numpy()
    if mode == "on a mesh":
        mesh = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 2})
        given = ts.tensor(given, mesh=mesh, layout="[4@dp, 6]")
        dist.place(model, dist.strategy("data_parallel", "dp"), mesh)
        for weight in model.parameters().values():
            weight.put(dist.redistribute(weight.now(), "[4, 6@tp]"))

    def loss(model: Any, x: Any) -> Any:
        y = model(x)
        return ts.sum(y * y), y

    run = ts.value_and_grad(loss, has_aux=True)
    (_, y), grads = (run if mode == "at once" else ts.jit(run))(model, given)
    np.testing.assert_allclose(y.numpy(), want.detach().numpy(), rtol=1e-5, atol=1e-5)
    for name, p in peer.named_parameters():
        assert p.grad is not None
        np.testing.assert_allclose(grads[name].numpy(), p.grad.numpy(), rtol=1e-4, atol=1e-4)


def test_a_function_that_changes_its_argument_is_an_error() -> None:
    class Changed(nn.Module):
        def forward(self, x: Any) -> Any:
            return InPlace.apply(x * 2)

    with pytest.raises(ts.UsageError, match="changes its arguments in place"):
        ts.from_torch(Changed(), (torch.ones(2),))
    assert "apply" not in vars(torch.autograd.Function.__base__)  # PyTorch is as it was
