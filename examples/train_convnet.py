"""Trains a small convolutional network on a mesh, beside a linear classifier on the same images.

An image is a patch of stripes somewhere in noise; its class is the direction of the stripes. Their
phase and place are random, so the mean image of every class is empty and a weighted sum of pixels
says next to nothing. Images are made as they are needed: nothing is read or downloaded.

Over `dp` each device takes a part of the batch. The batch norms still use the statistics of all of
it, so a run gives the same losses on any number of devices.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

import tessera as ts
from tessera import dist, nn, optim
from tessera.show.plan_view import planned, render_plan
from tessera.train.cli import one_line

HELP = """Train a small convolutional network on a mesh of devices, beside a linear classifier.

Examples:

\b
  --mesh dp=8 --steps 200         the batch over eight devices
  --mesh dp=1 --steps 200         the same losses on one
  --noise 2                       harder images
"""
CLASSES, SIDE = 6, 24
TEST_IMAGES = 1536


def images(count: int, noise: float, *seed: int) -> tuple[np.ndarray, np.ndarray]:
    """`count` images [count, 1, SIDE, SIDE] and their classes: a function of `seed` alone."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count)
    angle = (labels + rng.uniform(-0.25, 0.25, count)) * np.pi / CLASSES
    wave, phase = rng.uniform(4.0, 6.0, count), rng.uniform(0, 2 * np.pi, count)
    middle = rng.uniform(0.3, 0.7, (2, count)) * SIDE
    y, x = np.mgrid[:SIDE, :SIDE][:, None] - middle[:, :, None, None]
    along = x * np.cos(angle)[:, None, None] + y * np.sin(angle)[:, None, None]
    stripes = np.cos(2 * np.pi * along / wave[:, None, None] + phase[:, None, None])
    patch = np.exp(-(x**2 + y**2) / (2 * (SIDE / 5) ** 2))
    made = stripes * patch + noise * rng.normal(size=(count, SIDE, SIDE))
    return made[:, None].astype(np.float32), labels.astype(np.int32)


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

    def on_mesh(count: int, *where: int) -> Any:
        return dist.place(images(count, noise, seed, *where), plan, mesh, kind="batch")

    # What a step will do, before any of it runs.
    weights = model.parameters()
    graph = planned(train_step, model, state, *on_mesh(batch, 0, 0))
    console.print(render_plan(mesh, graph, weights, {"weights": weights, "optimizer": state}), "")

    losses: list[float] = []
    times: list[float] = []
    for step in range(steps):
        start = time.perf_counter()
        losses.append(train_step(model, state, *on_mesh(batch, 0, step)).item())
        times.append(time.perf_counter() - start)
        if (step + 1) % max(1, steps // 8) == 0:
            console.print(f"step {step + 1:4}  loss {losses[-1]:.4f}", highlight=False)
    console.print()
    model.train(False)
    accuracy = hits(model, *on_mesh(TEST_IMAGES, 1)).item()
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


def main(
    mesh: Annotated[str, typer.Option(help="The axis dp and its size.")] = "dp=8",
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 200,
    batch: Annotated[int, typer.Option(min=1, help="Images a step.")] = 128,
    width: Annotated[int, typer.Option(min=1, help="Channels of the first layer.")] = 12,
    lr: Annotated[float, typer.Option(min=0, help="Peak learning rate.")] = 1e-2,
    noise: Annotated[float, typer.Option(min=0, help="Of each pixel; stripes reach 1.")] = 1.2,
    seed: Annotated[int, typer.Option(min=0, help="Decides weights and images.")] = 0,
) -> tuple[Trained, Trained]:
    console = Console(quiet=dist.process_index() > 0)  # one process shows
    try:
        devices = dist.Mesh.parse(mesh)
        if devices.axes != ("dp",):
            raise ts.UsageError(f"--mesh: name the axis dp alone, not {', '.join(devices.axes)}")
        ts.seed(seed)
        how = (devices, steps, batch, lr, noise, seed, console)
        convnet, linear = fit(ConvNet(width), *how), fit(Linear(), *how)
    except ts.TesseraError as error:
        typer.echo(f"error: {one_line(error)}", err=True)
        raise typer.Exit(2) from None
    report(console, convnet, linear)
    return convnet, linear


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(help=HELP)(main)
    app()
