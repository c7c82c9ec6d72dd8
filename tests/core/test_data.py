"""The demo's data: reproducible batches, clean splits, and metrics."""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.core.errors import UsageError
from tessera.data import bigram, tokenizer
from tessera.data.corpus import collect
from tessera.data.tokens import TokenBatches, open_tokens, write_tokens


def first_line(caught: pytest.ExceptionInfo[UsageError]) -> str:
    return str(caught.value).splitlines()[0]


# ---- corpus ------------------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    for i in range(40):
        path = root / f"part{i % 3}" / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"document {i}\n" * 20)
    (root / "blob.bin").write_bytes(b"\xff\xfe\x00 not text")
    (root / "zero.txt").write_bytes(b"a\0b")
    (root / "empty.txt").write_text("")
    (root / ".git").mkdir()
    (root / ".git" / "config").write_text("hidden")
    return root


def test_a_folder_is_split_by_file_and_the_same_each_time(folder: Path) -> None:
    corpus = collect(folder, val_fraction=0.2)
    train, val = ({d.name for d in part} for part in (corpus.train, corpus.val))
    assert not train & val
    assert train | val == {f"part{i % 3}/{i}.txt" for i in range(40)}
    assert 0.2 <= corpus.val_bytes / (corpus.val_bytes + corpus.train_bytes) < 0.25
    assert corpus == collect(folder, val_fraction=0.2)


def test_one_more_file_keeps_the_order_of_the_others(folder: Path) -> None:
    before = collect(folder)
    (folder / "new.txt").write_text("new\n")
    after = collect(folder)
    names = [d.name for d in (*before.val, *before.train)]
    assert [d.name for d in (*after.val, *after.train) if d.name != "new.txt"] == names


def test_the_size_is_a_cap(folder: Path) -> None:
    corpus = collect(folder, max_mb=0.003)
    assert corpus.train_bytes + corpus.val_bytes <= 3000
    assert corpus.train_bytes + corpus.val_bytes > 2500


def test_a_large_file_does_not_become_the_validation_text(folder: Path) -> None:
    for i in range(3):
        (folder / f"large{i}.txt").write_text("x" * 5000)
    assert not any("large" in d.name for d in collect(folder, val_fraction=0.5).val)


def test_two_large_files_are_one_each(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text(name * 100)
    corpus = collect(tmp_path)
    assert len(corpus.train) == len(corpus.val) == 1


def test_a_lone_file_is_cut_at_a_line(tmp_path: Path) -> None:
    path = tmp_path / "only.txt"
    path.write_text("".join(f"line {i}\n" for i in range(100)))
    corpus = collect(path, val_fraction=0.1)
    head, tail = corpus.train[0].text, corpus.val[0].text
    assert head + tail == path.read_text()
    assert head.endswith("\n")
    assert tail.startswith("line 9")
    path.write_text("no line end at all " * 10)
    assert collect(path).val_bytes > 0


def test_the_standard_library_is_the_default() -> None:
    corpus = collect(max_mb=0.5)
    names = [d.name for d in (*corpus.train, *corpus.val)]
    assert len(names) > 10
    assert all(name.endswith(".py") for name in names)
    assert not any("site-packages" in name or "/test/" in name for name in names)
    assert corpus.name == "Python standard library"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda p: collect(p / "absent"), "corpus: '{p}/absent' does not exist"),
        (lambda p: collect(p), "corpus: no text under '{p}' fits into 16 MB"),
        (lambda p: collect(val_fraction=1.0), "corpus: val_fraction cannot be 1.0"),
    ],
)
def test_bad_corpora(tmp_path: Path, call: object, text: str) -> None:
    assert callable(call)
    with pytest.raises(UsageError) as caught:
        call(tmp_path)
    assert first_line(caught) == text.format(p=tmp_path)


def test_a_corpus_of_one_byte(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    with pytest.raises(UsageError) as caught:
        collect(tmp_path)
    assert first_line(caught) == (
        "corpus: 'a' is too short to be cut into training and validation text"
    )


# ---- tokenizer ---------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [d.text for d in collect(max_mb=0.3).train]


@pytest.fixture(scope="module")
def tok(texts: list[str]) -> tokenizer.Tokenizer:
    return tokenizer.train(texts, vocab=512)


@given(text=st.text(max_size=60))
def test_any_text_comes_back_and_is_counted_in_bytes(tok: tokenizer.Tokenizer, text: str) -> None:
    ids = tok.encode(text)
    assert ids.dtype == np.uint16
    assert tok.decode(ids) == text
    assert tok.token_bytes[ids].sum() == len(text.encode())


def test_documents_are_closed_by_an_end(tok: tokenizer.Tokenizer) -> None:
    ids = tok.encode_documents(["one", "two <|end|>"])
    assert (ids == tok.end).sum() == 2
    assert ids[-1] == tok.end
    assert tok.decode(ids) == "onetwo <|end|>"
    assert tok.encode_documents([]).size == 0


def test_merges_shorten_the_text(tok: tokenizer.Tokenizer, texts: list[str]) -> None:
    ids = tok.encode(texts[0])
    assert tok.vocab == 512
    assert ids.max() < 512
    assert ids.size < 0.6 * len(texts[0].encode())


def test_training_again_and_loading_give_the_same_tokenizer(
    tok: tokenizer.Tokenizer, texts: list[str], tmp_path: Path
) -> None:
    tok.save(tmp_path / "tok.json")
    loaded = tokenizer.load(tmp_path / "tok.json")
    again = tokenizer.train(texts, vocab=512)
    again.save(tmp_path / "again.json")
    assert (tmp_path / "tok.json").read_bytes() == (tmp_path / "again.json").read_bytes()
    assert (loaded.encode(texts[0]) == tok.encode(texts[0])).all()
    assert (loaded.token_bytes == tok.token_bytes).all()
    assert (loaded.vocab, loaded.end) == (tok.vocab, tok.end)


def test_bits_per_byte(tok: tokenizer.Tokenizer) -> None:
    ids = tok.encode("import sys\n")
    nats = math.log(2) * 11 / ids.size  # one bit for each of 11 bytes
    assert tok.bits_per_byte(nats, ids.reshape(1, -1)) == pytest.approx(1.0)


def test_bad_tokenizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as caught:
        tokenizer.train(["x"], vocab=100)
    assert first_line(caught) == "tokenizer: vocab cannot be 100"
    with pytest.raises(UsageError) as caught:
        tokenizer.load(tmp_path / "absent.json")
    assert first_line(caught) == f"tokenizer: '{tmp_path}/absent.json' does not exist"
    other = {"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
    (tmp_path / "other.json").write_text(json.dumps(other))
    with pytest.raises(UsageError) as caught:
        tokenizer.load(tmp_path / "other.json")
    assert "has no <|end|> token" in first_line(caught)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError) as caught:
        tokenizer.train(["x"])
    assert first_line(caught) == "tokenizer: the `tokenizers` library is not installed"


# ---- token files and batches -------------------------------------------------------------------
def test_tokens_survive_the_file(tmp_path: Path) -> None:
    tokens = np.arange(70, dtype=np.uint16)
    write_tokens(tmp_path / "tokens.npy", tokens)
    mapped = open_tokens(tmp_path / "tokens.npy")
    assert isinstance(mapped, np.memmap)
    assert (mapped == tokens).all()
    a, b = (TokenBatches(t, 3, 8, seed=1).batch(5) for t in (tokens, mapped))
    assert (a.inputs == b.inputs).all()
    np.save(tmp_path / "wide.npy", np.zeros((2, 2)))
    with pytest.raises(UsageError) as caught:
        open_tokens(tmp_path / "wide.npy")
    assert first_line(caught) == f"tokens: '{tmp_path}/wide.npy' holds float64 of shape (2, 2)"


def test_batches_do_not_change_between_releases() -> None:
    """Golden values: a change here changes the training data of every recorded run."""
    data = TokenBatches(np.arange(50_000, dtype=np.uint16), batch_size=4, seq_len=3, seed=1234)
    assert data.batch(0).inputs[:, 0].tolist() == [13817, 23917, 29083, 3885]
    assert data.batch(1_000_000).inputs[:, 0].tolist() == [8474, 34016, 30061, 18452]


@given(st.integers(-5, 2**64), st.integers(0, 10**9), st.integers(1, 9), st.integers(1, 30))
def test_a_batch_is_a_function_of_seed_and_step(
    seed: int, step: int, batch_size: int, seq_len: int
) -> None:
    tokens = (np.arange(40) * 7).astype(np.uint16)
    batch = TokenBatches(tokens, batch_size, seq_len, seed).batch(step)
    again = TokenBatches(tokens, batch_size, seq_len, seed).batch(step)
    assert batch.inputs.shape == batch.targets.shape == (batch_size, seq_len)
    assert batch.inputs.dtype == batch.targets.dtype == np.int32
    assert (batch.targets == batch.inputs + 7).all()
    assert (batch.inputs == again.inputs).all()


def test_windows_cover_the_file_evenly_and_differ_by_step_and_seed() -> None:
    tokens = np.arange(1001, dtype=np.uint16)
    starts = np.concatenate(
        [TokenBatches(tokens, 100, 1, seed=3).batch(s).inputs[:, 0] for s in range(400)]
    )
    counts = np.bincount(starts, minlength=1000)
    assert counts.size == 1000
    # 40 expected at each position; a chi-square of 1000 ± 45 (one standard deviation).
    assert abs(((counts - 40) ** 2 / 40).sum() - 1000) < 200
    other = TokenBatches(tokens, 100, 1, seed=4).batch(0).inputs[:, 0]
    assert (other != starts[:100]).mean() > 0.9


def test_validation_windows_are_fixed_and_do_not_overlap() -> None:
    data = TokenBatches(np.arange(1000, dtype=np.uint16), batch_size=4, seq_len=10, seed=1)
    batches = data.fixed(5)
    assert len(batches) == 5
    seen = np.concatenate([b.inputs.reshape(-1) for b in batches])
    assert np.unique(seen).size == seen.size == 200
    assert seen.min() == 0
    assert seen.max() == 998  # the last window ends where the last target is the last token
    assert all(
        (a.inputs == b.inputs).all()
        for a, b in zip(batches, TokenBatches(data.tokens, 4, 10, seed=2).fixed(5))
    )
    assert len(data.fixed(1000)) == 24  # 999 tokens have a successor, 40 make a batch
    assert len(TokenBatches(data.tokens[:12], 4, 10).fixed(3)) == 1


@pytest.mark.parametrize("length", range(41, 90))
def test_fixed_windows_never_overlap_where_they_fit(length: int) -> None:
    data = TokenBatches(np.arange(length, dtype=np.uint16), batch_size=4, seq_len=10)
    seen = np.concatenate([b.inputs.reshape(-1) for b in data.fixed(9)])
    assert np.unique(seen).size == seen.size


def test_bad_batches() -> None:
    with pytest.raises(UsageError) as caught:
        TokenBatches(np.zeros(10, np.uint16), 1, 10)
    assert first_line(caught) == ("tokens: 10 tokens hold no window of 10 and the token after it")


# ---- bigram ------------------------------------------------------------------------------------
@given(st.lists(st.integers(0, 5), min_size=40, max_size=200))
def test_probabilities_are_what_the_formula_says(tokens: list[int]) -> None:
    model = bigram.fit(np.array(tokens, np.uint16), vocab=6)
    m = model.strength
    single = [(tokens[1:].count(b) + 1) / (len(tokens) - 1 + 6) for b in range(6)]
    pairs = list(itertools.pairwise(tokens))
    p = model.probabilities()
    for a in range(6):
        after = tokens[:-1].count(a)
        for b in range(6):
            assert p[a, b] == pytest.approx((pairs.count((a, b)) + m * single[b]) / (after + m))
    assert p.sum(1) == pytest.approx(np.ones(6))
    nats = -sum(math.log(p[a, b]) for a, b in pairs) / len(pairs)
    x = np.array(tokens)
    assert model.nats_per_token(x[:-1], x[1:]) == pytest.approx(nats)


def test_a_bigram_finds_the_entropy_of_a_markov_chain() -> None:
    rng = np.random.default_rng(0)
    steps = rng.random(60_000)
    tokens = np.zeros(60_000, np.uint16)
    for i in range(1, tokens.size):  # the token repeats with probability 0.9
        tokens[i] = tokens[i - 1] if steps[i] < 0.9 else 1 - tokens[i - 1]
    model = bigram.fit(tokens[:50_000], vocab=2)
    entropy = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))
    val = tokens[50_000:]
    assert model.nats_per_token(val[:-1], val[1:]) == pytest.approx(entropy, abs=0.02)


def test_noise_is_smoothed_harder_than_structure() -> None:
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 64, 4000).astype(np.uint16)
    cycle = np.tile(np.arange(64, dtype=np.uint16), 60)
    assert bigram.fit(noise, 64).strength > 10 * bigram.fit(cycle, 64).strength
    assert bigram.fit(noise, 64).nats_per_token(noise[:-1], noise[1:]) < math.log(64)


def test_counting_in_chunks_loses_no_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.random.default_rng(1).integers(0, 9, 1000).astype(np.uint16)
    whole = bigram.fit(tokens, 9).counts
    monkeypatch.setattr(bigram, "_CHUNK", 7)
    assert (bigram.fit(tokens, 9).counts == whole).all()
    assert whole.sum() == 999


def test_bad_bigrams() -> None:
    with pytest.raises(UsageError) as caught:
        bigram.fit(np.array([0, 1, 2], np.uint16), 4)
    assert first_line(caught) == (
        "bigram: 3 tokens are too few to count and to choose the smoothing on"
    )
    with pytest.raises(UsageError) as caught:
        bigram.fit(np.arange(50, dtype=np.uint16), 4)
    assert "is outside a vocabulary of 4" in first_line(caught)
