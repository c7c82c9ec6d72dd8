"""Mixture of experts: each token goes through k of E feed-forward networks (guide 2, 3.4).

Experts are one stacked weight whose first dim may be split over mesh axes. Tokens are redistributed
to the experts' devices and back, and the rest follows from the layouts of `x` and of the weights:
data, tensor, sequence and expert parallelism in any combination.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any
from zlib import crc32

import numpy as np

from ...core.checks import axes_of, divides, shown, unfit, whole
from ...core.declared import Count, Flag, Integer, Natural, OneOf, Rate, Real, String
from ...core.dtypes import bool_, f32
from ...core.errors import ShapeError, UsageError
from ...core.layout import Dim, Factor, TensorType, dim_axes, plain, shard_count
from ...core.mesh import Mesh
from ...core.tensor_checks import ranked, shaped
from ...lang.jit.weight_store import weights
from ...lang.math import functions as F
from ...lang.parallel.collectives import split_over
from ...lang.parallel.microbatches import warn_of_microbatches
from ...lang.record.determinism import sums_in_order
from ...lang.record.operands import as_tensor
from ...lang.record.parameter import Parameter
from ...lang.record.recorder import current, named_scope
from ...lang.value.checks import mesh_or_none
from ...lang.value.tensor import Like, Tensor
from ..layers import normal
from ..module import Module, state
from ..visible_keys import check_token_mask
from .call import settled
from .options import Options
from .placement import Placement
from .routing import AUXILIARY, Routing, updated_expert_bias
from .transport import MoEInspection, transport_of
from .weights import NETWORK, expert_axes, has_weights

Balance = Annotated[str, OneOf("bias")]
RATE = 1e-3


def moe(
    x: Tensor,
    experts: Any,
    router: str = "topk",
    k: int = 2,
    transport: Any = "auto",
    deterministic: bool = False,
    mesh: Mesh | None = None,
    *,
    capacity: float | None = None,
    groups: int | None = None,
    normalize: bool | None = None,
    activation: str | None = None,
    hidden: Count | None = None,
    axis: str | Sequence[str] | None = None,
    placement: Placement | None = None,
    block: int | None = None,
    zigzag: int = 1,
    stats: Flag = False,
    name: str = "",
    expert_groups: int | None = None,
    topk_groups: int | None = None,
    scale: float = 1.0,
    network: Callable[[Tensor, dict[str, Tensor]], Tensor] | None = None,
    mask: Like | None = None,
) -> Any:
    """The sum of gate * expert(token) over the `k` experts of each token of x [..., d].

    `experts` is a dict of weights {"router" [d, E], "up" [E, d, h], "down" [E, h, d]}, with "gate"
    [E, d, h] for a gated network, "bias" [E] to steer the choice, and "shared" {"up" [d, h],
    "down", "gate"} for an expert of all tokens. It may also be an `nn.MoE`, whose options are the
    defaults here; or a number of experts: then the weights (`hidden` wide, default 4 d) belong to
    the enclosing function, as in `op.transformer_block`.

    - `router`: "topk" scores the experts by softmax, "sigmoid" each one separately; of equal scores
      the lower id wins. `normalize` divides the gates by their sum (None: if k > 1), then they are
      multiplied by `scale`. With `expert_groups` equal runs of experts, a token chooses among those
      of its best `topk_groups`: the score of a run is its best score, with "sigmoid" the sum of its
      two best.
    - `capacity`: None serves every choice. A number c gives each expert room for c k S / E choices
      in every group of S tokens (a sequence, or `groups` equal runs of all tokens); later tokens
      are dropped.
    - `zigzag`: sequences [..., S, d] in the order of `nn.zigzag` over this many devices are served
      in their original order.
    - `activation`: "gelu", "relu" or "silu" (None: silu with a gate, else gelu).
    - `axis`: the mesh axis over which the experts are split, or several, from the outermost link
      inwards with one hop each. None: the axis that splits them already, else "ep" if the mesh has
      it.
    - `transport`: "nccl", "nvshmem", "deepep" or "auto", or a dict of the fields of `Transport`: a
      preference, and the packing and buckets of the payload.
    - `deterministic`: sums a token's experts in the order of their ids, and values of different
      devices in a fixed order at every level, as `dist.all_reduce(deterministic=True)` does. The
      sums of the gradients follow the level (`dist.deterministic`).
    - `placement`: the expert in each row of the weights; replicas share tokens and gradients.
    - `block`: dropless experts compute padded blocks of this many rows, of one expert each (None:
      on a CPU each expert's rows as they are, else blocks of a chosen size).
    - `network`: a user-defined function `network(rows, weights)` for other kinds of experts. Its
      weights are the entries of `experts` besides "router", "bias" and "shared", [E, ...] each. It
      gets rows [*, t, d] of one expert for each index of the dims *, and weights [*, ...] of that
      expert, or of size 1 in some of *: it returns [*, t, d], as `rows @ w["a"] @ w["b"]` does.
    - `mask` [...]: 0 or False for a padding token: it goes to no expert, takes no room, counts in
      no number of the `Routing`, and gets zeros (except from an expert of all tokens).

    The result has the layout of `x`; if `x` has no mesh, its tokens are split. With `stats` it
    returns (result, Routing). Raises UsageError if an option is unknown or the experts do not
    divide, ShapeError if shapes do not fit or x has no token, DTypeError if x is not of floats or
    the mask is, LayoutError or MeshError if the layouts or meshes do not fit.

    >>> import tessera as ts
    >>> w = {"router": ts.eye(2), "up": ts.ones((2, 2, 4)), "down": ts.ones((2, 4, 2))}
    >>> y, routing = moe(ts.tensor([[3.0, 1.0], [2.0, 1.0]]), w, k=1, activation="relu", stats=True)
    >>> routing.load.numpy().tolist(), y.shape
    ([2.0, 0.0], (2, 2))
    """
    t = as_tensor(x)
    if isinstance(experts, (int, np.integer)) and not isinstance(experts, bool):
        experts = _layer_of_call(t, whole("moe", "experts", experts, 1), hidden, k, name)
    elif hidden is not None or name:
        which = f"hidden={shown(hidden)}" if hidden is not None else f"name={shown(name)}"
        raise UsageError(
            f"moe: {which} is for weights that it makes itself",
            fix="leave it out, or give a number of experts",
        )
    options = Options(
        router, k, transport, deterministic, capacity, groups, normalize, activation, axis,
        placement, block, zigzag, expert_groups, topk_groups, scale, network,
    )  # fmt: skip
    if isinstance(experts, MoE):
        options, experts = _of_layer(experts, options), experts.weights()
    if stats:
        warn_of_microbatches(AUXILIARY)
    return _called(t, experts, options, mesh, stats, mask)


def _of_layer(layer: MoE, options: Options) -> Options:
    """`options`, with the layer's own in place of defaults."""
    return replace(layer.options(), **options.non_defaults())


def _called(
    x: Tensor, experts: Any, options: Options, mesh: Any, stats: bool, mask: Like | None
) -> Any:
    if 0 in x.shape[:-1]:
        fix = "leave out the step for a batch that has none"
        raise ShapeError("moe: there is no token to route", x=x.type, fix=fix)
    if mask is not None:
        mask = as_tensor(mask)
        shaped("moe", "the mask", mask.type, x.shape[:-1], x=x.type)
        check_token_mask("moe", mask)
        mask = mask if mask.dtype is bool_ else mask != 0
    call = settled(x.type, experts, options, mesh)
    call.warn_of_no_effect()
    with named_scope("moe"), sums_in_order("moe", options.deterministic):
        out, choice, dropped = call.run(x, mask)
        result = (out, choice.routing(dropped)) if stats else out
    recorder = current()
    if recorder is None:
        out._reports = (call.inspection(),)
    else:
        recorder.root.builder.reports.append(call.inspection())
    return result


def moe_inspection(
    experts: Any,
    x: Any = None,
    k: int = 2,
    transport: Any = "auto",
    mesh: Mesh | None = None,
    *,
    capacity: float | None = None,
    groups: int | None = None,
    axis: str | Sequence[str] | None = None,
    placement: Placement | None = None,
) -> MoEInspection:
    """A report of a call of `moe` with these arguments, without running it.

    It has the transport, the devices of the experts, and the bytes that are sent. The options of an
    `nn.MoE` are the defaults here. `x` may be a type; without it the report has no sizes. Raises
    the errors of `moe`.
    """
    options = Options("topk", k, transport, False, capacity, groups, None, None, axis, placement)
    if isinstance(experts, MoE):
        options, experts = _of_layer(experts, options), experts.weights()
    if x is not None:
        t = x if isinstance(x, TensorType) else as_tensor(x).type
        return settled(t, experts, options, mesh).inspection()
    d, where = 1, mesh
    if has_weights(experts):
        d, where = as_tensor(experts["router"]).shape[0], mesh or as_tensor(experts["up"]).mesh
    t = plain(f32, (where.size if where is not None else 1, d))
    return settled(t, experts, replace(options, groups=None), mesh).inspection(tokens_known=False)


def _layer_of_call(x: Tensor, experts: int, hidden: Any, k: Any, name: Any) -> MoE:
    """The layer that belongs to this call in the program."""
    ranked("moe", "x", x.type, 2, "give [batch, d]", more=True)
    width = whole("moe", "hidden", 4 * x.shape[-1] if hidden is None else hidden, 1)
    asked = (x.shape[-1], width, experts)
    k = min(whole("moe", "k", k, 1), experts)
    made: MoE = weights("moe", lambda: MoE(*asked, k=k), asked, x.mesh, name)[1]
    return made


def _need_placement(name: str, placement: object, experts: int) -> None:
    if not isinstance(placement, Placement) or placement.experts != experts:
        raise unfit(name, "placement", placement, f"give a placement of {experts} experts")


# -- a layer --------------------------------------------------------------------------------------
class MoE(Module):
    """A mixture-of-experts layer: `experts` networks of width `hidden` for tokens [..., d].

    Options are as in `op.moe`. `shared` experts see every token; they form one network of `shared`
    times the width. `balance` "bias" balances the load without a loss: each call while `training`
    changes the buffer `bias` by `rate`. `routed` returns the numbers for an auxiliary loss. With a
    `mesh` the experts are split over `axis` from the start. Raises UsageError if `k` is above
    `experts`, a choice is unknown, or the experts do not divide over `axis`.
    """

    def __init__(
        self, d: Count, hidden: Count, experts: Count, k: Integer = 2, *, router: String = "topk",
        gated: Flag = False, shared: Natural = 0, activation: String | None = None,
        capacity: Real | None = None, groups: Integer | None = None, normalize: Flag | None = None,
        transport: Any = "auto", deterministic: Flag = False, balance: Balance | None = None,
        rate: Rate = RATE, mesh: Mesh | None = None, axis: str | Sequence[str] | None = None,
        placement: Placement | None = None, expert_groups: Integer | None = None,
        topk_groups: Integer | None = None, scale: Real = 1.0,
    ):  # fmt: skip
        whole("MoE", "k", k, 1, experts)
        if placement is not None:
            _need_placement("MoE", placement, experts)
        self.router_kind, self.k, self.transport = router, k, transport_of(transport)
        self.deterministic, self.capacity, self.groups = deterministic, capacity, groups
        self.normalize, self.activation, self.placement = normalize, activation, placement
        self.expert_groups, self.topk_groups, self.scale = expert_groups, topk_groups, scale
        self.axis = None if axis is None else axes_of("MoE", axis)
        self.options().routing.check(experts)  # raises early for impossible options
        if balance is None and rate != RATE:
            raise UsageError(
                f"MoE: rate={shown(rate)} has no effect: the load is not balanced by a bias",
                fix='give balance="bias"',
            )
        self.balance, self.rate = balance, rate
        self.training = True
        wide, tall = normal(1.0 / math.sqrt(d)), normal(1.0 / math.sqrt(hidden))
        self.router = Parameter(d, experts, init=wide)
        self.up = Parameter(experts, d, hidden, init=wide)
        self.gate = Parameter(experts, d, hidden, init=wide) if gated else None
        self.down = Parameter(experts, hidden, d, init=tall)
        if shared:
            self.shared_up = Parameter(d, shared * hidden, init=wide)
            self.shared_gate = Parameter(d, shared * hidden, init=wide) if gated else None
            self.shared_down = Parameter(shared * hidden, d, init=tall)
        self.bias = state(experts)
        self.placed = self._placed()
        self.scope_name = "moe"
        if placement is not None:
            self._rehash(np.array(placement.rows))
        where = mesh_or_none("MoE", mesh)
        if where is not None:
            over = expert_axes(self.up.type, self.axis, where)
            divides(
                "MoE", self.up.shape[0], shard_count(over, where.sizes),
                f"{{count}} experts do not divide over {', '.join(over)}",
                "choose a number of experts that divides, or add replicas by a placement",
                UsageError, mesh=where.text(),
            )  # fmt: skip
            for name, w in self.named_parameters():
                t = w.type.on(where)
                w.type = split_over(t, 0, over) if name in NETWORK and over else t

    def weights(self) -> dict[str, Any]:
        """The dict of weights that `op.moe` takes."""
        found: dict[str, Any] = {"router": self.router, "up": self.up, "down": self.down,
                                 "gate": self.gate}  # fmt: skip
        found["bias"] = self.bias if self.balance == "bias" else None
        if "shared_up" in self.__dict__:
            found["shared"] = {"up": self.shared_up, "down": self.shared_down,
                               "gate": self.shared_gate}  # fmt: skip
        return found

    def options(self) -> Options:
        """The current options as one value. Raises UsageError if an attribute has a wrong value."""
        mine = {f.name: self.__dict__[f.name] for f in fields(Options) if f.name in self.__dict__}
        return Options(**{**mine, "router": self.router_kind})

    def routed(
        self, x: Tensor, zigzag: int = 1, mask: Like | None = None
    ) -> tuple[Tensor, Routing]:
        """Returns (the result for `x`, a `Routing`): add `routing.aux_loss` to the loss to balance.

        `zigzag` and `mask` are as in `moe`. In a pipeline the auxiliary loss is the mean over the
        microbatches, which is not that of the whole batch; a PipelineWarning says so.
        """
        warn_of_microbatches(AUXILIARY)
        return self._routed(x, zigzag, mask)

    def _routed(
        self, x: Tensor, zigzag: int, mask: Like | None, learns: bool = True
    ) -> tuple[Tensor, Routing]:
        options = replace(self.options(), zigzag=zigzag)
        made: tuple[Tensor, Routing] = _called(
            as_tensor(x), self.weights(), options, None, True, mask
        )
        if self.balance == "bias" and self.training and learns:
            self.bias = updated_expert_bias(self.bias, made[1].load, self.rate)
        return made

    def __call__(self, x: Tensor, zigzag: int = 1, mask: Like | None = None) -> Tensor:
        return self._routed(x, zigzag, mask)[0]

    def rehash(self, placement: Placement) -> None:
        """Moves the experts' weights to the rows of `placement`; the layer computes the same.

        Optimizer state must be moved too: `placement.sources(old)` gives the old row of each row.
        Raises UsageError if `placement` is for another number of experts.
        """
        old = self.placement
        _need_placement("rehash", placement, self.router.shape[-1])
        self._rehash(placement.sources(old))
        self.placement = placement
        self.placed = self._placed()

    def _placed(self) -> dict[str, Tensor]:
        """A buffer whose name encodes the order of the rows, so that a checkpoint of another order
        fails by name. None if row i has expert i."""
        rows = () if self.placement is None else self.placement.rows
        if rows == tuple(range(self.router.shape[-1])) or not rows:
            return {}
        return {f"rows_{crc32(repr(rows).encode()):08x}": state(*self.bias.shape[:-1])}

    def _rehash(self, rows: Any) -> None:
        for name in NETWORK:
            w = self.__dict__[name]
            if w is not None:
                home, at = w.type, w.ndim - 3  # after the dim of stacked layers, if any
                axes = dim_axes(home.dims[at])
                moved = F.take_or_zero(w, as_tensor(np.asarray(rows, np.int32)), at)
                new: Dim = (Factor(len(rows), axes),)
                to = home.with_dims((*home.dims[:at], new, *home.dims[at + 1 :]))
                laid = F.relayout(moved, to) if home.mesh is not None else moved
                w.fill(laid.stored, laid.type)  # of another shape
