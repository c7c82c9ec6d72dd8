"""Padded and packed batches on every mesh: each sequence as if alone, and as in transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn, pipeline
from tessera.checkpoint import load_hf
from tessera.lang.record.tree import flatten
from tests.cases import LONG, grid
from tests.mesh.test_hf import IDS, MESHES, MODELS, made

torch = pytest.importorskip("torch")

B, S = IDS.shape
LEFT = (np.arange(S) >= np.array([[0], [5], [S - 1], [9]])).astype(np.int32)
PADDED = {
    "left": LEFT,
    "right": LEFT[:, ::-1].copy(),
    "both": LEFT & LEFT[::-1, ::-1],
    "holes": np.random.default_rng(1).integers(0, 2, (B, S)).astype(np.int32),
}
STARTS = np.array([[0, 7, 20], [0, 1, 2], [0, 23, 23], [0, 12, 13]])
DOCUMENTS = (np.arange(S)[None, :, None] >= STARTS[:, None]).sum(-1) - 1
PACKED = (np.arange(S) - np.take_along_axis(STARTS, DOCUMENTS, 1)).astype(np.int32)
KINDS = ("gpt2", "llama3", "mistral", "gemma2", "falcon-alibi", "mixtral")


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    root, done = tmp_path_factory.mktemp("padded"), {}

    def get(name: str) -> tuple[Path, Any]:
        if name not in done:
            done[name] = root / name, made(*MODELS[name])
            done[name][1].save_pretrained(root / name)
        return done[name]  # type: ignore[no-any-return]

    return get


def theirs(model: Any, **given: Any) -> np.ndarray[Any, Any]:
    given = {k: torch.tensor(v.astype(np.int64)) if v.dtype == np.int32 else torch.tensor(v)
             for k, v in given.items()}  # fmt: skip
    with torch.no_grad():
        out = model(torch.tensor(IDS.astype(np.int64)), use_cache=False, **given)
    return np.asarray(out.logits.float())


@cache
def loaded(path: Path, mesh_name: str) -> Any:
    return load_hf(path, *MESHES[mesh_name])


@cache
def compiled(path: Path, mesh_name: str, *names: str) -> Any:
    return ts.jit(lambda model, batch: model(**batch))


def mine(path: Path, mesh_name: str, **given: Any) -> np.ndarray[Any, Any]:
    mesh, plan = MESHES[mesh_name]
    batch: Any = {"ids": IDS, **given}
    if plan is not None:
        batch = dist.place(batch, plan, mesh, kind="batch")
    call = compiled(path, mesh_name, *given)
    return call(loaded(path, mesh_name), batch).numpy()  # type: ignore[no-any-return]


def counted(mask: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Positions as in transformers' `generate`."""
    return ((mask.cumsum(1) - 1) * mask).astype(np.int32)


@pytest.mark.parametrize(("kind", "mesh"), grid(KINDS, list(MESHES)))
def test_padding_is_that_of_transformers(
    kind: str, mesh: str, model_of: Callable[[str], tuple[Path, Any]]
) -> None:
    path, peer = model_of(kind)
    for side, mask in PADDED.items():
        want = theirs(peer, attention_mask=mask, position_ids=counted(mask))
        got = mine(path, mesh, attention_mask=mask)
        np.testing.assert_allclose(got[mask > 0], want[mask > 0], rtol=0, atol=1e-4)
        assert np.isfinite(got).all()
        if side in ("left", "right"):  # the sequence alone, without padding
            alone = theirs_alone(peer, IDS[1][mask[1] > 0])
            np.testing.assert_allclose(got[1][mask[1] > 0], alone, rtol=0, atol=1e-4)


def theirs_alone(model: Any, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        return np.asarray(model(torch.tensor(ids[None].astype(np.int64))).logits[0].float())


@pytest.mark.parametrize("kind", ["gpt2", "mistral", "falcon-alibi"])
def test_documents_of_a_row_do_not_see_each_other(
    kind: str, model_of: Callable[[str], tuple[Path, Any]]
) -> None:
    path, peer = model_of(kind)
    for mesh in ("one", "dp2tp2"):
        got = mine(path, mesh, position_ids=PACKED)
        for row, documents in enumerate(DOCUMENTS):
            for n in set(documents):
                part = documents == n
                want = theirs_alone(peer, IDS[row][part])
                np.testing.assert_allclose(got[row][part], want, rtol=0, atol=1e-4)
        if kind != "falcon-alibi":  # its bias in transformers counts positions across documents
            want = theirs(peer, position_ids=PACKED)
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("kind", "heads"), [("gpt2", 1), ("gemma2", 4)])
def test_a_mask_of_scores_is_taken_as_it_is(
    kind: str, heads: int, model_of: Callable[[str], tuple[Path, Any]]
) -> None:
    path, peer = model_of(kind)
    sees = np.random.default_rng(2).uniform(size=(B, heads, S, S)) < 0.5
    sees |= np.eye(S, dtype=bool)
    added = np.where(sees, 0.0, np.finfo(np.float32).min).astype(np.float32)
    want = theirs(peer, attention_mask=added)
    for mesh, mask in (("one", sees), ("dp2tp2", added)):
        got = mine(path, mesh, attention_mask=mask)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def padded(model: nn.GPT, batch: dict[str, Any], pipe: Callable[..., Any]) -> Any:
    """The logits, the loss and its gradients."""
    told = {n: x for n, x in batch.items() if n not in ("ids", "labels")}
    x = pipe(model, batch["ids"], **told)
    loss = model.loss_of(x, batch["labels"])
    return loss, ts.grad(loss, model.trainable_parameters())


@pytest.mark.parametrize(
    ("kind", "experts"),
    [
        ("scores", 0), ("left", 4), pytest.param("left", 0, marks=LONG),
        pytest.param("packed", 0, marks=LONG),
    ],
)  # fmt: skip
def test_a_pipeline_cuts_masks_with_their_rows(kind: str, experts: int) -> None:
    """Compares the loss and gradients of four microbatches with the model without a pipeline.
    Arguments that are the same for all rows are whole in each microbatch."""
    rng, (rows, size) = np.random.default_rng(5), (8, 6)
    ids = rng.integers(0, 16, (rows, size)).astype(np.int32)
    mask = (np.arange(size) >= rng.integers(0, size, (rows, 1))).astype(np.int32)
    told = {
        "left": {"attention_mask": mask},
        "scores": {"attention_mask": rng.uniform(size=(rows, 1, size, size)) < 0.5},
        "packed": {"position_ids": np.array([0, 1, 0, 1, 2, 0], np.int32)[None]},
    }[kind]
    routes = {"experts": experts, "capacity": None, "aux_weight": 0.0} if experts else {}
    c = nn.GPTConfig(vocab=16, seq=size, d=8, layers=2, heads=2, stacked=False, **routes)
    ts.seed(0)
    model = nn.GPT(c)
    batch = {"ids": ids, "labels": np.where(mask, ids, -100).astype(np.int32), **told}
    want = ts.jit(lambda model, batch: padded(model, batch, nn.GPT.features))(model, batch)
    with dist.Mesh(("dp", "pp"), shape={"dp": 2, "pp": 2}):
        pipe = pipeline.run(("pp",), schedule="1F1B", microbatches=4)(
            lambda model, ids, **told: model.features(ids, **told)
        )
        got = ts.jit(lambda model, batch: padded(model, batch, pipe))(model, batch)
    for a, b in zip(flatten(got)[0], flatten(want)[0], strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "side"), [("gpt2", "left"), pytest.param("llama3", "both", marks=LONG)]
)
def test_a_pipeline_of_padded_batches_is_that_of_transformers(
    kind: str, side: str, model_of: Callable[[str], tuple[Path, Any]]
) -> None:
    """The loss and its gradient with respect to the embedding, for four microbatches of one row,
    each weighted by its tokens."""
    path, peer = model_of(kind)
    mask = PADDED[side]
    labels = np.where(mask, IDS, -100).astype(np.int32)
    told = {"attention_mask": mask, "position_ids": counted(mask)}
    peer.zero_grad()
    want = peer(torch.tensor(IDS.astype(np.int64)), labels=torch.tensor(labels.astype(np.int64)),
                **{n: torch.tensor(v.astype(np.int64)) for n, v in told.items()}).loss  # fmt: skip
    want.backward()
    model = load_hf(path, stacked=False)
    following = np.concatenate([labels[:, 1:], np.full((B, 1), -100, np.int32)], 1)
    batch = {"ids": IDS, "labels": following, "attention_mask": mask}
    with dist.Mesh(("pp",), devices=2):
        pipe = pipeline.run(("pp",), schedule="1F1B", microbatches=4)(
            lambda model, ids, **told: model.features(ids, **told)
        )
        loss, grads = ts.jit(lambda model, batch: padded(model, batch, pipe))(model, batch)
    assert loss.item() == pytest.approx(want.item(), abs=1e-5)
    theirs = peer.get_input_embeddings().weight.grad
    np.testing.assert_allclose(grads["embed.weight"].numpy(), theirs, rtol=1e-3, atol=1e-5)
