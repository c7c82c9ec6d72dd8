"""`tessera plan`: a script's step on a cluster that is not there."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent

import pytest
from typer.testing import CliRunner

from tessera.launch.cli import app

SCRIPT = """
    import sys
    import numpy as np
    import tessera as ts
    from tessera import dist, graph, nn, optim

    mesh = dist.Mesh(("dp", "tp"), shape={"dp": 32, "tp": 8})
    layouts = dist.strategy("zero_redundancy_optimizer", stage=3) + dist.strategy("tensor_parallel")
    config = nn.GPTConfig(vocab=512, seq=128, d=256, layers=2, heads=8, remat=True)
    model = dist.place(nn.GPT(config).to(ts.bf16), layouts, mesh)
    optimizer = optim.AdamW(1e-3)
    state = optimizer.init(model.parameters())


    @ts.jit
    def scaled(x):
        return x * 2


    @ts.jit(donate=("model", "state"))
    def train(model, state, ids):
        loss, weights = model.loss(ids, ids), model.parameters()
        grads = ts.grad(loss, weights, layout=layouts)
        weights, new = optimizer.update(weights, grads, state)
        model.load_parameters(weights)
        state.update(new)
        return loss


    if __name__ == "__main__":
        rows = int(sys.argv[1]) if sys.argv[1:] else 64
        ids = dist.place(np.zeros((rows, 128), np.int32), layouts, mesh, kind="batch")
        if "--scaled" in sys.argv:
            print("scaled is", scaled(np.ones(2, np.float32)).numpy().tolist())
        try:
            train(model, state, ids=ids)
            print("it ran")
        except Exception:
            print("it was caught")
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(dedent(SCRIPT))
    return str(path)


def run(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["plan", *map(str, words)])
    return done.exit_code, done.output


def test_a_script_is_planned_up_to_its_step(script: str, tmp_path: Path) -> None:
    to = {k: tmp_path / f"report.{k}" for k in ("html", "json", "trace")}
    files = [word for k, path in to.items() for word in (f"--{k}", path)]
    code, text = run(script, "--cluster", "h100x256", "--tokens", "1e12", "--price", "2.5", *files)
    assert code == 0, text
    assert "train on dp=32 tp=8: dgx_h100, 256 devices" in text
    assert "it ran" not in text and "it was caught" not in text
    found = json.loads(to["json"].read_text())
    assert found["tokens"] == 64 * 128 and found["devices"] == 256
    assert found["days"] == pytest.approx(1e12 / found["tokens_per_s"] / 86400)
    assert found["cost"] == pytest.approx(found["days"] * 24 * 256 * 2.5)
    assert found["memory"][0]["rows"]["weights"] > 0 and found["fits"]
    assert found["memory"][0]["rows"]["optimizer"] > found["memory"][0]["rows"]["weights"]
    # bf16 attention is that of a GPU, though there is none
    assert any("attention" in s["where"] for s in found["layers"])
    assert all(s["at"].startswith("train.py:") for s in found["collectives"] if s["at"])
    assert "</html>" in to["html"].read_text()
    assert json.loads(to["trace"].read_text())["traceEvents"]


def test_arguments_and_a_named_step(script: str, tmp_path: Path) -> None:
    to = tmp_path / "report.json"
    how = ("--cluster", "h100x256", "--json", to)
    code, text = run(script, *how, "--step", "train", "--", "128", "--scaled")
    assert code == 0 and "scaled is [2.0, 2.0]" in text
    assert json.loads(to.read_text())["tokens"] == 128 * 128
    code, text = run(script, *how, "--step-tokens", 99, "--", "128", "--scaled")
    assert code == 0 and json.loads(to.read_text())["name"] == "scaled"
    assert json.loads(to.read_text())["tokens"] == 99


def test_what_is_called_before_the_step_gives_nan(script: str, tmp_path: Path) -> None:
    more = """
        @ts.jit
        def validate(model, ids):
            return model.loss(ids, ids)

        print("the loss is", validate(model, ids).item())
    """
    text = Path(script).read_text()
    before = '    if "--scaled"'
    added = "".join(f"    {line}\n" for line in dedent(more).splitlines())
    Path(script).write_text(text.replace(before, added + before, 1))
    how = ("--cluster", "h100x256", "--step", "train")
    code, text = run(script, *how)
    assert code == 0 and "the loss is nan" in text and "train on dp=32" in text, text
    assert text.count("validate does not run; its results are NaN") == 1


def test_a_training_step(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(dedent("""
        import numpy as np
        from tessera import dist, graph, op

        mesh = dist.Mesh(("dp",), devices=64)
        layer = graph.stage("up")(lambda x: op.transformer_block(x, heads=4))

        @graph.training_step("net", strategy=dist.strategy("data_parallel"))
        def step(x):
            loss = (layer(x) ** 2).mean()
            return loss, graph.backward(loss)

        with mesh:
            step(np.ones((128, 16, 64), np.float32))
            raise SystemExit("it ran")
    """))  # fmt: skip
    code, text = run(path, "--cluster", "h100x64")
    assert code == 0 and "step on dp=64" in text and "weights" in text, text


MISTAKES = {
    "too small": (["--cluster", "h100x8"], "dgx_h100 has 8 devices, and the program is for 256"),
    "no chip": (["--cluster", "t3000"], "the machine t3000 has no chip"),
    "no cluster": ([], "no cluster is named"),
    "no such cluster": (["--cluster", "h900x8"], "dgx_h900"),
    "no such step": (["--cluster", "h100x256", "--step", "fit"], "it called train"),
    "no file": (["--cluster", "h100x256", "--html", "/proc/none/x.html"], "cannot be written"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(script: str, name: str) -> None:
    words, message = MISTAKES[name]
    code, text = run(script, *words)
    assert code == 2 and message in text


def test_a_script_without_a_step(tmp_path: Path) -> None:
    path = tmp_path / "empty.py"
    path.write_text("import tessera as ts\nts.ones((2,))\n")
    code, text = run(path, "--cluster", "h100x8")
    assert code == 2 and "empty.py ended without a call of a compiled step (compile" in text
    path.write_text("raise SystemExit(3)\n")
    code, text = run(path, "--cluster", "h100x8")
    assert code == 2 and "empty.py ended with 3 before a step" in text


BUILDER = """
    import sys
    import tessera as ts
    from tessera import dist, nn, optim

    rows = int(sys.argv[1]) if sys.argv[1:] else 64


    def build(mesh, strategy, *, remat):
        config = nn.GPTConfig(vocab=512, seq=128, d=256, layers=2, heads=8, remat=remat)
        model = dist.place(nn.GPT(config).to(ts.bf16), strategy, mesh)

        @ts.jit
        def step(model, ids):
            return ts.grad(model.loss(ids, ids), model.parameters(), layout=strategy)

        ids = dist.tensor((rows, 128), dtype=ts.int32)
        return step, (model, dist.place(ids, strategy, mesh, kind="batch"))


    if __name__ == "__main__":
        raise SystemExit("it trains")
"""


def test_search_of_a_script_with_a_builder(tmp_path: Path) -> None:
    path, out = tmp_path / "train.py", tmp_path / "found.json"
    path.write_text(dedent(BUILDER))
    asked = ["plan", str(path), "--cluster", "h100x8", "--search"]
    done = CliRunner().invoke(app, [*asked, "--json", str(out), "--", "32"])
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert found["rows"][0]["text"] in done.output and len(found["rows"]) == 10
    assert all(r["why"] in done.output and r["why"] for r in found["rows"][1:])
    sizes = [dict(r["candidate"]["axes"]) for r in found["rows"]]
    assert all(32 % s["dp"] == 0 and s["dp"] * s.get("tp", 1) == 8 for s in sizes)
    for more, said in (
        (["--step", "make"], "has no make to search with"),
        (["--price", "2"], "--search has no --price"),
    ):
        done = CliRunner().invoke(app, [*asked, *more])
        assert done.exit_code == 2 and said in done.output
