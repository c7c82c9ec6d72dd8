"""Mistakes with layers and their functions. A row: name, error, mistake, message."""

from __future__ import annotations

from typing import Any

import torch

import tessera as ts
from tessera import dist, nn
from tessera.nn.stack import Stack
from tests.mesh.errors import X, Y, row

# fmt: off

row("labels of another shape", ts.ShapeError, lambda: nn.cross_entropy(X, ts.tensor([0, 1, 2])), """
cross_entropy: one label per row of logits is needed
  logits : f32[2, 3]
  labels : i32[3]
  at     : AT
  fix    : reshape labels to the shape of logits without its last dim
""")
row("labels of floats", ts.DTypeError, lambda: nn.cross_entropy(X, ts.tensor([0.0, 1.0])), """
cross_entropy: labels must be integers
  labels : f32[2]
  at     : AT
  fix    : cast them with .to(ts.int32)
""")
row("labels of the head in blocks", ts.ShapeError,
    lambda: nn.linear_cross_entropy(X, Y, ts.tensor([0, 1, 2])), """
linear_cross_entropy: one label per row of x is needed
  x      : f32[2, 3]
  labels : i32[3]
  at     : AT
  fix    : reshape labels to the shape of x without its last dim
""")
row("a dropout of everything", ts.UsageError, lambda: nn.dropout(X, 1.0), """
dropout: p cannot be 1.0
  at  : AT
  fix : give a number of at least 0 and below 1
""")

def attention_of_heads_that_do_not_divide() -> Any:
    q, k = ts.ones((1, 3, 4, 2)), ts.ones((1, 2, 4, 2))
    return nn.attention(q, k, k)


row("attention of heads that do not divide", ts.ShapeError,
    attention_of_heads_that_do_not_divide, """
attention: the shapes of q, k and v do not fit
  q   : f32[1, 3, 4, 2]
  k   : f32[1, 2, 4, 2]
  v   : f32[1, 2, 4, 2]
  at  : AT
  fix : q [..., H, S, D], k [..., G, T, D], v [..., G, T, E] with H a multiple of G
""")
row("attention of too few dims", ts.ShapeError, lambda: nn.flash_attention(X, X, X), """
attention: the shapes of q, k and v do not fit
  q   : f32[2, 3]
  k   : f32[2, 3]
  v   : f32[2, 3]
  at  : AT
  fix : q [..., H, S, D], k [..., G, T, D], v [..., G, T, E] with H a multiple of G
""")
row("rotary of an odd dim", ts.ShapeError, lambda: nn.rotary(X), """
rotary: the last dim is not even, or there is none before it
  x   : f32[2, 3]
  at  : AT
  fix : give [..., S, D] with an even D
""")
row("an unknown gelu", ts.UsageError, lambda: nn.gelu(X, approximate="sigmoid"), """
gelu: approximate cannot be 'sigmoid'
  at  : AT
  fix : use tanh, none
""")
row("heads that do not divide", ts.UsageError, lambda: nn.GPTConfig(d=30, heads=4), """
GPTConfig: d=30, heads=4, kv_heads=4 do not divide
  at  : AT
  fix : heads divides d, kv_heads divides heads
""")
row("a config of no layers", ts.UsageError, lambda: nn.GPTConfig(layers=0), """
GPTConfig: layers cannot be 0
  at  : AT
  fix : give a whole number of at least 1
""")
row("an unknown norm", ts.UsageError, lambda: nn.GPTConfig(norm="batch"), """
GPTConfig: norm cannot be 'batch'
  at  : AT
  fix : use layer, rms, rms_offset
""")
row("a model without a config", ts.UsageError, lambda: nn.GPT({"d": 256}), """
GPT: the config cannot be {'d': 256}
  at  : AT
  fix : give nn.GPTConfig(vocab=..., seq=..., d=..., layers=..., heads=...)
""")

def a_sequence_that_is_too_long() -> Any:
    config = nn.GPTConfig(vocab=8, seq=4, d=8, layers=1, heads=2)
    return nn.GPT(config)(ts.ones((1, 5), ts.int32))


row("a sequence that is too long", ts.ShapeError, a_sequence_that_is_too_long, """
GPT: ids must be integers [B, S] with S at most 4
  ids : i32[1, 5]
  at  : AT
  fix : cut the sequences, or build the model with a longer config.seq
""")
row("parameters of another model", ts.UsageError,
    lambda: nn.Linear(2, 3).load_parameters({"weight": X, "scale": X}), """
load_parameters: 1 names are missing, 1 are too many
  missing  : bias
  too many : scale
  at       : AT
  fix      : give what parameters() names, or load what is there: strict=False
""")
row("PyTorch's weight of a layer", ts.ShapeError,
    lambda: nn.Linear(2, 3, bias=False).load_state_dict({"weight": ts.ones((3, 2))}), """
load_state_dict: 'weight' has another shape
  have  : f32[2, 3]
  given : f32[3, 2]
  at    : AT
  fix   : PyTorch keeps it as [out, in]: give w.T, also of linear layers that are square
""")
row("a state without the statistics", ts.UsageError, lambda: nn.BatchNorm(2).load_state_dict(
    nn.BatchNorm(2).parameters()), """
load_state_dict: 2 names are missing, 0 are too many
  missing  : running_mean, running_var
  too many : none
  at       : AT
  fix      : give what state_dict() names, or load what is there: strict=False
""")
row("a row of a weight that is set", ts.UsageError,
    lambda: nn.Linear(2, 3).weight.__setitem__(0, 0.0), """
a parameter cannot be changed in a part of it
  parameter : f32[2, 3]
  at        : AT
  fix       : put a whole value into it: p.data = ts.where(mask, value, p)
""")
row("parameters of another size", ts.ShapeError,
    lambda: nn.Linear(2, 3, bias=False).load_parameters({"weight": Y}), """
load_parameters: 'weight' has another shape
  have  : f32[2, 3]
  given : f32[4, 5]
  at    : AT
  fix   : load a checkpoint of a model with the same sizes
""")
row("parameters of PyTorch", ts.ShapeError,
    lambda: nn.Linear(2, 3).load_state_dict(torch.nn.Linear(2, 3).state_dict()), """
load_state_dict: 'weight' has another shape
  have  : f32[2, 3]
  given : f32[3, 2]
  at    : AT
  fix   : PyTorch keeps it as [out, in]: give w.T, also of linear layers that are square
""")
row("an unknown init", ts.UsageError, lambda: dist.tensor((2, 3), init="orthogonal"), """
init: 'orthogonal' is not known
  at  : AT
  fix : use "normal", "uniform", "zeros", "ones", a number or a function of the shape
""")
row("an init of another shape", ts.ShapeError,
    lambda: dist.tensor((2, 3), init=lambda shape: ts.ones((3, 2))).numpy(), """
init: the function gave shape (3, 2) for (2, 3)
  tensor : f32[2, 3]
  at     : AT
  fix    : return a tensor of the shape it is called with
""")

def a_stack_of_made_weights() -> Any:
    class Scale(nn.Module):
        def __init__(self):
            self.w = nn.Parameter(ts.ones((2,)))
    return Stack(Scale(), 2)


row("a stack of weights that have values", ts.UsageError, a_stack_of_made_weights, """
Stack: a parameter of the block has values already, so it cannot be made for every layer
  parameter : f32[2]
  at        : AT
  fix       : make it of sizes: nn.Parameter(4, 8, init=...)
""")
row("a weight set to a number", ts.UsageError,
    lambda: setattr(nn.Linear(2, 3), "weight", 0.5), """
Linear.weight is a parameter, it cannot be 0.5
  parameter : f32[2, 3]
  at        : AT
  fix       : give a tensor of its type, or another nn.Parameter
""")
row("a buffer set to a number", ts.UsageError,
    lambda: setattr(nn.BatchNorm(3), "running_mean", 0), """
BatchNorm.running_mean is a buffer, it cannot be 0
  buffer : f32[3]
  at     : AT
  fix    : give a tensor of its type: ts.full_like(module.running_mean, 0)
""")
row("a weight set to another shape", ts.ShapeError,
    lambda: setattr(nn.Linear(2, 3), "weight", Y), """
Linear.weight: the new value has another shape
  have  : f32[2, 3]
  given : f32[4, 5]
  at    : AT
  fix   : give a tensor like it, or another weight: nn.Parameter(tensor)
""")
row("a pattern that fits no weight", ts.UsageError, lambda: nn.Linear(2, 3).freeze("enc*"), """
freeze: 'enc*' fits no parameter
  parameters : weight, bias
  at         : AT
  fix        : write what their names are, with * for any part
""")
row("a gradient by a frozen weight", ts.UsageError, lambda: ts.grad(
    ts.ones(()), nn.Linear(2, 3).freeze("bias").parameters()), """
grad: 'bias' is frozen
  parameter : f32[3]
  at        : AT
  fix       : give the module itself or its trainable_parameters(), or unfreeze it
""")
row("gradients by a model that is frozen", ts.UsageError, lambda: ts.grad(
    X.sum(), nn.Linear(2, 3).freeze()), """
grad: there is no weight to take a gradient by
  weights : Linear, no parameter of which is trained
  at      : AT
  fix     : train some of it: model.unfreeze("head.*")
""")
row("gradients by the weights that fit no pattern", ts.UsageError, lambda: ts.grad(X.sum(), {}), """
grad: there is no weight to take a gradient by
  weights : {}
  at      : AT
  fix     : give the model, or a dict or list of tensors that is not empty
""")
row("gradients by the values of a dict", ts.UsageError, lambda: ts.grad(
    X.sum(), nn.Linear(2, 3).parameters().values()), """
grad: weight '' is not a float tensor
  weight : dict_values
  at     : AT
  fix    : give the model, its parameters(), or a list of tensors
""")
row("a module called with arguments one by one", ts.UsageError, lambda: nn.functional_call(
    nn.Linear(3, 2), {}, X, X), """
functional_call: kwargs cannot be <Tensor f32[2, 3]>
  at  : AT
  fix : several arguments go in one tuple: functional_call(module, params, (x, y))
""")


def a_block_that_knows_its_model() -> Any:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].parent = [model]


row("a block that knows its model", ts.UsageError, a_block_that_knows_its_model, """
Linear.parent: a module cannot hold itself, nor one that holds it
  at  : AT
  fix : give what is needed of it as an argument of the call
""")


def two_weights_of_one_name() -> Any:
    model = nn.Module()
    model.layers = {1: nn.Linear(2, 2), "1": nn.Linear(2, 2)}
    return model.parameters()


row("two weights of one name", ts.UsageError, two_weights_of_one_name, """
Module: two tensors have the name 'layers.1.weight'
  at  : AT
  fix : rename one key, as of {1: a, "1": b} or {"x.y": a, "x": {"y": b}}
""")


def a_weight_that_is_set_by_its_dotted_name() -> Any:
    model = nn.Sequential(nn.Linear(2, 2))
    for name, weight in model.named_parameters():
        setattr(model, name, weight * 0.5)


row("a weight that is set by its dotted name", ts.UsageError,
    a_weight_that_is_set_by_its_dotted_name, """
Sequential: an attribute cannot be named '0.weight'
  at  : AT
  fix : write model.block.weight = t, or load_state_dict({name: t}, strict=False)
""")
