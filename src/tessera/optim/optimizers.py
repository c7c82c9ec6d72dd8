"""The optimizers: SGD, Momentum, Adam, AdamW, Lion and Adafactor.

>>> import tessera as ts
>>> params = {"w": ts.tensor([1.0, 2.0])}
>>> opt = ts.optim.SGD(lr=0.5)
>>> params, state = opt.update(params, {"w": ts.tensor([1.0, -1.0])}, opt.init(params))
>>> params["w"].numpy().tolist(), state["step"].item()
([0.5, 2.5], 1)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import final

from ..core.declared import Flag, Integer, Pair, Real
from ..core.errors import UsageError
from ..core.layout import TensorType
from ..lang.math import functions as F
from ..lang.record.operands import scalar
from ..lang.value.tensor import Tensor
from .base import Optimizer, Rate, Slots
from .clipping import to_add_up

Factors = dict[str, Tensor]


def _constants(like: Tensor, **values: float) -> Factors:
    return {name: scalar(float(v), like.dtype) for name, v in values.items()}


def _coupled(w: Tensor, g: Tensor, k: Factors, decays: bool) -> Tensor:
    """The gradient plus the gradient of the penalty `weight_decay / 2 * |w|^2`."""
    return g + k["decay"] * w if decays else g


def _one_minus_power(base: float, t: Tensor) -> Tensor:
    """`1 - base**t`, accurate also for a base near 1, where the difference would cancel."""
    if base == 0:
        return scalar(1.0, t.dtype)
    h = F.tanh(t * (-0.5 * math.log(base)))
    return 2.0 * h / (1.0 + h)


@final
@dataclass(frozen=True, slots=True)
class SGD(Optimizer):
    """Stochastic gradient descent: `w - lr * (g + weight_decay * w)`."""

    lr: Rate = 1e-2

    def _limits(self) -> list[tuple[str, float, str]]:
        return []

    def _slots(self, t: TensorType) -> dict[str, TensorType]:
        return {}

    def _factors(self, lr: Tensor, count: Tensor) -> Factors:
        return {"lr": lr, **_constants(lr, decay=self.weight_decay)}

    def _step(
        self, w: Tensor, g: Tensor, old: Slots, k: Factors, decays: bool
    ) -> tuple[Tensor, Slots]:
        return w - k["lr"] * _coupled(w, g, k, decays), {}


@final
@dataclass(frozen=True, slots=True)
class Momentum(Optimizer):
    """SGD along the momentum `m = momentum * m + g` (Sutskever et al. 2013).

    `nesterov` looks one step ahead. `weight_decay * w` is added to the gradient.
    """

    lr: Rate = 1e-2
    momentum: Real = 0.9
    nesterov: Flag = False

    def _limits(self) -> list[tuple[str, float, str]]:
        return [("momentum", self.momentum, ">= 0 and < 1")]

    def _slots(self, t: TensorType) -> dict[str, TensorType]:
        return {"m": t}

    def _factors(self, lr: Tensor, count: Tensor) -> Factors:
        return {"lr": lr, **_constants(lr, decay=self.weight_decay, momentum=self.momentum)}

    def _step(
        self, w: Tensor, g: Tensor, old: Slots, k: Factors, decays: bool
    ) -> tuple[Tensor, Slots]:
        g = _coupled(w, g, k, decays)
        m = g + k["momentum"] * old["m"]
        return w - k["lr"] * (g + k["momentum"] * m if self.nesterov else m), {"m": m}


def _adam_limits(betas: tuple[float, float], eps: float) -> list[tuple[str, float, str]]:
    moments = [(f"betas[{i}]", b, ">= 0 and < 1") for i, b in enumerate(betas)]
    return [*moments, ("eps", eps, "> 0")]


def _adam_factors(betas: tuple[float, float], eps: float, lr: Tensor, count: Tensor) -> Factors:
    """Adam's bias corrections as one rate and one eps: `lr * (m / c1) / (sqrt(v / c2) + eps)` is
    `rate * m / (sqrt(v) + eps * sqrt(c2))`."""
    b1, b2 = betas
    root = F.sqrt(_one_minus_power(b2, count))
    rate = lr * root / _one_minus_power(b1, count)
    return {"rate": rate, "eps": root * eps, **_constants(lr, b1=b1, c1=1 - b1, b2=b2, c2=1 - b2)}


def _adam_moments(g: Tensor, old: Slots, k: Factors) -> tuple[Tensor, Slots]:
    """(step to subtract, new moments)."""
    m = k["b1"] * old["m"] + k["c1"] * g
    v = k["b2"] * old["v"] + k["c2"] * (g * g)
    return k["rate"] * m / (F.sqrt(v) + k["eps"]), {"m": m, "v": v}


@final
@dataclass(frozen=True, slots=True)
class Adam(Optimizer):
    """Adam (Kingma & Ba 2015). `weight_decay * w` is added to the gradient; see AdamW."""

    lr: Rate = 1e-3
    betas: Pair = (0.9, 0.999)
    eps: Real = 1e-8

    def _limits(self) -> list[tuple[str, float, str]]:
        return _adam_limits(self.betas, self.eps)

    def _slots(self, t: TensorType) -> dict[str, TensorType]:
        return {"m": t, "v": t}

    def _factors(self, lr: Tensor, count: Tensor) -> Factors:
        made = _adam_factors(self.betas, self.eps, lr, count)
        return made | _constants(lr, decay=self.weight_decay)

    def _step(
        self, w: Tensor, g: Tensor, old: Slots, k: Factors, decays: bool
    ) -> tuple[Tensor, Slots]:
        u, new = _adam_moments(_coupled(w, g, k, decays), old, k)
        return w - u, new


@final
@dataclass(frozen=True, slots=True)
class AdamW(Optimizer):
    """Adam with decoupled decay, `w - lr * (u + weight_decay * w)` (Loshchilov & Hutter 2019).

    Unlike in PyTorch and optax, norms, biases and other weights of one dim do not decay, unless
    `mask` selects them: `mask=lambda name: True` decays every weight. The defaults are those of
    large models; PyTorch's are `betas=(0.9, 0.999), weight_decay=0.01`.
    """

    lr: Rate = 3e-4
    betas: Pair = (0.9, 0.95)
    eps: Real = 1e-8
    weight_decay: Real = field(default=0.1, kw_only=True)

    def _limits(self) -> list[tuple[str, float, str]]:
        return _adam_limits(self.betas, self.eps)

    def _slots(self, t: TensorType) -> dict[str, TensorType]:
        return {"m": t, "v": t}

    def _factors(self, lr: Tensor, count: Tensor) -> Factors:
        made = _adam_factors(self.betas, self.eps, lr, count)
        return made | {"keep": 1.0 - lr * self.weight_decay}

    def _step(
        self, w: Tensor, g: Tensor, old: Slots, k: Factors, decays: bool
    ) -> tuple[Tensor, Slots]:
        u, new = _adam_moments(g, old, k)
        return (w * k["keep"] if decays else w) - u, new


@final
@dataclass(frozen=True, slots=True)
class Lion(Optimizer):
    """The sign of an interpolated momentum (Chen et al. 2023), with decoupled decay as in AdamW."""

    lr: Rate = 1e-4
    betas: Pair = (0.9, 0.99)
    weight_decay: Real = field(default=1e-3, kw_only=True)

    def _limits(self) -> list[tuple[str, float, str]]:
        return [(f"betas[{i}]", b, ">= 0 and < 1") for i, b in enumerate(self.betas)]

    def _slots(self, t: TensorType) -> dict[str, TensorType]:
        return {"m": t}

    def _factors(self, lr: Tensor, count: Tensor) -> Factors:
        b1, b2 = self.betas
        made = {"lr": lr, "keep": 1.0 - lr * self.weight_decay}
        return made | _constants(lr, b1=b1, c1=1 - b1, b2=b2, c2=1 - b2)

    def _step(
        self, w: Tensor, g: Tensor, old: Slots, k: Factors, decays: bool
    ) -> tuple[Tensor, Slots]:
        u = F.sign(k["b1"] * old["m"] + k["c1"] * g)
        m = k["b2"] * old["m"] + k["c2"] * g
        return (w * k["keep"] if decays else w) - k["lr"] * u, {"m": m}


@final
@dataclass(frozen=True, slots=True)
class Adafactor(Optimizer):
    """Adam with a factored second moment and steps relative to the weights (Shazeer & Stern 2018).

    A weight whose two largest dims are at least `factor_from` keeps only the means of the second
    moment along each of them; other weights keep all of it. The root mean square of a step is
    limited to `clip` (None: no limit) and, with `relative`, multiplied by that of the weight. The
    second moment decays by `1 - (step - offset)**-decay`. With `momentum` None there is no first
    moment. `weight_decay * w` is subtracted without the factor `lr`.
    """

    lr: Rate = 1e-2
    decay: Real = 0.8
    offset: Integer = 0
    factor_from: Integer = 128
    clip: Real | None = 1.0
    relative: Flag = True
    momentum: Real | None = None
    eps: Real = 1e-30

    def _limits(self) -> list[tuple[str, float, str]]:
        out = [("decay", self.decay, "> 0"), ("eps", self.eps, "> 0")]
        out += [("offset", self.offset, ">= 0"), ("factor_from", self.factor_from, "> 0")]
        out += [("clip", self.clip, "> 0")] if self.clip is not None else []
        return out + (
            [("momentum", self.momentum, ">= 0 and < 1")] if self.momentum is not None else []
        )

    def _factored(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """The two largest dims (the largest last), or None if they are smaller than
        `factor_from`."""
        if len(shape) < 2:
            return None
        *_, second, first = sorted(range(len(shape)), key=lambda d: (shape[d], d))
        return (second, first) if shape[second] >= self.factor_from else None

    def _slots(self, t: TensorType) -> dict[str, TensorType]:
        dims = self._factored(t.shape)
        out = {} if self.momentum is None else {"m": t}
        if dims is None:
            return {"v": t, **out}
        row, col = (t.with_dims(f for i, f in enumerate(t.dims) if i != d) for d in dims[::-1])
        return {"v_row": row, "v_col": col, **out}

    def _home(self, w: Tensor, g: Tensor, old: Slots) -> TensorType:
        dims = self._factored(w.shape)
        if dims is None:
            return Optimizer._home(self, w, g, old)
        # The row means lack the largest dim, the column means have it.
        second, first = dims
        row, col = old["v_row"].type, old["v_col"].type
        missing = col.dims[first - (second < first)]
        t = row.with_dims((*row.dims[:first], missing, *row.dims[first:]))
        return t.with_rest_axes((*row.rest_axes, *col.rest_axes))

    def _factors(self, lr: Tensor, count: Tensor) -> Factors:
        b = 1.0 - (count - float(self.offset)) ** -self.decay
        made = {"lr": lr, "b": b, "c": 1.0 - b}
        mu = self.momentum or 0.0
        return made | _constants(lr, eps=self.eps, keep=1 - self.weight_decay, mu=mu, one=1 - mu)

    def _step(
        self, w: Tensor, g: Tensor, old: Slots, k: Factors, decays: bool
    ) -> tuple[Tensor, Slots]:
        """(new weight, new slots). A factored weight keeps the mean squares of its rows and
        columns, whose product approximates the second moment; other weights keep it whole. Raises
        UsageError if `w` is a device's block, as these are means over whole weights."""
        if w.type.varying:
            raise UsageError(
                "Adafactor: it takes means over whole weights, of which a device has blocks here",
                weight=w.type,
                fix="return the gradients from the local body, and update outside of it",
            )
        new: Slots = {}
        square = g * g + k["eps"]
        dims = self._factored(w.shape)
        if dims is None:
            new["v"] = k["b"] * old["v"] + k["c"] * square
            u = g * F.rsqrt(new["v"])
        else:
            second, first = dims
            parts = to_add_up(square)
            row = k["b"] * old["v_row"] + k["c"] * _lies_as(old["v_row"], F.mean(parts, first))
            col = k["b"] * old["v_col"] + k["c"] * _lies_as(old["v_col"], F.mean(parts, second))
            new["v_row"], new["v_col"] = row, col
            mean = F.mean(to_add_up(row), second - (first < second), True)
            u = g * _with_dim(F.rsqrt(row / mean), first) * _with_dim(F.rsqrt(col), second)
        size = k["lr"]
        if self.clip is not None:
            size = size / F.maximum(_rms(u) * (1.0 / self.clip), 1.0)
        if self.relative:
            # The minimum of Adafactor's paper lets a weight of zeros move.
            size = size * F.maximum(_rms(w), 1e-3)
        u = u * size
        if self.momentum is not None:
            u = new["m"] = k["mu"] * old["m"] + k["one"] * u
        return (w * k["keep"] if decays else w) - u, new


def _rms(x: Tensor) -> Tensor:
    return F.sqrt(F.mean(to_add_up(x * x)))


def _lies_as(like: Tensor, x: Tensor) -> Tensor:
    return F.relayout(x, like.type)


def _with_dim(x: Tensor, dim: int) -> Tensor:
    return F.reshape(x, (*x.shape[:dim], 1, *x.shape[dim:]))
