"""Do old public names still work, with a warning that says the new one at the user's line?"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tessera as ts
from tessera import dist, nn, optim
from tessera.checkpoint import load_hf
from tessera.core.context import settings
from tessera.core.layout import parse_type
from tessera.core.options import ProgramOptions
from tessera.core.renamed import RENAMED
from tessera.nn.conv_layers import OLD_NAMES
from tessera.observe.nan_origin import Found
from tests.core.numpy_engine import Oracle

PAGE = Path(__file__).parents[2] / "docs" / "renamed.md"
ROWS = re.findall(r"^\| `(.+?)`.*? \| `(.+?)` \|", PAGE.read_text(), re.M)
HERE = {"ts": ts} | {name: getattr(ts, name) for name in ts.__all__} | {"Found": Found}


def within(context: Any) -> ProgramOptions:
    with context:
        return settings().program


def from_here_on(**choice: Any) -> ProgramOptions:
    """The options that `dist.set_deterministic(**choice)` leaves."""
    with dist.deterministic():
        dist.set_deterministic(**choice)
        return settings().program


def gradient(who: Callable[..., Any]) -> Callable[[dict[str, Any]], str]:
    """The text of what `who` records as the gradient of a weight on two devices."""

    def text(name: dict[str, Any]) -> str:
        return ts.graph.trace(
            lambda w, x: who(ts.sum(x @ w), w, **name), W, X, reduce_partial=False
        ).text

    return text


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(ts.TesseraError) as caught:
        call()
    if "are the same argument" in str(caught.value):
        raise caught.value
    return str(caught.value).splitlines()[0]


def shapes(layer: nn.Module) -> list[tuple[int, ...]]:
    return [p.shape for p in layer.parameters().values()]


MESH = dist.Mesh(("dp",), shape={"dp": 2})
W = parse_type("f32[4, 3]", MESH)
X = parse_type("f32[8@dp, 4]", MESH)
# A call under each argument's name, and what can be compared of it.
CALLS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "dist.deterministic(promise=)": lambda name: within(dist.deterministic(**name)),
    "dist.set_deterministic(promise=)": lambda name: from_here_on(**name),
    "ts.grad(finish=)": gradient(ts.grad),
    "op.autodiff(finish=)": gradient(ts.op.autodiff),
    "schedule.ScheduleOptions(cut=)": lambda name: ts.schedule.ScheduleOptions(**name),
    "graph.backward(finish=)": gradient(ts.graph.backward),
    "graph.trace(finish=)": lambda name: ts.graph.trace(ts.sum, X, **name).text,
    "nn.Linear(inputs=)": lambda name: shapes(nn.Linear(out_features=3, **name)),
    "nn.Linear(outputs=)": lambda name: shapes(nn.Linear(3, **name)),
    "ts.jit(finish=)": lambda name: ts.jit(**name)(ts.sum).reduce_partial,
}
for conv in (nn.Conv1d, nn.Conv2d):
    given = {"inputs": 2, "outputs": 2, "kernel": 2}
    for old in OLD_NAMES:
        others = {OLD_NAMES[k]: v for k, v in given.items() if k != old}
        CALLS[f"nn.{conv.__name__}({old}=)"] = lambda name, make=conv, others=others: (  # type: ignore[misc]
            shapes(make(**others, **name))
        )
for dims, pools in ((1, (nn.max_pool1d, nn.avg_pool1d)), (2, (nn.max_pool2d, nn.avg_pool2d))):
    for pool in pools:
        CALLS[f"nn.{pool.__name__}(size=)"] = lambda name, pool=pool, dims=dims: (  # type: ignore[misc]
            pool(ts.ones((1, 1, *[4] * dims)), **name).shape
        )
CALLS |= {
    "dist.place(plan=)": lambda name: (
        dist.place({"w": ts.ones((4, 3))}, mesh=MESH, **name)["w"].type
    ),
    "optim.Optimizer.init(plan=)": lambda name: (
        optim.AdamW(0.1).init({"w": dist.tensor((4, 3), mesh=MESH)}, **name)["m"]["w"].type
    ),
    "checkpoint.load_hf(plan=)": lambda name: refused(lambda: load_hf("nowhere", **name)),
}
SCALES = {
    "initial": 8.0,
    "growth": 4.0,
    "backoff": 0.25,
    "interval": 5,
    "least": 2.0,
    "most": 2.0**20,
}
for old in SCALES:
    CALLS[f"optim.LossScale({old}=)"] = lambda name: optim.LossScale(**name)
VALUES: dict[str, Any] = {
    "promise": "run_to_run", "finish": False, "op.autodiff(finish=)": True, "cut": 2,
    "inputs": 4, "outputs": 4, "kernel": 3, "size": 2,
    "plan": dist.strategy("zero_redundancy_optimizer", stage=3),
} | SCALES  # fmt: skip


def test_the_page_has_every_renamed_name() -> None:
    assert dict(ROWS) == RENAMED


@pytest.mark.parametrize(("old", "new"), [p for p in RENAMED.items() if "(" not in p[0]])
def test_an_old_name_is_the_new_thing(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"^{re.escape(f'{old} is called {new} now')}") as w:
        found = eval(old, dict(HERE))
    assert found is eval(new, dict(HERE)) and w[0].filename == "<string>"


@pytest.mark.parametrize("old", [k for k in RENAMED if "(" in k])
def test_an_old_argument_is_the_new_one(old: str, oracle: Oracle) -> None:
    name, new = re.search(r"\((\w+)=", old)[1], RENAMED[old].rstrip("=")  # type: ignore[index]
    value = VALUES.get(old, VALUES.get(name))
    with pytest.warns(DeprecationWarning, match=re.escape(f"{old} is called {new}= now")) as w:
        got = CALLS[old]({name: value})
    assert w[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert got == CALLS[old]({new: value})
        with pytest.raises((AssertionError, TypeError)):  # the argument decides something
            assert got == CALLS[old]({})
    with pytest.raises(ts.UsageError, match=f"{name}= and {new}= are the same argument"):
        CALLS[old]({name: value, new: value})


def test_other_names_do_not_exist() -> None:
    with pytest.raises(AttributeError, match="module 'tessera' has no attribute 'anything'"):
        ts.anything  # type: ignore[attr-defined]  # noqa: B018
