"""`tessera train`: a known and an imported config on text, a kill, and what transformers loads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import tessera as ts
from tessera.interop import save_hf
from tessera.launch.cli import app
from tessera.train.metrics import read_metrics

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

VOCAB = 300
LLAMA = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 32, "rms_norm_eps": 1e-6, "dtype": "bfloat16",
}  # fmt: skip
NEO = {
    "model_type": "gpt_neo", "vocab_size": VOCAB, "hidden_size": 32, "num_layers": 2,
    "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8,
    "max_position_embeddings": 32, "embed_dropout": 0.1,
}  # fmt: skip
SIZES = ["--batch", "8", "--seq", "16", "--lr", "1e-2"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts and configs."""
    root = tmp_path_factory.mktemp("train")
    (root / "texts").mkdir()
    for i in range(4):
        lines = (f"{j} times {i} is {i * j}, and not {i + j}.\n" for j in range(40))
        (root / "texts" / f"{i}.txt").write_text("".join(lines))
    for name, config in (("llama", LLAMA), ("neo", NEO)):
        (root / f"{name}.json").write_text(json.dumps(config))
    return root


def words(root: Path, hf: str, out: str, *more: str, data: str = "texts") -> list[str]:
    told = ["train", "--hf", str(root / hf), "--data", str(root / data), "--out", str(root / out)]
    return [*told, *SIZES, *more]


def run(*args: Any, **kwargs: Any) -> str:
    done = CliRunner().invoke(app, words(*args, **kwargs))
    assert done.exit_code == 0, done.output
    return done.output


def of_transformers(folder: Path) -> tuple[Any, Any]:
    """(the model, ids of a text by the saved tokenizer)."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(folder)
    assert model.config.eos_token_id == tokens.eos_token_id
    return model, tokens("3 times 2 is 6", return_tensors="pt")["input_ids"]


def test_a_known_config_is_planned_trained_and_saved(root: Path) -> None:
    command = "--steps", "12", "--mesh", "auto", "--machine", "h100x8"
    said = run(root, "llama.json", "known", *command)
    assert "best of" in said and "llama as nn.GPT" in said and "parameters in" in said
    plan = json.loads((root / "known" / "plan.json").read_text())
    assert np.prod([n for _, n in plan["candidate"]["axes"]]) == 8
    losses = [r["loss"] for r in read_metrics(root / "known" / "metrics.jsonl")]
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.3
    peer, ids = of_transformers(root / "known" / "hf")
    ours = ts.checkpoint.load_hf(root / "known" / "hf")
    got = ours(ts.tensor(ids.numpy().astype(np.int32))).numpy()
    np.testing.assert_allclose(got, peer(ids).logits.detach().numpy(), atol=1e-4)
    again = run(root, "llama.json", "known", *command)
    assert "all 12 steps were made before" in again and "measuring" not in again
    # A save that was killed after its weights, before its config and the tokenizer.
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (root / "known" / "hf" / file).unlink()
    run(root, "llama.json", "known", *command)
    assert of_transformers(root / "known" / "hf")[1].tolist() == ids.tolist()
    # Its weights and tokenizer go on: with text, and with tokens.
    for name, data in (("more", "texts"), ("tokens", "known/text/tokens.npy")):
        said = run(root, "known/hf", name, "--steps", "2", "--mesh", "dp=2", "--json", data=data)
        assert json.loads(said.splitlines()[-1])["mesh"] == {"dp": 2}
        first = next(iter(read_metrics(root / name / "metrics.jsonl")))
        assert first["loss"] < losses[0] - 0.3
        assert (root / name / "hf" / "tokenizer.json").is_file()


def test_an_imported_config_is_killed_and_goes_on(root: Path) -> None:
    command = "--steps", "120", "--save-every", "8", "--mesh", "dp=2,tp=2", "--zero", "1"
    env = {**os.environ, "TESSERA_DEVICES": "4"}

    def started(out: str) -> subprocess.Popen[str]:
        line = [sys.executable, "-m", "tessera", *words(root, "neo.json", out, *command)]
        return subprocess.Popen(line, env=env, stdout=subprocess.PIPE, text=True)

    with started("whole") as whole, started("cut") as cut:
        try:
            end = time.monotonic() + 400
            while not (root / "cut" / "checkpoints" / "step-00000016").exists():
                assert time.monotonic() < end and cut.poll() is None
                time.sleep(0.005)
            cut.kill()
            assert cut.wait(20) == -signal.SIGKILL and not (root / "cut" / "hf").exists()
            assert "120/120" in whole.communicate(timeout=400)[0]
        finally:
            whole.kill()
            cut.kill()
    with started("cut") as resumed:
        assert "it goes on after step" in resumed.communicate(timeout=400)[0]
    one, other = ((root / n / "hf" / "model.safetensors").read_bytes() for n in ("whole", "cut"))
    assert one == other
    assert len(list(read_metrics(root / "cut" / "metrics.jsonl"))) == 120
    peer, ids = of_transformers(root / "whole" / "hf")
    call = {"input_ids": ids, "use_cache": False}
    ours = ts.from_torch(transformers.AutoModelForCausalLM.from_config(peer.config), (), call)
    ours.load_state_dict(peer.state_dict())
    got = ours.eval()(**call).logits.numpy()
    np.testing.assert_allclose(got, peer(ids).logits.detach().numpy(), atol=1e-4)
    wrong = CliRunner().invoke(app, words(root, "neo.json", "cut", "--mesh", "dp=4"))
    assert wrong.exit_code == 2 and "had other options: --mesh dp=2,tp=2" in wrong.output


ERRORS = {
    "--mesh: axis 'pp' is not known": ("llama.json", "--mesh", "pp=2"),
    "--zero has no effect": ("llama.json", "--zero", "1"),
    "--machine has no effect": ("llama.json", "--mesh", "dp=2", "--machine", "h100x8"),
    "holds files that are not of a run": ("llama.json", "--mesh", "dp=2", "--out", "texts"),
    "is a file, or": ("llama.json", "--mesh", "dp=2", "--out", "llama.json"),
    "tokenizer.json' is no tokenizer": ("spoilt", "--mesh", "dp=2"),
    "--seq cannot be 64": ("llama.json", "--mesh", "dp=2", "--seq", "64"),
    "transformers makes no causal language model": ("odd.json", "--mesh", "dp=2"),
    "the data have token 500, the model knows 300": (
        "llama.json", "--mesh", "dp=2", "--data", "odd.npy",
    ),
}  # fmt: skip


@pytest.mark.parametrize("said", ERRORS)
def test_errors_are_one_line(root: Path, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    (root / "odd.json").write_text('{"model_type": "t5", "vocab_size": 300}')
    (root / "spoilt").mkdir(exist_ok=True)
    (root / "spoilt" / "config.json").write_text(json.dumps(LLAMA))
    (root / "spoilt" / "tokenizer.json").write_text("{")
    np.save(root / "odd.npy", np.full(400, 500, np.uint16))
    hf, *more = ERRORS[said]
    done = CliRunner().invoke(app, words(root, hf, f"wrong {abs(hash(said))}", *more))
    assert done.exit_code == 2, done.output
    assert said in done.output and done.output.count("\n") == 1, done.output


def test_torch_is_named_where_it_is_missing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    done = CliRunner().invoke(app, words(root, "neo.json", "without", "--mesh", "dp=2"))
    assert done.exit_code == 2 and "pip install 'tessera-spmd[train]'" in done.output


@pytest.mark.parametrize("is_tied", [True, False])
def test_an_imported_model_is_saved_as_transformers_saves_it(tmp_path: Path, is_tied: bool) -> None:
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, intermediate_size=64, tie_word_embeddings=is_tied,
    )  # fmt: skip
    peer = transformers.Qwen3ForCausalLM(config).eval()
    ids = torch.arange(16).reshape(2, 8)
    model = ts.from_torch(peer, (), {"input_ids": ids, "use_cache": False})
    save_hf(model, tmp_path / "ours", shard_bytes=20_000)
    back, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(info.values()) and type(back) is type(peer)
    torch.testing.assert_close(back.eval()(ids).logits, peer(ids).logits, rtol=0, atol=0)
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    assert ("lm_head.weight" in index["weight_map"]) is not is_tied
    with pytest.raises(ts.UsageError, match="is written as 'qwen3' alone"):
        save_hf(model, tmp_path / "other", "llama")
    plain = ts.from_torch(torch.nn.Linear(2, 2), (torch.zeros(1, 2),))
    with pytest.raises(ts.UsageError, match="Linear is no model of transformers"):
        save_hf(plain, tmp_path / "plain")
