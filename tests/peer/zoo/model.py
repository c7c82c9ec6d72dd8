"""Models of other libraries with random weights, in small configurations: a row, and the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

ROWS = 4  # of each batch


def by_name(module: Any, inputs: Mapping[str, Any]) -> Any:
    return module(**inputs)


@dataclass(frozen=True)
class Model:
    """A row: `make()` gives the library's model, `inputs()` a call by name, and `pick` takes the
    tensor that counts from its results. `mode` is that of a PyTorch module. With `layers` a
    pipeline is cut between them. Texts of errors, where one is raised: `refused` by the import,
    `uncut` by the pipeline."""

    name: str
    library: str
    make: Callable[[], Any]
    inputs: Callable[[], dict[str, Any]]
    pick: Callable[[Any], Any] = lambda out: out
    mode: str = "train"
    layers: bool = False
    refused: str = ""
    uncut: str = ""

    def __str__(self) -> str:
        return f"{self.library}-{self.name}"


MODELS: dict[str, Model] = {}


def add(model: Model) -> None:
    assert str(model) not in MODELS
    MODELS[str(model)] = model


# -- inputs ---------------------------------------------------------------------------------------
def ids(*names: str) -> Callable[[], dict[str, Any]]:
    return lambda: {name: torch.randint(3, 64, (ROWS, 8)) for name in names}


def floats(**shapes: tuple[int, ...]) -> Callable[[], dict[str, Any]]:
    """Normal numbers [rows, ...shape] by name."""
    return lambda: {name: torch.randn(ROWS, *shape) for name, shape in shapes.items()}


def images(size: int) -> Callable[[], dict[str, Any]]:
    return floats(pixel_values=(3, size, size))


def both(*parts: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    return lambda: {k: v for part in parts for k, v in part().items()}
