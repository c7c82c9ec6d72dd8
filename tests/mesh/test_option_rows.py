"""Rows of the option table that need devices or files.

`tests/core/options_with_devices.txt` lists them; `tests/core/test_option_table.py` has the others.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import checkpoint, dist, elastic, nn, random, schedule
from tessera.runtime import program_cache
from tests.core.option_rows import Row, seen

ROWS: dict[str, Row] = {}
LISTED = Path(__file__).parents[1] / "core" / "options_with_devices.txt"
TP = dist.Mesh(("tp",), shape={"tp": 4})
SMALL = nn.GPTConfig(
    vocab=16, seq=8, d=8, layers=1, heads=2, norm="rms", activation="swiglu", positions="rotary",
    biases=("qkv", "out"),
)  # fmt: skip


def row(name: str, run: Callable[..., Any], given: Any = None, /, **changes: Any) -> None:
    ROWS[name] = Row(run, changes, given or {})


def in_folder(run: Callable[..., Any]) -> Callable[..., Any]:
    """Calls `run` with a new folder as its first argument; returns its result or its error."""

    def call(**k: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            try:
                return run(Path(folder), **k)
            except ts.TesseraError as error:
                return str(error).replace(folder, "")

    return call


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if p.is_file() and "bin" not in p.suffix)


# -- models of others ------------------------------------------------------------------------------
def of_jax(params: Any, *args: Any, rngs: Any = None) -> Any:
    """A function of JAX with weights, perhaps state, and perhaps random numbers."""
    import jax

    y = args[-1] * params + (jax.random.normal(rngs["a"], (2,)) if rngs else 0)
    return y if len(args) == 1 else (y, args[0] + 1)


def jax_model(**k: Any) -> Any:
    try:
        model = ts.from_jax_model(of_jax, **k)
        ts.seed(0)
        return model(np.ones(2, np.float32)).numpy(), list(model.state_dict())
    except ts.TesseraError as error:
        return str(error)


ARRAY = np.ones(2, np.float32)
row("tessera.from_jax_model", jax_model, {"params": ARRAY}, params=2 * ARRAY, state=ARRAY,
    rngs=("a",))  # fmt: skip


def gpt() -> nn.GPT:
    ts.seed(0)
    return nn.GPT(SMALL)


def hf_saved(folder: Path, **k: Any) -> Any:
    checkpoint.save_hf(gpt(), folder / "out", **k)
    return files(folder), "qwen2" in (folder / "out" / "config.json").read_text()


def hf_loaded(folder: Path, **k: Any) -> Any:
    checkpoint.save_hf(gpt(), folder / "out")
    model = checkpoint.load_hf(folder / "out", **k)
    return [(n, str(w.type), w.mesh) for n, w in model.parameters().items()]


row("tessera.checkpoint.save_hf", in_folder(hf_saved), architecture="gpt2", shard_bytes=1000)
row("tessera.checkpoint.load_hf", in_folder(hf_loaded), {"mesh": TP},
    mesh=dist.Mesh(("tp",), shape={"tp": 2}), dtype="bf16",
    strategy=dist.strategy("tensor_parallel"))  # fmt: skip


def of_torch(args: Any = (), **k: Any) -> Any:
    import torch

    class Scaled(torch.nn.Module):
        def forward(self, x: Any, by: float = 1.0) -> Any:
            return x * by

    def told(use: Callable[[], Any]) -> Any:
        try:
            return use()
        except ts.TesseraError as error:
            return str(error)

    model = told(lambda: ts.from_torch(Scaled(), args or (torch.ones(2, 3),), **k))
    if isinstance(model, str):
        return model
    return [told(lambda s=s: model(np.ones(s, np.float32))) for s in ((2, 3), (4, 3))]


def torch_changes() -> dict[str, Any]:
    import torch

    return {
        "args": (torch.ones(4, 3),), "kwargs": {"by": 2.0},
        "dynamic_shapes": {"x": {0: torch.export.Dim("rows", min=2, max=8)}},
    }  # fmt: skip


row("tessera.from_torch", of_torch, **torch_changes())

# -- checkpoints -----------------------------------------------------------------------------------
W = {"w": ts.tensor(np.arange(8, dtype=np.float32)), "v": ts.tensor(np.ones(4, np.float32))}
MORE = {"m": ts.tensor(np.ones(4, np.float32))}


def after(folder: Path, **k: Any) -> Any:
    root = folder / k.pop("root", "here")
    for i in range(2):
        checkpoint.save(f"s{i}", W, root=root, **{"quiet": True, **k})
    checkpoint.wait()
    back = checkpoint.load(root=root)
    there = sorted(str(p.relative_to(folder)) for p in folder.glob("*/*"))
    found = back.step, back.metrics, back.state, sorted(back.optimizer or ())
    return there, files(folder), found, str(back.manifest.mesh)


row("tessera.checkpoint.save", in_folder(after), atomic=False, keep=1, mesh=TP,
    metrics={"loss": 2.0}, optimizer=MORE, root="there", state={"a": 1}, step=7)  # fmt: skip


def kept(**k: Any) -> Any:
    """The names of the checkpoints, of six, that `Keep` retains."""

    def run(folder: Path) -> Any:
        for i, loss in enumerate((3.0, 1.0, 9.0, 4.0, 5.0, 6.0)):
            metrics = {"loss": loss, "other": -loss}
            checkpoint.save(
                f"s{i}", W, root=folder, keep=checkpoint.Keep(**k), step=i, metrics=metrics,
                quiet=True, async_io=False,
            )  # fmt: skip
        return sorted(p.name for p in folder.iterdir() if p.is_dir())

    return in_folder(run)()


row("tessera.checkpoint.Keep", kept, {"best": 1}, last=2, every=2, best=2, metric="other",
    largest=True)  # fmt: skip


def two(folder: Path) -> None:
    """Saves three checkpoints: two in `a`, one in `b`."""
    for root, tag, scale in (("a", "s0", 1.0), ("a", "s1", 2.0), ("b", "s2", 3.0)):
        random.seed(int(scale))
        tensors = {n: t * scale for n, t in W.items()}
        tensors |= MORE if tag == "s0" else {}
        checkpoint.save(tag, tensors, MORE, root=folder / root, quiet=True, async_io=False)
    random.seed(9)


def of_two(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls `call` on the checkpoints of `root`, and gives the result and
    the state of the random generator."""

    def run(folder: Path, **k: Any) -> Any:
        two(folder)
        made = call(folder, **{**k, "root": folder / k.get("root", "a")})
        return made, str(random.state())

    return in_folder(run)


def loaded(folder: Path, **k: Any) -> Any:
    made = checkpoint.load(**k)
    return seen(made.tensors), seen(made.optimizer)


def exported(folder: Path, **k: Any) -> Any:
    count = checkpoint.export(folder / "out.npz", **k)
    return count, {n: x.tolist() for n, x in np.load(folder / "out.npz").items()}


BF16 = {n: t.to(ts.bf16) for n, t in W.items()}
row("tessera.checkpoint.load", of_two(loaded), tag="s0", root="b", only="w", dtype="bf16",
    restore_random=False, tensors=BF16, optimizer={"m": MORE["m"].to(ts.bf16)})  # fmt: skip
row("tessera.checkpoint.export", of_two(exported), tag="s0", root="b", only="w")
row("tessera.checkpoint.latest", of_two(lambda folder, **k: checkpoint.latest(**k)), root="b")
row("tessera.checkpoint.verify", of_two(lambda folder, **k: checkpoint.verify(**k)), tag="s0",
    root="none")  # fmt: skip
row("tessera.checkpoint.prune", of_two(lambda folder, **k: checkpoint.prune(1, **k)), root="b")


# -- programs --------------------------------------------------------------------------------------
def own_gradient(**k: Any) -> Any:
    made = ts.op(index="b d -> b", **k)(lambda x: x.sum(1))
    x = ts.tensor(np.ones((2, 3), np.float32))
    return ts.grad(made(x).sum(), x)


row("tessera.op.from_jax", own_gradient, grad=lambda g, x: g[:, None] * x * 5.0)


def limited(**k: Any) -> Any:
    """The cache limits after a call; tests/mesh/test_endures.py tests that they are kept."""
    book = program_cache.BOOK
    before = book.most_maps, book.most_bytes
    ts.set_program_cache(**k)
    found = book.most_maps, book.most_bytes
    ts.set_program_cache(maps=before[0], bytes=before[1])
    return found


def timed(**k: Any) -> Any:
    """(the number of candidates that a call has timed, its choices); tests/mesh/test_tuner.py tests
    which one is taken."""
    run = schedule(**k)(lambda x: x @ x)
    run(np.ones((2, 2), np.float32))
    return len(run.timings), run.choices.choices


row("schedule", timed, choices={"instruction_order": "least_memory"}, tune=True)


row("tessera.set_program_cache", limited, maps=20000, bytes=1 << 34)


def profiled(**k: Any) -> Any:
    """The number of runs of a function under a profile, or the type of a profile as a context."""
    count: list[int] = []
    add = ts.jit(lambda x: x + 1.0)

    def step() -> None:
        count.append(1)
        add(np.ones(4, np.float32))

    if "fn" not in k:
        with dist.profile() as p:
            step()
        return type(p).__name__
    dist.profile(step, **({"runs": k["runs"]} if "runs" in k else {}))
    return len(count)


row("tessera.dist.profile", profiled, fn=True)
row("tessera.dist.profile of runs", profiled, {"fn": True}, runs=1)


def validated(**k: Any) -> str:
    x = ts.tensor(np.ones((8, 4), np.float32), mesh=TP, layout="[8@tp, 4]")
    return str(dist.validate_determinism(lambda x: x.sum(), x, **k))


row("tessera.dist.validate_determinism", validated, onto=2)


def on_devices(**k: Any) -> list[tuple[int, int]]:
    """The number of devices of each step if one is lost in the second and then restored."""
    x, made, lose = ts.tensor(np.ones(4, np.float32), mesh=TP), [], True
    state = {"x": x}
    of_loop = {"mesh": k.pop("mesh")} if "mesh" in k else {}
    with dist.elastic(**k):
        for step in elastic.steps(state, 3, **of_loop):
            with step as i:
                made.append((i, step.mesh.physical.size))
                state["x"] = state["x"] + 1
                if i == 1 and lose:
                    lose = False
                    elastic.drop(0)
                elif i == 1:
                    elastic.restore(0)
    return made


row("tessera.dist.elastic", on_devices, rejoin=False, safe_point=2)
row("tessera.elastic.steps", on_devices, mesh=TP.fold(onto=2))


# -- the table -------------------------------------------------------------------------------------
def test_the_list_has_these_rows() -> None:
    lines = (x.split(":") for x in LISTED.read_text().splitlines())
    listed = {name: {*options.split()} for name, options in lines}
    have: dict[str, set[str]] = {}
    for name, each in ROWS.items():
        have.setdefault(name.partition(" ")[0], set()).update(each.changes)
    assert have == listed


@pytest.mark.parametrize("name", ROWS)
def test_each_option_changes_what_is_seen(name: str) -> None:
    each = ROWS[name]
    plain = seen(each.run(**each.given))
    assert plain == seen(each.run(**each.given)), "two calls with the same options differ"
    same = [k for k, v in each.changes.items() if seen(each.run(**{**each.given, k: v})) == plain]
    assert not same, "these options change nothing"
