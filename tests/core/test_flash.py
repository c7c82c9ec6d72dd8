"""Flash attention against whole attention, by the oracle: masks, biases, scales, uneven tiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, graph, nn
from tessera.core.layout import parse_type
from tessera.ir.graph.oracle import evaluate, evaluate_blocks
from tessera.ir.graph.verify import verify
from tessera.nn import blockwise, dot_product_attention, flash
from tessera.passes.simplify import simplify
from tests.core.test_context_parallel import everything
from tests.core.test_lang import real, traced

RNG = np.random.default_rng(21)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets tiles of two queries and chunks of three keys, to have many of both, some of them
    uneven."""
    monkeypatch.setattr(flash, "TILE", 24)
    monkeypatch.setattr(blockwise, "ROWS", 2)
    monkeypatch.setattr(dot_product_attention, "CHUNK", 3)
    flash._tiles.cache_clear()


def both(how: str, **options: Any) -> Any:
    """The value and all gradients of attention by the implementation `how`."""
    named = sorted(k for k, v in options.items() if isinstance(v, np.ndarray))

    def run(q: Any, k: Any, v: Any, c: Any, *more: Any) -> Any:
        given = {**options, **dict(zip(named, more, strict=True))}
        if how == "tiles":
            y = nn.flash_attention(q, k, v, implementation="tiles", **given)
        else:
            y = nn.attention(q, k, v, **given)
        return y, ts.grad((y * c).sum(), [q, k, v, *(m for m in more if m.dtype.is_float)])

    return run


B, G, R, D = 2, 2, 2, 4
MASKS = {
    "none": None,
    "keys": RNG.uniform(size=(B, 1, 1, 7)) < 0.6,
    "keys of heads": RNG.uniform(size=(G * R, 1, 7)) < 0.6,
    "scores": RNG.uniform(size=(7, 7)) < 0.6,
    "scores of sequences": RNG.uniform(size=(B, 1, 7, 7)) < 0.6,
    "scores of heads": RNG.uniform(size=(B, G * R, 7, 7)) < 0.6,
    "queries": RNG.uniform(size=(B, 1, 7, 1)) < 0.6,
    "left padding": np.arange(7) >= np.array([4, 1]).reshape(B, 1, 1, 1),
    "added": RNG.normal(size=(B, G * R, 1, 7)).astype(np.float32),
    "nothing seen": np.zeros((B, 1, 1, 7), bool),
}


@pytest.mark.parametrize(("name", "heads"), [(m, (4, 2)[i % 2]) for i, m in enumerate(MASKS)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("small")
def test_what_hides_keys_hides_them_in_tiles(name: str, heads: int, causal: bool) -> None:
    mask = MASKS[name]
    more = {} if mask is None else {"mask": mask}
    x = [real(B, n, 7, D) for n in (4, heads, heads, 4)]
    x += more.values()
    tiles, whole = (traced(both(how, causal=causal, **more), *x) for how in ("tiles", "whole"))
    for a, b in zip(tiles, whole, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize(
    ("queries", "keys", "causal", "more"),
    [
        (13, 13, True, {}),  # not divisible by any number of chunks or rows
        (5, 11, True, {"cap": 2.0, "scale": 0.7}),
        (11, 5, True, {}),  # some queries see no key
        (1, 9, False, {"bias": real(4, 9)}),
        (12, 12, True, {"bias": real(2, 4, 12), "cap": 1.5}),
        (17, 3, False, {"bias": 100 * real(4, 3)}),
    ],
)
@pytest.mark.usefixtures("small")
def test_so_are_other_shapes_and_scores(
    queries: int, keys: int, causal: bool, more: dict[str, Any]
) -> None:
    x = [real(2, 4, queries, D), real(2, 2, keys, D), real(2, 2, keys, 3), real(2, 4, queries, 3)]
    x += [more[k] for k in sorted(more) if isinstance(more[k], np.ndarray)]
    tiles, whole = (traced(both(how, causal=causal, **more), *x) for how in ("tiles", "whole"))
    for a, b in zip(tiles, whole, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("layout", "mask"),
    [
        ("[4@dp, 4@tp, 6, 4]", "none"),
        ("[4@dp, 4@tp, 6, 4]", "scores of sequences"),
        ("[4, 4@(dp, tp), 6, 4]", "keys"),
        ("[4@(dp, tp), 4, 6, 4]", "scores"),
        ("[4, 4, 6@tp, 4]", "none"),
    ],
)
@pytest.mark.usefixtures("small")
def test_devices_work_on_their_own_heads_and_sequences(layout: str, mask: str) -> None:
    mesh = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 2})
    t = parse_type(f"f32{layout}", mesh)
    shapes = {"keys": (4, 1, 1, 6), "scores": (6, 6), "scores of sequences": (4, 1, 6, 6)}
    m = RNG.uniform(size=shapes[mask]) < 0.7 if mask in shapes else None
    run = both("tiles", causal=True, **({} if m is None else {"mask": m}))
    given = [] if m is None else [m]
    g = graph.trace(run, t, t, t, t, *given)
    verify(g)
    if "6@" not in layout:
        assert not list(g.collectives()), "its own"
    x = [*(real(4, 4, 6, 4) for _ in range(4)), *given]
    whole = traced(both("whole", causal=True, **({} if m is None else {"mask": m})), *x)
    for each in (evaluate, evaluate_blocks):
        for a, b in zip(each(g, x), whole, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)


def test_no_device_ever_holds_all_scores() -> None:
    mesh = dist.Mesh(("tp",), shape={"tp": 4})
    seq, heads, d = 1 << 14, 8, 64
    t = parse_type(f"f32[1, {heads}@tp, {seq}, {d}]", mesh)

    def run(q: Any, k: Any, v: Any) -> Any:
        y = nn.flash_attention(q, k, v, causal=True, implementation="tiles")
        return ts.grad((y * y).sum(), [q, k, v])

    g = simplify(graph.trace(run, t, t, t))
    largest = max(int(np.prod(x.local_shape)) for n in everything(g.nodes) for x in n.types)
    assert largest == blockwise.ROWS * seq < (heads // 4) * seq**2 / 100
    # Of the square of queries and keys, a little over one half is computed.
    products = 2 * heads * seq**2 * d
    assert 7 * products * 0.5 < g.flops < 7 * products * 0.6


def test_gradients_of_gradients_are_those_of_the_whole() -> None:
    def twice(how: str) -> Any:
        def run(q: Any, k: Any, v: Any) -> Any:
            options = {"implementation": "tiles"} if how == "tiles" else {}
            attend = nn.flash_attention if how == "tiles" else nn.attention
            y = attend(q, k, v, causal=True, **options)
            (first,) = ts.grad((y * y).sum(), [q])
            return ts.grad((first * first).sum(), [q, k, v])

        return run

    x = [real(1, 2, 5, 3) for _ in range(3)]
    for a, b in zip(*(traced(twice(how), *x) for how in ("tiles", "whole")), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_what_it_cannot_do_says_so() -> None:
    x = np.zeros((1, 2, 4, 4), np.float32)
    with pytest.raises(ts.UsageError) as error:
        nn.flash_attention(x, x, x, mask=np.zeros((4, 4), np.float32), implementation="tiles")
    said = str(error.value)
    assert said.startswith("attention: a float mask of all scores would have no gradient\n")
    assert "or use nn.attention" in said
    with pytest.raises(ts.UsageError, match="only sequences are computed so many at a time"):
        nn.flash_attention(x, x, x, rows=1, implementation="tiles")
    with pytest.raises(ts.UsageError, match="attention_implementation with context"):
        nn.GPTConfig(attention_implementation="tiles", context="ring")


def test_tiles_are_what_is_used_but_for_rows_and_a_float_for_each_score() -> None:
    x = np.random.default_rng(0).normal(size=(4, 2, 4, 4)).astype(np.float32)

    def text(**how: Any) -> str:
        return graph.trace(lambda q: nn.flash_attention(q, q, q, causal=True, **how), x).text

    tiles, sequences = text(implementation="tiles"), text(implementation="sequences")
    assert tiles != sequences
    assert text() == tiles
    assert text(rows=2) == sequences
    added = np.zeros((4, 4), np.float32)
    assert text(mask=added) == text(mask=added, implementation="sequences")
