"""Warnings for configuration keys without effect.

Such a key needs another key, or is not followed by the model of a user's own loop: a model takes
the batch and the weights, not the configuration, so `mixed_precision`, `gradient_checkpointing` and
`dropout` reach it only by `make_model(config)`. The recorded graph shows whether it follows a key:
products in the narrow dtype, recomputed layers, random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ..core.errors import warn_no_effect
from ..ir.graph.node import Graph, Node
from ..lang.record.recorder import current
from ..nn.gpt_config import GPTConfig
from ..ops.control import scan
from ..ops.random import random_bits
from .config import KEYS, TrainingConfig

HOW = {
    "mixed_precision": "pass make_model(config) as model_fn, or open ts.autocast around the model",
    "gradient_checkpointing": "pass make_model(config) as model_fn, or loop by ts.scan(policy=)",
    "dropout": "pass make_model(config) as model_fn, or call nn.dropout in the model",
}
# The condition under which a key has an effect, as text and as a predicate.
NEEDS: dict[str, tuple[str, Callable[[TrainingConfig], bool]]] = {
    "min_learning_rate": (
        'schedule "cosine" or "linear"', lambda c: c.schedule in ("cosine", "linear")
    ),
    "betas": (
        'optimizer "adamw", "adam" or "lion"', lambda c: c.optimizer in ("adamw", "adam", "lion")
    ),
    "eps": ('optimizer "adamw" or "adam"', lambda c: c.optimizer in ("adamw", "adam")),
    "momentum": ('optimizer "momentum"', lambda c: c.optimizer == "momentum"),
    "loss_scale_interval": ("a loss_scale that is dynamic", lambda c: c.dynamic),
    "keep_metric": ("keep_best", lambda c: c.keep_best > 0),
}  # fmt: skip


def warn_of_needs(call: str, c: TrainingConfig) -> None:
    """Warns of keys that are not at their defaults and have no effect because of another key."""
    for key, (needs, there) in NEEDS.items():
        value = getattr(c, key)
        if value != KEYS[key].default and not there(c):
            warn_no_effect(
                f"{call}: config[{key!r}]={value!r}",
                f"it needs {needs}",
                means=KEYS[key].metadata["what"],
                fix="say that too, or leave it out",
            )


def warn_of_unused(call: str, c: TrainingConfig) -> None:
    """Warns of keys of `c` that the program recorded so far does not follow, with its model, loss
    and gradients."""
    recorder = current()
    if recorder is None:
        return
    builder = recorder.root.builder
    nodes = list(_all(builder.nodes))
    models = [r.remat for r in builder.reports if isinstance(r, GPTConfig)]
    again = models or [n.op == scan.name and n.attrs["policy"] != "save" for n in nodes]
    dtypes = {t.dtype for n in nodes for t in n.types}
    follows = {
        "mixed_precision": c.compute is None or c.compute in dtypes,
        "gradient_checkpointing": not c.remat or any(again),
        "dropout": not c.dropout or any(n.op == random_bits.name for n in nodes),
    }
    for key, done in follows.items():
        if not done:
            warn_no_effect(
                f"{call}: config[{key!r}]={getattr(c, key)!r}",
                "the model that was recorded does not follow it",
                means=KEYS[key].metadata["what"],
                fix=HOW[key],
            )


def _all(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yields `nodes` and those in the bodies of loops and branches."""
    for n in nodes:
        yield n
        for value in n.attrs.values():
            if isinstance(value, Graph):
                yield from _all(value.nodes)
