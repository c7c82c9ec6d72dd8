"""Trains a small convolutional network on a mesh, beside a linear classifier on the same images.

An image is a patch of stripes somewhere in noise; its class is the direction of the stripes. Their
phase and place are random, so the mean image of every class is empty and a weighted sum of pixels
says next to nothing. Images are made when the loader's thread reads them: nothing is downloaded.

Over `dp` each device takes a part of the batch. The batch norms still use the statistics of all of
it, so a run gives the same losses on any number of devices.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

import tessera as ts
from tessera import data, dist, nn, optim
from tessera.show.curves import Series, save_loss_curve
from tessera.show.plan_view import planned, render_plan
from tessera.train.cli import one_line

HELP = """Train a small convolutional network on a mesh of devices, beside a linear classifier.

Examples:

\b
  --mesh dp=8 --steps 200         the batch over eight devices
  --mesh dp=1 --steps 200         the same losses on one
  --noise 2                       harder images
  --curve loss.png                a picture of both losses
"""
CLASSES, SIDE = 6, 24
IMAGES, TEST_IMAGES = 16384, 1536


class Stripes:
    """`count` images [1, SIDE, SIDE] and their classes, functions of `seed` and their number."""

    def __init__(self, count: int, noise: float, *seed: int):
        self.count, self.noise, self.seed = count, noise, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        rng = np.random.default_rng((*self.seed, i))
        label = int(rng.integers(0, CLASSES))
        angle = (label + rng.uniform(-0.25, 0.25)) * np.pi / CLASSES
        wave, phase = rng.uniform(4.0, 6.0), rng.uniform(0, 2 * np.pi)
        y, x = np.mgrid[:SIDE, :SIDE] - rng.uniform(0.3, 0.7, (2, 1, 1)) * SIDE
        stripes = np.cos(2 * np.pi * (x * np.cos(angle) + y * np.sin(angle)) / wave + phase)
        patch = np.exp(-(x**2 + y**2) / (2 * (SIDE / 5) ** 2))
        made = stripes * patch + self.noise * rng.normal(size=(SIDE, SIDE))
        return made[None].astype(np.float32), label


class ConvNet(nn.Module):
    """Three convolutions, each with batch norm, ReLU and pooling; then the mean over all places."""

    def __init__(self, width: int):
        sizes = [(1, width, 7), (width, 2 * width, 3), (2 * width, 4 * width, 3)]
        self.convs = [nn.Conv2d(i, o, k, padding="same", bias=False) for i, o, k in sizes]
        self.norms = [nn.BatchNorm(o) for _, o, _ in sizes]
        self.head = nn.Linear(4 * width, CLASSES)

    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nn.max_pool2d(nn.relu(norm(conv(x))), 2)
        return self.head(x.mean((2, 3)))


class Linear(nn.Module):
    """One weight for each pixel and class."""

    def __init__(self) -> None:
        self.head = nn.Linear(SIDE * SIDE, CLASSES, std=0.01)

    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        return self.head(x.reshape(x.shape[0], -1))


@dataclass(frozen=True, slots=True)
class Trained:
    """What a training gave: the loss of each step, accuracy on new images, the median step."""

    losses: list[float]
    accuracy: float
    step_s: float


def fit(
    model: nn.Module, mesh: dist.Mesh, steps: int, batch: int, lr: float, noise: float, seed: int,
    console: Console,
) -> Trained:  # fmt: skip
    """Trains `model` on `mesh` and tries it on images that it has not seen."""
    plan = dist.strategy("data_parallel")
    dist.place(model, plan, mesh)
    optimizer = optim.AdamW(optim.warmup_cosine(lr, steps // 10, steps + 1), weight_decay=0.01)
    state = optimizer.init(model.parameters(), plan)

    @ts.jit(donate=("model", "state"))
    def train_step(model: nn.Module, state: dict[str, Any], x: ts.Tensor, y: ts.Tensor) -> Any:
        loss = nn.cross_entropy(model(x), y)
        weights = model.parameters()
        weights, new_state = optimizer.update(weights, ts.grad(loss, weights), state)
        model.load_parameters(weights)
        state.update(new_state)
        return loss

    @ts.jit
    def hits(model: nn.Module, x: ts.Tensor, y: ts.Tensor) -> ts.Tensor:
        return (ts.argmax(model(x)) == y).to(ts.f32).mean()

    loader = data.DataLoader(
        Stripes(IMAGES, noise, seed, 0), batch, shuffle=True, seed=seed, epochs=math.inf,
        drop_last=True, mesh=mesh,
    )  # fmt: skip
    x, y = next(loader)
    # What a step will do, before any of it runs.
    weights = model.parameters()
    graph = planned(train_step, model, state, x, y)
    console.print(render_plan(mesh, graph, weights, {"weights": weights, "optimizer": state}), "")

    losses: list[float] = []
    times: list[float] = []
    for step in range(steps):
        start = time.perf_counter()
        losses.append(train_step(model, state, x, y).item())
        times.append(time.perf_counter() - start)
        x, y = next(loader)
        if (step + 1) % max(1, steps // 8) == 0:
            console.print(f"step {step + 1:4}  loss {losses[-1]:.4f}", highlight=False)
    console.print()
    loader.close()
    model.train(False)
    new = data.DataLoader(Stripes(TEST_IMAGES, noise, seed, 1), TEST_IMAGES, mesh=mesh)
    accuracy = hits(model, *next(new)).item()
    return Trained(losses, accuracy, median(times[1:] or times))


def report(console: Console, convnet: Trained, linear: Trained) -> None:
    table = Table("on new images", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in ("accuracy", "last loss", "ms a step"):
        table.add_column(column, justify="right")
    table.add_row("guessing", f"{1 / CLASSES:.1%}", f"{np.log(CLASSES):.3f}", "")
    for name, got in (("linear", linear), ("convolutional", convnet)):
        row = f"{got.accuracy:.1%}", f"{got.losses[-1]:.3f}", f"{got.step_s * 1e3:.1f}"
        table.add_row(name, *row)
    console.print(table)


def draw(path: Path, convnet: Trained, linear: Trained) -> None:
    named = (("linear", linear), ("convolutional", convnet))
    series = [Series(name, range(1, len(t.losses) + 1), t.losses) for name, t in named]
    save_loss_curve(path, series, baselines={"guessing": math.log(CLASSES)}, unit="nats per image")


def main(
    mesh: Annotated[str, typer.Option(help="The axis dp and its size.")] = "dp=8",
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 200,
    batch: Annotated[int, typer.Option(min=1, help="Images a step.")] = 128,
    width: Annotated[int, typer.Option(min=1, help="Channels of the first layer.")] = 12,
    lr: Annotated[float, typer.Option(min=0, help="Peak learning rate.")] = 1e-2,
    noise: Annotated[float, typer.Option(min=0, help="Of each pixel; stripes reach 1.")] = 1.2,
    seed: Annotated[int, typer.Option(min=0, help="Decides weights and images.")] = 0,
    curve: Annotated[Path | None, typer.Option(help="Where a PNG of the losses goes.")] = None,
) -> tuple[Trained, Trained]:
    console = Console(quiet=dist.process_index() > 0)  # one process shows
    try:
        devices = dist.Mesh.parse(mesh)
        if devices.axes != ("dp",):
            raise ts.UsageError(f"--mesh: name the axis dp alone, not {', '.join(devices.axes)}")
        ts.seed(seed)
        how = (devices, steps, batch, lr, noise, seed, console)
        convnet, linear = fit(ConvNet(width), *how), fit(Linear(), *how)
        if curve is not None and dist.process_index() == 0:
            draw(curve, convnet, linear)
    except ts.TesseraError as error:
        typer.echo(f"error: {one_line(error)}", err=True)
        raise typer.Exit(2) from None
    report(console, convnet, linear)
    return convnet, linear


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(help=HELP)(main)
    app()
