"""Calls with too few or too many arguments. A row: name, error, mistake, message."""

from __future__ import annotations

import tessera as ts
from tests.mesh.errors import X, row

# What is not there is no mistake of this file's: mypy would say the same as the messages.
# mypy: disable-error-code="attr-defined, call-arg, arg-type, operator, misc, call-overload, call-arg"
# ruff: noqa: E501
# fmt: off

LAYER = ts.nn.Linear(2, 3)


class Own(ts.nn.Module):
    def __call__(self, x: ts.Tensor, y: ts.Tensor, *, mask: ts.Tensor | None = None) -> ts.Tensor:
        return x


def loss(w: ts.Tensor) -> ts.Tensor:
    return ts.sum(w)


row('ts.where(X > 0)', ts.UsageError, lambda: ts.where(X > 0), """
where: x and y are missing
  arguments : pick, x, y
  at        : AT
  fix       : write ts.where(mask, x, y); where a mask is true: np.nonzero(mask.numpy())
""")
row('ts.tensor()', ts.UsageError, lambda: ts.tensor(), """
tensor: data is missing
  arguments : data, mesh, layout, dtype, name
  at        : AT
  fix       : call it with (data)
""")
row('ts.matmul(X)', ts.UsageError, lambda: ts.matmul(X), """
matmul: y is missing
  arguments : x, y
  at        : AT
  fix       : call it with (x, y)
""")
row('ts.dist.all_reduce()', ts.UsageError, lambda: ts.dist.all_reduce(), """
all_reduce: x is missing
  arguments : x, axis, op, deterministic
  at        : AT
  fix       : call it with (x)
""")
row('ts.grad()', ts.UsageError, lambda: ts.grad(), """
grad: loss is missing
  arguments : loss, weights, layout, reduce_partial, reduce_dtype
  at        : AT
  fix       : call it with (loss)
""")
row('ts.sum(X, 1, 2, 3)', ts.UsageError, lambda: ts.sum(X, 1, 2, 3), """
sum: 4 arguments by place, where it takes 3
  arguments : x, dim, keepdims
  at        : AT
  fix       : several go in one tuple: dim=(a, b)
""")
row('X.sum(1, 2, 3)', ts.UsageError, lambda: X.sum(1, 2, 3), """
sum: 3 arguments by place, where it takes 2
  arguments : dim, keepdims
  at        : AT
  fix       : several go in one tuple: dim=(a, b)
""")
row('ts.exp(X, X, X)', ts.UsageError, lambda: ts.exp(X, X, X), """
exp: 3 arguments by place, where it takes 1
  arguments : x
  at        : AT
  fix       : leave out those that it does not take
""")
row('ts.concat(X, X, X)', ts.UsageError, lambda: ts.concat(X, X, X), """
concat: 3 arguments by place, where it takes 2
  arguments : xs, dim
  at        : AT
  fix       : several go in one tuple: xs=(a, b)
""")
row('ts.checkpoint.save()', ts.UsageError, lambda: ts.checkpoint.save(), """
save: tag and tensors are missing
  arguments : tag, tensors, optimizer, atomic, async_io, mesh, root, keep, step, metrics, state, quiet
  at        : AT
  fix       : call it with (tag, tensors)
""")
row('X.transpose(2, 0, 1)', ts.UsageError, lambda: X.transpose(2, 0, 1), """
transpose: 3 arguments by place, where it takes 2
  arguments : a, b
  at        : AT
  fix       : two dims are exchanged: x.transpose(0, 1); an order of all is x.permute(2, 0, 1)
""")
row('X.type(ts.f32)', ts.UsageError, lambda: X.type(ts.f32), """
type: it is not a function
  type : f32[2, 3]
  at   : AT
  fix  : the dtype is x.dtype; convert by x.to(dtype)
""")
row('X.item(0)', ts.UsageError, lambda: X.item(0), """
Tensor.item: 1 argument by place, where it takes none
  arguments : none
  at        : AT
  fix       : leave out those that it does not take
""")
row('LAYER()', ts.UsageError, lambda: LAYER(), """
Linear: x is missing
  arguments : x
  at        : AT
  fix       : call it with (x)
""")
row('LAYER(X, X)', ts.UsageError, lambda: LAYER(X, X), """
Linear: 2 arguments by place, where it takes 1
  arguments : x
  at        : AT
  fix       : leave out those that it does not take
""")
row('Own()(X)', ts.UsageError, lambda: Own()(X), """
Own: y is missing
  arguments : x, y, mask
  at        : AT
  fix       : call it with (x, y)
""")
row('Own()(X, X, X)', ts.UsageError, lambda: Own()(X, X, X), """
Own: 3 arguments by place, where it takes 2
  arguments : x, y, mask
  at        : AT
  fix       : give the others by name: mask=
""")
row('Own()(X, X, msk=X)', ts.UsageError, lambda: Own()(X, X, msk=X), """
Own: there is no argument 'msk'
  arguments : x, y, mask
  at        : AT
  fix       : write mask=
""")
row('ts.optim.AdamW(0.1).update({}, {})', ts.UsageError, lambda: ts.optim.AdamW(0.1).update({}, {}), """
Optimizer.update: state is missing
  arguments : params, grads, state
  at        : AT
  fix       : call it with (params, grads, state)
""")
row('ts.nn.Linear(3)', ts.UsageError, lambda: ts.nn.Linear(3), """
Linear: out_features is missing
  arguments : in_features, out_features, bias, std
  at        : AT
  fix       : call it with (in_features, out_features)
""")
row('ts.dist.Mesh()', ts.UsageError, lambda: ts.dist.Mesh(), """
Mesh: axes is missing
  arguments : axes, devices, shape
  at        : AT
  fix       : call it with (axes)
""")
row('ts.dist.Mesh.parse()', ts.UsageError, lambda: ts.dist.Mesh.parse(), """
Mesh.parse: text is missing
  arguments : text
  at        : AT
  fix       : call it with (text)
""")
row('ts.no_grad(1)', ts.UsageError, lambda: ts.no_grad(1), """
no_grad: 1 argument by place, where it takes none
  arguments : none
  at        : AT
  fix       : leave out those that it does not take
""")
row('ts.jit(loss)(X, X)', ts.UsageError, lambda: ts.jit(loss)(X, X), """
loss: 2 arguments by place, where it takes 1
  arguments : w
  at        : AT
  fix       : leave out those that it does not take
""")
row('ts.vmap(loss)(X, X)', ts.UsageError, lambda: ts.vmap(loss)(X, X), """
loss: 2 arguments by place, where it takes 1
  arguments : w
  at        : AT
  fix       : leave out those that it does not take
""")
row('ts.vjp(loss)', ts.UsageError, lambda: ts.vjp(loss), """
loss: w is missing
  arguments : w
  at        : AT
  fix       : call it with (w)
""")
row('ts.scan(loss, X, X)', ts.UsageError, lambda: ts.scan(loss, X, X), """
loss: 2 arguments by place, where it takes 1
  arguments : w
  at        : AT
  fix       : leave out those that it does not take
""")
row('ts.checkpoint(loss)', ts.UsageError, lambda: ts.checkpoint(loss), """
checkpoint: a module is not a function
  module : tessera.checkpoint
  at     : AT
  fix    : to compute again in the backward pass: layers: nn.GPTConfig(remat=True); a loop of yours: ts.scan(..., policy="recompute"); it is for saving: checkpoint.save("step_100", model, state)
""")
row('ts.random(3)', ts.UsageError, lambda: ts.random(3), """
random: a module is not a function
  module : tessera.lang.random
  at     : AT
  fix    : write ts.random.uniform(shape) or ts.random.normal(shape)
""")
row('ts.nn(X)', ts.UsageError, lambda: ts.nn(X), """
nn: a module is not a function
  module : tessera.nn
  at     : AT
  fix    : it has adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_max_pool1d, adaptive_max_pool2d, all_to_all_attention, attention
""")
row('ts.mesh((2, 2))', ts.UsageError, lambda: ts.mesh((2, 2)), """
mesh: a module is not a function
  module : tessera.mesh
  at     : AT
  fix    : write dist.Mesh(("dp",), devices=8)
""")
row('ts.optim(0.1)', ts.UsageError, lambda: ts.optim(0.1), """
optim: a module is not a function
  module : tessera.optim
  at     : AT
  fix    : write optim.AdamW(lr)
""")
row('ts.pipeline(loss)', ts.UsageError, lambda: ts.pipeline(loss), """
pipeline: a module is not a function
  module : tessera.pipeline
  at     : AT
  fix    : it has compose, pipeline_svg, pipeline_table, pipeline_text, run, show
""")
row('ts.nn.functional.one_hot(X, 3)', ts.UnknownNameError, lambda: ts.nn.functional.one_hot(X, 3), """
module 'tessera.nn.functional' has no attribute 'one_hot'
  at  : AT
  fix : write ts.one_hot
""")
row('ts.nn.functional.Linear(2, 3)', ts.UnknownNameError, lambda: ts.nn.functional.Linear(2, 3), """
module 'tessera.nn.functional' has no attribute 'Linear'
  at  : AT
  fix : write nn.Linear
""")
row('ts.mesh.make((2, 2))', ts.UnknownNameError, lambda: ts.mesh.make((2, 2)), """
module 'tessera.mesh' has no attribute 'make'
  at  : AT
  fix : the names most like it are Mesh, auto, from_descriptor
""")
