"""Routing of tokens to experts: scores, top-k choice, load balance.

The choice depends on the token alone: batch, layout and number of devices do not change it. Of
equal scores the lower expert id wins.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from ...core.checks import divides, whole
from ...core.declared import Rate
from ...core.dtypes import f32
from ...core.errors import UsageError
from ...lang.math import functions as F
from ...lang.parallel.microbatches import by_microbatch
from ...lang.record.operands import as_tensor
from ...lang.record.tree import register
from ...lang.value.tensor import Tensor
from .. import functional as fn

AUXILIARY = "the auxiliary loss of experts is that of each microbatch"
ROUTERS = ("topk", "sigmoid")


@dataclass(frozen=True)
class Routing:
    """Statistics of a routed batch: scalars, and `load` [E], the tokens that chose each expert.

    `aux_loss` is E times the sum over experts of (share of choices)(mean score), 1 for equal loads
    (Fedus et al. 2021). `z_loss` is the mean squared logsumexp of the logits (Zoph et al. 2022).
    `dropped` is the number of choices that no expert had room for.
    """

    load: Tensor
    dropped: Tensor
    aux_loss: Tensor
    z_loss: Tensor


register(Routing)


@dataclass(frozen=True, slots=True)
class Choice:
    """Ids of experts and gates (f32) per token [.., k], with logits and scores [.., E] in f32.
    `token_mask` bool [.., 1] is False for tokens that go to no expert; None: all go."""

    ids: Tensor
    gates: Tensor
    logits: Tensor
    scores: Tensor
    token_mask: Tensor | None = None

    def routing(self, dropped: Tensor) -> Routing:
        """The statistics of this choice; `dropped` is the number of choices without room. Tokens
        outside of `token_mask` do not count."""
        experts, tokens = self.scores.shape[-1], self.scores.size // self.scores.shape[-1]
        # [turns, .., k or E]: in a pipeline the loss is computed for each microbatch.
        scores, ids = by_microbatch(self.scores), by_microbatch(self.ids)
        microbatches, dims = scores.shape[0], tuple(range(1, scores.ndim - 1))
        part: Any = microbatches / tokens  # that one token has of its turn
        hot = F.one_hot(ids, experts)
        share = scores / F.sum(scores, -1, True)
        if self.token_mask is not None:
            counts = by_microbatch(self.token_mask.to(f32))
            part = 1.0 / F.maximum(F.complete(F.sum(counts, dims)), 1.0)  # [turns, 1]
            hot, share = hot * counts.unsqueeze(-1), share * counts
        load, mean = F.sum(hot, (*dims, len(dims) + 1)), F.sum(share, dims)
        if microbatches == 1:
            load, mean = load.reshape(experts), mean.reshape(experts)
        mean = mean * part
        scale: Any = part * (experts / (self.ids.shape[-1] * microbatches))
        aux = F.sum(F.complete(load) * F.complete(mean) * scale)
        load = F.sum(load, 0) if microbatches > 1 else load
        lse = F.logsumexp(self.logits, -1)
        z = F.mean(lse * lse)
        if self.token_mask is not None:
            token_mask = self.token_mask.to(f32)
            z = F.sum(lse * lse * token_mask[..., 0]) / F.maximum(
                F.complete(F.sum(token_mask)), 1.0
            )
        return Routing(
            F.stop_gradient(F.complete(load)),
            F.stop_gradient(F.complete(dropped)),
            aux,
            F.complete(z),
        )


@dataclass(frozen=True, slots=True)
class Router:
    """The router: "topk" scores experts by softmax, "sigmoid" each one separately; `k` are chosen.

    With `expert_groups` only experts of a token's best `topk_groups` groups can be chosen. The
    score of a group is that of its best expert, with "sigmoid" the sum of its two best (DeepSeek-AI
    2024). `normalize` divides the gates by their sum, then they are multiplied by `scale`. `sort`
    puts a token's experts in order of their ids.
    """

    kind: str
    k: int
    normalize: bool
    sort: bool = False
    expert_groups: int = 1
    topk_groups: int = 1
    scale: float = 1.0

    def check(self, experts: int) -> None:
        """Raises UsageError if the settings do not fit this number of experts."""
        whole("moe", "k", self.k, 1, experts)
        divides(
            "moe", experts, self.expert_groups, "{count} experts do not divide into {parts} groups",
            "give expert_groups that divide the experts", UsageError,
        )  # fmt: skip
        most = experts // self.expert_groups * self.topk_groups
        if self.k > most:
            raise UsageError(
                f"moe: k={self.k}, but {self.topk_groups} groups have {most} experts",
                fix="choose from more groups: topk_groups",
            )


def choose(
    x: Tensor,
    weight: Tensor,
    how: Router,
    bias: Tensor | None = None,
    token_mask: Tensor | None = None,
) -> Choice:
    """The best experts of tokens `x` [.., d] under `weight` [d, E]. `bias` [E] is added for the
    choice only, not to gates and gradients. `token_mask` is that of `Choice`."""
    logits = F.matmul(x.to(f32), weight.to(f32))
    scores = fn.softmax(logits) if how.kind == "topk" else F.sigmoid(logits)
    biased = F.stop_gradient(scores if bias is None else scores + bias.to(f32))
    if how.topk_groups < how.expert_groups:
        biased = _in_best_groups(biased, how)
    _, ids = F.topk(biased, how.k)
    if how.sort:
        ids = F.sort(ids)[0]
    gates = F.gather_or_zero(scores, ids)
    if how.normalize:
        gates = gates / F.sum(gates, -1, True)
    if how.scale != 1.0:
        gates = gates * how.scale
    return Choice(ids, gates, logits, scores, token_mask)


def _in_best_groups(scores: Tensor, how: Router) -> Tensor:
    """`scores` [.., E], with minus infinity for experts outside of the best groups."""
    parts = scores.reshape(*scores.shape[:-1], how.expert_groups, -1)
    of_group = F.topk(parts, min(2 if how.kind == "sigmoid" else 1, parts.shape[-1]))[0]
    _, best = F.topk(F.sum(of_group, -1), how.topk_groups)
    taken = F.sum(F.one_hot(best, how.expert_groups), -2) > 0
    return F.where(taken.unsqueeze(-1), parts, -inf).reshape(scores.shape)


def updated_expert_bias(bias: Tensor, load: Tensor, rate: Rate = 1e-3) -> Tensor:
    """The bias after one step of balancing without a loss (Wang et al. 2024).

    `bias` and `load` are [E]. The bias of an expert below the mean load rises by `rate`, that of
    one above falls. Raises UsageError if the shapes differ.

    >>> import tessera as ts
    >>> updated_expert_bias(ts.zeros(3), ts.tensor([4.0, 1.0, 1.0]), 0.5).numpy().tolist()
    [-0.5, 0.5, 0.5]
    """
    bias, load = as_tensor(bias), as_tensor(load)
    if bias.ndim != 1 or bias.shape != load.shape:
        raise UsageError(
            "updated_expert_bias: bias and load are not both [E]",
            bias=bias.type,
            load=load.type,
            fix="give the layer's bias and routing.load",
        )
    load = F.stop_gradient(load.to(f32))
    return bias + F.sign(F.mean(load) - load) * rate
