"""Low-rank adapters of weights (LoRA, Hu et al. 2021).

A weight W with an adapter is read as W + scale · A·B, with A [in, r] and B [r, out]; W is frozen.
The module computes with that sum in place of W, so an adapter fits any module, in any layout: A and
B are parameters beside W, and the gradient of the sum is the only one that passes through them.

The class of the module becomes a subclass whose attribute W is a property, as in PyTorch's
parametrizations. The weight itself keeps its name in `parameters()` and `state_dict()`.
"""

from __future__ import annotations

import fnmatch
import math
import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from string import ascii_lowercase
from typing import Annotated, Any, TypeVar

from ..core.declared import Count, Given, Number
from ..core.dtypes import f32
from ..core.errors import UsageError
from ..core.layout import plain
from ..lang.math import functions as F
from ..lang.record.operands import emit
from ..lang.record.parameter import Parameter
from ..lang.value.tensor import Tensor
from .layers import Embedding, normal
from .module import Module
from .remat import bare, recomputing
from .self_attention import Attention
from .stack import Stack

M = TypeVar("M", bound=Module)
Positive = Annotated[float, Number(above=0)]


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter `name` of a module's parameter `weight`, or of its part `part` along the dim after
    the inputs. The weight has `lead` dims for layers, then `come` dims of inputs, then those of
    outputs; with `out_in` outputs come first."""

    name: str
    weight: str
    lead: int = 0
    come: int = 1
    part: int | None = None
    out_in: bool = False
    scale: float = 1.0

    @property
    def a(self) -> str:
        return f"{self.name}_lora_a"

    @property
    def b(self) -> str:
        return f"{self.name}_lora_b"

    def within(self, own: dict[str, Any]) -> Adapter:
        """The adapter of `own` tensors: in a layer of a stack these have no dims for layers."""
        return replace(self, lead=own[self.a].ndim - self.come - 1)

    def shapes(self, weight: Tensor) -> tuple[tuple[int, ...], ...]:
        """(dims of layers, of inputs, of outputs)."""
        lead, rest = weight.shape[: self.lead], weight.shape[self.lead :]
        if self.out_in:
            return lead, rest[1:], rest[:1]
        return lead, rest[: self.come], rest[self.come + (self.part is not None) :]

    def delta(self, own: dict[str, Any]) -> Tensor:
        """scale · A·B in the shape of the weight, f32; zero outside of the adapter's part."""
        weight, a, b = own[self.weight], own[self.a] * self.scale, own[self.b]
        letters = iter(ascii_lowercase)
        lead, come, go = ("".join(next(letters) for _ in dims) for dims in self.shapes(weight))
        r, part = "YZ"
        if self.part is None:
            out = go + come if self.out_in else come + go
            return emit("contract", a, b, index=f"{lead}{come}{r},{lead}{r}{go}->{lead}{out}")
        mine = F.one_hot(self.part, weight.shape[self.lead + self.come])
        index = f"{lead}{come}{r},{lead}{r}{go},{part}->{lead}{come}{part}{go}"
        return emit("contract", a, b, mine, index=index)


@lru_cache(maxsize=256)
def _adapted(kind: type[Module], adapters: tuple[Adapter, ...]) -> type[Module]:
    """The subclass of `kind` whose weights are read with `adapters`."""
    names: dict[str, Any] = {"__doc__": kind.__doc__, "adapters": adapters, "adapted_kind": kind}
    names["__reduce__"] = lambda module: (_revived, (bare(kind), adapters), module.__dict__)
    for weight in {a.weight: None for a in adapters}:
        names[weight] = _property(weight, tuple(a for a in adapters if a.weight == weight))
    made: type[Module] = type(kind.__name__, (kind,), names)
    made.__module__, made.__qualname__ = kind.__module__, kind.__qualname__
    return made


def _revived(of: Module, adapters: tuple[Adapter, ...]) -> Module:
    made: Module = bare(_adapted(type(of), adapters))  # type: ignore[arg-type]  # hashable
    return made


def _without(kind: Any) -> Any:
    """The class of a module without its adapters; calls that are computed again stay so."""
    own = vars(kind)
    if "recomputed" in own:
        inner, how = own["recomputed"]
        return recomputing(_without(inner), how)
    return own.get("adapted_kind", kind)


def _property(weight: str, adapters: tuple[Adapter, ...]) -> property:
    def read(module: Module) -> Tensor:
        return _sum(module.__dict__, weight, adapters)

    def write(module: Module, value: Any) -> None:
        module.__dict__[weight] = value

    return property(read, write)


def _sum(own: dict[str, Any], weight: str, adapters: tuple[Adapter, ...]) -> Tensor:
    """The weight with the deltas of its adapters, in its own dtype."""
    w: Tensor = own[weight]
    deltas = [a.within(own).delta(own) for a in adapters]
    return reduce(operator.add, deltas, F.wide(w)).to(w.dtype)


# -- weights that can have an adapter -------------------------------------------------------------
def places(model: Module) -> Iterator[tuple[str, Module, Adapter]]:
    """Yields (name, module, adapter) of each matrix in `model`; those of attention, also of fused
    weights, are q, k, v and out. A weight called "weight" has the name of its module."""
    modules = [(n, m) for n, m in model.named_modules() if not isinstance(m, Embedding)]
    stacks = [
        f"{n}." if n else "" for n, m in modules if isinstance(m, Stack) and "block" in vars(m)
    ]
    for path, module in modules:
        lead = sum(f"{path}.".startswith(f"{s}block.") for s in stacks)
        for a in _of(module, lead):
            tail = "" if a.name == "weight" else a.name
            yield ".".join(p for p in (path, tail) if p), module, a


def _of(module: Module, lead: int) -> Iterator[Adapter]:
    if isinstance(module, Attention):
        fused = "qkv" in vars(module)
        for i, name in enumerate("qkv"):
            weight, part = ("qkv", i) if fused else ("kv", i - 1) if i else ("q", None)
            yield Adapter(name, weight, lead, 1, part)
        yield Adapter("out", "out", lead, 2)
        return
    for name, t in vars(module).items():
        if type(t) is not Parameter or t.ndim != lead + 2 or "_lora_" in name:
            continue
        if name in getattr(module, "tables", ()):
            continue
        if t.out_in or not getattr(module, "only_linear", False):
            yield Adapter(name, name, lead, out_in=t.out_in)


def adapters_of(model: Module) -> Iterator[tuple[str, Module, Adapter]]:
    """Yields (name, module, adapter) of each adapter in `model`."""
    for path, module in model.named_modules():
        for a in getattr(type(module), "adapters", ()):
            tail = "" if a.name == "weight" else a.name
            yield ".".join(p for p in (path, tail) if p), module, a


def add(module: Module, adapter: Adapter, r: int) -> None:
    """Gives `module` the parameters of `adapter`: A is drawn, B is zero."""
    weight = vars(module)[adapter.weight]
    lead, come, go = adapter.shapes(weight)
    std = 1.0 / math.sqrt(3 * math.prod(come))  # the deviation of PyTorch's uniform init
    for name, shape, init in (
        (adapter.a, (*lead, *come, r), normal(std)), (adapter.b, (*lead, r, *go), "zeros"),
    ):  # fmt: skip
        p = Parameter(*shape, init=init)
        p.type = plain(f32, shape, weight.mesh)
        setattr(module, name, p)
    _set_kind(module, _without(type(module)), (*getattr(type(module), "adapters", ()), adapter))


def _set_kind(module: Module, kind: type[Module], adapters: tuple[Adapter, ...]) -> None:
    made = _adapted(kind, adapters) if adapters else kind  # type: ignore[arg-type]  # hashable
    object.__setattr__(module, "__class__", made)


# -- the public functions -------------------------------------------------------------------------
def lora(
    model: Annotated[M, Given(Module, "give an nn.Module, then r=")],
    r: Count,
    *,
    alpha: Positive | None = None,
    targets: str = "*",
) -> M:
    """Adds an adapter of rank `r` to each matrix of `model` whose name fits `targets`, and freezes
    all other parameters. Returns `model`.

    A matrix W [in, out] is read as W + alpha / r · A·B, computed in f32 and rounded to the dtype of
    W. A [in, r] is drawn, B [r, out] is zero, so at first the model computes the same. `alpha` None
    is `r`. `targets` are patterns with * for any part, joined by |: "*.q|*.v". The names are those
    of `parameters()` without ".weight"; the weights of attention in an `nn.GPT` are q, k, v and
    out, those of its MLP up, gate and down. Tables of embeddings have no adapters. Call it before
    `Optimizer.init`; a strategy lays A and B out like other weights.

    Raises UsageError if a pattern fits no matrix, one that has an adapter already, or one that two
    modules share.

    >>> import tessera as ts
    >>> model = ts.nn.lora(ts.nn.Linear(6, 4), r=2)
    >>> {str(name): p.shape for name, p in model.trainable_parameters().items()}
    {'weight_lora_a': (6, 2), 'weight_lora_b': (2, 4)}
    """
    every = list(places(model))
    have = {name for name, _, _ in adapters_of(model)}
    chosen: dict[str, tuple[Module, Adapter]] = {}
    for pattern in targets.split("|"):
        found = {n: (m, a) for n, m, a in every if fnmatch.fnmatchcase(n, pattern)}
        if not found:
            raise UsageError(
                f"lora: {pattern!r} fits no matrix",
                matrices=", ".join(n for n, _, _ in every[:6]) or "none",
                fix='write their names, with * for any part and | between patterns: "*.q|*.v"',
            )
        chosen |= found
    if twice := sorted(have & {*chosen}):
        raise UsageError(
            f"lora: {twice[0]!r} has an adapter already",
            fix="merge it first: nn.merge_lora(model)",
        )
    modules = {id(m): m for m in model.modules()}
    holders = Counter(id(t) for m in modules.values() for t in vars(m).values())
    for name, (module, adapter) in chosen.items():
        if holders[id(vars(module)[adapter.weight])] > 1:
            raise UsageError(
                f"lora: {name!r} is a weight of two modules",
                fix="leave it out of targets=, or give each module its own weight",
            )
    if not have:
        model.freeze()
    for module, adapter in chosen.values():
        add(module, replace(adapter, scale=(r if alpha is None else alpha) / r), r)
    model.parameters()  # names the new ones
    return model


def merge_lora(model: Annotated[M, Given(Module, "give an nn.Module with adapters")]) -> M:
    """Adds the adapters of `model` to its weights, and removes them. Returns `model`.

    It computes the same as before, up to the order of sums, at the speed of a model without
    adapters. Its weights stay frozen: `model.unfreeze()` trains them. Raises UsageError if there is
    no adapter.

    >>> import tessera as ts
    >>> model = ts.nn.merge_lora(ts.nn.lora(ts.nn.Linear(6, 4), r=2))
    >>> [str(name) for name in model.parameters()]
    ['weight', 'bias']
    """
    modules = {id(m): m for _, m, _ in adapters_of(model)}
    if not modules:
        raise UsageError(
            "merge_lora: the model has no adapter", fix="add them: nn.lora(model, r=8)"
        )
    for module in modules.values():
        kind: Any = type(module)
        for weight in {a.weight for a in kind.adapters}:
            box = vars(module)[weight]
            box.put(getattr(module, weight).detach())
        for a in kind.adapters:
            del module.__dict__[a.a], module.__dict__[a.b]
        _set_kind(module, _without(kind), ())
    return model


__all__ = ["lora", "merge_lora"]
