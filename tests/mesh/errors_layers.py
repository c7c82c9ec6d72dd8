"""Mistakes with layers and their functions. A row: name, error, mistake."""

from __future__ import annotations

from typing import Any

import torch

import tessera as ts
from tessera import dist, nn
from tessera.nn.stack import Stack
from tests.mesh.errors import X, Y, row

# fmt: off

row("labels of another shape", ts.ShapeError, lambda: nn.cross_entropy(X, ts.tensor([0, 1, 2])))
row("labels of floats", ts.DTypeError, lambda: nn.cross_entropy(X, ts.tensor([0.0, 1.0])))
row("labels of the head in blocks", ts.ShapeError,
    lambda: nn.linear_cross_entropy(X, Y, ts.tensor([0, 1, 2])))
row("a dropout of everything", ts.UsageError, lambda: nn.dropout(X, 1.0))

def attention_of_heads_that_do_not_divide() -> Any:
    q, k = ts.ones((1, 3, 4, 2)), ts.ones((1, 2, 4, 2))
    return nn.attention(q, k, k)


row("attention of heads that do not divide", ts.ShapeError,
    attention_of_heads_that_do_not_divide)
row("attention of too few dims", ts.ShapeError, lambda: nn.flash_attention(X, X, X))
row("rotary of an odd dim", ts.ShapeError, lambda: nn.rotary(X))
row("an unknown gelu", ts.UsageError, lambda: nn.gelu(X, approximate="sigmoid"))
row("heads that do not divide", ts.UsageError, lambda: nn.GPTConfig(d=30, heads=4))
row("a config of no layers", ts.UsageError, lambda: nn.GPTConfig(layers=0))
row("an unknown norm", ts.UsageError, lambda: nn.GPTConfig(norm="batch"))
row("a model without a config", ts.UsageError, lambda: nn.GPT({"d": 256}))

def a_sequence_that_is_too_long() -> Any:
    config = nn.GPTConfig(vocab=8, seq=4, d=8, layers=1, heads=2)
    return nn.GPT(config)(ts.ones((1, 5), ts.int32))


row("a sequence that is too long", ts.ShapeError, a_sequence_that_is_too_long)
row("parameters of another model", ts.UsageError,
    lambda: nn.Linear(2, 3).load_parameters({"weight": X, "scale": X}))
row("PyTorch's weight of a layer", ts.ShapeError,
    lambda: nn.Linear(2, 3, bias=False).load_state_dict({"weight": ts.ones((3, 2))}))
row("a state without the statistics", ts.UsageError, lambda: nn.BatchNorm(2).load_state_dict(
    nn.BatchNorm(2).parameters()))
row("a row of a weight that is set", ts.UsageError,
    lambda: nn.Linear(2, 3).weight.__setitem__(0, 0.0))
row("parameters of another size", ts.ShapeError,
    lambda: nn.Linear(2, 3, bias=False).load_parameters({"weight": Y}))
row("parameters of PyTorch", ts.ShapeError,
    lambda: nn.Linear(2, 3).load_state_dict(torch.nn.Linear(2, 3).state_dict()))
row("an unknown init", ts.UsageError, lambda: dist.tensor((2, 3), init="orthogonal"))
row("an init of another shape", ts.ShapeError,
    lambda: dist.tensor((2, 3), init=lambda shape: ts.ones((3, 2))).numpy())

def a_stack_of_made_weights() -> Any:
    class Scale(nn.Module):
        def __init__(self):
            self.w = nn.Parameter(ts.ones((2,)))
    return Stack(Scale(), 2)


row("a stack of weights that have values", ts.UsageError, a_stack_of_made_weights)
row("a weight set to a number", ts.UsageError,
    lambda: setattr(nn.Linear(2, 3), "weight", 0.5))
row("a buffer set to a number", ts.UsageError,
    lambda: setattr(nn.BatchNorm(3), "running_mean", 0))
row("a weight set to another shape", ts.ShapeError,
    lambda: setattr(nn.Linear(2, 3), "weight", Y))
row("a pattern that fits no weight", ts.UsageError, lambda: nn.Linear(2, 3).freeze("enc*"))
row("a gradient by a frozen weight", ts.UsageError, lambda: ts.grad(
    ts.ones(()), nn.Linear(2, 3).freeze("bias").parameters()))
row("gradients by a model that is frozen", ts.UsageError, lambda: ts.grad(
    X.sum(), nn.Linear(2, 3).freeze()))
row("gradients by the weights that fit no pattern", ts.UsageError, lambda: ts.grad(X.sum(), {}))
row("gradients by the values of a dict", ts.UsageError, lambda: ts.grad(
    X.sum(), nn.Linear(2, 3).parameters().values()))
row("a module called with arguments one by one", ts.UsageError, lambda: nn.functional_call(
    nn.Linear(3, 2), {}, X, X))


def a_block_that_knows_its_model() -> Any:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].parent = [model]


row("a block that knows its model", ts.UsageError, a_block_that_knows_its_model)


def two_weights_of_one_name() -> Any:
    model = nn.Module()
    model.layers = {1: nn.Linear(2, 2), "1": nn.Linear(2, 2)}
    return model.parameters()


row("two weights of one name", ts.UsageError, two_weights_of_one_name)


def a_weight_that_is_set_by_its_dotted_name() -> Any:
    model = nn.Sequential(nn.Linear(2, 2))
    for name, weight in model.named_parameters():
        setattr(model, name, weight * 0.5)


row("a weight that is set by its dotted name", ts.UsageError,
    a_weight_that_is_set_by_its_dotted_name)
