"""Compiled loops that continue texts: with a cache of keys and values, or over whole windows.

A state is a dict of tensors for B texts: ids i32[B, capacity], zeros after the text's end; length
i32[B]; done bool[B]. Each text has its own length, and its tokens their own positions, so nothing
is padded in front, and no text depends on the others. A loop adds tokens until each text is done,
has `until` new ones, or (with a cache) is longer than the window.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

import numpy as np

from ..core.dtypes import f32, int32
from ..core.errors import UsageError
from ..core.mesh import Mesh
from ..lang.autodiff.while_loop import while_loop
from ..lang.jit.jit import Jit
from ..lang.math import functions as F
from ..lang.record.operands import as_tensor
from ..lang.value.tensor import Tensor
from ..nn.cache import Cache
from ..nn.gpt_config import GPTConfig
from ..nn.module import Module
from ..nn.transformer import GPT
from .sampling import drawn, filtered, penalized

State = dict[str, Tensor]
NO_TOKEN = -1
"""Stands in the ids where logits have no largest finite one."""


class Given(NamedTuple):
    """The inputs of a generation besides its texts: the length of each prompt, i32[B]; the ids that
    end a text, i32[n]; the factor against repeated tokens, or None; to sample, uniform numbers
    f32[B, capacity], one for each new token, and the other arguments of `filtered`; None takes the
    likeliest token."""

    start: Tensor
    stops: Tensor
    repetition: Tensor | None
    shares: Tensor | None
    filters: tuple[Tensor, ...] | None


class Programs(NamedTuple):
    """`prefill(model, prompts i32[B, P], state, given)` adds the first token to each text and
    returns (state, cache). `cached(model, state, cache, given, until)` and `whole(model, state,
    given, until)` are loops. Each takes over the memory of state and cache."""

    prefill: Callable[..., tuple[State, Cache]]
    cached: Callable[..., tuple[State, Cache]]
    whole: Callable[..., State]


@lru_cache(maxsize=32)
def programs(
    window: int,
    mesh: Mesh | None,
    config: GPTConfig | None,
    code: CodeType | None,
    shape: tuple[int, int] | None = None,
) -> Programs:
    """Compiled programs of a model: an `nn.GPT` if it has a `config`, or a function with `code` for
    ids of the shape `shape`. A function that is created for each call is compiled for each, with a
    warning."""

    def fits(state: State) -> Tensor:
        return state["length"] <= window

    def prefill(model: GPT, prompts: Tensor, state: State, given: Given) -> tuple[State, Cache]:
        with _inference(model):
            at = F.minimum(state["length"], prompts.shape[1]) - 1
            logits, cache = model.prefill(prompts, at, window)
            return _added(state, logits, given, ~state["done"] & fits(state)), cache

    def cached(
        model: GPT, state: State, cache: Cache, given: Given, until: Tensor
    ) -> tuple[State, Cache]:
        def one_token(carry: tuple[State, Cache]) -> tuple[State, Cache]:
            state, cache = carry
            # A text that waits writes its last token again, into the same slot.
            at = F.minimum(state["length"], window) - 1
            last = F.gather(state["ids"], at.reshape(-1, 1), 1)[:, 0]
            logits, cache = model.decode(last, cache, at)
            return _added(state, logits, given, _goes_on(state, given, until) & fits(state)), cache

        def some(carry: tuple[State, Cache]) -> Tensor:
            return F.any(_goes_on(carry[0], given, until) & fits(carry[0]))

        with _inference(model):
            return while_loop(some, one_token, (state, cache))

    def whole(model: Any, state: State, given: Given, until: Tensor) -> State:
        def one_token(state: State) -> State:
            first = F.maximum(state["length"] - window, 0).reshape(-1, 1)
            ids = F.gather_or_zero(state["ids"], first + F.arange(window).reshape(1, -1), 1)
            at = F.minimum(state["length"], window) - 1
            logits = F.gather(_logits(model(ids), ids), at.reshape(-1, 1, 1), 1)[:, 0]
            return _added(state, logits, given, _goes_on(state, given, until))

        with _inference(model):
            found: State = while_loop(
                lambda state: F.any(_goes_on(state, given, until)), one_token, state
            )
            return found

    whole.__name__ = "generate"
    return Programs(
        Jit(prefill, "state", True, quiet=True),
        Jit(cached, ("state", "cache"), True, quiet=True),
        Jit(whole, "state", True, quiet=code is None),
    )


def _goes_on(state: State, given: Given, until: Tensor) -> Tensor:
    return ~state["done"] & (state["length"] - given.start < until)


def _added(state: State, logits: Tensor, given: Given, go: Tensor) -> State:
    """`state` with one more token in the texts `go` bool[B], by their `logits` [B, V]. An end of a
    text is not added."""
    x, length = logits.to(f32), state["length"]
    places = F.arange(state["ids"].shape[1]).reshape(1, -1)
    if given.repetition is not None:
        there = (places < length.reshape(-1, 1)).to(int32)
        count = F.scatter_add(F.zeros_like(x).to(int32), state["ids"], there, 1)
        x = penalized(x, count > 0, given.repetition)
    largest = F.max(x, -1)
    if given.shares is None or given.filters is None:
        token, sound = F.argmax(x, -1), largest > -math.inf
    else:
        at = (length - given.start).reshape(-1, 1)
        token = drawn(*filtered(x, *given.filters), F.gather(given.shares, at, 1)[:, 0])
        sound = (largest > -math.inf) & (largest < math.inf)
    token = F.where(sound, token, NO_TOKEN)
    ends = F.any(token.reshape(-1, 1) == given.stops.reshape(1, -1), -1)
    put = go & ~ends
    here = (places == length.reshape(-1, 1)) & put.reshape(-1, 1)
    return {
        "ids": F.where(here, token.reshape(-1, 1), state["ids"]),
        "length": length + put.to(int32),
        "done": state["done"] | (go & (ends | ~sound)),
    }


def _logits(result: Any, ids: Tensor) -> Tensor:
    """The model's result as logits of each of the `ids` [B, window]. Raises UsageError if it is
    anything else."""
    logits, came = None, "None" if result is None else f"a {type(result).__name__}"
    shape = f"[{ids.shape[0]}, {ids.shape[1]}, V]"
    fix = f"return logits for each token of the window, {shape}"
    if isinstance(result, (Tensor, np.ndarray)):
        logits = as_tensor(result)
        came = str(logits.type)
        if logits.shape[:1] == ids.shape[:1] and logits.ndim == 2:
            fix = f"return those of each token, not of the last alone: {shape}"
    elif hasattr(result, "logits") or (isinstance(result, dict) and "logits" in result):
        part = ".logits" if hasattr(result, "logits") else '["logits"]'
        fix = f"give lambda ids: model(ids){part} and window="
    elif isinstance(result, (tuple, list)):
        fix = "give lambda ids: model(ids)[0] and window=, if the logits come first"
    if logits is None or logits.ndim != 3 or logits.shape[:2] != ids.shape:
        raise UsageError(f"generate: the model gave {came}, not logits {shape}", fix=fix)
    return logits


@contextlib.contextmanager
def _inference(model: object) -> Iterator[None]:
    """Sets the modules of `model` to `eval()` inside, and back afterwards. It is for recorded
    functions only, so that other threads, which may train the model, never see it."""
    every = list(model.modules()) if isinstance(model, Module) else []
    before = [(m.__dict__, {"training": m.training}) for m in every if "training" in m.__dict__]
    inside = [m.__dict__ for m in every if m.training]
    for own in inside:
        own["training"] = False
    try:
        yield
    finally:
        for own in inside:
            del own["training"]
        for own, was in before:
            own |= was


__all__ = ["NO_TOKEN", "Given", "Programs", "State", "programs"]
