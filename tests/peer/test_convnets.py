"""Random convolutional networks against PyTorch's: values and gradients.

The ops between convolutions are those that change their memory order (passes/channels_last.py):
norms, sums, per-channel numbers, and ops that need the written order.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as tf

import tessera as ts
from tessera import dist, nn

MESH = dist.Mesh(("dp",), shape={"dp": 4})
Pair = tuple[Callable[..., Any], Callable[..., Any]]


@dataclass
class Drawn:
    """A network as pairs of steps (Tessera's, PyTorch's), each with its own parameters."""

    pick: random.Random
    spatial: int
    channels: int
    sizes: list[int]
    steps: list[tuple[Pair, int]] = field(default_factory=list)
    numbers: list[Any] = field(default_factory=list)

    def add(self, pair: Pair, *shapes: tuple[int, ...]) -> None:
        rng = np.random.default_rng(self.pick.randrange(1 << 30))
        self.numbers += [rng.normal(0, 0.3, s).astype(np.float32) for s in shapes]
        self.steps.append((pair, len(shapes)))

    def conv(self) -> None:
        groups = self.pick.choice([g for g in (1, 1, 2, self.channels) if self.channels % g == 0])
        outs, size = groups * self.pick.randint(1, 3), self.pick.choice((1, 3))
        stride, dilation, pad = (self.pick.choice(k) for k in ((1, 1, 2), (1, 1, 2), (0, 1, 2)))
        left = [(n + 2 * pad - dilation * (size - 1) - 1) // stride + 1 for n in self.sizes]
        if min(left) < 1:
            return
        how = {"stride": stride, "padding": pad, "dilation": dilation, "groups": groups}
        ours, theirs = (getattr(m, f"conv{self.spatial}d") for m in (nn, tf))
        kernel = (outs, self.channels // groups, *[size] * self.spatial)
        self.add((lambda h, *p: ours(h, *p, **how), lambda h, *p: theirs(h, *p, **how)), kernel,
                 *[(outs,)] * self.pick.randint(0, 1))  # fmt: skip
        self.channels, self.sizes = outs, left

    def spread(self) -> None:
        """A transposed convolution."""
        outs, size, stride = self.pick.randint(1, 3), self.pick.choice((1, 2, 3)), 2
        left = [(n - 1) * stride + size for n in self.sizes]
        if self.spatial > 2 or max(left) > 20:
            return
        ours, theirs = (getattr(m, f"conv_transpose{self.spatial}d") for m in (nn, tf))
        self.add((lambda h, w: ours(h, w, stride=stride), lambda h, w: theirs(h, w, stride=stride)),
                 (self.channels, outs, *[size] * self.spatial))  # fmt: skip
        self.channels, self.sizes = outs, left

    def pool(self) -> None:
        size, stride = self.pick.choice((2, 3, 5)), self.pick.choice((1, 2, 3))
        pad = self.pick.choice((0, size // 2))
        left = [(n + 2 * pad - size) // stride + 1 for n in self.sizes]
        if self.spatial > 2 or min(n + 2 * pad - size for n in self.sizes) < 0:
            return
        kind = self.pick.choice(("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool"))
        ours, theirs = (getattr(m, f"{kind}{self.spatial}d") for m in (nn, tf))
        how: tuple[Any, ...] = (size, stride, pad)
        if kind.startswith("adaptive"):
            left = [self.pick.randint(1, n) for n in self.sizes]
            how = (tuple(left) if self.spatial > 1 else left[0],)
        self.add((lambda h: ours(h, *how), lambda h: theirs(h, *how)))
        self.sizes = left

    def between(self) -> None:
        line, dims = (self.channels,), tuple(range(2, 2 + self.spatial))
        rows: list[tuple[Pair, tuple[tuple[int, ...], ...]]] = [
            ((nn.relu, tf.relu), ()),
            ((_batch_norm, lambda h, w, b: tf.batch_norm(h, None, None, w, b, True)), (line, line)),
            ((lambda h, b: h + b,) * 2, ((*line, *[1] * self.spatial),)),
            ((lambda h: h + ts.tanh(h), lambda h: h + torch.tanh(h)), ()),
            ((lambda h: h * ts.mean(h, dims, True), lambda h: h * h.mean(dims, True)), ()),
            ((lambda h: h - ts.max(h, 1, True), lambda h: h - h.amax(1, True)), ()),
            ((lambda h: h + ts.sum(h, (0, 1), True), lambda h: h + h.sum((0, 1), True)), ()),
            ((lambda h: ts.where(h > 0.1, h, 0.5), lambda h: torch.where(h > 0.1, h, 0.5)), ()),
            ((lambda h: nn.softmax(h, 1), lambda h: torch.softmax(h, 1)), ()),
            ((lambda h: h + ts.flip(h, -1), lambda h: h + torch.flip(h, (-1,))), ()),
        ]
        if self.channels % 2 == 0:
            norm = lambda h, w, b: nn.group_norm(h, 2, w, b)  # noqa: E731
            rows.append(((norm, lambda h, w, b: tf.group_norm(h, 2, w, b)), (line, line)))
        pair, shapes = self.pick.choice(rows)
        self.add(pair, *shapes)

    def run(self, side: int, h: Any, numbers: list[Any]) -> Any:
        rest = iter(numbers)
        for pair, count in self.steps:
            h = pair[side](h, *(next(rest) for _ in range(count)))
        return h


def _batch_norm(h: ts.Tensor, w: ts.Tensor, b: ts.Tensor) -> ts.Tensor:
    running = ts.zeros(h.shape[1]), ts.ones(h.shape[1])
    return nn.batch_norm(h, running, w, b)[0]


@pytest.mark.parametrize("seed", range(40))
def test_drawn_convnets(seed: int) -> None:
    pick = random.Random(seed)
    spatial = pick.choice((1, 2, 2, 3))
    batch = pick.choice((4, 8, 32))  # a batch of 32 is processed in parts
    net = Drawn(pick, spatial, pick.choice((2, 4)), [pick.choice((8, 9)) for _ in range(spatial)])
    x = np.random.default_rng(seed).normal(size=(batch, net.channels, *net.sizes))
    x = x.astype(np.float32)
    net.conv()
    for _ in range(pick.randint(2, 5)):
        pick.choice((net.conv, net.spread, net.pool, net.between, net.between))()

    given = [torch.tensor(v, requires_grad=True) for v in (x, *net.numbers)]
    made = net.run(1, given[0], given[1:])
    (made * made).mean().backward()

    @ts.jit
    def step(x: ts.Tensor, numbers: list[ts.Tensor]) -> Any:
        h = net.run(0, x, numbers)
        return h, ts.grad((h * h).mean(), [x, *numbers])

    mesh = pick.choice((None, MESH))
    layout = f"[{', '.join([f'{batch}@dp', *map(str, x.shape[1:])])}]" if mesh else None
    ours = ts.tensor(x, mesh=mesh, layout=layout)
    h, grads = step(ours, [ts.tensor(v, mesh=mesh) for v in net.numbers])
    want = [made, *(g.grad for g in given)]
    for a, b in zip([h, *grads], want, strict=True):
        theirs = b.detach().numpy()
        tol = 2e-4 * max(1.0, float(np.abs(theirs).max()))
        np.testing.assert_allclose(a.numpy(), theirs, rtol=2e-3, atol=tol)
