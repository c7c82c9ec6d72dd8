"""Signals at random times of a training loop: the losses and weights of an undisturbed one.

Each round sends one SIGINT (with --alarm: SIGALRM, whose handler raises too) at a random time; the
loop is entered again, as a user would run a notebook cell again. At the end losses and weights are
compared, bit by bit, with those of an undisturbed loop. `python bench/soak/interrupts.py --signals
500`
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import tessera as ts
from tessera import dist, nn, optim, pipeline
from tessera.runtime.devices import start


class Small(nn.Module):
    """A small model that compiles quickly."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.turns = nn.Parameter(8, 8), ts.tensor([0.0])

    def features(self, ids: Any) -> Any:
        self.turns = self.turns + 1.0
        return ts.tanh(ids.to(ts.f32) @ self.w)

    def loss_of(self, found: Any, ids: Any) -> Any:
        return (found - 1.0 / (1.0 + ids.to(ts.f32))).mean()


class Task:
    """A model in training: `step()` runs one statement's work and returns the loss."""

    def __init__(self, kind: str, small: bool) -> None:
        ts.seed(1)
        shape = {"dp": 2, "pp": 2} if kind == "pipeline" else {"dp": 2}
        self.mesh = dist.Mesh(tuple(shape), shape=shape)
        stage = 3 if kind == "zero" else 1
        plan: Any = dist.strategy("zero_redundancy_optimizer", stage=stage)
        if kind not in ("zero", "state apart"):
            plan = dist.strategy("data_parallel")
        config = nn.GPTConfig(32, 8, 16, 2, 2, dropout=0.1, stacked=False)
        small = kind == "recording" or (small and kind != "pipeline")
        made = Small() if small else nn.GPT(config)
        self.model: Any = dist.place(made, plan, self.mesh)
        features: Any = type(made).features
        if kind == "pipeline":
            features = pipeline.run(("pp",), "1F1B", 2, mesh=self.mesh)(features)
        optimizer = optim.AdamW(1e-2)
        apart = kind == "state apart"

        def body(model: Any, state: Any, ids: Any) -> Any:
            loss = model.loss_of(features(model, ids), ids)
            weights = model.parameters()
            grads = ts.grad(loss, weights, layout=plan)
            weights, new = optimizer.update(weights, grads, state)
            if apart:
                return loss, weights, new
            model.load_parameters(weights)
            state.update(new)
            return loss

        def fresh() -> Any:
            donate = () if kind == "kept" else ("model", "state")
            return ts.jit(donate=donate)(body)

        rows = np.random.default_rng(3).integers(0, 32, (4, 8, 8)).astype(np.int32)
        self.batches = [dist.place(ts.tensor(r), plan, self.mesh, kind="batch") for r in rows]
        self.fresh, self.compiled = fresh, fresh()
        if kind == "pipeline":
            self.state = optimizer.init(self.model.parameters(), plan)
            self.compiled.plan(self.model, self.state, self.batches[0])
            self.model = features.place(self.model)
        self.state = optimizer.init(self.model.parameters(), plan)
        self.kind = kind
        self.losses: list[float] = []
        self.done = 0
        self.loss: Any = None
        if apart:
            self.weights = {k: v.now() for k, v in self.model.parameters().items()}
            self.apart: Any = ts.jit(donate=("weights", "state"))(self._functional(body))

    def _functional(self, body: Callable[..., Any]) -> Callable[..., Any]:
        def functional(weights: Any, state: Any, ids: Any) -> Any:
            self.model.load_parameters(weights)
            return body(self.model, state, ids)

        return functional

    def train(self, steps: int) -> None:
        """A user's loop, which can be run again after Ctrl-C."""
        if self.kind == "state apart":
            while len(self.losses) < steps:
                if self.done > len(self.losses):  # Ctrl-C came between the two statements below
                    self.losses.append(self.loss.item())
                self.loss, self.weights, self.state, self.done = (  # type: ignore[misc]  # mypy: no *Any
                    *self.apart(self.weights, self.state, self.batches[self.done % 4]),
                    self.done + 1,
                )
                self.losses.append(self.loss.item())
            return
        while len(self.losses) < steps:
            if self.kind == "recording" and not len(self.losses) % 3:
                self.compiled = self.fresh()
            batch = self.batches[len(self.losses) % 4]
            self.losses.append(self.compiled(self.model, self.state, batch).item())

    def values(self) -> list[np.ndarray[Any, Any]]:
        weights = self.weights if self.kind == "state apart" else self.model.parameters()
        parts = [weights, *(v for k, v in self.state.items() if k != "step")]
        every = [t for part in parts for t in part.values()]
        every += [self.state["step"]] + ([self.model.turns] if type(self.model) is Small else [])
        return [t.numpy() for t in every]


KINDS = ("donated", "kept", "state apart", "zero", "pipeline", "recording")

SLOW = {"pipeline": 5, "recording": 10}  # these get fewer signals by this factor


def interrupted(
    kind: str, signals: int, seed: int, small: bool = False, signum: int = signal.SIGINT
) -> str:
    """Returns a line with the number of interrupts and their effect. Raises if a bit differs."""
    draw = random.Random(seed)
    task = Task(kind, small)
    task.train(2)
    start = time.perf_counter()
    task.train(4)
    longest_s = max(3 * (time.perf_counter() - start) / 2, 0.004)
    if kind == "recording":
        longest_s = max(longest_s, 0.5)
    came = 0
    latest_s = 0.0

    def press(after_s: float) -> None:
        time.sleep(after_s)
        sent.append(time.perf_counter())
        os.kill(os.getpid(), signum)

    for _ in range(signals):
        sent: list[float] = []
        thread = threading.Thread(target=press, args=(draw.uniform(0, longest_s),))
        try:
            thread.start()
            task.train(10**9)
        except KeyboardInterrupt:
            came += 1
            latest_s = max(latest_s, time.perf_counter() - sent[0])
        thread.join()
    task.train(len(task.losses) + 2)
    calm = Task(kind, small)
    calm.train(len(task.losses))
    assert task.losses == calm.losses, f"{kind}: losses differ"
    for a, b in zip(task.values(), calm.values(), strict=True):
        assert a.tobytes() == b.tobytes(), f"{kind}: weights or moments differ"
    return (
        f"{kind:<12} {came} interrupts in {len(task.losses)} steps, the latest after"
        f" {latest_s:.2f} s: the same losses, weights and moments"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--signals", type=int, default=500, help="of each kind; slow kinds get fewer"
    )
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--small", action="store_true", help="a model that is compiled soon")
    parser.add_argument("--alarm", action="store_true", help="SIGALRM in place of SIGINT")
    args = parser.parse_args()
    warnings.simplefilter("ignore", pipeline.PipelineWarning)
    start(8)
    # A shell starts background jobs with SIGINT ignored.
    signum = signal.SIGALRM if args.alarm else signal.SIGINT
    signal.signal(signum, signal.default_int_handler)
    print(f"seed {args.seed}", flush=True)
    for kind in args.kinds.split(","):
        count = -(-args.signals // SLOW.get(kind, 1))
        print(interrupted(kind, count, args.seed, args.small, signum), flush=True)


if __name__ == "__main__":
    main()
