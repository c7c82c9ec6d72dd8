"""Generation against `transformers`: greedy texts token by token, filters, and draws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from typer.testing import CliRunner

import tessera as ts
from tessera import dist
from tessera.checkpoint import load_hf
from tessera.launch.cli import app
from tessera.train.generate import generate
from tessera.train.sampling import filtered, ranks_for, sample, uniform

TP2 = dist.Mesh(("tp",), shape={"tp": 2})
CORPUS = ["the cat sat on the mat", "the dog ran to the cat", "a dog and a cat sat"] * 4
SIZES = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 64}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights, a tokenizer of words and bytes, and an end of texts."""
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, eos_token_id=7, bos_token_id=1, pad_token_id=0)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():  # larger weights: the likeliest tokens differ
        for p in model.parameters():
            p.mul_(8.0) if p.ndim == 2 else p
    model.save_pretrained(path)
    engine = tokenizers.Tokenizer(tokenizers.models.BPE())
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    engine.train_from_iterator(CORPUS, tokenizers.trainers.BpeTrainer(
        vocab_size=300, show_progress=False,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())))  # fmt: skip
    engine.save(str(path / "tokenizer.json"))
    return path


def theirs(folder: Path, prompts: list[list[int]], tokens: int, **how: Any) -> list[list[int]]:
    """The texts of transformers, padded on the left, without the padding and the end."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, **how)
    texts = []
    for row, p in zip(out.tolist(), prompts, strict=True):
        new = row[longest:]
        texts.append(p + new[: new.index(7) if 7 in new else None])
    return texts


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_texts_are_those_of_transformers(folder: Path, split: bool, penalty: float) -> None:
    draw = np.random.default_rng(0)
    prompts = [draw.integers(8, 300, n).tolist() for n in (3, 11, 1, 7)]
    mesh, plan = (TP2, "tensor_parallel") if split else (None, None)
    want = theirs(folder, prompts, 20, repetition_penalty=penalty)
    got = generate(load_hf(folder, mesh, plan), prompts, 20, temperature=0.0, stop=7, mesh=mesh,
                   repetition=penalty)  # fmt: skip
    assert got == want
    assert len({t for text in want for t in text}) > 12


FILTERS = [
    {}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2},
    {"temperature": 1.4, "top_k": 30, "top_p": 0.9, "min_p": 0.05}, {"top_p": 0.0001},
]  # fmt: skip


@pytest.mark.parametrize("how", FILTERS, ids=str)
def test_filtered_probabilities_are_those_of_transformers(how: dict[str, Any]) -> None:
    logits = np.random.default_rng(1).normal(0, 2.0, (40, 64)).astype(np.float32)
    p = transformers.generation.logits_process
    given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **how}
    scores = torch.tensor(logits) / given["temperature"]
    for name, kind in (("top_k", p.TopKLogitsWarper), ("top_p", p.TopPLogitsWarper),
                       ("min_p", p.MinPLogitsWarper)):  # fmt: skip
        if name in how:
            scores = kind(how[name])(None, scores)
    want = torch.softmax(scores, -1).numpy()
    weights, ids = (
        t.numpy()
        for t in filtered(ts.tensor(logits), *given.values(), ts.tensor(ranks_for(given["top_k"])))
    )
    got = np.zeros_like(want)
    assert ids.shape == (40, {0: 64, 5: 8, 30: 32}[given["top_k"]])
    np.put_along_axis(got, ids, weights / weights.sum(-1, keepdims=True), 1)
    np.testing.assert_array_equal(got > 0, want > 0)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_without_a_largest_logit_gives_no_token(value: float, temperature: float) -> None:
    rows = np.zeros((2, 3), np.float32)
    rows[1] = value
    ids = sample(rows, [0.5, 0.5], temperature=temperature).numpy()
    assert ids[0] in range(3) and ids[1] == -1


def test_draws_have_the_probabilities() -> None:
    """Pearson's chi-square of 20,000 draws, below its 99.9 % quantile for 11 degrees of freedom."""
    logits = np.random.default_rng(2).normal(0, 1.0, 12).astype(np.float32)
    want = np.exp(logits) / np.exp(logits).sum() * 20_000
    ids = sample(np.tile(logits, (20_000, 1)), uniform([5], 20_000)[0]).numpy()
    chi = ((np.bincount(ids, minlength=12) - want) ** 2 / want).sum()
    assert 1.0 < chi < 31.3


def test_texts_of_many_seeds_follow_the_model(folder: Path) -> None:
    """The first new token of 3,000 texts, against the model's own probabilities."""
    model, prompt = load_hf(folder), [9, 40, 3]
    texts = generate(model, [prompt] * 3000, 1, temperature=1.0, top_k=8, seed=11)
    logits = ts.jit(lambda m, ids: m(ids))(model, ts.tensor([prompt])).numpy()[0, -1]
    top = np.argsort(-logits)[:8]
    want = np.exp(logits[top] - logits[top[0]])
    want = want / want.sum() * 3000
    counts = np.array([sum(t[-1] == i for t in texts) for i in top])
    assert counts.sum() == 3000
    large = want > 5
    chi = ((counts - want) ** 2 / want)[large].sum()
    assert large.sum() > 1 and chi < 24.3  # 99.9 % for 7 degrees of freedom


# -- text, and the command -------------------------------------------------------------------------
def test_text_is_that_of_transformers(folder: Path) -> None:
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    texts = ["the cat", "a dog and"]
    want = [
        t + tokenizer.decode(ids[len(tokenizer.encode(t)):])
        for t, ids in zip(texts, theirs(folder, [tokenizer.encode(t) for t in texts], 12),
                          strict=True)
    ]  # fmt: skip
    got = generate(load_hf(folder), texts, 12, temperature=0.0, stop=7, tokenizer=tokenizer)
    assert got == want


def test_the_command_continues_texts(folder: Path) -> None:
    engine = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = ["the cat", "a dog and"]
    want = generate(load_hf(folder), texts, 12, temperature=0.0, stop=7, tokenizer=engine)
    options = ["--tokens", "12", "--temperature", "0", "--mesh", "tp=2"]
    run = CliRunner().invoke(app, ["generate", str(folder), *texts, *options])
    assert (run.exit_code, run.stdout) == (0, "\n".join(want) + "\n")
    run = CliRunner().invoke(app, ["generate", str(folder), texts[0], *options])
    assert (run.exit_code, run.stdout) == (0, want[0] + "\n")
    run = CliRunner().invoke(app, ["generate", str(folder), texts[0], *options, "--json"])
    assert json.loads(run.stdout) == [{"prompt": texts[0], "text": want[0]}]
    run = CliRunner().invoke(app, ["generate", str(folder), *options], input="\n".join(texts))
    assert run.stdout == "\n".join(want) + "\n"


def test_mistakes_at_the_command_are_one_line(folder: Path, tmp_path: Path) -> None:
    for words, says in (
        ([str(tmp_path), "x"], "tokenizer.json"),
        ([str(folder), "x", "--mesh", "tp=3000"], "3000 devices"),
        ([str(folder), "x", "--top-p", "2"], "top_p cannot be 2"),
        ([str(folder), ""], "has no token"),
        ([str(folder), "x", "--dtype", "f99"], "f99"),
    ):
        run = CliRunner().invoke(app, ["generate", *words])
        assert run.exit_code == 2, run.output
        assert says in run.output and len(run.output.strip().splitlines()) <= 2
