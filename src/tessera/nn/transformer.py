"""`GPT`, a decoder-only transformer with the architecture choices of current models.

GPT-2, Llama, Gemma, Falcon and others are this class with different `GPTConfig`s.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..core.checks import divides, mapping
from ..core.tensor_checks import ranked
from ..lang.math import functions as F
from ..lang.parallel.microbatches import warn_of_microbatches
from ..lang.record.operands import as_tensor
from ..lang.record.parameter import Parameter
from ..lang.value.tensor import Like, Tensor
from . import functional as fn
from .block_size import rows_at_once
from .cache import Cache, checked_ids, prompt_of, token_of
from .context_parallel import axis_size, split_sequence, unzigzag, whole_sequence, zigzag
from .experts.layer import MoE
from .experts.routing import AUXILIARY
from .gpt_config import ACTIVATIONS, Config, GPTConfig
from .layers import Dropout, Embedding, LayerNorm, RMSNorm, normal
from .losses import linear_cross_entropy
from .module import Module
from .self_attention import Attention, LayerTensors
from .stack import Stack
from .visible_keys import Told, token_masks

# For layers without a window in a stack with some: all need a number, and this one hides no key.
NO_WINDOW = 2**30


class MLP(Module):
    """The feed-forward part of a layer, in blocks of rows."""

    def __init__(self, c: GPTConfig):
        hidden = c.width
        biased = "mlp" in c.biases
        self.activation, self.sequence_parallel = c.activation, c.sequence_parallel
        self.up = Parameter(c.d, hidden, init=normal(0.02))
        self.up_bias = Parameter(hidden, init="zeros") if biased else None
        self.gated = c.gated
        if c.gated:
            self.gate = Parameter(c.d, hidden, init=normal(0.02))
            self.gate_bias = Parameter(hidden, init="zeros") if biased else None
        self.down = Parameter(hidden, c.d, init=normal(0.02 / math.sqrt(2 * c.layers)))
        self.down_bias = Parameter(c.d, init="zeros") if biased else None
        self.scope_name = "mlp"

    def __call__(self, x: Tensor) -> Tensor:
        """[..., d] to [..., d], row by row, without the bias of the output."""
        h = F.save_for_backward(fn.linear(x, self.up, self.up_bias))
        activation = ACTIVATIONS[self.activation]
        if self.gated:
            h = activation(F.save_for_backward(fn.linear(x, self.gate, self.gate_bias))) * h
        else:
            h = activation(h)
        return F.matmul(h, self.down)

    def whole(self, x: Tensor, norm: LayerNorm | RMSNorm | None, *_: Any) -> tuple[Tensor, ...]:
        """([B, S, d],) from [B, S, d], in blocks of rows; each row is normalized first if there is
        a `norm`. Padding is computed as well.

        The bias of the output is not added: with it in each block, each block would complete the
        sum over devices.
        """
        if self.sequence_parallel is not None:
            x, norm = whole_sequence(x if norm is None else norm(x), self.sequence_parallel), None
        rows = rows_at_once(None, x, self.up.shape[-1])
        return (fn.by_rows(lambda r: self(r if norm is None else norm(r)), x, rows),)


class Experts(MoE):
    """The feed-forward part of a layer with experts."""

    down_bias = None

    def __init__(self, c: GPTConfig):
        self.ring_axis = c.context_axis if c.context == "ring" else None
        super().__init__(
            c.d, c.width, c.experts, c.experts_per_token, gated=c.gated, capacity=c.capacity,
            router=c.router, shared=c.shared_experts, normalize=c.normalize_gates,
            scale=c.gate_scale, expert_groups=c.expert_groups, topk_groups=c.topk_groups,
            balance=c.balance, rate=c.balance_rate,
            activation={"swiglu": "silu", "geglu": "gelu"}.get(c.activation, c.activation),
        )  # fmt: skip

    def whole(
        self, x: Tensor, norm: LayerNorm | RMSNorm | None, token_mask: Tensor | None, learns: bool
    ) -> tuple[Tensor, ...]:
        """(result [B, S, d], auxiliary loss) from [B, S, d], for the tokens of `token_mask` [B,
        S]. With `learns`, the bias that balances the load is updated."""
        zigzag = axis_size("GPT", x, self.ring_axis)
        y, routing = self._routed(x if norm is None else norm(x), zigzag, token_mask, learns)
        return y, routing.aux_loss


class TransformerBlock(Module):
    """A transformer block on [B, S, d]: norm, attention, residual, then norm, MLP, residual.

    It is causal. For an encoder, where each token sees all others, call it with a mask of scores:
    `block(x, attention_mask=there[:, None, None])`, with `there` bool [B, S], False for padding.
    With `config.context` "ring" its sequence must be in zig-zag order, which is not checked:
    `nn.unzigzag(block(nn.zigzag(x, n)), n)` over n devices. `GPT` reorders by itself.

    With `config.block` "parallel", attention and MLP take the same input side by side. Attention
    runs a few sequences at a time, norm and MLP a block of rows at a time; of their intermediates
    only values marked by `ts.save_for_backward` outlive a block. The residual is added outside of
    these loops, so under tensor parallelism one all_reduce completes each sublayer (one for both,
    side by side).
    """

    def __init__(self, c: Config):
        self.norm_1, self.attention = c.make_norm(), Attention(c)
        self.norm_2 = c.make_norm() if c.block != "parallel" else None
        self.post_norm_1 = c.make_norm() if c.block == "post_norms" else None
        self.post_norm_2 = c.make_norm() if c.block == "post_norms" else None
        if c.experts:
            self.moe = Experts(c)
        else:
            self.mlp = MLP(c)
        self.dropout, self.block = Dropout(c.dropout), c.block
        self.sequence_parallel = c.sequence_parallel
        self.scope_name = "block"

    def __call__(
        self,
        x: Tensor,
        own: LayerTensors | None = None,
        slots: int = 0,
        *,
        attention_mask: Like | None = None,
        position_ids: Like | None = None,
    ) -> Any:
        """[B, S, d] to [B, S, d]; with experts, to (that, their auxiliary loss). With a cache (see
        `Attention`), to (the first of that, the cache). `attention_mask` and `position_ids` are
        those of `GPT`."""
        name, fix = "TransformerBlock", "give a batch: x[None] for one sequence"
        x = as_tensor(x)
        ranked(name, "x", x.type, 3, fix)
        if own is not None:
            mapping(name, "own", own, "give a mask by name: attention_mask=")
        a, m = self.attention, self.__dict__.get("moe") or self.mlp
        if attention_mask is not None or position_ids is not None:
            shape = x.shape[:2]
            size = a.config.seq if a.config.positions == "alibi" else None
            told = token_masks(name, shape, attention_mask, position_ids, size)
            own = {**(own or {}), **told}
        there = (own or {}).get("there")
        if slots and "moe" in self.__dict__:  # tokens after a prompt's last one are padding
            there = F.arange(x.shape[1]) <= (own or {})["at"].reshape(-1, 1)
        h = self.norm_1(x)
        y, *cache = attended if isinstance(attended := a(h, own, slots), tuple) else (attended,)
        if self.block in ("sequential", "post_norms"):
            x = x + self._done(y, self.post_norm_1, a.out_bias)
            y, *aux = m.whole(x, self.norm_2, there, not cache)
            x = x + self._done(y, self.post_norm_2, m.down_bias)
        else:
            z, *aux = m.whole(h if self.norm_2 is None else x, self.norm_2, there, not cache)
            x = x + self._done(y + z, None, a.out_bias, m.down_bias)
        more = cache or aux
        return (x, *more) if more else x

    def _done(self, y: Tensor, norm: LayerNorm | RMSNorm | None, *biases: Tensor | None) -> Tensor:
        """A sublayer's result in the layout of the residual, with its biases, norm and dropout."""
        y = split_sequence(y, self.sequence_parallel)
        for bias in biases:
            y = y if bias is None else y + bias.to(y.dtype)
        return self.dropout(y if norm is None else norm(y))


class GPT(Module):
    """A decoder-only transformer: token ids [B, S] to logits [B, S, vocab].

    `loss(ids, labels)` gives the training loss without the whole logits. `config` is a `GPTConfig`.

    Both take an `attention_mask` [B, S], 0 for padding, on either side: no token sees it. Positions
    then count the other tokens, as in transformers' `generate`. A mask [B, 1, S, S] or [B, H, S, S]
    gives the keys that each query sees, in place of causality and windows: a bool mask is True for
    a visible key, a float mask is added to the scores. `position_ids` [B, S] are the positions
    themselves; without a mask, a position that does not follow its predecessor begins a new
    document, and no token sees another document.

    Raises UsageError if `config` is not a GPTConfig, ShapeError at a call if ids are not integers
    [B, S] with S at most `config.seq`, or mask or positions do not fit them, or a position that the
    host knows is outside of the table of "learned" or "alibi" positions.
    """

    origin: str = ""
    """The config.json of the checkpoint it was loaded from, if any."""

    tables = ("position",)
    """The parameters whose rows are chosen, as in an `Embedding`; they have no adapters."""

    def __init__(self, config: Config):
        self.config = c = config
        self.embed = Embedding(c.vocab, c.d)
        if c.positions == "learned":
            self.position = Parameter(c.seq, c.d, init=normal(0.02))
        self.blocks = Stack(TransformerBlock(c), c.layers, c.loop, c.remat, c.stacked)
        self.norm = c.make_norm()
        if not c.tied:
            self.head = Parameter(c.d, c.vocab, init=normal(0.02))
        self.head_bias = Parameter(c.vocab, init="zeros") if "head" in c.biases else None
        self.scope_name = "gpt"
        self.parameters()

    def features(
        self, ids: Tensor, attention_mask: Like | None = None, position_ids: Like | None = None
    ) -> Any:
        """The last hidden layer [B, S, d]; with experts, (that, the auxiliary losses [layers]).

        Its tokens are in the order of `ids`, for any `context`. Raises ShapeError if `ids` are not
        integers [B, S] with S at most `config.seq`.
        """
        made = self._features(ids, attention_mask, position_ids)
        x, *aux = made if isinstance(made, tuple) else (made,)
        if self.config.context == "ring":
            x = split_sequence(unzigzag(x, self._devices(x)), self.config.context_axis)
        return (x, *aux) if aux else x

    def _features(self, ids: Tensor, attention_mask: Like | None, position_ids: Like | None) -> Any:
        """`features` in the token order of `context`."""
        ids = checked_ids(ids, self.config)
        size = None if self.config.positions == "rotary" else self.config.seq
        told = token_masks("GPT", ids.shape, attention_mask, position_ids, size)
        # One of them decides for all whether they are reordered: weights and masks may have no
        # mesh.
        where = next((t for t in (ids, *told.values()) if t.mesh is not None), self.embed.weight)
        told = self._told(told, where)
        x = self._embedded(self._placed(ids, where))
        if self.config.positions == "learned" and "positions" in told:
            x = x + fn.embedding(told["positions"], self.position)
        elif self.config.positions == "learned":
            x = x + self._placed(self.position[: ids.shape[1]], where, 0)
        x, *aux = self._layers(x, ids.shape[1], shared=told)
        return (x, *aux) if aux else x

    def _told(self, told: Told, where: Tensor) -> Told:
        """`told` with its sequences in the order and layout of `context`."""
        placed = {name: self._placed(t, where) for name, t in told.items() if name != "scores"}
        if "scores" in told:
            m = told["scores"]
            m = m if m.shape[2] == 1 else self._placed(m, where, 2)
            if self.config.context == "ring":
                m = zigzag(m, self._devices(where), 3)
            placed["scores"] = m
        return placed

    def _embedded(self, ids: Tensor) -> Tensor:
        c = self.config
        # Completed at the start: a partial residual stream would be completed in every layer.
        x = F.complete(split_sequence(self.embed(ids), c.sequence_parallel))
        return x * math.sqrt(c.d) if c.embed_scale else x

    def _layers(
        self, x: Tensor, length: int, layer_tensors: LayerTensors | None = None, **how: Any
    ) -> tuple[Any, ...]:
        """(last hidden layer, further results of the blocks, if any)."""
        c, each = self.config, dict(layer_tensors or {})
        if windows := c.layer_windows:
            each["window"] = as_tensor(np.array([w or NO_WINDOW for w in windows], np.int32))
            if c.local_rope is not None:
                rates = [c.rope.rates(c.size, length), c.local_rope.rates(c.size, length)]
                each["rates"] = F.stack([rates[w > 0] for w in windows])
        made = self.blocks(x, each or None, **how)
        x, *more = made if isinstance(made, tuple) else (made,)
        return whole_sequence(self.norm(x), c.sequence_parallel), *more

    def prefill(self, ids: Tensor, at: Tensor, slots: int) -> tuple[Tensor, Cache]:
        """(logits [B, vocab] of the tokens at `at`, the cache after them) of whole sequences.

        `ids` are integers [B, S]; `at` i32[B] is the position of each sequence's last token, later
        ones are padding. The cache holds the last `slots` tokens: as many as there will be, or as
        the largest window, if every layer has one; rates that depend on the length ("dynamic",
        "longrope") are those of `slots` tokens. Experts with a capacity may drop tokens here, and
        serve every token in `decode`. Raises ShapeError or DTypeError if shapes or dtypes do not
        fit or a position is outside of S, UsageError if there are fewer slots, or if the config has
        a `context`.
        """
        ids, at, slots = prompt_of(ids, at, slots, self.config)
        x = self._embedded(ids)
        if self.config.positions == "learned":
            x = x + self.position[: ids.shape[1]]
        x, cache = self._layers(x, slots, self._every(at), slots=slots)
        return self._logits(F.gather(x, at.reshape(-1, 1, 1), 1))[:, 0], cache

    def decode(self, ids: Tensor, cache: Cache, at: Tensor) -> tuple[Tensor, Cache]:
        """(logits [B, vocab], the cache with the new tokens) of one more token `ids` [B] at `at`
        [B].

        Raises ShapeError or DTypeError if shapes or dtypes do not fit those of the cache, or if the
        host knows that a position is not below the number of slots (`config.seq`, if every layer
        has a window); if only the devices know it, the logits of that sequence are NaN. Raises
        UsageError if `cache` is not one, or if the config has a `context`.
        """
        ids, cache, at, inside = token_of(ids, cache, at, self.config)
        x = self._embedded(ids.reshape(-1, 1))
        if self.config.positions == "learned":
            x = x + F.take_or_zero(self.position, at.reshape(-1, 1))
        slots = cache["k"].shape[3]
        x, cache = self._layers(x, slots, {**self._every(at), **cache})
        y = self._logits(x)[:, 0]
        return y * inside.reshape(-1, 1).to(y.dtype), cache

    def _every(self, at: Tensor) -> LayerTensors:
        """`at`, repeated for every layer."""
        return {"at": F.broadcast_to(at.reshape(1, -1), (self.config.layers, at.shape[0]))}

    def _head(self) -> Tensor:
        return self.embed.weight.T if self.config.tied else self.head

    def _logits(self, x: Tensor) -> Tensor:
        return fn.soft_cap(fn.logits(x, self._head(), self.head_bias), self.config.logit_cap)

    def _devices(self, where: Tensor) -> int:
        """The number of devices over which `context` splits the sequence, on the mesh of
        `where`."""
        c = self.config
        return 1 if c.context is None else axis_size("GPT", where, c.context_axis)

    def _placed(self, x: Tensor, where: Tensor, dim: int = 1) -> Tensor:
        """`x` with its sequence dim `dim` in the order and layout of `context`, on the mesh of
        `where`."""
        c, n = self.config, self._devices(where)
        if n == 1:
            return x
        fix = f"make it a multiple of {2 * n if c.context == 'ring' else n}"
        text = "a sequence of {count} does not divide over {parts} devices"
        divides("GPT", x.shape[dim], n, text, fix, x=x.type)
        if c.context == "ring":
            x = zigzag(x, n, dim)
        mesh = x.mesh or where.mesh
        return split_sequence(F.relayout(x, x.type.on(mesh)), c.context_axis, dim)

    def __call__(
        self, ids: Tensor, attention_mask: Like | None = None, position_ids: Like | None = None
    ) -> Tensor:
        x = self.features(ids, **_not_none(attention_mask, position_ids))
        return self._logits(x[0] if isinstance(x, tuple) else x)

    def loss(
        self,
        ids: Tensor,
        labels: Tensor,
        attention_mask: Like | None = None,
        position_ids: Like | None = None,
    ) -> Tensor:
        """The mean cross-entropy in nats per token, f32[], without the whole logits.

        `ids` and `labels` are integers [B, S]. Labels of -100 do not count: padding must have them,
        also with an `attention_mask`. With experts, `aux_weight` times the mean auxiliary loss is
        added.
        """
        overridable = (type(self).features, type(self).loss_of)
        if self.config.context != "ring" or overridable != (GPT.features, GPT.loss_of):
            return self.loss_of(
                self.features(ids, **_not_none(attention_mask, position_ids)), labels
            )
        # The mean does not depend on the order: labels are cheaper to reorder than features.
        features = self._features(ids, attention_mask, position_ids)
        x = features[0] if isinstance(features, tuple) else features
        return self.loss_of(features, self._placed(as_tensor(labels), x))

    def loss_of(self, features: Any, labels: Tensor) -> Tensor:
        """The loss from the result of `features`."""
        x, *aux = features if isinstance(features, tuple) else (features,)
        loss = linear_cross_entropy(
            x, self._head(), labels, bias=self.head_bias, cap=self.config.logit_cap
        )
        share = self.config.aux_weight
        if not (aux and share):
            return loss
        warn_of_microbatches(AUXILIARY)
        return loss + share * F.mean(aux[0])


def _not_none(attention_mask: Like | None, position_ids: Like | None) -> dict[str, Like]:
    """The arguments that are not None: a user's subclass may have a `features` without them."""
    both = (("attention_mask", attention_mask), ("position_ids", position_ids))
    return {name: x for name, x in both if x is not None}
