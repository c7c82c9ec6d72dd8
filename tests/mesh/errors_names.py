"""Names and arguments of other libraries. A row: name, error, mistake."""

from __future__ import annotations

import tessera as ts
from tessera import checkpoint
from tests.mesh.errors import X, row

# These mistakes are intended: mypy would report the same as the messages.
# mypy: disable-error-code="attr-defined, call-arg, arg-type, operator, misc, call-overload"
# ruff: noqa: E501, E711
# fmt: off

LAYER = ts.nn.Linear(2, 3)


class Forward(ts.nn.Module):
    def forward(self, x: ts.Tensor) -> ts.Tensor:
        return x


row('X.view(6)', ts.UnknownNameError, lambda: X.view(6))
row('X.dim()', ts.UnknownNameError, lambda: X.dim())
row('X.max(1).values', ts.UnknownNameError, lambda: X.max(1).values)
row('ts.distributions.Normal(0, 1)', ts.UnknownNameError, lambda: ts.distributions.Normal(0, 1))
row('ts.autocast("cuda", dtype=ts.bf16)', ts.UsageError,
    lambda: ts.autocast("cuda", dtype=ts.bf16))
row('ts.amp.GradScaler()', ts.UnknownNameError, lambda: ts.amp.GradScaler())
row('ts.grad(y, X, create_graph=True)', ts.UsageError,
    lambda: ts.grad(X.sum(), X, create_graph=True))
row('ts.grad(outputs=y)', ts.UsageError, lambda: ts.grad(outputs=X.sum(), inputs=X))
row('X.numel()', ts.UnknownNameError, lambda: X.numel())
row('X.backward()', ts.UnknownNameError, lambda: X.backward())
row('X.zero_grad', ts.UnknownNameError, lambda: X.zero_grad)
row('X.grad', ts.UnknownNameError, lambda: X.grad)
row('X.requires_grad', ts.UnknownNameError, lambda: X.requires_grad)
row('X.cuda()', ts.UnknownNameError, lambda: X.cuda())
row('X.half()', ts.UnknownNameError, lambda: X.half())
row('X.detach_()', ts.UnknownNameError, lambda: X.detach_())
row('X.mT', ts.UnknownNameError, lambda: X.mT)
row('X.tolist()', ts.UnknownNameError, lambda: X.tolist())
row('X.exp()', ts.UnknownNameError, lambda: X.exp())
row('X.softmax(-1)', ts.UnknownNameError, lambda: X.softmax(-1))
row('X.size()', ts.UsageError, lambda: X.size())
row('X.size(0)', ts.UsageError, lambda: X.size(0))
row('X.sum(axis=1)', ts.UsageError, lambda: X.sum(axis=1))
row('X.mean(dim=1, keepdim=True)', ts.UsageError, lambda: X.mean(dim=1, keepdim=True))
row('X.to("cuda")', ts.DTypeError, lambda: X.to("cuda"))
row('X == None', ts.UsageError, lambda: X == None)
row('X != None', ts.UsageError, lambda: X != None)
row('ts.sum(X, axis=1)', ts.UsageError, lambda: ts.sum(X, axis=1))
row('ts.concat([X, X], axis=-1)', ts.UsageError, lambda: ts.concat([X, X], axis=-1))
row('ts.tensor([1.0], requires_grad=True)', ts.UsageError, lambda: ts.tensor([1.0], requires_grad=True))
row('ts.tensor([1.0], device="cuda")', ts.UsageError, lambda: ts.tensor([1.0], device="cuda"))
row('ts.ones(2, 3)', ts.DTypeError, lambda: ts.ones(2, 3))
row('ts.sum(X, dims=1)', ts.UsageError, lambda: ts.sum(X, dims=1))
row('ts.sum(X, 1, dim=1)', ts.UsageError, lambda: ts.sum(X, 1, dim=1))
row('ts.softmx', ts.UnknownNameError, lambda: ts.softmx)
row('ts.cat([X, X])', ts.UnknownNameError, lambda: ts.cat([X, X]))
row('ts.float32', ts.UnknownNameError, lambda: ts.float32)
row('ts.float64', ts.UnknownNameError, lambda: ts.float64)
row('ts.randn(3)', ts.UnknownNameError, lambda: ts.randn(3))
row('ts.Linear(2, 3)', ts.UnknownNameError, lambda: ts.Linear(2, 3))
row('ts.cuda.is_available()', ts.UnknownNameError, lambda: ts.cuda.is_available())
row('ts.nn.ReLU()', ts.UnknownNameError, lambda: ts.nn.ReLU())
row('ts.nn.ModuleList([])', ts.UnknownNameError, lambda: ts.nn.ModuleList([]))
row('ts.nn.where', ts.UnknownNameError, lambda: ts.nn.where)
row('ts.optim.lr_scheduler', ts.UnknownNameError, lambda: ts.optim.lr_scheduler)
row('ts.optim.adamw(0.1)', ts.UnknownNameError, lambda: ts.optim.adamw(0.1))
row('optim.chain', ts.UnknownNameError, lambda: ts.optim.chain)
row('ts.dist.init_process_group()', ts.UnknownNameError, lambda: ts.dist.init_process_group())
row('ts.linalg.vector', ts.UnknownNameError, lambda: ts.linalg.vector)
row('ts.nn.Linear(2, 3, use_bias=False)', ts.UsageError, lambda: ts.nn.Linear(2, 3, use_bias=False))
row('ts.nn.LayerNorm(normalized_shape=4)', ts.UsageError, lambda: ts.nn.LayerNorm(normalized_shape=4))
row('ts.optim.AdamW(learning_rate=0.1)', ts.UsageError, lambda: ts.optim.AdamW(learning_rate=0.1))
row('ts.optim.AdamW(LAYER.parameters(), lr=0.1)', ts.UsageError, lambda: ts.optim.AdamW(LAYER.parameters(), lr=0.1))
row('ts.optim.AdamW(LAYER)', ts.UsageError, lambda: ts.optim.AdamW(LAYER))
row('ts.optim.AdamW(0.1).step()', ts.UnknownNameError, lambda: ts.optim.AdamW(0.1).step())
row('ts.optim.AdamW(0.1).state', ts.UnknownNameError, lambda: ts.optim.AdamW(0.1).state)
row('ts.optim.clip_grad_norm_', ts.UnknownNameError, lambda: ts.optim.clip_grad_norm_)
row('ts.optim.AdamW(0.1).zero_grad()', ts.UnknownNameError, lambda: ts.optim.AdamW(0.1).zero_grad())
row('LAYER.cuda()', ts.UnknownNameError, lambda: LAYER.cuda())
row('LAYER.to("cuda")', ts.DTypeError, lambda: LAYER.to("cuda"))
row('LAYER.to(ts.int8)', ts.DTypeError, lambda: LAYER.to(ts.int8))
row('LAYER.half()', ts.UnknownNameError, lambda: LAYER.half())
row('LAYER.forward(X)', ts.UnknownNameError, lambda: LAYER.forward(X))
row('LAYER.register_buffer("mean", X)', ts.UnknownNameError, lambda: LAYER.register_buffer("mean", X))
row('LAYER.wieght', ts.UnknownNameError, lambda: LAYER.wieght)
row('Forward()(X)', ts.UsageError, lambda: Forward()(X))
row('checkpoint.Keep(mode="max")', ts.UsageError,
    lambda: checkpoint.Keep(best=1, metric="accuracy", mode="max"))
row('checkpoint.Keep(monitor="loss")', ts.UsageError,
    lambda: checkpoint.Keep(monitor="loss"))
row('create_dataloader(batch_size=4)', ts.UsageError,
    lambda: ts.data.create_dataloader(batch_size=4))
