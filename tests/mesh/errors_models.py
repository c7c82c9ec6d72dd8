"""Mistakes with models. A row: name, error, mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import tessera as ts
from tessera.train import generate as generate_module
from tessera.train import recipe
from tessera.train.generate import generate
from tessera.train.sampling import sample
from tests.mesh.errors import row

# fmt: off

# -- choices that nothing reads --------------------------------------------------------------------
row("rates of no rotation", ts.UsageError, lambda: ts.nn.GPTConfig(rope=ts.nn.Rope(100.0)))
row("room for no experts", ts.UsageError, lambda: ts.nn.GPTConfig(capacity=2.0))
row("biases of experts", ts.UsageError, lambda: ts.nn.GPTConfig(experts=4, biases=("mlp",)))
row("an axis that splits nothing", ts.UsageError, lambda: ts.nn.GPTConfig(context_axis="sp"))
row("a factor of no scaling", ts.UsageError, lambda: ts.nn.Rope(factor=4.0))
row("a rate of no balance", ts.UsageError, lambda: ts.nn.MoE(4, 4, 4, rate=0.1))
row("a rate that takes away", ts.UsageError,
    lambda: ts.nn.MoE(4, 4, 4, balance="bias", rate=-0.1))
row("a weight that is no number", ts.UsageError,
    lambda: ts.nn.GPTConfig(experts=4, aux_weight=float("nan")))
LAYER = ts.nn.MoE(4, 4, 4)
FOUR, TWO = (ts.dist.Mesh((a,), devices=n) for a, n in (("ep", 4), ("a", 2)))
ROWS = {"router": ts.ones((4, 4)), "up": ts.ones((4, 4, 4)), "down": ts.ones((4, 4, 4))}
row("experts on another mesh than the tokens", ts.MeshError,
    lambda: ts.op.moe(ts.tensor(np.ones((2, 4)), mesh=TWO), ROWS, mesh=FOUR))
row("weights of experts on another mesh", ts.MeshError,
    lambda: ts.op.moe(ts.tensor(np.ones((2, 4)), mesh=TWO),
                      {**ROWS, "up": ts.tensor(np.ones((4, 4, 4)), mesh=FOUR)}))
row("an axis of experts named twice", ts.UsageError,
    lambda: ts.op.moe(np.ones((2, 4)), ROWS, axis=("ep", "ep"), mesh=FOUR))
row("a mask that is added", ts.DTypeError, lambda: LAYER(
    ts.ones((2, 3, 4)), mask=np.array([[0, 0, -np.inf]] * 2)))
row("an expert of all tokens as an array", ts.UsageError, lambda: ts.op.moe(
    np.ones((2, 4)), {**ROWS, "shared": np.ones((4, 4))}, network=lambda rows, w: rows))
row("experts without a token", ts.ShapeError, lambda: LAYER(ts.ones((0, 3, 4))))
row("a width of given weights", ts.UsageError, lambda: ts.op.moe(W, LAYER, hidden=8))

BLOCK = ts.nn.TransformerBlock(ts.nn.GPTConfig(d=8, heads=2, layers=1))
row("a mask of a block by place", ts.UsageError, lambda: BLOCK(
    ts.ones((2, 4, 8)), np.ones((2, 4), bool)))
row("a block of one sequence", ts.ShapeError, lambda: BLOCK(ts.ones((4, 8))))
row("a rotation by no base", ts.UsageError, lambda: ts.nn.rotary(ts.ones((4, 8)), base=0))

# -- a model that decodes --------------------------------------------------------------------------
GPT = ts.nn.GPT(ts.nn.GPTConfig(vocab=8, seq=8, d=8, layers=1, heads=2))
IN_TURN = np.zeros((2, 4), np.int32)
W = ts.ones((2,))
CACHE = {n: ts.zeros((1, 2, 2, 6, 4)) for n in "kv"}
row("a prompt ends outside", ts.ShapeError, lambda: GPT.prefill(IN_TURN, [3, 4], 6))
row("a cache that is too small", ts.UsageError, lambda: GPT.prefill(IN_TURN, [3, 3], 3))
row("ends of other sequences", ts.ShapeError, lambda: GPT.prefill(IN_TURN, [3], 6))
row("a place beyond the cache", ts.ShapeError, lambda: GPT.decode([1, 2], CACHE, [5, 6]))
row("a cache of other sequences", ts.ShapeError, lambda: GPT.decode([1], CACHE, [5]))
row("a cache of whole numbers", ts.DTypeError, lambda: GPT.decode(
    [1, 2], {n: t.to("i32") for n, t in CACHE.items()}, [5, 5]))
row("no cache", ts.UsageError, lambda: GPT.decode([1, 2], {}, [5, 5]))
row("a token that is a sequence", ts.ShapeError, lambda: GPT.decode(IN_TURN, CACHE, [5, 5]))
row("a cache of a split sequence", ts.UsageError, lambda: ts.nn.GPT(ts.nn.GPTConfig(
    vocab=8, seq=8, d=8, layers=1, heads=2, context="ring")).prefill(IN_TURN, [3, 3], 6))

# -- text ------------------------------------------------------------------------------------------
def text(what: Any, **more: Any) -> Callable[[], Any]:
    """Returns a text generation with a model that returns `what`."""
    return lambda: generate(lambda ids: what, [1], 2, window=8, **more)


row("the module that has generate", ts.UsageError, lambda: generate_module(GPT, [1], 2))
row("the logits of one text", ts.ShapeError, lambda: sample(np.zeros(8), [0.5]))
row("the numbers of other texts", ts.ShapeError, lambda: sample(np.zeros((2, 8)), [0.5]))
row("logits of the last token", ts.UsageError, text(ts.zeros((1, 16))))
row("logits of other texts", ts.UsageError, text(ts.zeros((2, 8, 16))))
row("no logits", ts.UsageError, text(None))
row("logits in a tuple", ts.UsageError, text((ts.zeros((1, 8, 16)), None)))
row("logits in a dict", ts.UsageError, text({"logits": ts.zeros((1, 8, 16))}))
for temperature in (0.0, 1.0):
    row(f"logits that are NaN at {temperature}", ts.UsageError, text(
        np.array([[[0.0, np.nan, 1.0, 3.0]] * 8], np.float32), temperature=temperature))
row("no model", ts.UsageError, lambda: generate(None, [1], 2, window=4))
for prompt, says in (
    ("hi", "cannot be 'hi'"),
    (None, "cannot be None"),
    ([1.9, True], "cannot be [1.9, True]"),
    ([[1, 2], []], "has no token"),
    ([[1, 2], ["a"]], "has a part 'a'"),
    ([1, [2]], "is an id and a list"),
    (["a", "b"], "are texts"),
    (3, "cannot be 3"),
    ([1, 2**40], f"has the id {2**40} at [1]"),
    ([9, *[1] * 20], "has the id 9 at [0]"),
):
    row(f"a prompt that {says}", ts.UsageError,
        lambda prompt=prompt: generate(GPT, prompt, 2))
for stop, says in (
    ("24", "cannot be '24'"), (True, "cannot be True"), ([1.5], "cannot be [1.5]"),
    (-1, "has the id -1 at [0]"), ([3, 8], "has the id 8 at [1]"),
):
    row(f"a stop that {says}", ts.UsageError,
        lambda stop=stop: generate(GPT, [1], 2, stop=stop))
row("a seed of no number", ts.UsageError, lambda: generate(GPT, [1], 2, seed=1.5))
row("a tokenizer of one way", ts.UsageError, lambda: generate(GPT, "a", 2, tokenizer=object()))
row("a stop of no letter", ts.UsageError, lambda: generate(GPT, [1], 2, stop=""))
row("a stream of no function", ts.UsageError, lambda: generate(GPT, [1], 2, stream=True))
row("a repetition of 0", ts.UsageError, lambda: generate(GPT, [1], 2, repetition=0))
for name in ("max_new_tokens", "eos_token_id", "do_sample", "repetition_penalty", "streamer",
             "stop_strings", "num_beams", "num_return_sequences", "attention_mask"):
    row(f"text by {name}", ts.UsageError, lambda name=name: generate(GPT, [1], 2, **{name: 3}))
row("a layout of pending sums", ts.UsageError, lambda: ts.grad(
    (W * 2.0).sum(), W, layout=W, reduce_partial=False))

# -- positions -------------------------------------------------------------------------------------
ALIBI = ts.nn.GPTConfig(vocab=8, seq=8, d=8, layers=1, heads=2, positions="alibi")
LATE, BATCH = np.arange(4) + 5, np.zeros((2, 4), np.int32)
for given in (LATE, LATE[None], np.stack([LATE, LATE])):
    row(f"positions {given.shape} beyond the table", ts.ShapeError,
        lambda given=given: GPT(BATCH, position_ids=given))
    row(f"positions {given.shape} beyond the table, recorded", ts.ShapeError,
        lambda given=given: ts.jit(lambda m, i, p: m.loss(i, i, position_ids=p))(GPT, BATCH, given))
row("positions beyond ALiBi's", ts.ShapeError,
    lambda: ts.nn.TransformerBlock(ALIBI)(ts.ones((2, 4, 8)), position_ids=LATE))

# -- attention -------------------------------------------------------------------------------------
Q = ts.ones((2, 2, 4, 8))
for attend in (ts.nn.ring_attention, ts.nn.all_to_all_attention):
    for axes in (("dp", "cp"), ()):
        row(f"{attend.__name__} over {axes}", ts.UsageError,
            lambda attend=attend, axes=axes: attend(Q, Q, Q, axes))
for bias in (ts.ones((1, 2, 4, 4)), ts.ones((2, 2, 4, 4))):
    row(f"a bias of scores {bias.shape}", ts.ShapeError,
        lambda bias=bias: ts.nn.attention(Q, Q, Q, bias=bias))
row("a bias of scores in tiles", ts.ShapeError,
    lambda: ts.nn.flash_attention(Q, Q, Q, bias=ts.ones((2, 4, 4))))
for many in (1, 2):
    row(f"a mask of other sizes in tiles, {many} heads a group", ts.ShapeError,
        lambda many=many: ts.nn.flash_attention(
            Q, Q[:, ::many], Q[:, ::many], mask=ts.ones((3, 5), dtype="bool")
        ))
row("a loop over nothing", ts.ShapeError,
    lambda: ts.scan(lambda c, x: (c, ()), ts.tensor(0.0), None))
row("a loop over a list of numbers", ts.ShapeError,
    lambda: ts.scan(lambda c, x: (c, ()), ts.tensor(0.0), [1.0, 2.0]))

# -- parts that are called alone -------------------------------------------------------------------
def gradients_of_two_parts() -> object:
    a, b = ts.nn.Linear(4, 4), ts.nn.Linear(4, 4)
    return ts.jit(lambda x: ts.grad((b(a(x)) ** 2).sum()))(ts.ones((2, 4)))


row("gradients of two parts", ts.UsageError, gradients_of_two_parts)

# -- what PyTorch's users give by place, or in another shape ---------------------------------------
row("positions by sequence", ts.ShapeError,
    lambda: ts.nn.rotary(ts.ones((4, 4, 8, 2)), positions=ts.zeros((4, 8))))
row("positions of another length", ts.ShapeError,
    lambda: ts.nn.rotary(ts.ones((4, 8, 2)), positions=ts.zeros((9,))))
row("a rate and a beta", ts.UsageError, lambda: ts.optim.AdamW(1e-3, 0.9))
row("whether unbiased", ts.UsageError, lambda: ts.ones((2, 3)).var(0, True))
row("limits of a norm", ts.ShapeError,
    lambda: ts.optim.clip_by_global_norm({"w": W}, W))
row("a step of a recipe without its state", ts.UsageError,
    lambda: recipe.make_step({})({}, {}))
for model, kind in (
    (ts.nn.GPT, "<class 'tessera.nn.transformer.GPT'>"),
    (ts.nn.Linear(2, 2), "Linear(weight=f32[2, 2], bias=f32[2])"),
):
    row(f"a recipe's model is {kind}", ts.UsageError,
        lambda model=model: recipe.make_step({}, model))
row("keys of other trainers in a recipe", ts.UsageError,
    lambda: recipe.make_step({"lr": 1e-3, "max_grad_norm": 1.0, "n_embd": 8, "wd": 0.1}))
