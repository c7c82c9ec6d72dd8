"""Causal self-attention of a layer, with the choices of a GPTConfig."""

from __future__ import annotations

import math
from typing import Any

from ..core.layout import dim_axes
from ..lang.math import functions as F
from ..lang.record.operands import as_tensor
from ..lang.record.parameter import Parameter
from ..lang.value.tensor import Tensor
from . import cache
from . import functional as fn
from .context_parallel import (
    all_to_all_attention,
    axis_size,
    whole_sequence,
    zigzag_positions,
)
from .flash import flash_attention
from .gpt_config import GPTConfig
from .layers import normal
from .module import Module
from .positions import alibi_bias
from .ring import ring_attention
from .visible_keys import mask_of

LayerTensors = dict[str, Tensor]
"""Values of one layer or call: "window" i32[], "rates" f32[n]; "at" i32[B], the position of each
sequence's last token; "k" and "v", the cache before it; the entries of `Told`."""


class Attention(Module):
    """Causal self-attention; heads are a dim of the weights, so a split of that dim is by head."""

    def __init__(self, c: GPTConfig):
        self.config = c
        size, groups = c.size, c.groups
        std = 0.02
        biased = "qkv" in c.biases
        if groups == c.heads:
            self.qkv = Parameter(c.d, 3, c.heads, size, init=normal(std))
            self.qkv_bias = Parameter(3, c.heads, size, init="zeros") if biased else None
        else:
            self.q = Parameter(c.d, c.heads, size, init=normal(std))
            self.kv = Parameter(c.d, 2, groups, size, init=normal(std))
            self.q_bias = Parameter(1, c.heads, size, init="zeros") if biased else None
            self.kv_bias = Parameter(2, groups, size, init="zeros") if biased else None
        self.q_norm = c.make_norm(size) if c.qk_norm else None
        self.k_norm = c.make_norm(size) if c.qk_norm else None
        self.out = Parameter(c.heads, size, c.d, init=normal(std / math.sqrt(2 * c.layers)))
        self.out_bias = Parameter(c.d, init="zeros") if "out" in c.biases else None
        self.scope_name = "attention"

    def __call__(self, x: Tensor, own: LayerTensors | None = None, slots: int = 0) -> Any:
        """[B, S, d] to [B, S, d], over whole sequences, without the bias of the output.

        With `slots`, or with a cache in `own`, the result is (that, {"k", "v"}), with the cache
        after these tokens.
        """
        own = own or {}
        x, c = whole_sequence(x, self.config.sequence_parallel), self.config
        batch, seq, d = x.shape
        rows = x.reshape(batch * seq, d)

        def projected(w: Tensor, bias: Tensor | None) -> list[Tensor]:
            """Parts [B, heads, S, size] of one matrix product."""
            y = F.matmul(rows, w.reshape(d, -1)).reshape(batch, seq, *w.shape[1:])
            if bias is not None:
                y = y + bias.to(y.dtype)
            return [y[:, :, i].transpose(1, 2) for i in range(w.shape[1])]

        if "qkv" in self.__dict__:
            q, k, v = projected(self.qkv, self.qkv_bias)
        else:
            (q,) = projected(self.q.reshape(d, 1, *self.q.shape[1:]), self.q_bias)
            k, v = projected(self.kv, self.kv_bias)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        bias = mask = kept = None
        n = axis_size("GPT", x, c.context_axis) if c.context == "ring" else 1
        order = zigzag_positions(seq, n)
        places = None if n == 1 else order
        if "k" in own:
            places = own["at"].reshape(batch, 1, 1)
        elif "positions" in own:
            places = own["positions"].reshape(batch, 1, seq)
        if c.positions == "rotary":
            length = own["k"].shape[2] if "k" in own else slots or seq
            rates = own["rates"] if "rates" in own else c.rope.rates(c.size, length)
            scale = c.rope.amplitude
            q, k = (fn.rotary(t, positions=places, rates=rates, scale=scale) for t in (q, k))
        if "k" in own:
            kept = cache.added({"k": own["k"], "v": own["v"]}, {"k": k, "v": v}, own["at"])
            k, v = kept["k"], kept["v"]
            mask = cache.visible_slots(k.shape[2], own["at"], own.get("window"))
        else:
            if slots:
                kept = cache.filled({"k": k, "v": v}, own["at"], slots)
            mask = mask_of(own, order)
        if c.positions == "alibi":
            scale = 1.0 / math.sqrt(c.size)
            if "positions" in own:
                bias = as_tensor(alibi_bias(c.heads, c.seq, scale))
                bias = F.take(bias, own["positions"], 1).transpose(0, 1)
            else:
                bias = as_tensor(alibi_bias(c.heads, k.shape[2], scale))
                bias = bias if n == 1 else F.take_or_zero(bias, order, 1)
        k, v = _by_head(k, q), _by_head(v, q)
        causal = "k" not in own and "scores" not in own
        if c.context is None:
            out = flash_attention(
                q, k, v, causal, c.query_scale, bias=bias, mask=mask, cap=c.attention_cap,
                implementation=c.attention_implementation,
            )  # fmt: skip
        else:
            attend = ring_attention if c.context == "ring" else all_to_all_attention
            out = attend(q, k, v, c.context_axis, causal, c.query_scale, bias, mask)
        out = out.transpose(1, 2).reshape(batch * seq, out.shape[1] * out.shape[3])
        out = F.matmul(out, self.out.reshape(-1, d)).reshape(batch, seq, d)
        return out if kept is None else (out, kept)


def _by_head(t: Tensor, q: Tensor) -> Tensor:
    """Keys or values [B, G, S, size], repeated for the heads of `q` if that saves communication.

    Fewer key heads than devices are whole on each device, while the heads of `q` are split: each
    device then takes those of its own heads, and nothing is sent.
    """
    (batch, groups, seq, size), heads = t.shape, q.shape[1]
    if groups == heads or dim_axes(t.type.dims[1]) or not dim_axes(q.type.dims[1]):
        return t
    each = t.reshape(batch, groups, 1, seq, size)
    each = F.broadcast_to(each, (batch, groups, heads // groups, seq, size))
    return each.reshape(batch, heads, seq, size)
