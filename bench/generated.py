"""Random programs: models, optimizers and placements.

`drawn(seed)` is a program: ops on its weights, terms of the loss, an optimizer and a logical mesh.
`trained` runs it at one placement and returns one hash of all weights and losses, or the reason of
a refusal. `bench/prove.py` runs many, the tests few.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import tessera as ts
from tessera import dist, nn, optim
from tessera.core.context import replaced
from tessera.core.options import ScheduleOptions
from tessera.train.accumulate import accumulated

ROWS, VOCAB = 16, 12
QUICK = (1, 3, 8, 9)  # programs that compile quickly, for a first check
MESHES = ("dp=4", "dp=3", "dp=2,tp=2", "tp=2,dp=3", "dp=2,ep=2")
Weights = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]


def _norm(w: Any, dim: int) -> Any:
    return w / ts.sqrt((w * w).sum(dim, keepdims=True))


def _conv(p: Weights, h: Any) -> Any:
    return nn.conv1d(h.reshape(h.shape[0], 2, -1), p["kernel"], padding=1).reshape(*h.shape)


def _experts(p: Weights, h: Any, **options: Any) -> Any:
    return nn.moe(h, p["moe"], k=2, **options)


def _turns(p: Weights, h: Any) -> Any:
    return ts.scan(lambda h, w: (ts.tanh(h @ w), ()), h, p["layers"])[0]


# Each piece: the shapes of its weights for a width d, and its function of h [rows, d].
PIECES: dict[str, tuple[Callable[[int], Any], Callable[[Weights, Any], Any]]] = {
    "linear": (lambda d: {"w": (d, d), "bias": (d,)}, lambda p, h: h @ p["w"] + p["bias"]),
    "transposed": (lambda d: {"w": (d, d)}, lambda p, h: h @ p["w"].T),
    "scaled": (lambda d: {"w": (d, d)}, lambda p, h: h @ (p["w"] * 0.3)),
    "added": (
        lambda d: {"w": (d, d), "a": (d, 3), "b": (3, d)},
        lambda p, h: h @ (p["w"] + p["a"] @ p["b"]),
    ),
    "normed": (
        lambda d: {"w": (d, d), "size": (d,)},
        lambda p, h: h @ (_norm(p["w"], 0) * p["size"]),
    ),
    "normed rows": (lambda d: {"w": (d, d)}, lambda p, h: h @ _norm(p["w"], 1).T),
    "softmaxed": (lambda d: {"w": (d, d)}, lambda p, h: h @ nn.softmax(p["w"], 0)),
    "gated": (
        lambda d: {"w": (d, d), "gate": (d, d)},
        lambda p, h: h @ (p["w"] * ts.sigmoid(p["gate"])),
    ),
    "tied": (lambda d: {"w": (d, d + 2)}, lambda p, h: ts.tanh(h @ p["w"]) @ p["w"].T),
    "squared": (lambda d: {"w": (d, d)}, lambda p, h: h @ (p["w"] @ p["w"])),
    "outer": (
        lambda d: {"a": (d,), "b": (d,)},
        lambda p, h: h @ (p["a"].reshape(-1, 1) * p["b"].reshape(1, -1)),
    ),
    "cut": (
        lambda d: {"w": (d, 2 * d)},
        lambda p, h: h @ p["w"][:, : d_of(h)] * p["w"][0, d_of(h) :],
    ),
    "joined": (
        lambda d: {"a": (d, d // 2), "b": (d, d - d // 2)},
        lambda p, h: h @ ts.concat([p["a"], p["b"]], 1),
    ),
    "mlp": (
        lambda d: {"up": (d, 2 * d), "down": (2 * d, d)},
        lambda p, h: h + nn.gelu(h @ p["up"]) @ p["down"],
    ),
    "layer norm": (
        lambda d: {"weight": (d,), "bias": (d,)},
        lambda p, h: nn.layer_norm(h, p["weight"], p["bias"]),
    ),
    "rms norm": (lambda d: {"weight": (d,)}, lambda p, h: nn.rms_norm(h, p["weight"])),
    "conv": (lambda d: {"kernel": (2, 2, 3)}, _conv),
    "loop": (lambda d: {"layers": (3, d, d)}, _turns),
    "experts": (
        lambda d: {"moe": {"router": (d, 4), "up": (4, d, 6), "down": (4, 6, d)}},
        lambda p, h: h + _experts(p, h),
    ),
    "experts with a capacity": (
        lambda d: {"moe": {"router": (d, 4), "up": (4, d, 6), "down": (4, 6, d)}},
        lambda p, h: h + _experts(p, h, capacity=1.0, groups=2),
    ),
}  # fmt: skip

# Terms of the loss: functions of all weights [leaves] to f32[].
PENALTIES: dict[str, Callable[[list[Any]], Any]] = {
    "none": lambda ws: 0.0,
    "squares": lambda ws: 1e-2 * sum((w * w).sum() for w in ws),
    "sizes": lambda ws: 1e-2 * sum(ts.abs(w).mean() for w in ws),
    "norm": lambda ws: 1e-2 * optim.global_norm({str(i): w for i, w in enumerate(ws)}),
    "crossed": lambda ws: 1e-2 * sum(((w.T @ w) ** 2).mean() for w in ws if w.ndim == 2),
    "largest": lambda ws: 1e-2 * sum(ts.max(ts.abs(w)) for w in ws),
}


def d_of(h: Any) -> int:
    return int(h.shape[-1])


def optimizers() -> dict[str, list[Any]]:
    """Every optimizer with a list of settings, from which one is drawn."""
    more: dict[str, list[dict[str, Any]]] = {
        "SGD": [{}, {"weight_decay": 0.1}],
        "Momentum": [{}, {"nesterov": True, "weight_decay": 0.1}],
        "Adafactor": [
            {"factor_from": 4}, {"factor_from": 4, "momentum": 0.9, "weight_decay": 0.01},
            {}, {"factor_from": 4, "clip": None, "relative": False},
        ],
    }  # fmt: skip
    kinds: list[Any] = [v for v in vars(optim).values() if inspect.isclass(v)]
    kinds = [v for v in kinds if issubclass(v, optim.Optimizer) and not inspect.isabstract(v)]
    return {v.__name__: [v(0.01, **said) for said in more.get(v.__name__, [{}])] for v in kinds}


@dataclass(frozen=True)
class Drawn:
    """A random program: everything that determines its bits."""

    seed: int
    mesh: str
    width: int
    pieces: tuple[str, ...]
    head: str
    penalty: str
    optimizer: Any
    clip: float
    half: bool
    microbatches: int

    def __str__(self) -> str:
        said = [f"{self.seed:4} {self.mesh:10} {type(self.optimizer).__name__:9}", self.penalty]
        said += [f"{self.head} head", *self.pieces]
        said += ["clip"] * bool(self.clip) + ["bf16"] * self.half
        said += [f"{self.microbatches} microbatches"] * (self.microbatches > 1)
        return ", ".join(said)


@dataclass(frozen=True)
class Spot:
    """A random program's placement and executor."""

    onto: str
    zero: int
    executor: str = "fused"
    schedule: ScheduleOptions = ScheduleOptions()  # noqa: RUF009  # it is frozen

    def __str__(self) -> str:
        said = self.schedule.text() or self.executor
        return f"{self.onto}  ZeRO-{self.zero}  {said}"


def drawn(seed: int) -> Drawn:
    """Returns the program of number `seed`. Optimizers and pieces rotate, so that few programs
    cover all; their combinations are random."""
    rng = np.random.default_rng(seed)
    kinds, names = [*optimizers().values()], [*PIECES]
    kind = kinds[seed % len(kinds)]
    # Every run of len(PIECES) / 2 programs has every piece.
    order = np.random.default_rng(seed * 2 // len(names)).permutation(len(names))
    at = 2 * (seed % (len(names) // 2))
    pieces = [names[i] for i in (order[at], order[at + 1], rng.integers(len(names)))]
    return Drawn(
        seed,
        MESHES[rng.integers(len(MESHES))],
        int(rng.choice([8, 12, 10])),
        tuple(pieces),
        str(rng.choice(["tied", "own"])),
        str(rng.choice([*PENALTIES])),
        kind[rng.integers(len(kind))],
        float(rng.choice([0.0, 0.05])),
        bool(rng.random() < 0.25),
        int(rng.choice([1, 1, 2])),
    )


def spots(program: Drawn, count: int = 0) -> list[Spot]:
    """Returns the placements of `program`, or `count` of them, the most different first."""
    rng = np.random.default_rng(program.seed + 1)
    sizes = [part.split("=") for part in program.mesh.split(",")]
    folds = [
        ",".join(f"{a}={k}" for (a, _), k in zip(sizes, ks, strict=True))
        for ks in itertools.product(*([n, *([2] if n == "4" else []), "1"] for _, n in sizes))
    ]
    whole, one = folds[0], folds[-1]
    buckets = ScheduleOptions(overlap=True, bucket_bytes=512)
    some = [Spot(whole, 0), Spot(whole, 3), Spot(one, 3), Spot(whole, 1), Spot(one, 0)]
    some += [Spot(whole, 2, schedule=buckets), Spot(one, 1 + int(rng.integers(2)))]
    some += [Spot(fold, int(rng.integers(4))) for fold in folds[1:-1]]
    some += [Spot(whole, 3, "stepped"), Spot(whole, 2)]
    some += [Spot(whole, int(rng.choice([0, 1, 3])), schedule=buckets)]
    some += [Spot(fold, int(rng.integers(3)), "stepped") for fold in (whole, one)]
    return some[:count] if count else some


def _made(shapes: Any, rng: np.random.Generator) -> Any:
    if isinstance(shapes, dict):
        return {name: _made(s, rng) for name, s in shapes.items()}
    return ts.tensor((rng.normal(size=shapes) / np.sqrt(shapes[0])).astype(np.float32))


def plan_of(program: Drawn, zero: int) -> Any:
    plan = dist.strategy("data_parallel")
    if "tp" in program.mesh:
        plan = plan + dist.strategy("tensor_parallel")
    if any("experts" in piece for piece in program.pieces):
        plan = plan + dist.strategy("expert_parallel", "ep" if "ep" in program.mesh else "dp")
    return plan + dist.strategy("zero_redundancy_optimizer", stage=zero) if zero else plan


def trained(program: Drawn, spot: Spot, steps: int = 2) -> str:
    """Returns the hash of all weights and losses after `steps` steps, or the error's first line."""
    with replaced(executor=spot.executor, schedule=spot.schedule), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that a strategy leaves weights whole
        try:
            return _trained(program, spot, steps)
        except ts.TesseraError as refused:
            return f"refused: {str(refused).splitlines()[0]}"


def _trained(program: Drawn, spot: Spot, steps: int) -> str:
    mesh, plan = dist.Mesh.parse(program.mesh).fold(spot.onto), plan_of(program, spot.zero)
    ts.seed(7)
    rng = np.random.default_rng(program.seed)
    d = program.width
    weights = {"embed": _made((VOCAB, d), rng)}
    for i, name in enumerate(program.pieces):
        weights[f"p{i}"] = _made(PIECES[name][0](d), rng)
    if program.head == "own":
        weights["head"] = _made((d, VOCAB), rng)
    weights = dist.place(weights, plan, mesh)
    optimizer = program.optimizer
    state = optimizer.init(weights, plan)

    def loss_of(batch: Any, weights: Any) -> Any:
        with ts.autocast(ts.bf16, enabled=program.half):
            h = nn.embedding(batch["ids"], weights["embed"])
            for i, name in enumerate(program.pieces):
                h = PIECES[name][1](weights[f"p{i}"], h)
            head = weights["embed"].T if program.head == "tied" else weights["head"]
            loss = nn.cross_entropy(nn.rms_norm(h) @ head, batch["labels"])
        return loss + PENALTIES[program.penalty](leaves(weights))

    @ts.jit
    def step(weights: Any, state: Any, batch: Any) -> Any:
        if program.microbatches > 1:
            loss, grads = accumulated(loss_of, batch, weights, program.microbatches)
        else:
            loss = loss_of(batch, weights)
            grads = ts.grad(loss, weights, layout=plan)
        if program.clip:
            grads, _ = optim.clip_by_global_norm(grads, program.clip)
        weights, state = optimizer.update(weights, grads, state)
        return weights, state, loss

    found = hashlib.sha256()
    tokens = rng.integers(0, VOCAB, (steps, 2, ROWS if "dp=3" not in program.mesh else 12))
    for ids, labels in tokens.astype(np.int32):
        batch = dist.place({"ids": ids, "labels": labels}, plan, mesh, kind="batch")
        weights, state, loss = step(weights, state, batch)
        found.update(loss.numpy().tobytes())
    for w in leaves(weights):
        found.update(w.numpy().tobytes())
    return found.hexdigest()


def leaves(tree: Any) -> list[Any]:
    return [w for _, v in sorted(tree.items()) for w in (leaves(v) if isinstance(v, dict) else [v])]
