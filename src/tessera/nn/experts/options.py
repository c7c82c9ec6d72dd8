"""Options of a call of `moe`, as one checked value."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any

from ...core.checks import axes_of, flag, function_of, instance, number, one_of, unfit, whole
from ...core.context import settings
from ...core.errors import UsageError
from ...lang.value.tensor import Tensor
from .. import functional as fn
from .placement import Placement
from .routing import Router, checked_router
from .transport import TRANSPORTS, Transport, transport_of

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": fn.gelu, "relu": fn.relu, "silu": fn.silu,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    """Options of routing, transport and computation; each field is the argument of `moe` of that
    name. Raises UsageError if a value does not fit."""

    router: str = "topk"
    k: int = 2
    transport: Any = "auto"  # a name, a dict of fields, or a Transport
    deterministic: bool = False
    capacity: float | None = None
    groups: int | None = None
    normalize: bool | None = None
    activation: str | None = None
    axis: Any = None  # a name or several; a tuple of names, once made
    placement: Placement | None = None
    block: int | None = None
    zigzag: int = 1
    expert_groups: int | None = None
    topk_groups: int | None = None
    scale: float = 1.0
    network: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        transport_of(self.transport)
        checked_router(self.router)
        flag("moe", "deterministic", self.deterministic)
        if self.normalize is not None:
            flag("moe", "normalize", self.normalize)
        for name in ("k", "groups", "block", "zigzag", "expert_groups", "topk_groups"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole("moe", name, value, 1))
        if self.axis is not None:
            object.__setattr__(self, "axis", axes_of("moe", self.axis))
        if self.capacity is None and self.groups is not None:
            raise UsageError(
                "moe: groups without a capacity have no meaning",
                fix="give capacity=1.25 too, or leave out groups",
            )
        if self.capacity is not None:
            number("moe", "capacity", self.capacity, above=0, below=inf)
        if (self.expert_groups is None) is not (self.topk_groups is None):
            raise UsageError(
                "moe: expert_groups and topk_groups belong together",
                fix="give both: 8 groups, of which each token uses 4",
            )
        if self.expert_groups is not None:
            whole("moe", "topk_groups", self.topk_groups, 1, self.expert_groups)
        number("moe", "scale", self.scale, above=0, below=inf)
        if self.network is not None:
            _of_two(function_of("moe", "network", self.network))
            if self.activation is not None:
                raise UsageError(
                    "moe: an activation and a network of your own",
                    fix="leave out activation=, and let the network apply it",
                )
        one_of("moe", "activation", self.activation, (None, *ACTIVATIONS))
        if self.placement is not None:
            fix = "give nn.place_experts(experts, owners)"
            instance("moe", "placement", self.placement, Placement, fix)

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

    def given(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        every = ((f, getattr(self, f.name)) for f in fields(self))
        return {f.name: value for f, value in every if value != f.default}


def _of_two(network: Callable[..., Any]) -> None:
    """Raises UsageError if `network` cannot be called with two arguments."""
    try:
        inspect.signature(network).bind(None, None)
    except ValueError:  # a builtin that does not say
        return
    except TypeError:
        fix = "give a function of two arguments, network(rows, weights)"
        raise unfit("moe", "network", network, fix) from None
