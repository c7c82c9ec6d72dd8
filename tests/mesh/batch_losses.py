"""Losses of a batch of rows, for tests that split the batch.

Each is a loss of a small network in two stages, `features(x, weights) -> h` and `head(h, batch,
weights) -> loss`. For any split of the batch, value and gradients must equal those of the whole
batch. `torch(T, h, batch, weights)` is the head in PyTorch; T is the module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import tessera as ts
from tessera import nn, op

Array = np.ndarray[Any, np.dtype[Any]]
ROWS, D, HIDDEN, WIDTH, EXPERTS = 16, 6, 12, 8, 4
RNG = np.random.default_rng(12)


def _drawn(*shape: int) -> Array:
    return RNG.normal(size=shape).astype(np.float32)


# The count of valid rows differs between halves and quarters: in the first quarter every label is
# ignored, in the third no row is in the mask, and the row weights increase.
BATCH: dict[str, Array] = {
    "x": _drawn(ROWS, D),
    "t": _drawn(ROWS, WIDTH) + 0.3,
    "c": np.int32([0, 0, 1, 0, 5, 2, 7, 1, 3, 3, 6, 4, 2, 5, 1, 7]),
    "y": np.int32([-100, -100, -100, -100, 5, 2, -100, 1, 3, 3, 6, 4, 2, -100, 1, 7]),
    "w": (RNG.random(ROWS) + np.arange(ROWS) / 4).astype(np.float32),
    "m": np.array([1, 1, 1, 1, 0, 1, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0], bool),
}
WEIGHTS: dict[str, Any] = {
    "a": _drawn(D, HIDDEN) * 0.5,
    "b": _drawn(HIDDEN, WIDTH) * 0.5,
    "line": _drawn(D, WIDTH) * 0.5,
    "experts": {
        "router": _drawn(WIDTH, EXPERTS),
        "up": _drawn(EXPERTS, WIDTH, HIDDEN) * 0.5,
        "down": _drawn(EXPERTS, HIDDEN, WIDTH) * 0.5,
    },
}
CLASSES = np.float32([1.0, 3.0, 0.2, 1.5, 0.7, 2.0, 0.5, 1.2])


def mlp(x: Any, w: Any) -> Any:
    return ts.tanh(x @ w["a"]) @ w["b"]


def itself(loss: Any) -> Any:
    return loss


Head = Callable[[Any, Any, Any], Any]


@dataclass(frozen=True)
class Loss:
    """A loss with its inputs: names of WEIGHTS, and the number of rows of BATCH."""

    head: Head
    torch: Callable[[Any, Any, Any, Any], Any] | None = None
    features: Callable[[Any, Any], Any] = mlp
    weights: tuple[str, ...] = ("a", "b")
    rows: int = ROWS
    goal: Callable[[Any], Any] = itself  # returns the function to differentiate

    def __call__(self, batch: Any, weights: Any) -> Any:
        return self.head(self.features(batch["x"], weights), batch, weights)

    def batch(self) -> dict[str, Array]:
        return {k: v[: self.rows] for k, v in BATCH.items()}

    def trained(self) -> dict[str, Any]:
        return {k: WEIGHTS[k] for k in self.weights}


# -- heads ----------------------------------------------------------------------------------------
def errors(h: Any, b: Any) -> Any:
    """The mean square of each row."""
    return ((h - b["t"]) ** 2).mean(-1)


def nll(h: Any, labels: Any) -> Any:
    """The negative log-likelihood of each row's label."""
    return -(nn.log_softmax(h) * ts.one_hot(labels, WIDTH)).sum(-1)


def centred(h: Any) -> Any:
    return h - h.mean(0)


def batch_norm(h: Any, b: Any, w: Any) -> Any:
    mean = h.mean(0)
    var = ((h - mean) ** 2).mean(0)
    return ((((h - mean) / ts.sqrt(var + 1e-5)) - b["t"]) ** 4).mean()


def batch_norm_of_nn(h: Any, b: Any, w: Any) -> Any:
    normed, running = nn.batch_norm(h, (ts.zeros((WIDTH,)), ts.ones((WIDTH,))))
    return ((normed - b["t"]) ** 4).mean() + running[1].sum()


def contrastive(h: Any, b: Any, w: Any) -> Any:
    """InfoNCE: each row's positive is the row itself."""
    return nn.cross_entropy(h @ h.T * 0.3, ts.arange(h.shape[0]))


def balanced_experts(h: Any, b: Any, w: Any) -> Any:
    y, routing = op.moe(h, w["experts"], k=2, stats=True)
    return errors(y, b).mean() + 0.1 * routing.aux_loss + 0.01 * routing.z_loss


def full_experts(h: Any, b: Any, w: Any) -> Any:
    """Experts with too little capacity: the last rows of the whole batch are dropped."""
    return errors(op.moe(h, w["experts"], k=2, capacity=0.75, groups=1), b).mean()


def penalty(w: Any) -> Any:
    return 0.1 * sum((w[k] ** 2).sum() for k in "ab")


def three_losses(h: Any, b: Any, w: Any) -> Any:
    """A sum of a mean over rows, a function of the whole batch, and a term without rows."""
    return nn.cross_entropy(h, b["y"]) + ts.sqrt(errors(h, b).mean()) + penalty(w)


def products(h: Any, b: Any, w: Any) -> Any:
    x, line = b["x"], w["line"]
    return (line * (x.T @ b["t"])).sum() + ((x @ line) * h).mean()


def correlation(h: Any, b: Any, w: Any) -> Any:
    p, q = centred(h[:, 0]), centred(b["t"][:, 7])
    return (p * q).sum() / ts.sqrt((p * p).sum() * (q * q).sum())


def whitened(h: Any, b: Any, w: Any) -> Any:
    z = centred(h)
    return ((z.T @ z / (h.shape[0] - 1) - ts.eye(WIDTH)) ** 2).sum()


def as_integers(h: Any, b: Any, w: Any) -> Any:
    return (h * (h.mean(0) * 30).to("i32").to(ts.f32)).mean()


def in_turn(h: Any, b: Any, w: Any) -> Any:
    """A recurrence over the rows."""
    return ts.scan(lambda c, row: (ts.tanh(0.5 * c + row), c * row), ts.zeros((WIDTH,)), h)[1].sum()


def layers_in_a_loop(h: Any, b: Any, w: Any) -> Any:
    layers = ts.stack([w["b"].T @ w["b"]] * 3)
    return ts.scan(lambda h, m: (ts.tanh(h @ m), (h**2).mean()), h, layers)[1].sum()


def by_sign_of_labels(h: Any, b: Any, w: Any) -> Any:
    return ts.where(b["y"].to(ts.f32).mean() > 0, h.mean(), (h**2).mean())


def entropy(T: Any, h: Any, labels: Any, **how: Any) -> Any:
    """PyTorch's cross entropy."""
    return T.nn.functional.cross_entropy(h, labels.long(), **how)


def norm_of_torch(T: Any, h: Any, b: Any) -> Any:
    normed = T.nn.functional.batch_norm(h, None, None, training=True)
    return ((normed - b["t"]) ** 4).mean()


LOSSES: dict[str, Loss] = {
    # -- of each row
    "mean": Loss(
        lambda h, b, w: errors(h, b).mean(),
        lambda T, h, b, w: T.nn.functional.mse_loss(h, b["t"]),
    ),
    "sum": Loss(
        lambda h, b, w: errors(h, b).sum(),
        lambda T, h, b, w: T.nn.functional.mse_loss(h, b["t"], reduction="sum") / WIDTH,
    ),
    "masked mean": Loss(
        lambda h, b, w: (errors(h, b) * b["m"]).sum() / b["m"].to(ts.f32).sum(),
        lambda T, h, b, w: errors(h, b)[b["m"]].mean(),
    ),
    "weighted mean": Loss(
        lambda h, b, w: (nll(h, b["c"]) * b["w"]).sum() / b["w"].sum(),
        lambda T, h, b, w: T.dot(entropy(T, h, b["c"], reduction="none"), b["w"] / b["w"].sum()),
    ),
    "label smoothing": Loss(
        lambda h, b, w: nn.cross_entropy(h, b["y"], label_smoothing=0.1),
        lambda T, h, b, w: entropy(T, h, b["y"], label_smoothing=0.1),
    ),
    "ignored labels": Loss(
        lambda h, b, w: nn.cross_entropy(h, b["y"]),
        lambda T, h, b, w: entropy(T, h, b["y"]),
    ),
    "ignored labels, weights of classes": Loss(
        lambda h, b, w: nn.cross_entropy(h, b["y"], weight=CLASSES),
        lambda T, h, b, w: entropy(T, h, b["y"], weight=T.tensor(CLASSES)),
    ),
    "ignored labels, a sum": Loss(
        lambda h, b, w: ts.where(b["y"] < 0, 0.0, nll(h, ts.maximum(b["y"], 0))).sum(),
        lambda T, h, b, w: entropy(T, h, b["y"], reduction="sum"),
    ),
    "ignored labels, times their number": Loss(
        lambda h, b, w: nn.cross_entropy(h, b["y"]) * (b["y"] >= 0).to(ts.f32).sum(),
        lambda T, h, b, w: entropy(T, h, b["y"], reduction="sum"),
    ),
    "ignored labels, in blocks": Loss(
        lambda h, b, w: nn.linear_cross_entropy(
            b["x"] + h.mean(-1, True), w["line"], b["y"], rows=3
        ),
        lambda T, h, b, w: entropy(T, (b["x"] + h.mean(-1, True)) @ w["line"], b["y"]),
        weights=("a", "b", "line"),
    ),
    "row by row in Python": Loss(  # the number of rows changes the program
        lambda h, b, w: sum(((h[i] - b["t"][i]) ** 2).mean() for i in range(len(h))) / len(h),
        lambda T, h, b, w: T.nn.functional.mse_loss(h, b["t"]),
    ),
    # -- functions of the batch's numbers
    "root mean square": Loss(
        lambda h, b, w: ts.sqrt(errors(h, b).mean()),
        lambda T, h, b, w: T.linalg.norm(h - b["t"]) / (ROWS * WIDTH) ** 0.5,
    ),
    "maximum": Loss(lambda h, b, w: errors(h, b).max(), lambda T, h, b, w: errors(h, b).max()),
    "minimum": Loss(lambda h, b, w: errors(h, b).min(), lambda T, h, b, w: errors(h, b).min()),
    "logsumexp": Loss(
        lambda h, b, w: ts.logsumexp(errors(h, b), 0),
        lambda T, h, b, w: T.logsumexp(errors(h, b), 0),
    ),
    "goal that is not linear": Loss(
        lambda h, b, w: errors(h, b).mean(),
        lambda T, h, b, w: errors(h, b).mean(),
        goal=lambda loss: loss**2 + loss,
    ),
    "quotient of sums": Loss(
        lambda h, b, w: errors(h, b).sum() / (h**2).sum(),
        lambda T, h, b, w: T.sum(errors(h, b)) / T.sum(h**2),
    ),
    "variance": Loss(
        lambda h, b, w: ts.var(h - b["t"]), lambda T, h, b, w: T.var(h - b["t"], correction=0)
    ),
    "correlation": Loss(
        correlation,
        lambda T, h, b, w: T.corrcoef(T.stack([h[:, 0], b["t"][:, 7]]))[0, 1],
    ),
    "tanh of a share": Loss(lambda h, b, w: ts.tanh(8 * h / h.shape[0]).sum()),
    "tanh of a mean": Loss(lambda h, b, w: ts.tanh(h.sum(0) / b["x"].shape[0]).sum()),
    "times the number of rows": Loss(lambda h, b, w: nn.cross_entropy(h, b["y"]) * len(b["x"])),
    "by the sign of the labels' mean": Loss(by_sign_of_labels),
    "stopped mean": Loss(lambda h, b, w: ((h - ts.stop_gradient(h.mean(0))) ** 2).mean()),
    # -- numbers of the batch within rows
    "batch norm by hand": Loss(batch_norm, lambda T, h, b, w: norm_of_torch(T, h, b)),
    "batch norm": Loss(
        batch_norm_of_nn,
        lambda T, h, b, w: norm_of_torch(T, h, b) + (0.9 + 0.1 * T.var(h.detach(), 0)).sum(),
    ),
    "batch norm in the features": Loss(
        lambda h, b, w: errors(h, b).mean(),
        lambda T, h, b, w: errors(h, b).mean(),
        features=lambda x, w: ts.tanh(centred(x @ w["a"])) @ w["b"],
    ),
    "centred labels": Loss(
        lambda h, b, w: -ts.where(ts.one_hot(b["c"], 8) > 0, h - h.mean(0), 0.0).sum(1).mean()
    ),
    "masked advantages": Loss(
        lambda h, b, w: (ts.where(b["m"], centred(errors(h, b)), 0.0) * h[:, 0]).mean(),
        lambda T, h, b, w: T.mean(b["m"] * (errors(h, b) - errors(h, b).mean()) * h[:, 0]),
    ),
    "masked advantages alone": Loss(
        lambda h, b, w: ts.where(b["m"], centred(errors(h, b)), 0.0).mean(),
        lambda T, h, b, w: T.mean(b["m"] * (errors(h, b) - errors(h, b).mean())),
    ),
    "rows or their mean": Loss(
        lambda h, b, w: ts.where(b["m"][:, None], h, h.mean(0)).mean(),
        lambda T, h, b, w: T.where(b["m"][:, None], h, h.mean(0)).mean(),
    ),
    "mean as integers": Loss(as_integers),
    "plus the sum of rows": Loss(
        lambda h, b, w: (h + h.sum(0)).mean(), lambda T, h, b, w: T.mean(h + T.sum(h, 0))
    ),
    # -- rows that meet
    "contrastive": Loss(
        contrastive,
        lambda T, h, b, w: entropy(T, h @ h.T * 0.3, T.arange(len(h))),
    ),
    "whitened": Loss(
        whitened, lambda T, h, b, w: ((T.cov(h.T, correction=1) - T.eye(WIDTH)) ** 2).sum()
    ),
    "products over rows": Loss(products, weights=("a", "b", "line")),
    "upper median": Loss(
        lambda h, b, w: ts.sort(errors(h, b))[0][h.shape[0] // 2],
        lambda T, h, b, w: T.sort(errors(h, b))[0][len(h) // 2],
    ),
    "hardest half": Loss(
        lambda h, b, w: ts.topk(errors(h, b), h.shape[0] // 2)[0].mean(),
        lambda T, h, b, w: T.topk(errors(h, b), len(h) // 2)[0].mean(),
    ),
    "running sum": Loss(
        lambda h, b, w: (ts.cumsum(h, 0) * b["t"]).mean(),
        lambda T, h, b, w: (T.cumsum(h, 0) * b["t"]).mean(),
    ),
    "recurrence": Loss(in_turn),
    "next row": Loss(
        lambda h, b, w: nn.mse_loss(h, ts.roll(b["t"], 1, 0)),
        lambda T, h, b, w: T.nn.functional.mse_loss(h, b["t"].roll(1, 0)),
    ),
    "places": Loss(lambda h, b, w: (ts.arange(h.shape[0])[:, None] * h).mean()),
    "softmax over rows": Loss(
        lambda h, b, w: (nn.softmax(b["w"], 0) * errors(h, b)).sum(),
        lambda T, h, b, w: T.dot(T.softmax(b["w"], 0), errors(h, b)),
    ),
    "four quarters": Loss(
        lambda h, b, w: ts.prod(h.reshape(4, -1, WIDTH), 0).mean(),
        lambda T, h, b, w: h.unflatten(0, (4, -1)).prod(0).mean(),
    ),
    "groups of more rows": Loss(
        lambda h, b, w: (h.reshape(-1, 8, WIDTH).mean(1) ** 2).mean(),
        lambda T, h, b, w: (h.unflatten(0, (-1, 8)).mean(1) ** 2).mean(),
    ),
    "another order": Loss(lambda h, b, w: (h.reshape(WIDTH, -1) * b["t"].T).mean()),
    "a sum in turn": Loss(
        lambda h, b, w: ts.scan(lambda c, r: (c + r, ()), ts.zeros(()), h.mean(-1))[0],
        lambda T, h, b, w: h.mean(-1).sum(),
    ),
    "neighbours": Loss(
        lambda h, b, w: (nn.conv1d(h.T[None], ts.ones((4, WIDTH, 3)), padding=1) ** 2).mean(),
        lambda T, h, b, w: (
            T.nn.functional.conv1d(h.T[None], T.ones(4, WIDTH, 3), padding=1) ** 2
        ).mean(),
    ),
    "two views of other rows": Loss(
        lambda h, b, w: (ts.concat([h, b["t"]], 0) * ts.repeat_interleave(b["t"], 2, 0)).mean(),
        lambda T, h, b, w: (T.cat([h, b["t"]]) * b["t"].repeat_interleave(2, 0)).mean(),
    ),
    "two views of the same rows": Loss(
        lambda h, b, w: (ts.concat([h, b["t"]], 0) * ts.tile(b["t"], (2, 1))).mean(),
        lambda T, h, b, w: (T.cat([h, b["t"]]) * b["t"].tile(2, 1)).mean(),
    ),
    "rows that are chosen": Loss(
        lambda h, b, w: nn.mse_loss(h, ts.take(b["t"], ts.argsort(b["t"][:, 0]), 0)),
        lambda T, h, b, w: T.nn.functional.mse_loss(h, b["t"][b["t"][:, 0].argsort()]),
    ),
    "back to front": Loss(
        lambda h, b, w: nn.mse_loss(h, b["t"][ts.arange(len(h) - 1, -1, -1)]),
        lambda T, h, b, w: T.nn.functional.mse_loss(h, b["t"].flip(0)),
    ),
    "distances": Loss(
        lambda h, b, w: ts.sqrt(((h[:, None] - b["t"][None]) ** 2).sum(-1)).mean(),
        lambda T, h, b, w: T.cdist(h, b["t"]).mean(),
    ),
    "mixed with others before": Loss(
        lambda h, b, w: errors(h, b).mean(),
        features=lambda x, w: mlp(0.7 * x + 0.3 * ts.flip(x, 0), w),
    ),
    "places in the features": Loss(
        lambda h, b, w: errors(h, b).mean(),
        features=lambda x, w: ts.tanh(x @ w["a"]) * (ts.arange(len(x))[:, None] / 16) @ w["b"],
    ),
    "means of layers in a loop": Loss(layers_in_a_loop),
    # -- rows in other shapes
    "groups of a microbatch's rows": Loss(
        lambda h, b, w: (h.reshape(-1, 2, WIDTH).mean(1) ** 2).mean(),
        lambda T, h, b, w: (h.unflatten(0, (-1, 2)).mean(1) ** 2).mean(),
    ),
    "pairs in a row": Loss(lambda h, b, w: ((h[:, :, None] - b["t"][:, None]) ** 2).mean()),
    "columns": Loss(lambda h, b, w: (h.T * b["t"].T).mean()),
    "flat rows": Loss(lambda h, b, w: (h.reshape(-1) * b["t"].reshape(-1)).mean()),
    "the next of a row": Loss(lambda h, b, w: nn.mse_loss(h[:, :-1], b["t"][:, 1:])),
    "the two largest of a row": Loss(
        lambda h, b, w: ts.topk(h, 2)[0].mean(), lambda T, h, b, w: T.topk(h, 2)[0].mean()
    ),
    "a column of each row": Loss(
        lambda h, b, w: -nn.log_softmax(h)[ts.arange(len(h)), b["c"]].mean(),
        lambda T, h, b, w: entropy(T, h, b["c"]),
    ),
    "gathered labels": Loss(
        lambda h, b, w: -ts.gather(nn.log_softmax(h), b["c"].reshape(-1, 1), -1).mean(),
        lambda T, h, b, w: entropy(T, h, b["c"]),
    ),
    "rows in blocks": Loss(lambda h, b, w: ts.map_chunks(ts.tanh, h, rows=2).mean()),
    "a running product": Loss(
        lambda h, b, w: (ts.cumprod(h, 0) * b["t"]).mean(),
        lambda T, h, b, w: (T.cumprod(h, 0) * b["t"]).mean(),
    ),
    "each row's gradient": Loss(
        lambda h, b, w: (
            (ts.vmap(lambda r: ts.grad(ts.tanh(r @ w["line"]).sum(), r))(b["x"]) ** 2).sum()
            + errors(h, b).mean()
        ),
        weights=("a", "b", "line"),
    ),
    # -- experts
    "experts, auxiliary loss": Loss(balanced_experts, weights=("a", "b", "experts")),
    "experts, capacity": Loss(full_experts, weights=("a", "b", "experts")),
    # -- random numbers
    "dropout": Loss(
        lambda h, b, w: errors(h, b).mean(),
        features=lambda x, w: nn.dropout(ts.tanh(x @ w["a"]), 0.5) @ w["b"],
    ),
    "dropout after centring": Loss(lambda h, b, w: (nn.dropout(h - h.mean(0), 0.5) ** 2).mean()),
    "noise of rows": Loss(lambda h, b, w: (h * ts.random.normal((ROWS, WIDTH))).mean()),
    # -- of no rows
    "penalty on weights": Loss(lambda h, b, w: errors(h, b).mean() + penalty(w)),
    "three losses": Loss(
        three_losses,
        lambda T, h, b, w: entropy(T, h, b["y"]) + T.sqrt(T.mean((h - b["t"]) ** 2)) + penalty(w),
    ),
    "no rows": Loss(lambda h, b, w: penalty(w)),
    # -- a last batch, whose rows do not divide
    "ten rows": Loss(
        lambda h, b, w: errors(h, b).mean(), lambda T, h, b, w: errors(h, b).mean(), rows=10
    ),
    "ten rows, ignored labels and the batch's mean": Loss(
        lambda h, b, w: nn.cross_entropy(centred(h), b["y"]),
        lambda T, h, b, w: entropy(T, h - h.mean(0), b["y"]),
        rows=10,
    ),
}
