"""Names and arguments of other libraries. A row: name, error, mistake, message."""

from __future__ import annotations

import tessera as ts
from tessera import checkpoint
from tests.mesh.errors import X, row

# What is not there is no mistake of this file's: mypy would say the same as the messages.
# mypy: disable-error-code="attr-defined, call-arg, arg-type, operator, misc, call-overload"
# ruff: noqa: E501, E711
# fmt: off

LAYER = ts.nn.Linear(2, 3)


class Forward(ts.nn.Module):
    def forward(self, x: ts.Tensor) -> ts.Tensor:
        return x


row('X.view(6)', ts.UnknownNameError, lambda: X.view(6), """
'Tensor' object has no attribute 'view'
  tensor : f32[2, 3]
  at     : AT
  fix    : write x.reshape(...)
""")
row('X.dim()', ts.UnknownNameError, lambda: X.dim(), """
'Tensor' object has no attribute 'dim'
  tensor : f32[2, 3]
  at     : AT
  fix    : write x.ndim
""")
row('X.max(1).values', ts.UnknownNameError, lambda: X.max(1).values, """
'Tensor' object has no attribute 'values'
  tensor : f32[2]
  at     : AT
  fix    : ts.max and ts.min give the values themselves, ts.argmax and ts.argmin their ids
""")
row('ts.distributions.Normal(0, 1)', ts.UnknownNameError, lambda: ts.distributions.Normal(0, 1), """
module 'tessera' has no attribute 'distributions'
  at  : AT
  fix : log-probabilities are functions: of classes nn.log_softmax(logits), of a normal -0.5 * ((x - mean) / std) ** 2 - ts.log(std) - 0.5 * math.log(2 * math.pi); ts.random draws
""")
row('ts.autocast("cuda", dtype=ts.bf16)', ts.UsageError,
    lambda: ts.autocast("cuda", dtype=ts.bf16), """
autocast: 'dtype' is given by place and by name
  arguments : dtype, enabled, embeddings
  at        : AT
  fix       : leave out the kind of device: with ts.autocast(ts.bf16)
""")
row('ts.amp.GradScaler()', ts.UnknownNameError, lambda: ts.amp.GradScaler(), """
module 'tessera' has no attribute 'amp'
  at  : AT
  fix : compute so: with ts.autocast(ts.bf16); scale a loss in f16 by optim.LossScale
""")
row('ts.grad(y, X, create_graph=True)', ts.UsageError,
    lambda: ts.grad(X.sum(), X, create_graph=True), """
grad: there is no argument 'create_graph'
  arguments : loss, weights, layout, reduce_partial, reduce_dtype
  at        : AT
  fix       : leave it out: a gradient can be differentiated again, and is a constant as ts.stop_gradient(g)
""")
row('ts.grad(outputs=y)', ts.UsageError, lambda: ts.grad(outputs=X.sum(), inputs=X), """
grad: there is no argument 'outputs'
  arguments : loss, weights, layout, reduce_partial, reduce_dtype
  at        : AT
  fix       : write loss=
""")
row('X.numel()', ts.UnknownNameError, lambda: X.numel(), """
'Tensor' object has no attribute 'numel'
  tensor : f32[2, 3]
  at     : AT
  fix    : write x.size
""")
row('X.backward()', ts.UnknownNameError, lambda: X.backward(), """
'Tensor' object has no attribute 'backward'
  tensor : f32[2, 3]
  at     : AT
  fix    : gradients are values: grads = ts.grad(loss, model)
""")
row('X.zero_grad', ts.UnknownNameError, lambda: X.zero_grad, """
'Tensor' object has no attribute 'zero_grad'
  tensor : f32[2, 3]
  at     : AT
  fix    : leave it out: gradients are values: grads = ts.grad(loss, model)
""")
row('X.grad', ts.UnknownNameError, lambda: X.grad, """
'Tensor' object has no attribute 'grad'
  tensor : f32[2, 3]
  at     : AT
  fix    : gradients are values: grads = ts.grad(loss, model)
""")
row('X.requires_grad', ts.UnknownNameError, lambda: X.requires_grad, """
'Tensor' object has no attribute 'requires_grad'
  tensor : f32[2, 3]
  at     : AT
  fix    : ask a parameter: nn.Parameter(x).requires_grad
""")
row('X.cuda()', ts.UnknownNameError, lambda: X.cuda(), """
'Tensor' object has no attribute 'cuda'
  tensor : f32[2, 3]
  at     : AT
  fix    : a value lies where its mesh is: x = ts.tensor(data, mesh=mesh); x.numpy() is the host's
""")
row('X.half()', ts.UnknownNameError, lambda: X.half(), """
'Tensor' object has no attribute 'half'
  tensor : f32[2, 3]
  at     : AT
  fix    : write x.to(ts.f16)
""")
row('X.detach_()', ts.UnknownNameError, lambda: X.detach_(), """
'Tensor' object has no attribute 'detach_'
  tensor : f32[2, 3]
  at     : AT
  fix    : tensors do not change: x = x.detach()
""")
row('X.mT', ts.UnknownNameError, lambda: X.mT, """
'Tensor' object has no attribute 'mT'
  tensor : f32[2, 3]
  at     : AT
  fix    : write x.transpose(-2, -1)
""")
row('X.at[0].set(1.0)', ts.UnknownNameError, lambda: X.at[0].set(1.0), """
'Tensor' object has no attribute 'at'
  tensor : f32[2, 3]
  at     : AT
  fix    : make a new tensor: ts.where(mask, value, x), ts.scatter_add
""")
row('X.tolist()', ts.UnknownNameError, lambda: X.tolist(), """
'Tensor' object has no attribute 'tolist'
  tensor : f32[2, 3]
  at     : AT
  fix    : write x.numpy().tolist()
""")
row('X.exp()', ts.UnknownNameError, lambda: X.exp(), """
'Tensor' object has no attribute 'exp'
  tensor : f32[2, 3]
  at     : AT
  fix    : write ts.exp
""")
row('X.softmax(-1)', ts.UnknownNameError, lambda: X.softmax(-1), """
'Tensor' object has no attribute 'softmax'
  tensor : f32[2, 3]
  at     : AT
  fix    : write nn.softmax
""")
row('X.size()', ts.UsageError, lambda: X.size(), """
size: it is a number, not a function
  size : 6
  at   : AT
  fix  : write x.shape
""")
row('X.size(0)', ts.UsageError, lambda: X.size(0), """
size: it is a number, not a function
  size : 6
  at   : AT
  fix  : write x.shape[0]
""")
row('X.sum(axis=1)', ts.UsageError, lambda: X.sum(axis=1), """
sum: there is no argument 'axis'
  arguments : dim, keepdims
  at        : AT
  fix       : write dim=
""")
row('X.mean(dim=1, keepdim=True)', ts.UsageError, lambda: X.mean(dim=1, keepdim=True), """
mean: there is no argument 'keepdim'
  arguments : dim, keepdims
  at        : AT
  fix       : write keepdims=
""")
row('X.to("cuda")', ts.DTypeError, lambda: X.to("cuda"), """
dtype 'cuda' is not known
  at  : AT
  fix : a value lies where its mesh is: ts.tensor(data, mesh=mesh), dist.place(model, strategy, mesh)
""")
row('X == None', ts.UsageError, lambda: X == None, """
eq: a tensor is not compared with None
  x   : f32[2, 3]
  at  : AT
  fix : write x is None
""")
row('X != None', ts.UsageError, lambda: X != None, """
ne: a tensor is not compared with None
  x   : f32[2, 3]
  at  : AT
  fix : write x is not None
""")
row('ts.sum(X, axis=1)', ts.UsageError, lambda: ts.sum(X, axis=1), """
sum: there is no argument 'axis'
  arguments : x, dim, keepdims
  at        : AT
  fix       : write dim=
""")
row('ts.concat([X, X], axis=-1)', ts.UsageError, lambda: ts.concat([X, X], axis=-1), """
concat: there is no argument 'axis'
  arguments : xs, dim
  at        : AT
  fix       : write dim=
""")
row('ts.tensor([1.0], requires_grad=True)', ts.UsageError, lambda: ts.tensor([1.0], requires_grad=True), """
tensor: there is no argument 'requires_grad'
  arguments : data, mesh, layout, dtype, name
  at        : AT
  fix       : leave it out: ts.grad takes any tensor; a module's weight is nn.Parameter(x)
""")
row('ts.tensor([1.0], device="cuda")', ts.UsageError, lambda: ts.tensor([1.0], device="cuda"), """
tensor: there is no argument 'device'
  arguments : data, mesh, layout, dtype, name
  at        : AT
  fix       : write mesh=
""")
row('ts.ones(2, 3)', ts.DTypeError, lambda: ts.ones(2, 3), """
dtype '3' is not known
  at  : AT
  fix : sizes go in one tuple, as in (2, 3); then comes a dtype
""")
row('ts.sum(X, dims=1)', ts.UsageError, lambda: ts.sum(X, dims=1), """
sum: there is no argument 'dims'
  arguments : x, dim, keepdims
  at        : AT
  fix       : write dim=
""")
row('ts.sum(X, 1, dim=1)', ts.UsageError, lambda: ts.sum(X, 1, dim=1), """
sum: 'dim' is given by place and by name
  arguments : x, dim, keepdims
  at        : AT
  fix       : give it once
""")
row('ts.softmx', ts.UnknownNameError, lambda: ts.softmx, """
module 'tessera' has no attribute 'softmx'
  at  : AT
  fix : the name most like it is nn.softmax
""")
row('ts.cat([X, X])', ts.UnknownNameError, lambda: ts.cat([X, X]), """
module 'tessera' has no attribute 'cat'
  at  : AT
  fix : write ts.concat
""")
row('ts.float32', ts.UnknownNameError, lambda: ts.float32, """
module 'tessera' has no attribute 'float32'
  at  : AT
  fix : write ts.f32
""")
row('ts.float64', ts.UnknownNameError, lambda: ts.float64, """
module 'tessera' has no attribute 'float64'
  at  : AT
  fix : the widest dtypes are ts.f32 and ts.int32; host data is narrowed on the way in
""")
row('ts.randn(3)', ts.UnknownNameError, lambda: ts.randn(3), """
module 'tessera' has no attribute 'randn'
  at  : AT
  fix : write ts.random.normal
""")
row('ts.Linear(2, 3)', ts.UnknownNameError, lambda: ts.Linear(2, 3), """
module 'tessera' has no attribute 'Linear'
  at  : AT
  fix : write nn.Linear
""")
row('ts.cuda.is_available()', ts.UnknownNameError, lambda: ts.cuda.is_available(), """
module 'tessera' has no attribute 'cuda'
  at  : AT
  fix : a value lies where its mesh is: x = ts.tensor(data, mesh=mesh); x.numpy() is the host's
""")
row('ts.nn.ReLU()', ts.UnknownNameError, lambda: ts.nn.ReLU(), """
module 'tessera.nn' has no attribute 'ReLU'
  at  : AT
  fix : write nn.relu
""")
row('ts.nn.ModuleList([])', ts.UnknownNameError, lambda: ts.nn.ModuleList([]), """
module 'tessera.nn' has no attribute 'ModuleList'
  at  : AT
  fix : assign a list of modules: self.layers = [nn.Linear(4, 4)]
""")
row('ts.nn.where', ts.UnknownNameError, lambda: ts.nn.where, """
module 'tessera.nn' has no attribute 'where'
  at  : AT
  fix : write ts.where
""")
row('ts.optim.lr_scheduler', ts.UnknownNameError, lambda: ts.optim.lr_scheduler, """
module 'tessera.optim' has no attribute 'lr_scheduler'
  at  : AT
  fix : give the optimizer a schedule: optim.AdamW(lr=optim.warmup_cosine(...))
""")
row('ts.optim.adamw(0.1)', ts.UnknownNameError, lambda: ts.optim.adamw(0.1), """
module 'tessera.optim' has no attribute 'adamw'
  at  : AT
  fix : write optim.AdamW
""")
row('optim.chain', ts.UnknownNameError, lambda: ts.optim.chain, """
module 'tessera.optim' has no attribute 'chain'
  at  : AT
  fix : if optax has it: optim.from_optax(optax.chain(...)); a rate: lr=optax.chain(...)
""")
row('ts.dist.init_process_group()', ts.UnknownNameError, lambda: ts.dist.init_process_group(), """
module 'tessera.dist' has no attribute 'init_process_group'
  at  : AT
  fix : write dist.Mesh
""")
row('ts.linalg.vector', ts.UnknownNameError, lambda: ts.linalg.vector, """
module 'tessera.lang.linalg' has no attribute 'vector'
  at  : AT
  fix : the names most like it are vector_norm, det, norm
""")
row('ts.nn.Linear(2, 3, use_bias=False)', ts.UsageError, lambda: ts.nn.Linear(2, 3, use_bias=False), """
Linear: there is no argument 'use_bias'
  arguments : in_features, out_features, bias, std
  at        : AT
  fix       : write bias=
""")
row('ts.nn.LayerNorm(normalized_shape=4)', ts.UsageError, lambda: ts.nn.LayerNorm(normalized_shape=4), """
LayerNorm: there is no argument 'normalized_shape'
  arguments : d, eps
  at        : AT
  fix       : write d=
""")
row('ts.optim.AdamW(learning_rate=0.1)', ts.UsageError, lambda: ts.optim.AdamW(learning_rate=0.1), """
AdamW: there is no argument 'learning_rate'
  arguments : lr, betas, eps, weight_decay, mask, master
  at        : AT
  fix       : write lr=
""")
row('ts.optim.AdamW(LAYER.parameters(), lr=0.1)', ts.UsageError, lambda: ts.optim.AdamW(LAYER.parameters(), lr=0.1), """
AdamW: 'lr' is given by place and by name
  arguments : lr, betas, eps, weight_decay, mask, master
  at        : AT
  fix       : give the weights to optimizer.init(params)
""")
row('ts.optim.AdamW(LAYER)', ts.UsageError, lambda: ts.optim.AdamW(LAYER), """
AdamW: lr is a Linear
  at  : AT
  fix : give a number or a schedule: optim.warmup_cosine(...); weights go to optimizer.init
""")
row('ts.optim.AdamW(0.1).step()', ts.UnknownNameError, lambda: ts.optim.AdamW(0.1).step(), """
'AdamW' object has no attribute 'step'
  at  : AT
  fix : write params, state = optimizer.update(params, grads, state), with state of optimizer.init
""")
row('ts.optim.AdamW(0.1).state', ts.UnknownNameError, lambda: ts.optim.AdamW(0.1).state, """
'AdamW' object has no attribute 'state'
  at  : AT
  fix : the state is a value: optimizer.init(params) makes it, and optimizer.update(params, grads, state) returns the next one
""")
row('ts.optim.clip_grad_norm_', ts.UnknownNameError, lambda: ts.optim.clip_grad_norm_, """
module 'tessera.optim' has no attribute 'clip_grad_norm_'
  at  : AT
  fix : write grads, norm = optim.clip_by_global_norm(grads, max_norm), of ts.grad(loss, model)
""")
row('ts.optim.AdamW(0.1).zero_grad()', ts.UnknownNameError, lambda: ts.optim.AdamW(0.1).zero_grad(), """
'AdamW' object has no attribute 'zero_grad'
  at  : AT
  fix : leave it out: gradients are values: grads = ts.grad(loss, model)
""")
row('LAYER.cuda()', ts.UnknownNameError, lambda: LAYER.cuda(), """
'Linear' object has no attribute 'cuda'
  at  : AT
  fix : weights lie where the mesh is: dist.place(model, strategy, mesh)
""")
row('LAYER.to("cuda")', ts.DTypeError, lambda: LAYER.to("cuda"), """
dtype 'cuda' is not known
  at  : AT
  fix : a value lies where its mesh is: ts.tensor(data, mesh=mesh), dist.place(model, strategy, mesh)
""")
row('LAYER.to(ts.int8)', ts.DTypeError, lambda: LAYER.to(ts.int8), """
to: weights cannot be i8
  at  : AT
  fix : give a float, such as ts.bf16
""")
row('LAYER.half()', ts.UnknownNameError, lambda: LAYER.half(), """
'Linear' object has no attribute 'half'
  at  : AT
  fix : store weights so: model.to(ts.bf16); compute so: with ts.autocast("bf16")
""")
row('LAYER.forward(X)', ts.UnknownNameError, lambda: LAYER.forward(X), """
'Linear' object has no attribute 'forward'
  at  : AT
  fix : write model(x)
""")
row('LAYER.register_buffer("mean", X)', ts.UnknownNameError, lambda: LAYER.register_buffer("mean", X), """
'Linear' object has no attribute 'register_buffer'
  at  : AT
  fix : write model.name = t
""")
row('LAYER.wieght', ts.UnknownNameError, lambda: LAYER.wieght, """
'Linear' object has no attribute 'wieght'
  at  : AT
  fix : the names most like it are weight, requires_grad_, training
""")
row('Forward()(X)', ts.UsageError, lambda: Forward()(X), """
Forward: there is no __call__ to call
  at  : AT
  fix : name forward __call__
""")
row('checkpoint.Keep(mode="max")', ts.UsageError,
    lambda: checkpoint.Keep(best=1, metric="accuracy", mode="max"), """
Keep: there is no argument 'mode'
  arguments : last, every, best, metric, largest
  at        : AT
  fix       : write largest=True for "max", and leave it out for "min"
""")
row('checkpoint.Keep(monitor="loss")', ts.UsageError,
    lambda: checkpoint.Keep(monitor="loss"), """
Keep: there is no argument 'monitor'
  arguments : last, every, best, metric, largest
  at        : AT
  fix       : write metric=
""")
row('create_dataloader(batch_size=4)', ts.UsageError,
    lambda: ts.data.create_dataloader(batch_size=4), """
create_dataloader: there is no argument 'batch_size'
  arguments : config
  at        : AT
  fix       : give one dict: {"data": ..., "batch_size": ..., "sequence_length": ...}
""")
