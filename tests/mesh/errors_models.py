"""Mistakes with models. A row: name, error, mistake, message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import tessera as ts
from tessera.train import generate as generate_module
from tessera.train import recipe
from tessera.train.generate import generate, sample
from tests.mesh.errors import row

# fmt: off

# -- choices that nothing reads --------------------------------------------------------------------
row("rates of no rotation", ts.UsageError, lambda: ts.nn.GPTConfig(rope=ts.nn.Rope(100.0)), """
GPTConfig: rope=an object of type Rope has no effect: positions are "learned"
  at  : AT
  fix : give positions="rotary"
""")
row("room for no experts", ts.UsageError, lambda: ts.nn.GPTConfig(capacity=2.0), """
GPTConfig: capacity=2.0 has no effect: no layer has experts
  at  : AT
  fix : give experts=8
""")
row("biases of experts", ts.UsageError, lambda: ts.nn.GPTConfig(experts=4, biases=("mlp",)), """
GPTConfig: biases=('mlp',) has no effect: experts have no biases
  at  : AT
  fix : leave out "mlp"
""")
row("an axis that splits nothing", ts.UsageError, lambda: ts.nn.GPTConfig(context_axis="sp"), """
GPTConfig: context_axis='sp' has no effect: the sequence is not split
  at  : AT
  fix : give context="ring" or "all_to_all"
""")
row("a factor of no scaling", ts.UsageError, lambda: ts.nn.Rope(factor=4.0), """
Rope: factor=4.0 has no effect: scaling is "default"
  at  : AT
  fix : give scaling="linear" or "llama3" or "dynamic" or "yarn" or "longrope"
""")
row("a rate of no balance", ts.UsageError, lambda: ts.nn.MoE(4, 4, 4, rate=0.1), """
MoE: rate=0.1 has no effect: the load is not balanced by a bias
  at  : AT
  fix : give balance="bias"
""")
row("a rate that takes away", ts.UsageError,
    lambda: ts.nn.MoE(4, 4, 4, balance="bias", rate=-0.1), """
MoE: rate cannot be -0.1
  at  : AT
  fix : give a number of at least 0
""")
row("a weight that is no number", ts.UsageError,
    lambda: ts.nn.GPTConfig(experts=4, aux_weight=float("nan")), """
GPTConfig: aux_weight cannot be nan
  at  : AT
  fix : give a number of at least 0
""")
LAYER = ts.nn.MoE(4, 4, 4)
FOUR, TWO = (ts.dist.Mesh((a,), devices=n) for a, n in (("ep", 4), ("a", 2)))
ROWS = {"router": ts.ones((4, 4)), "up": ts.ones((4, 4, 4)), "down": ts.ones((4, 4, 4))}
row("experts on another mesh than the tokens", ts.MeshError,
    lambda: ts.op.moe(ts.tensor(np.ones((2, 4)), mesh=TWO), ROWS, mesh=FOUR), """
moe: mesh= is another mesh than that of its arguments
  mesh      : ep=4
  arguments : a=2
  at        : AT
  fix       : leave it out, or outside of a function: dist.place(x, mesh=...)
""")
row("weights of experts on another mesh", ts.MeshError,
    lambda: ts.op.moe(ts.tensor(np.ones((2, 4)), mesh=TWO),
                      {**ROWS, "up": ts.tensor(np.ones((4, 4, 4)), mesh=FOUR)}), """
moe: arguments are on different meshes
  arg 0 : f32[2, 4] on a=2
  arg 1 : f32[4, 4] on no mesh
  arg 2 : f32[4, 4, 4] on ep=4
  at    : AT
  fix   : build all on one mesh, or outside of a function: dist.place(x, mesh=...)
""")
row("an axis of experts named twice", ts.UsageError,
    lambda: ts.op.moe(np.ones((2, 4)), ROWS, axis=("ep", "ep"), mesh=FOUR), """
moe: axis cannot be ('ep', 'ep')
  at  : AT
  fix : name each mesh axis once
""")
row("a mask that is added", ts.DTypeError, lambda: LAYER(
    ts.ones((2, 3, 4)), mask=np.array([[0, 0, -np.inf]] * 2)), """
moe: a float attention mask of tokens may be one that is added to scores
  attention_mask : f32[2, 3]
  at             : AT
  fix            : give truths: mask != 0 where 0 is padding, mask == 0 where -inf is
""")
row("an expert of all tokens as an array", ts.UsageError, lambda: ts.op.moe(
    np.ones((2, 4)), {**ROWS, "shared": np.ones((4, 4))}, network=lambda rows, w: rows), """
moe: shared cannot be an object of type ndarray
  at  : AT
  fix : give a dict of what the network takes, without the dim of experts
""")
row("experts without a token", ts.ShapeError, lambda: LAYER(ts.ones((0, 3, 4))), """
moe: there is no token to route
  x   : f32[0, 3, 4]
  at  : AT
  fix : leave out the step for a batch that has none
""")
row("a width of given weights", ts.UsageError, lambda: ts.op.moe(W, LAYER, hidden=8), """
moe: hidden=8 is for weights that it makes itself
  at  : AT
  fix : leave it out, or give a number of experts
""")

BLOCK = ts.nn.TransformerBlock(ts.nn.GPTConfig(d=8, heads=2, layers=1))
row("a mask of a block by place", ts.UsageError, lambda: BLOCK(
    ts.ones((2, 4, 8)), np.ones((2, 4), bool)), """
TransformerBlock: own cannot be an object of type ndarray
  at  : AT
  fix : give a mask by name: attention_mask=
""")
row("a block of one sequence", ts.ShapeError, lambda: BLOCK(ts.ones((4, 8))), """
TransformerBlock: x has 2 dims, not 3
  x   : f32[4, 8]
  at  : AT
  fix : give a batch: x[None] for one sequence
""")
row("a rotation by no base", ts.UsageError, lambda: ts.nn.rotary(ts.ones((4, 8)), base=0), """
rotary: base cannot be 0
  at  : AT
  fix : give a number above 0
""")

# -- a model that decodes --------------------------------------------------------------------------
GPT = ts.nn.GPT(ts.nn.GPTConfig(vocab=8, seq=8, d=8, layers=1, heads=2))
IN_TURN = np.zeros((2, 4), np.int32)
W = ts.ones((2,))
CACHE = {n: ts.zeros((1, 2, 2, 6, 4)) for n in "kv"}
row("a prompt ends outside", ts.ShapeError, lambda: GPT.prefill(IN_TURN, [3, 4], 6), """
GPT.prefill: place 4 at [1] is outside 0 to 3
  places : i32[2]
  at     : AT
  fix    : keep each place within 0 to 3
""")
row("a cache that is too small", ts.UsageError, lambda: GPT.prefill(IN_TURN, [3, 3], 3), """
GPT.prefill: slots cannot be 3
  at  : AT
  fix : give a whole number of at least 4
""")
row("ends of other sequences", ts.ShapeError, lambda: GPT.prefill(IN_TURN, [3], 6), """
GPT.prefill: at has shape (1,), not (2,)
  at  : i32[1]
  at  : AT
  fix : give it the shape (2,)
""")
row("a place beyond the cache", ts.ShapeError, lambda: GPT.decode([1, 2], CACHE, [5, 6]), """
GPT.decode: place 6 at [1] is outside 0 to 5
  places : i32[2]
  at     : AT
  fix    : keep each place within 0 to 5
""")
row("a cache of other sequences", ts.ShapeError, lambda: GPT.decode([1], CACHE, [5]), """
GPT.decode: the cache's k has shape (1, 2, 2, 6, 4), not (1, 1, 2, 6, 4)
  cache's k : f32[1, 2, 2, 6, 4]
  ids       : i32[1]
  at        : AT
  fix       : give it the shape (1, 1, 2, 6, 4)
""")
row("a cache of whole numbers", ts.DTypeError, lambda: GPT.decode(
    [1, 2], {n: t.to("i32") for n, t in CACHE.items()}, [5, 5]), """
GPT.decode: the cache's k must be floats
  cache's k : i32[1, 2, 2, 6, 4]
  at        : AT
  fix       : cast it with .to(ts.f32)
""")
row("no cache", ts.UsageError, lambda: GPT.decode([1, 2], {}, [5, 5]), """
GPT.decode: the cache cannot be {}
  at  : AT
  fix : give the second result of prefill or decode
""")
row("a token that is a sequence", ts.ShapeError, lambda: GPT.decode(IN_TURN, CACHE, [5, 5]), """
GPT.decode: ids has 2 dims, not 1
  ids : i32[2, 4]
  at  : AT
  fix : give one token of each sequence, [B]
""")
row("a cache of a split sequence", ts.UsageError, lambda: ts.nn.GPT(ts.nn.GPTConfig(
    vocab=8, seq=8, d=8, layers=1, heads=2, context="ring")).prefill(IN_TURN, [3, 3], 6), """
GPT.prefill: there is no cache of a sequence that is split by context='ring'
  at  : AT
  fix : load the weights into an nn.GPT with context=None
""")

# -- text ------------------------------------------------------------------------------------------
def text(what: Any, **more: Any) -> Callable[[], Any]:
    """The call that writes text with a model that gives `what`."""
    return lambda: generate(lambda ids: what, [1], 2, window=8, **more)


row("the module that has generate", ts.UsageError, lambda: generate_module(GPT, [1], 2), """
generate: a module is not a function
  module : tessera.train.generate
  at     : AT
  fix    : write from tessera.train.generate import generate
""")
row("the logits of several texts", ts.ShapeError, lambda: sample(
    np.zeros((2, 8)), np.random.default_rng(0), 0.0), """
sample: logits are those of one token, [V], not [2, 8]
  at  : AT
  fix : of several texts give one at a time: [sample(x, draw) for x in logits.numpy()]
""")
row("logits of the last token", ts.UsageError, text(ts.zeros((1, 16))), """
generate: the model gave f32[1, 16], not logits [1, 8, V]
  at  : AT
  fix : return those of each token, not of the last alone: [1, 8, V]
""")
row("logits of several texts", ts.UsageError, text(ts.zeros((2, 8, 16))), """
generate: the model gave f32[2, 8, 16], not logits [1, 8, V]
  at  : AT
  fix : return logits for each token of the window, [1, 8, V]
""")
row("no logits", ts.UsageError, text(None), """
generate: the model gave None, not logits [1, 8, V]
  at  : AT
  fix : return logits for each token of the window, [1, 8, V]
""")
row("logits in a tuple", ts.UsageError, text((ts.zeros((1, 8, 16)), None)), """
generate: the model gave a tuple, not logits [1, 8, V]
  at  : AT
  fix : give lambda ids: model(ids)[0] and window=, if the logits come first
""")
row("logits in a dict", ts.UsageError, text({"logits": ts.zeros((1, 8, 16))}), """
generate: the model gave a dict, not logits [1, 8, V]
  at  : AT
  fix : give lambda ids: model(ids)["logits"] and window=
""")
for temperature in (0.0, 1.0):
    row(f"logits that are NaN at {temperature}", ts.UsageError, text(
        np.array([[[0.0, np.nan, 1.0, 3.0]] * 8], np.float32), temperature=temperature), """
sample: no token can be chosen, as the largest logit is nan
  logits : 1 of 4 are NaN
  at     : AT
  fix    : find where it begins: ts.debug.nan_origin(model, ids)
""")
row("no model", ts.UsageError, lambda: generate(None, [1], 2, window=4), """
generate: the model cannot be None
  at  : AT
  fix : give an nn.GPT, or a function of ids [1, window]
""")
TEXT = """
generate: the prompt {}
  at  : AT
  fix : give the ids of one text, from 0 to 7; call it once for each of several texts
"""
for prompt, says in (
    ("hi", "cannot be 'hi'"),
    (None, "cannot be None"),
    ([1.9, True], "cannot be [1.9, True]"),
    ([[1, 2], [3, 4]], "cannot be [[1, 2], [3, 4]]"),
    ([[1], [3, 4]], "cannot be [[1], [3, 4]]"),
    (3, "cannot be 3"),
    ([1, 2**40], f"has the id {2**40} at [1]"),
    ([9, *[1] * 20], "has the id 9 at [0]"),
):
    row(f"a prompt that {says}", ts.UsageError,
        lambda prompt=prompt: generate(GPT, prompt, 2), TEXT.format(says))
for stop, says in (
    ("24", "cannot be '24'"), (True, "cannot be True"), ([1.5], "cannot be [1.5]"),
    (-1, "has the id -1 at [0]"), ([3, 8], "has the id 8 at [1]"),
):
    row(f"a stop that {says}", ts.UsageError,
        lambda stop=stop: generate(GPT, [1], 2, stop=stop), f"""
generate: stop {says}
  at  : AT
  fix : give an id from 0 to 7, or several
""")
row("a seed of no number", ts.UsageError, lambda: generate(GPT, [1], 2, seed=1.5), """
generate: seed cannot be 1.5
  at  : AT
  fix : give a whole number of at least 0
""")
row("a seed in place of a generator", ts.UsageError, lambda: sample(np.zeros(2), 1), """
sample: draw cannot be 1
  at  : AT
  fix : give np.random.default_rng(0)
""")
for name, fix in (
    ("max_new_tokens", "write tokens="),
    ("eos_token_id", "write stop="),
    ("do_sample", "leave it out: temperature=0 takes the likeliest token, above 0 it draws"),
    ("top_p", "1 is what it does; top_k= bounds from how many it draws"),
    ("num_beams", "1 is what it does; for beams, nn.GPT.prefill and nn.GPT.decode take several "
     "sequences at once"),
):
    row(f"text by {name}", ts.UsageError, lambda name=name: generate(GPT, [1], 2, **{name: 3}), f"""
generate: there is no argument {name!r}
  arguments : model, prompt, tokens, window, temperature, top_k, seed, stop, mesh, cache
  at        : AT
  fix       : {fix}
""")
row("a layout of pending sums", ts.UsageError, lambda: ts.grad(
    (W * 2.0).sum(), W, layout=W, reduce_partial=False), """
grad: a gradient whose sums stay pending has the layout that they leave it in
  layout : <Tensor f32[2]>
  at     : AT
  fix    : give reduce_partial=True, or leave out layout
""")

# -- positions -------------------------------------------------------------------------------------
ALIBI = ts.nn.GPTConfig(vocab=8, seq=8, d=8, layers=1, heads=2, positions="alibi")
LATE, BATCH = np.arange(4) + 5, np.zeros((2, 4), np.int32)
OUTSIDE = """
{}: position 8 at [{}3] is outside 0 to 7{}
  positions : i32[{}4]{}
  at        : AT
  fix       : keep each position within 0 to 7
"""
for given, *says in (
    (LATE, "", "", ""), (LATE[None], "0, ", "", "1, "),
    (np.stack([LATE, LATE]), "0, ", ", and 1 more", "2, "),
):
    row(f"positions {given.shape} beyond the table", ts.ShapeError,
        lambda given=given: GPT(BATCH, position_ids=given), OUTSIDE.format("GPT", *says, ""))
    row(f"positions {given.shape} beyond the table, recorded", ts.ShapeError,
        lambda given=given: ts.jit(lambda m, i, p: m.loss(i, i, position_ids=p))(GPT, BATCH, given),
        OUTSIDE.format("GPT", *says, "\n  used_at   : AT"))
row("positions beyond ALiBi's", ts.ShapeError,
    lambda: ts.nn.TransformerBlock(ALIBI)(ts.ones((2, 4, 8)), position_ids=LATE),
    OUTSIDE.format("TransformerBlock", "", "", "", ""))

# -- attention -------------------------------------------------------------------------------------
Q = ts.ones((2, 2, 4, 8))
for attend in (ts.nn.ring_attention, ts.nn.all_to_all_attention):
    for axes in (("dp", "cp"), ()):
        row(f"{attend.__name__} over {axes}", ts.UsageError,
            lambda attend=attend, axes=axes: attend(Q, Q, Q, axes), f"""
{attend.__name__}: axis cannot be {axes}
  at  : AT
  fix : name one axis of the mesh, e.g. "cp"
""")
for bias in (ts.ones((1, 2, 4, 4)), ts.ones((2, 2, 4, 4))):
    row(f"a bias of scores {bias.shape}", ts.ShapeError,
        lambda bias=bias: ts.nn.attention(Q, Q, Q, bias=bias), f"""
attention: the bias is of keys (2, 2, 4), and has no dim of queries
  bias : {bias.type}
  q    : f32[2, 2, 4, 8]
  k    : f32[2, 2, 4, 8]
  at   : AT
  fix  : give what is added to each score as mask=, which may be of floats
""")
row("a bias of scores in tiles", ts.ShapeError,
    lambda: ts.nn.flash_attention(Q, Q, Q, bias=ts.ones((2, 4, 4))), """
attention: the bias is of keys (2, 2, 4), and has no dim of queries
  bias : f32[2, 4, 4]
  q    : f32[2, 2, 4, 8]
  k    : f32[2, 2, 4, 8]
  at   : AT
  fix  : give what is added to each score as mask=, which may be of floats
""")
for many in (1, 2):
    row(f"a mask of other sizes in tiles, {many} heads a group", ts.ShapeError,
        lambda many=many: ts.nn.flash_attention(
            Q, Q[:, ::many], Q[:, ::many], mask=ts.ones((3, 5), dtype="bool")
        ), f"""
attention: the mask does not broadcast to the scores, (2, 2, 4, 4)
  mask : bool[3, 5]
  q    : f32[2, 2, 4, 8]
  k    : f32[2, {2 // many}, 4, 8]
  at   : AT
  fix  : a mask is [..., H, S, T], any of them 1; of keys [B, T]: mask[:, None, None]
""")
row("a loop over nothing", ts.ShapeError,
    lambda: ts.scan(lambda c, x: (c, ()), ts.tensor(0.0), None), """
scan: there is no tensor to take turns over
  at  : AT
  fix : give ts.arange(n) as xs for n turns
""")
row("a loop over a list of numbers", ts.ShapeError,
    lambda: ts.scan(lambda c, x: (c, ()), ts.tensor(0.0), [1.0, 2.0]), """
scan: the tensors need one leading length
  x0  : f32[]
  x1  : f32[]
  at  : AT
  fix : join what the turns take in one tensor: ts.tensor(numbers), ts.stack(tensors)
""")

# -- parts that are called alone -------------------------------------------------------------------
def gradients_of_two_parts() -> object:
    a, b = ts.nn.Linear(4, 4), ts.nn.Linear(4, 4)
    return ts.jit(lambda x: ts.grad((b(a(x)) ** 2).sum()))(ts.ones((2, 4)))


row("gradients of two parts", ts.UsageError, gradients_of_two_parts, """
grad: two weights are called 'weight'
  one   : f32[4, 4]
  other : f32[4, 4]
  at    : AT
  fix   : pass the weights: ts.grad(loss, [a.parameters(), b.parameters()]); parts of one module \
have names of their own
""")

# -- what PyTorch's users give by place, or in another shape ---------------------------------------
row("positions by sequence", ts.ShapeError,
    lambda: ts.nn.rotary(ts.ones((4, 4, 8, 2)), positions=ts.zeros((4, 8))), """
rotary: positions of two dims would be those of the dim before S, not of sequences
  positions : f32[4, 8]
  x         : f32[4, 4, 8, 2]
  at        : AT
  fix       : give [S], or for each sequence its own: positions.reshape(4, 1, 8)
""")
row("positions of another length", ts.ShapeError,
    lambda: ts.nn.rotary(ts.ones((4, 8, 2)), positions=ts.zeros((9,))), """
rotary: the positions do not broadcast to those of x
  positions : f32[9]
  x         : f32[4, 8, 2]
  at        : AT
  fix       : give [S], or for each sequence its own: positions.reshape(4, 8)
""")
row("a rate and a beta", ts.UsageError, lambda: ts.optim.AdamW(1e-3, 0.9), """
AdamW: betas cannot be 0.9
  at  : AT
  fix : give two numbers, e.g. (0.9, 0.999)
""")
row("whether unbiased", ts.UsageError, lambda: ts.ones((2, 3)).var(0, True), """
var: 2 arguments by place, where it takes 1
  arguments : dim, keepdims, correction
  at        : AT
  fix       : give the others by name: keepdims=, correction=
""")
row("limits of a norm", ts.ShapeError,
    lambda: ts.optim.clip_by_global_norm({"w": W}, W), """
clip_by_global_norm: max_norm has shape (2,), not ()
  max_norm : f32[2]
  at       : AT
  fix      : give it the shape ()
""")
row("a step of a recipe without its state", ts.UsageError,
    lambda: recipe.make_step({})({}, {}), """
step: state is missing
  arguments : batch, weights, state
  at        : AT
  fix       : call it with (batch, weights, state)
""")
for model, kind in (
    (ts.nn.GPT, "<class 'tessera.nn.transformer.GPT'>"),
    (ts.nn.Linear(2, 2), "Linear(weight=f32[2, 2], bias=f32[2])"),
):
    row(f"a recipe's model is {kind}", ts.UsageError,
        lambda model=model: recipe.make_step({}, model), f"""
make_step: the model cannot be {kind}
  at  : AT
  fix : give a function of (inputs, weights), as make_model(config) gives; a module trains by graph.training_step
""")  # noqa: E501
row("keys of other trainers in a recipe", ts.UsageError,
    lambda: recipe.make_step({"lr": 1e-3, "max_grad_norm": 1.0, "n_embd": 8, "wd": 0.1}), """
config: 4 keys are wrong
  lr            : is not known; did you mean learning_rate?
  max_grad_norm : is not known; did you mean gradient_clip_norm?
  n_embd        : is not known; did you mean hidden_size?
  wd            : is not known; did you mean weight_decay?
  at            : AT
  fix           : correct them, or leave them out for the defaults
""")
