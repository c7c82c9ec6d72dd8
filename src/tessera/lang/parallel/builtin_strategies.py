"""The built-in strategies of `dist.strategy`: data, tensor and expert parallelism, and ZeRO."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from ...core.checks import one_of, shown
from ...core.errors import StrategyError
from ...core.layout import Factor, TensorType
from ...core.public import checked
from ...core.value_checks import is_whole
from ...core.wording import nearest
from .strategy import (
    NAMED,
    STAGES,
    AxisStrategy,
    Strategy,
    largest,
    one_axis,
    warn_whole,
    whole_over,
    zero_dim,
)

# The dim of each transformer weight that tensor parallelism splits. Column: the outputs (heads,
# hidden, vocabulary) of [in, out]; row: the inputs. The names of Tessera's own modules come first,
# then the customary ones of checkpoints stored as [in, out].
# A third number is the count of equal parts in the dim (q, k and v side by side); each part is
# split. A weight or a bias by itself, as in a linear layer, is column parallel.
Rule = tuple[str, int] | tuple[str, int, int]
TRANSFORMER: tuple[Rule, ...] = (
    (r"(^|\.)attention\.(qkv|q|kv)(_bias)?$", -2),  # [d, (3,) heads, size]: heads
    (r"(^|\.)attention\.out$", -3),  # [heads, size, d]: heads
    (r"(^|\.)(up|gate|w_up|w_gate|up_proj|gate_proj|fc1|c_fc|w1|w3)(\.weight|\.bias|_bias)?$", -1),
    (r"(^|\.)(down|w_down|down_proj|fc2|w2)(\.weight)?$", -2),
    (r"(^|\.)(wq|wk|wv|q_proj|k_proj|v_proj)(\.weight|\.bias)?$", -1),
    (r"(^|\.)(w_qkv|c_attn|qkv_proj)(\.weight|\.bias)?$", -1, 3),
    (r"(^|\.)(wo|w_out|o_proj|out_proj)(\.weight)?$", -2),
    (r"(^|\.)(embed|wte|embed_tokens|tok_embeddings)(\.weight)?$", -2),
    (r"(^|\.)(head|lm_head)(\.weight)?$", -1),
    (r"^(weight|bias)$", -1),
    # GPT-2, GPT-Neo, GPT-NeoX, BLOOM, Falcon, Phi, Phi-3, BERT, ViT and T5 of transformers
    (r"\.(query_key_value|dense_h_to_4h|query|key|value)\.(weight|bias)$", -1),
    (r"\.(intermediate\.dense|(Self|EncDec)Attention\.[qkv]|wi(_[01])?)\.(weight|bias)$", -1),
    (r"\.gate_up_proj(\.weight)?$", -1, 2),
    (r"\.(c_proj|dense_4h_to_h|(Self|EncDec)Attention\.o)\.weight$", -2),
    (r"\.(attention|self_attention|self_attn|output)\.dense\.weight$", -2),
    (r"\.(word_embeddings|embed_in|shared)\.weight$|^shared\.weight$", -2),
    (r"(^|\.)embed_out\.weight$", -1),
)
# The weights of stacked experts [experts, in, out] are split by expert.
EXPERTS: tuple[Rule, ...] = ((r"(^|\.)(moe|experts)\.(up|gate|down)$", -3),)


@checked
@dataclass(frozen=True)
class NamedStrategy(AxisStrategy):
    """The base of the strategies that `dist.strategy` makes."""

    axis: str

    def __post_init__(self) -> None:
        one_axis(self.kind, self.axis)

    @property
    def _call(self) -> str:
        return f'dist.strategy({self.kind!r}, axis="...")'


@checked
@dataclass(frozen=True)
class DataParallel(NamedStrategy):
    """Data parallelism: the batch is split."""

    kind: ClassVar[str] = "data_parallel"


@checked
@dataclass(frozen=True)
class ZeroRedundancy(NamedStrategy):
    """ZeRO: the batch is split; between steps optimizer state (stage 1), gradients (2) and weights
    (3) are split too (Rajbhandari et al. 2020)."""

    stage: int = 2
    kind: ClassVar[str] = "zero_redundancy_optimizer"

    def lay_at_rest(self, kind: str, name: str, t: TensorType) -> TensorType:
        if self.stage < STAGES[kind] or not t.rank:
            return t
        return self.split_at_rest(t, zero_dim(t, self.axis))


@checked
@dataclass(frozen=True)
class ByRules(NamedStrategy):
    """A strategy that splits each weight by the first of the `rules` whose pattern fits its
    name."""

    rules: tuple[Rule, ...]
    default_rules: ClassVar[tuple[Rule, ...]] = ()

    def lay_weight(self, name: str, t: TensorType) -> TensorType:
        for rule, dim, *parts in self.rules:
            if not _fits((rule, dim), name, t):
                continue
            if dim >= t.rank:
                raise StrategyError(
                    f"strategy {self.kind!r}: the rule {rule!r} splits dim {dim}, which {name!r}"
                    " does not have",
                    tensor=t,
                    fix="write a rule that fits only those that have it, or count from the end",
                )
            d = dim % t.rank
            n = parts[0] if parts else 1
            if n > 1 and t.shape[d] % (n * t.sizes[self.axis]) == 0 and len(t.dims[d]) == 1:
                split = (Factor(n), Factor(t.shape[d] // n, (self.axis, *t.dims[d][0].axes)))
                return t.with_dims((*t.dims[:d], split, *t.dims[d + 1 :]))
            return self.split(t, d)
        return t

    def too_much(self, whole: int, every: int) -> bool:
        """Returns whether to warn that `whole` of `every` bytes of weights are not split."""
        return whole == every

    def check_reach(self, types: Mapping[str, TensorType]) -> None:
        """Raises StrategyError if none of the user's own rules fits a weight's name. Gives one
        StrategyWarning with the rules that fit no name or never act, the pairs of rules that split
        one weight differently, and the largest weights that are not split."""
        lost = [r for r in self.rules if not any(_fits(r, n, t) for n, t in types.items())]
        own = self.rules != self.default_rules
        if own and len(lost) == len(self.rules):
            raise StrategyError(
                f"strategy {self.kind!r} over {self.axis!r}: no rule fits the name of a weight, so"
                " nothing is split",
                rows=[(repr(r[0]), f"the nearest names are {nearest(r[0], types)}") for r in lost],
                fix="write what the names contain; a weight needs the dim that the rule splits",
            )
        rows = [f"{r[0]!r} fits none of {nearest(r[0], types)}" for r in lost if own]
        clashes = self._second_rules(types) if own else []
        whole = whole_over(self.axis, types)
        every = sum(t.nbytes for t in types.values() if t.rank > 1)
        if self.too_much(sum(t.nbytes for t in whole.values()), every):
            rows += largest(whole)
        if rows or clashes:
            fix = 'give it rules for their names: rules=[(r"wide$", -1), ...]'
            if clashes:
                fix = r'let one rule fit each weight: "(^|\.)wide$" fits no name like "xwide"'
            warn_whole(self, types, rows + clashes, fix)

    def _second_rules(self, types: Mapping[str, TensorType]) -> list[str]:
        """Returns a line for each pair of rules that split one weight differently, and for each
        rule that never acts because earlier rules fit all of its weights."""
        clashes: dict[tuple[int, int], str] = {}
        other_rules: dict[int, list[str]] = {}
        acts = set()
        for name, t in types.items():
            first, *others = [i for i, r in enumerate(self.rules) if _fits(r, name, t)] or [-1]
            acts.add(first)
            for i in others:
                other_rules.setdefault(i, []).append(name)
                a, b = self.rules[first], self.rules[i]
                first_split, second_split = _split_by(a, t), _split_by(b, t)
                if first_split != second_split:
                    message = (
                        f"{name} fits {a[0]!r}, {first_split}, and {b[0]!r}, "
                        f"{second_split}: the first holds"
                    )
                    clashes.setdefault((first, i), message)
        idle = [
            f"{self.rules[i][0]!r} never acts: a rule before it fits {nearest('', names)}"
            for i, names in other_rules.items()
            if i not in acts
        ]
        return [*clashes.values(), *idle]


@checked
@dataclass(frozen=True)
class TensorParallel(ByRules):
    """Tensor parallelism: the weights are split, the batch is not."""

    rules: tuple[Rule, ...] = TRANSFORMER
    kind: ClassVar[str] = "tensor_parallel"
    default_rules: ClassVar[tuple[Rule, ...]] = TRANSFORMER
    splits_batch: ClassVar[bool] = False  # type: ignore[misc]  # of the class

    def too_much(self, whole: int, every: int) -> bool:
        return 2 * whole > every

    @property
    def for_out_in(self) -> AxisStrategy:
        return OutInTensorParallel(self.axis) if self.rules == TRANSFORMER else self


class OutInTensorParallel(TensorParallel):
    """Tensor parallelism of weights [out, in], by the rules for their transposes."""

    def lay_weight(self, name: str, t: TensorType) -> TensorType:
        return _transposed(super().lay_weight(name, _transposed(t)))


def _transposed(t: TensorType) -> TensorType:
    return t.with_dims((*t.dims[:-2], *t.dims[:-3:-1]))


@checked
@dataclass(frozen=True)
class ExpertParallel(ByRules):
    """Expert parallelism: the weights of stacked experts and the batch are split."""

    rules: tuple[Rule, ...] = EXPERTS
    kind: ClassVar[str] = "expert_parallel"
    default_rules: ClassVar[tuple[Rule, ...]] = EXPERTS


def _fits(rule: Rule, name: str, t: TensorType) -> bool:
    return bool(re.search(rule[0], name)) and t.rank >= -rule[1]


def _split_by(rule: Rule, t: TensorType) -> str:
    """Returns the dim of a weight of type `t` that `rule` splits, as text for a warning."""
    _, dim, *parts = rule
    return f"dim {dim + t.rank if dim < 0 else dim}" + (
        f" in {parts[0]} parts" if parts and parts[0] > 1 else ""
    )


KINDS = {
    "data_parallel": "dp", "tensor_parallel": "tp", "zero_redundancy_optimizer": "dp",
    "expert_parallel": "ep", "fsdp": "dp", "ddp": "dp",
}  # fmt: skip
RULES: dict[str, type[ByRules]] = {
    "tensor_parallel": TensorParallel,
    "expert_parallel": ExpertParallel,
}


def strategy(
    kind: str,
    axis: str | None = None,
    *,
    stage: int | None = None,
    rules: Sequence[Rule] | None = None,
) -> Strategy:
    """The strategy named `kind` over a mesh axis.

    `axis` is by default "dp", for tensor_parallel "tp", for expert_parallel "ep" (which also splits
    the batch). `stage` is that of ZeRO (Rajbhandari et al. 2020): 1 splits optimizer state, 2
    gradients too (default), 3 weights too. "fsdp" is ZeRO at stage 3, "ddp" is data_parallel.
    `rules` are for tensor or expert parallelism: pairs (regular expression for a weight's name, dim
    to split); a third number is the count of equal parts in the dim, each of which is split.
    Strategies are combined by `+`. Raises StrategyError if `kind`, `stage` or a rule is unknown or
    not allowed for `kind`.

    >>> from tessera import dist
    >>> dist.strategy("fsdp") == dist.strategy("zero_redundancy_optimizer", stage=3)
    True
    """
    one_of("strategy", "the kind", kind, KINDS, StrategyError)
    if stage is not None and (kind != "zero_redundancy_optimizer" or stage not in (1, 2, 3)):
        raise StrategyError(
            f"strategy {kind!r}: stage {stage!r} does not exist",
            fix="zero_redundancy_optimizer takes stage 1, 2 or 3",
        )
    if rules is not None and kind not in RULES:
        raise StrategyError(
            f"strategy {kind!r}: it goes by no rules for names",
            fix="give rules to " + " or ".join(RULES),
        )
    along = KINDS[kind] if axis is None else axis
    if kind in RULES:
        return RULES[kind](along, *([_checked_rules(rules)] if rules is not None else []))
    if kind in ("data_parallel", "ddp"):
        return DataParallel(along)
    return ZeroRedundancy(along, 3 if kind == "fsdp" else stage or 2)


NAMED.update({kind: partial(strategy, kind) for kind in KINDS})


def _checked_rules(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Returns the rules as a tuple. Raises StrategyError if one is not a regular expression with a
    dim."""
    for rule in rules if isinstance(rules, (list, tuple)) else [rules]:
        pattern, *numbers = (
            rule if isinstance(rule, tuple) and len(rule) in (2, 3) else (None, None)
        )
        try:
            if not isinstance(pattern, str) or not all(map(is_whole, numbers)):
                raise TypeError
            re.compile(pattern)
        except (TypeError, re.error):
            raise StrategyError(
                f"strategy 'tensor_parallel': {shown(rule)} is no rule",
                fix=r'give pairs of a regular expression and a dim, e.g. (r"\.up$", -1)',
            ) from None
    return tuple(rules)
