"""Calls with too few or too many arguments. A row: name, error, mistake, message."""

from __future__ import annotations

import tessera as ts
from tessera import dist
from tessera.train.memory import offload
from tests.mesh.errors import X, row

# What is not there is no mistake of this file's: mypy would say the same as the messages.
# mypy: disable-error-code="attr-defined, call-arg, arg-type, operator, misc, call-overload"
# ruff: noqa: E501
# fmt: off

LAYER = ts.nn.Linear(2, 3)
GPT = ts.nn.GPT(ts.nn.GPTConfig(vocab=16, seq=8, d=16, layers=1, heads=2))
APART = [ts.tensor([1.0, 2.0], mesh=ts.dist.Mesh(("dp",), devices=[i, i + 1])) for i in (0, 1)]
FOUR = ts.dist.Mesh(("dp",), devices=4)
FOLDED = [ts.tensor([1.0, 2.0], mesh=m) for m in (FOUR, FOUR.fold(onto=2))]


class Own(ts.nn.Module):
    def __call__(self, x: ts.Tensor, y: ts.Tensor, *, mask: ts.Tensor | None = None) -> ts.Tensor:
        return x


def both(x: ts.Tensor, y: ts.Tensor) -> tuple[ts.Tensor, ts.Tensor]:
    return x * 2, y * 2


def loss(w: ts.Tensor) -> ts.Tensor:
    return ts.sum(w)


row('ts.where(X > 0)', ts.UsageError, lambda: ts.where(X > 0), """
where: x and y are missing
  arguments : pick, x, y
  at        : AT
  fix       : write ts.where(mask, x, y); where a mask is true: np.nonzero(mask.numpy())
""")
row('ts.jit(lambda x: offload(x))(X)', ts.UsageError, lambda: ts.jit(lambda x: offload(x))(X), """
a tensor of a recorded function cannot be moved to the host
  tensor : f32[2, 3]
  at     : AT
  fix    : move it outside: an argument before the call, or what the function returns
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
  fix       : call it first: with ts.no_grad(), and as a decorator @ts.no_grad()
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
row("an optimizer's rate is set", ts.UsageError,
    lambda: setattr(ts.optim.SGD(0.1), "lr", 0.01), """
SGD: lr cannot be set, an optimizer does not change
  optimizer : SGD(lr=0.1, weight_decay=0.0, mask=None, master=True)
  at        : AT
  fix       : make another one: optimizer = dataclasses.replace(optimizer, lr=...); or give it a schedule once: lr=optim.warmup_cosine(...)
""")
row("a new attribute of an optimizer", ts.UsageError,
    lambda: setattr(ts.optim.SGD(0.1), "count", 3), """
SGD: count cannot be set, an optimizer does not change
  optimizer : SGD(lr=0.1, weight_decay=0.0, mask=None, master=True)
  at        : AT
  fix       : keep what belongs to a run beside it; its settings are given where it is made
""")
row("the axis of a strategy is set", ts.UsageError,
    lambda: setattr(dist.strategy("data_parallel"), "axis", "x"), """
DataParallel: axis cannot be set, it is a value
  at  : AT
  fix : make another one: dataclasses.replace(x, axis=...)
""")
row("the axis of a strategy is deleted", ts.UsageError,
    lambda: delattr(dist.strategy("data_parallel"), "axis"), """
DataParallel: axis cannot be deleted, it is a value
  at  : AT
  fix : make another one
""")
row("sizes one by one of random numbers", ts.UsageError, lambda: ts.random.normal(2, 3), """
normal: 2 arguments by place, where it takes 1
  arguments : shape, mean, std, dtype, like
  at        : AT
  fix       : the shape is one tuple: ts.random.normal((2, 3)); mean= and std= go by name
""")
row("sizes one by one of uniform numbers", ts.UsageError, lambda: ts.random.uniform(2, 3), """
uniform: 2 arguments by place, where it takes 1
  arguments : shape, low, high, dtype, like
  at        : AT
  fix       : the shape is one tuple: ts.random.uniform((2, 3)); low= and high= go by name
""")
row("weights are clipped", ts.UsageError,
    lambda: ts.optim.clip_by_global_norm(ts.nn.Linear(2, 2).parameters(), 1.0), """
clip_by_global_norm: the gradients are parameters
  at  : AT
  fix : gradients are values: grads = ts.grad(loss, model); grads, norm = optim.clip_by_global_norm(grads, max_norm)
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
row('ts.zeros((2, 3), mesh=None)', ts.UsageError, lambda: ts.zeros((2, 3), mesh=None), """
zeros: there is no argument 'mesh'
  arguments : shape, dtype
  at        : AT
  fix       : a value comes to a mesh where it meets one: ts.tensor(x, mesh=mesh), dist.tensor(shape, mesh=mesh), or with mesh:
""")
row('ts.scan(loss, X, X, length=3)', ts.UsageError, lambda: ts.scan(loss, X, X, length=3), """
scan: there is no argument 'length'
  arguments : body, carry, xs, reverse, policy, name
  at        : AT
  fix       : it is the length of xs; for turns without data give ts.arange(n)
""")
row('ts.grad(loss, argnums=0)', ts.UsageError, lambda: ts.grad(loss, argnums=0), """
grad: there is no argument 'argnums'
  arguments : loss, weights, layout, reduce_partial, reduce_dtype
  at        : AT
  fix       : of a function: value, grads = ts.value_and_grad(fn, argnums, has_aux)(*args)
""")
row('ts.optim.SGD(0.1, momentum=0.9)', ts.UsageError, lambda: ts.optim.SGD(0.1, momentum=0.9), """
SGD: there is no argument 'momentum'
  arguments : lr, weight_decay, mask, master
  at        : AT
  fix       : use optim.Momentum(lr, momentum=0.9, nesterov=)
""")
row('ts.dist.Mesh(dp=2)', ts.UsageError, lambda: ts.dist.Mesh(dp=2), """
Mesh: there is no argument 'dp'
  arguments : axes, devices, shape
  at        : AT
  fix       : give sizes by shape: dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4}), or dist.Mesh.parse("dp=2 tp=4")
""")
row('ts.dist.Mesh((2,), ("dp",))', ts.MeshError, lambda: ts.dist.Mesh((2,), ("dp",)), """
Mesh: axis name 2 is not an identifier
  axes : (2,)
  at   : AT
  fix  : names come first: dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
""")
row('ts.optim.AdamW(foo=1)', ts.UsageError, lambda: ts.optim.AdamW(foo=1), """
AdamW: there is no argument 'foo'
  arguments : lr, betas, eps, weight_decay, mask, master
  at        : AT
  fix       : leave it out if its default is meant: no other choice is offered
""")
row('ts.optim.AdamW(weight_deacy=0.1)', ts.UsageError, lambda: ts.optim.AdamW(weight_deacy=0.1), """
AdamW: there is no argument 'weight_deacy'
  arguments : lr, betas, eps, weight_decay, mask, master
  at        : AT
  fix       : write weight_decay=
""")
row('X.repeat(2, axis=0)', ts.UsageError, lambda: X.repeat(2, axis=0), """
repeat: there is no argument 'axis'
  arguments : none by name
  at        : AT
  fix       : write ts.repeat_interleave(x, repeats, dim=); x.repeat is PyTorch's
""")
row('LAYER.dtype', ts.UnknownNameError, lambda: LAYER.dtype, """
'Linear' object has no attribute 'dtype'
  at  : AT
  fix : ask a weight, such as model.weight.dtype
""")
row('GPT(ts.ones((1, 8)))', ts.DTypeError, lambda: GPT(ts.ones((1, 8))), """
GPT: ids must be integers
  ids : f32[1, 8]
  at  : AT
  fix : cast them with .to(ts.int32)
""")
row('GPT(ts.zeros(8, "i32"))', ts.ShapeError, lambda: GPT(ts.zeros(8, "i32")), """
GPT: ids must be integers [B, S] with S at most 8
  ids : i32[8]
  at  : AT
  fix : give a batch: ids[None] for one sequence
""")
row('ts.checkpoint.load(state={})', ts.UsageError, lambda: ts.checkpoint.load(state={}), """
load: there is no argument 'state'
  arguments : tag, tensors, optimizer, root, only, dtype, restore_random
  at        : AT
  fix       : write optimizer= for the optimizer's; what save got as state= is .state of the result
""")
row('ts.checkpoint.load(model=LAYER)', ts.UsageError, lambda: ts.checkpoint.load(model=LAYER), """
load: there is no argument 'model'
  arguments : tag, tensors, optimizer, root, only, dtype, restore_random
  at        : AT
  fix       : write tensors=
""")
row('X.numpy(force=True)', ts.UsageError, lambda: X.numpy(force=True), """
Tensor.numpy: there is no argument 'force'
  arguments : none by name
  at        : AT
  fix       : leave it out: it always gathers the value and copies it
""")
row('APART[0] + APART[1]', ts.MeshError, lambda: APART[0] + APART[1], """
add: arguments are on different meshes
  arg 0 : f32[2] on dp=2, devices 0, 1
  arg 1 : f32[2] on dp=2, devices 1, 2
  at    : AT
  fix   : build all on one mesh, or outside of a function: dist.place(x, mesh=...)
""")
row('ts.jit(both)(*APART)', ts.MeshError, lambda: ts.jit(both)(*APART), """
both: results are on different meshes
  result 0 : f32[2] on dp=2, devices 0, 1
  result 1 : f32[2] on dp=2, devices 1, 2
  at       : AT
  fix      : build all on one mesh, or outside of a function: dist.place(x, mesh=...)
""")
row('ts.jit(both)(X, weights=X)', ts.UsageError, lambda: ts.jit(both)(X, weights=X), """
both: there is no argument 'weights'
  arguments : x, y
  at        : AT
  fix       : write y=
""")
row('FOLDED[0] + FOLDED[1]', ts.MeshError, lambda: FOLDED[0] + FOLDED[1], """
add: arguments are on different meshes
  arg 0 : f32[2] on dp=4, devices 0, 1, 2, 3
  arg 1 : f32[2] on dp=4 folded onto dp=2, devices 0, 1
  at    : AT
  fix   : build all on one mesh, or outside of a function: dist.place(x, mesh=...); in a loop that lost devices: put all that a step uses into its state
""")
row('ts.nn.cross_entropy(X, X, reduction="sum")', ts.UsageError, lambda: ts.nn.cross_entropy(X, X, reduction="sum"), """
cross_entropy: there is no argument 'reduction'
  arguments : logits, labels, ignore_index, weight, label_smoothing
  at        : AT
  fix       : leave it out for the mean over the labels that count; for others write nn.nll_loss(nn.log_softmax(logits), labels, reduction="none"), or "sum"
""")
row('ts.linalg.norm(X, p=1)', ts.UsageError, lambda: ts.linalg.norm(X, p=1), """
norm: there is no argument 'p'
  arguments : x, ord, dim, keepdims
  at        : AT
  fix       : write ord=
""")
row('ts.mesh.show("dp")', ts.UsageError, lambda: ts.mesh.show("dp"), """
show: mesh cannot be 'dp'
  at  : AT
  fix : give a Mesh
""")
row('ts.pipeline.show(None)', ts.UsageError, lambda: ts.pipeline.show(None), """
show: what cannot be None
  at  : AT
  fix : give a Pipe or a Table or a Timeline
""")
row('ts.dist.profile(loss)', ts.UsageError, lambda: ts.dist.profile(loss), """
loss: w is missing
  arguments : w
  at        : AT
  fix       : call it with (w)
""")
