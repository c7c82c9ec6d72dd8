"""Options of a call of `moe`, as one checked value."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

from ...core.checks import axes_of, unfit, whole
from ...core.context import settings
from ...core.declared import Count, Flag, Function, Given, OneOf, Scale
from ...core.errors import UsageError
from ...core.public import asking
from ...lang.value.tensor import Tensor
from .. import functional as fn
from .placement import Placement
from .routing import ROUTERS, Router
from .transport import TRANSPORTS, Transport, transport_of

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": fn.gelu, "relu": fn.relu, "silu": fn.silu,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    """Options of routing, transport and computation; each field is the argument of `moe` of that
    name. Raises UsageError if a value does not fit."""

    router: Annotated[str, OneOf(*ROUTERS)] = "topk"
    k: Count = 2
    transport: Any = "auto"  # a name, a dict of fields, or a Transport
    deterministic: Flag = False
    capacity: Scale | None = None
    groups: Count | None = None
    normalize: Flag | None = None
    activation: Annotated[str, OneOf(*ACTIVATIONS)] | None = None
    axis: Any = None  # a name or several; a tuple of names, once made
    placement: Annotated[Placement, Given("give nn.place_experts(experts, owners)")] | None = None
    block: Count | None = None
    zigzag: Count = 1
    expert_groups: Count | None = None
    topk_groups: Count | None = None
    scale: Scale = 1.0
    network: Function | None = None

    def __post_init__(self) -> None:
        transport_of(self.transport)
        if self.axis is not None:
            object.__setattr__(self, "axis", axes_of("moe", self.axis))
        if self.capacity is None and self.groups is not None:
            raise UsageError(
                "moe: groups without a capacity have no meaning",
                fix="give capacity=1.25 too, or leave out groups",
            )
        if (self.expert_groups is None) is not (self.topk_groups is None):
            raise UsageError(
                "moe: expert_groups and topk_groups belong together",
                fix="give both: 8 groups, of which each token uses 4",
            )
        if self.expert_groups is not None:
            whole("moe", "topk_groups", self.topk_groups, 1, self.expert_groups)
        if self.network is not None:
            _of_two(self.network)
            if self.activation is not None:
                raise UsageError(
                    "moe: an activation and a network of your own",
                    fix="leave out activation=, and let the network apply it",
                )

    @property
    def routing(self) -> Router:
        """The router with these options."""
        normalize = self.k > 1 if self.normalize is None else self.normalize
        return Router(
            self.router, self.k, normalize, self.deterministic, self.expert_groups or 1,
            self.topk_groups or 1, self.scale,
        )  # fmt: skip

    def requested(self) -> Transport:
        """The transport; fields that are not set follow `@schedule(comm_backend=, epoch=)`."""
        how, chosen = transport_of(self.transport), settings().program.schedule
        if how.type == "auto" and chosen.backend in TRANSPORTS:
            how = replace(how, type=chosen.backend)
        return replace(how, epoch=how.epoch or chosen.epoch or "soft")

    def non_defaults(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        every = ((f, getattr(self, f.name)) for f in fields(self))
        return {f.name: value for f, value in every if value != f.default}


Options.__init__ = asking(Options.__init__, "moe", of_object=True)  # type: ignore[method-assign]


def _of_two(network: Callable[..., Any]) -> None:
    """Raises UsageError if `network` cannot be called with two arguments."""
    try:
        inspect.signature(network).bind(None, None)
    except ValueError:  # a builtin that does not say
        return
    except TypeError:
        fix = "give a function of two arguments, network(rows, weights)"
        raise unfit("moe", "network", network, fix) from None
