"""Flash attention on the engine: PyTorch's results, and less memory."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn
from tessera.nn import flash
from tessera.runtime.arrays import array_shape

RNG = np.random.default_rng(3)


def attended(way: str | None, causal: bool = True, mask: Any = None) -> Any:
    def run(q: Any, k: Any, v: Any, c: Any) -> Any:
        y = nn.flash_attention(q, k, v, causal, mask=mask, implementation=way)
        return y, *ts.grad((y * c).sum(), [q, k, v])

    return ts.jit(run)


def real(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    ("heads", "groups", "seq", "causal", "masked"),
    [(4, 4, 300, True, False), (6, 2, 257, True, True), (3, 1, 64, False, True)],
)
def test_it_is_pytorchs(heads: int, groups: int, seq: int, causal: bool, masked: bool) -> None:
    torch = pytest.importorskip("torch")
    x = [real(2, n, seq, 16) for n in (heads, groups, groups, heads)]
    mask = np.arange(seq) < np.array([seq, seq // 2]).reshape(2, 1, 1, 1) if masked else None
    found = [t.numpy() for t in attended("tiles", causal, mask)(*map(ts.tensor, x))]
    q, k, v, c = (torch.tensor(a, requires_grad=True) for a in x)
    seen = torch.ones(seq, seq, dtype=torch.bool)
    seen = seen.tril() if causal else seen
    if masked:
        seen = seen & torch.from_numpy(mask)
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
    (y * c).sum().backward()
    for a, b in zip(found, (y, q.grad, k.grad, v.grad), strict=True):
        np.testing.assert_allclose(a, b.detach().numpy(), atol=2e-4)


def temporaries(run: Any, *args: Any) -> int:
    run.plan(*args)
    program = run.programs[0]
    given = [jax.ShapeDtypeStruct(array_shape(t), t.dtype.numpy) for t in program.wants]
    found: int = program.run.lower(*given).compile().memory_analysis().temp_size_in_bytes
    return found


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_its_temporaries_are_an_eighth(dtype: str) -> None:
    x = [ts.tensor(real(1, 8, 2048, 64)).to(dtype) for _ in range(4)]
    tiles, sequences = (temporaries(attended(way), *x) for way in ("tiles", "sequences"))
    assert tiles <= sequences / 8


def test_in_bf16_it_rounds_no_worse_than_by_sequences() -> None:
    x = [real(2, 4, 96, 16) for _ in range(4)]
    exact = [t.numpy() for t in attended(None)(*map(ts.tensor, x))]
    narrow = [ts.tensor(a).to("bf16") for a in x]
    far = {}
    for way in ("tiles", "sequences"):
        found = [t.to("f32").numpy() for t in attended(way)(*narrow)]
        far[way] = [np.linalg.norm(a - b) for a, b in zip(found, exact, strict=True)]
    for tiles, sequences in zip(far["tiles"], far["sequences"], strict=True):
        assert 0 < tiles < 1.2 * sequences


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"dp": 4}])
def test_a_model_learns_the_same_in_tiles(axes: dict[str, int]) -> None:
    ids, labels = RNG.integers(0, 64, (2, 4, 32))

    def loss_of(axes: dict[str, int], way: str) -> tuple[float, list[np.ndarray]]:
        ts.seed(0)
        mesh = dist.Mesh(tuple(axes), shape=axes)
        plan = dist.strategy("data_parallel")
        plan = plan + dist.strategy("tensor_parallel") if "tp" in axes else plan
        config = nn.GPTConfig(
            vocab=64, seq=32, d=32, layers=2, heads=4, kv_heads=2, attention_implementation=way
        )
        model = dist.place(nn.GPT(config), plan, mesh)

        @ts.jit
        def both(model: Any, ids: Any, labels: Any) -> Any:
            loss = model.loss(ids, labels)
            return loss, ts.grad(loss, model.parameters())

        loss, grads = both(model, *dist.place((ids, labels), plan, mesh, kind="batch"))
        return loss.item(), [g.numpy() for g in grads.values()]

    loss, grads = loss_of(axes, "tiles")
    expected, whole = loss_of({"dp": 1}, "sequences")
    assert abs(loss - expected) < 1e-5
    for a, b in zip(grads, whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def test_its_bits_are_those_of_every_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "TILE", 1 << 10)  # small, for several tiles
    flash._tiles.cache_clear()
    logical = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 2})
    x = [real(4, 4, 150, 8) for _ in range(4)]
    found = set()
    for mesh in (logical, logical.fold("tp=1"), logical.fold("dp=1,tp=1")):
        given = [ts.tensor(a, mesh=mesh, layout="[4@dp, 4@tp, 150, 8]") for a in x]
        with dist.deterministic(level="mesh_invariant"):
            found.add(b"".join(t.numpy().tobytes() for t in attended("tiles")(*given)))
    assert len(found) == 1
