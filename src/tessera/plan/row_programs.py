"""Programs of a row of a table: one microbatch of a GPT of one and of two layers, recorded.

The difference of both depths is a layer; the rest of the shallower one is the embedding, the head
and the loss. Each is planned without its backward pass and with it, as for a GPU, on the mesh of
the devices that share a microbatch. Nothing is allocated or compiled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..core.devices import recorded_for
from ..core.dtypes import int32
from ..core.mesh import Mesh
from ..cost.memory import memory_plan
from ..ir.schedule.schedule import Schedule
from ..lang.autodiff.grad import grad
from ..lang.autodiff.scan import scan
from ..lang.jit.jit import jit
from ..lang.math import functions as F
from ..lang.math.constants import zeros
from ..lang.parallel.builtin_strategies import strategy
from ..lang.parallel.strategy import place
from ..lang.value.tensor import Tensor
from ..nn import functional as fn
from ..nn.context_parallel import whole_sequence
from ..nn.gpt_config import GPTConfig
from ..nn.self_attention import Attention
from ..nn.stack import Stack
from ..nn.transformer import GPT, TransformerBlock


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes and choices that decide the programs of a microbatch; ep, cp and tp are the axes of
    the devices that share it."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    seq: int
    micro_batch: int
    experts: int = 0
    top_k: int = 2
    mlp: str = "gelu"
    attention: str = "flash"
    recompute: str = "none"
    dropout: float = 0.0
    sp: bool = False
    dtype: str = "bf16"
    ep: int = 1
    cp: int = 1
    tp: int = 1


@dataclass(frozen=True, slots=True)
class Depth:
    """The plans of a model of some layers, without and with its backward pass; the elements of a
    device's weights, those of its experts apart; the bytes that it keeps for the backward pass, and
    those that it works on at the peak."""

    forward: Schedule
    both: Schedule
    weights: int
    expert_weights: int
    kept_bytes: int
    working_bytes: int


class StoredScores(Attention):
    """Attention with stored scores of all pairs, as before FlashAttention: two products with a
    softmax and dropout between them, which selective recomputation computes again."""

    again, dropout = False, 0.0

    def __call__(self, x: Tensor, own: object = None, slots: int = 0) -> Tensor:
        c = self.config
        x = whole_sequence(x, c.sequence_parallel)
        batch, seq, d = x.shape
        y = F.matmul(x.reshape(batch * seq, d), self.qkv.reshape(d, -1))
        y = y.reshape(batch, seq, *self.qkv.shape[1:])
        q, k, v = (y[:, :, i].transpose(1, 2) for i in range(3))

        def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = F.matmul(q, k.transpose(-1, -2)) * (1.0 / math.sqrt(c.size))
            return F.matmul(fn.dropout(fn.softmax(scores), self.dropout), v)

        if self.again:  # a loop of one turn
            once = [t.reshape(1, *t.shape) for t in (q, k, v)]
            _, out = scan(lambda c, xs: (c, core(*xs)), (), once, policy="recompute")
            out = out.reshape(out.shape[1:])
        else:
            out = core(q, k, v)
        out = out.transpose(1, 2).reshape(batch * seq, c.heads * c.size)
        return F.matmul(out, self.out.reshape(-1, d)).reshape(batch, seq, d)


class _Model(GPT):
    """The GPT of some sizes, with its attention."""

    def __init__(self, config: GPTConfig, sizes: Sizes):
        super().__init__(config)
        if sizes.attention == "stored":
            block = TransformerBlock(config)
            block.attention = StoredScores(config)
            block.attention.again = sizes.recompute == "selective"
            block.attention.dropout = sizes.dropout
            self.blocks = Stack(block, config.layers, stacked=False)


@lru_cache(maxsize=256)
def planned(s: Sizes, layers: int) -> Depth:
    """Returns the plans of a model of `layers` layers."""
    llama = s.mlp == "swiglu"
    more: dict[str, Any] = {}
    if s.experts:
        more |= {"experts": s.experts, "experts_per_token": s.top_k}
    if s.cp > 1:
        more["context"] = "ring"
    config = GPTConfig(
        vocab=s.vocab, seq=s.seq, d=s.hidden, layers=layers, heads=s.heads, kv_heads=s.kv_heads,
        hidden=s.ffn, head_size=s.head_dim, norm="rms" if llama else "layer", activation=s.mlp,
        positions="rotary" if llama else "learned", dropout=s.dropout, stacked=False,
        sequence_parallel="tp" if s.sp else None, **more,
    )  # fmt: skip
    axes = {"ep": s.ep, "cp": s.cp, "tp": s.tp}
    mesh = Mesh(tuple(axes), devices=range(math.prod(axes.values())), shape=axes)
    laid = strategy("tensor_parallel") + strategy("expert_parallel")
    with recorded_for("gpu"):
        model = place(_Model(config, s).to(s.dtype), laid, mesh)
        ids = zeros((s.micro_batch * s.ep, s.seq), int32)
        batch = place((ids, ids), laid, mesh, kind="batch")
        forward = jit(lambda m, ids, labels: m.loss(ids, labels))

        def trained(m: GPT, ids: Tensor, labels: Tensor) -> object:
            loss = m.loss(ids, labels)
            return loss, grad(loss, m.parameters())

        both = jit(trained)
        plans = forward.plan(model, *batch), both.plan(model, *batch)
        weights = {n: t.type for n, t in model.parameters().items()}
        m = memory_plan(plans[1], {"weights": [*weights.values()]}, weights.values(), on="gpu")
    count = {n: math.prod(t.local_shape) for n, t in weights.items()}
    experts = sum(x for n, x in count.items() if s.experts and ".moe." in n and "router" not in n)
    return Depth(*plans, sum(count.values()) - experts, experts, m.activations, m.working)
