"""Decoding with a key-value cache: the logits of the whole sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn
from tessera.train.decoding import programs
from tessera.train.generate import generate
from tests.cases import LONG, short

BOTH = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 2})
PLAN = dist.strategy("data_parallel") + dist.strategy("tensor_parallel")
IDS = np.random.default_rng(1).integers(0, 48, (2, 16)).astype(np.int32)

CHOICES: dict[str, dict[str, Any]] = {
    "plain": {"kv_heads": 1},
    "ring": {"positions": "rotary", "kv_heads": 2, "windows": (4,), "loop": True},
    "local": {
        "positions": "rotary", "windows": (4, 0), "local_rope": nn.Rope(500.0), "qk_norm": True,
        "block": "post_norms", "norm": "rms_offset", "activation": "geglu", "embed_scale": True,
        "attention_cap": 5.0, "logit_cap": 3.0, "biases": ("head",), "stacked": False,
    },
    "alibi": {"positions": "alibi", "block": "parallel"},
    "experts": {"experts": 4, "capacity": None, "rope": nn.Rope(partial=0.5),
                "positions": "rotary"},
}  # fmt: skip


def made(**choices: Any) -> nn.GPT:
    model = nn.GPT(nn.GPTConfig(vocab=48, seq=16, d=32, layers=2, heads=4, **choices))
    draw = np.random.default_rng(0)
    weights = {n: draw.normal(0, 0.3, t.shape) for n, t in model.parameters().items()}
    model.load_parameters({n: ts.tensor(w.astype(np.float32)) for n, w in weights.items()})
    return model


@pytest.mark.parametrize("name", short(CHOICES, "ring", "experts"))
def test_a_token_alone_gets_the_logits_of_the_whole(name: str) -> None:
    model = made(**CHOICES[name])
    want = ts.jit(lambda model, ids: model(ids))(model, ts.tensor(IDS)).numpy()
    assert want.std() > 0.3
    windows = model.config.layer_windows
    slots = max(windows) if windows and all(windows) else 16
    at = np.array([5, 8], np.int32)
    if name in ("ring", "local"):
        model = dist.place(model, PLAN, BOTH)

    def batch(*arrays: Any) -> list[ts.Tensor]:
        tensors = [ts.tensor(x) for x in arrays]
        if name not in ("ring", "local"):
            return tensors
        return dist.place(tensors, PLAN, BOTH, kind="batch")  # type: ignore[no-any-return]

    ids, last = batch(IDS[:, :12], at)
    prefill = ts.jit(lambda model, ids, at: model.prefill(ids, at, slots))
    decode = ts.jit(lambda model, ids, cache, at: model.decode(ids, cache, at))
    got, cache = prefill(model, ids, last)
    assert cache["k"].shape == (2, 2, model.config.groups, slots, 8)
    layout = cache["k"].layout
    np.testing.assert_allclose(got.numpy(), want[[0, 1], at], rtol=0, atol=2e-5)
    for _ in range(7):
        at += 1
        one, last = batch(IDS[[0, 1], at], at)
        got, cache = decode(model, one, cache, last)
        np.testing.assert_allclose(got.numpy(), want[[0, 1], at], rtol=0, atol=2e-5)
        assert cache["k"].layout == layout
    if name == "ring":
        assert layout == "[2, 2@dp, 2@tp, 4, 8]"


# -- text ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name", short([*CHOICES, "long rates", "sequence parallel"], "plain", "local", "alibi")
)
def test_text_is_the_same_with_a_cache_and_without_one(name: str) -> None:
    """Also for a text longer than the window."""
    long = nn.Rope(scaling="dynamic", factor=4.0, original=8)
    more = {
        "long rates": {"positions": "rotary", "rope": long},
        "sequence parallel": {"sequence_parallel": "tp"},
    }
    model, mesh = made(**{**CHOICES, **more}[name]), None
    if name == "sequence parallel":
        model, mesh = dist.place(model, PLAN, BOTH), BOTH
    found = {}
    for cache in (True, False):
        found[cache] = [
            generate(model, prompt, 9, window=12, temperature=0.0, mesh=mesh, cache=cache)
            for prompt in ([7], [3, 1, 4, 1, 5, 9, 2, 6])
        ]
    assert found[True] == found[False]
    assert len({*map(str, found[True])}) == 2


@pytest.mark.parametrize("name", short(["plain", "ring", "local", "alibi"], "ring"))
def test_prompts_of_different_lengths_are_continued_as_alone(name: str) -> None:
    """On a mesh and past the window too; each draws with its own seed."""
    model, mesh = made(**CHOICES[name]), None
    if name in ("ring", "local"):
        model, mesh = dist.place(model, PLAN, BOTH), BOTH
    prompts = [[7], [3, 1, 4, 1, 5, 9, 2, 6], [8, 8, 1]]
    for how in ({"temperature": 0.0}, {"temperature": 1.5, "top_k": 0, "top_p": 0.9, "seed": 4}):
        for window in (8, 16):
            more: Any = {**how, "window": window, "mesh": mesh, "repetition": 1.2}
            together = generate(model, prompts, 7, stop=[11, 12, 13, 14], **more)
            seeds = range(more.pop("seed", 0), 99)
            alone = [
                generate(model, p, 7, stop=[11, 12, 13, 14], seed=s, **more)
                for p, s in zip(prompts, seeds, strict=False)
            ]
            assert together == alone
    assert len({*map(len, together)}) > 1


def test_texts_of_all_lengths_share_two_programs() -> None:
    programs.cache_clear()
    model = made(positions="rotary")
    for prompt in ([1], [1, 2, 3], [1, 2, 3, 4, 5]):
        generate(model, prompt, 10, window=16)
    made_for: Any = programs(16, None, model.config, None, None)
    counts = [sum(map(len, f._entries.values())) for f in made_for]
    assert counts == [1, 1, 0]


def test_models_of_several_kinds_may_share_a_window() -> None:
    """Warnings are errors in this test. A function created for each call would give one."""
    model = made(positions="rotary")
    for kind in (ts.f32, ts.bf16, ts.f16):
        generate(made(positions="rotary").to(kind), [1, 2], 2, window=8)
    for fn in (lambda x: model(x), lambda x: model(x) * 2, lambda x: model(x) * 3, ts.jit(model)):
        generate(fn, [1, 2], 2, window=8)
    with pytest.warns(ts.TraceWarning, match="^generate is recorded for the third time"):
        for _ in range(3):
            generate(lambda x: model(x), [1, 2], 2, window=8)


def test_the_window_is_as_long_as_the_text_will_be() -> None:
    model = made(positions="rotary", rope=nn.Rope(scaling="dynamic", factor=4.0, original=6))
    assert generate(model, [1, 2], 4, seed=1) == generate(model, [1, 2], 4, seed=1, window=6)
    assert len(generate(model, [1, 2], np.int64(4))) == 6
    with pytest.raises(ts.UsageError, match="generate: a function needs a window"):
        generate(lambda ids: model(ids), [1, 2], 4)
    with pytest.raises(ts.UsageError, match="generate: window cannot be 17"):
        generate(model, [1, 2], 4, window=17)


@LONG
def test_text_is_written_without_dropout() -> None:
    model = made(dropout=0.5)
    calm = made()
    assert generate(model, [1, 2], 8, seed=1) == generate(calm, [1, 2], 8, seed=1)
    assert all(m.training for m in model.modules() if isinstance(m, nn.Dropout))


class Loud(nn.GPT):
    def features(self, ids: ts.Tensor) -> Any:
        return super().features(ids) * 2.0


def test_a_model_that_has_no_cache_says_why() -> None:
    said = {
        "the sequence is split by context='ring'": made(context="ring", positions="rotary"),
        "experts with a capacity serve a token depending on the others": made(experts=4),
        "Loud computes in a way of its own": Loud(made().config),
    }
    for why, model in said.items():
        with pytest.warns(ts.OptionWarning, match=f"generate: cache=True has no effect: {why}"):
            found = generate(model, [1, 2], 2, temperature=0.0)
        assert found == generate(model, [1, 2], 2, temperature=0.0, cache=False)


def test_a_place_that_only_the_devices_know_to_be_too_large_gives_no_number() -> None:
    model = made(positions="rotary")

    @ts.jit
    def step(model: nn.GPT, ids: ts.Tensor, at: ts.Tensor) -> ts.Tensor:
        _, cache = model.prefill(ids, at, 16)
        return model.decode(ids[:, 0], cache, at + ts.tensor([1, 9]))[0]

    got = step(model, ts.tensor(IDS[:, :8]), ts.tensor([7, 7])).numpy()
    assert np.isfinite(got[0]).all()
    assert np.isnan(got[1]).all()


def test_choices_that_exclude_each_other_are_errors() -> None:
    for wrong, says in (
        ({"attention_cap": 4.0, "context": "ring"}, "attention_cap with context"),
        ({"windows": (4,), "positions": "alibi"}, "windows with ALiBi"),
        ({"positions": "rotary", "local_rope": nn.Rope()}, "local_rope without windows"),
        (
            {"positions": "rotary", "windows": (4,), "local_rope": nn.Rope(partial=0.5)},
            "another part of a head",
        ),
        ({"windows": (-1,)}, "a window cannot be -1"),
    ):
        with pytest.raises(ts.UsageError, match=says):
            nn.GPTConfig(**wrong)
