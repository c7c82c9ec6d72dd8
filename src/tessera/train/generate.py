"""Text generation: sampling token by token from compiled functions of fixed shapes.

A GPT keeps the keys and values of earlier tokens: the prompt is one program, each further token
another. A model without such a cache computes the whole window for each token. The window has a
fixed shape: shorter texts are padded at their end, which a causal model does not see.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from types import CodeType
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from ..core.checks import MOST, unfit, whole
from ..core.declared import Called, Flag, Given, Natural, Rate
from ..core.errors import ShapeError, UsageError, warn_no_effect
from ..core.mesh import Mesh
from ..core.public import checked, not_callable
from ..core.value_checks import is_whole
from ..lang.jit.jit import Jit
from ..lang.math import functions as F
from ..lang.math.create import tensor
from ..lang.record.operands import as_tensor
from ..lang.record.to_host import to_host
from ..lang.value.tensor import Like, Tensor
from ..nn.cache import Cache
from ..nn.gpt_config import GPTConfig
from ..nn.module import Module
from ..nn.transformer import GPT


@lru_cache(maxsize=16)
def _programs(
    window: int, mesh: Mesh | None, config: GPTConfig | None, code: CodeType | None
) -> tuple[Callable[..., Any], ...]:
    """Compiled functions of a model: an `nn.GPT` if it has a `config`, or a function with `code`. A
    function that is created for each call is compiled for each, with a warning.

    The first maps i32[1, window] and the index `at` i32[1] of the last token to the logits f32[V]
    there; the second also returns the cache. The third maps one id i32[1], the cache before it and
    its position to its logits and the cache after it.
    """

    def full(model: Any, ids: Tensor, at: Tensor) -> Tensor:
        with _inference(model):
            return F.take(_logits(model(ids), window)[0], at, 0)[0]

    def prefill(model: GPT, ids: Tensor, at: Tensor) -> tuple[Tensor, Cache]:
        with _inference(model):
            return model.prefill(ids, at, window)

    def decode(model: GPT, ids: Tensor, cache: Cache, at: Tensor) -> tuple[Tensor, Cache]:
        with _inference(model):
            return model.decode(ids, cache, at)

    full.__name__ = "generate"
    return (
        Jit(full, (), True, quiet=code is None),
        Jit(prefill, (), True, quiet=True),
        Jit(decode, "cache", True, quiet=True),
    )


@checked
def generate(
    model: Annotated[
        Callable[[Tensor], Tensor], Called("give an nn.GPT, or a function of ids [1, window]")
    ],
    prompt: Sequence[int] | NDArray[Any],
    tokens: Natural,
    *,
    window: int | None = None,
    temperature: Rate = 0.8,
    top_k: Natural = 40,
    seed: Natural = 0,
    stop: int | Sequence[int] | None = None,
    mesh: Mesh | None = None,
    cache: Flag = True,
) -> list[int]:
    """`prompt` continued by at most `tokens` tokens; it ends early before the token `stop`, or
    before any of several.

    `model` maps ids [1, window] to logits [1, window, V] and is causal. It sees the last `window`
    tokens; None: for an `nn.GPT` all tokens, but at most its `config.seq`. A module computes as
    after `eval()`. The same seed gives the same tokens.

    With `cache` an `nn.GPT` computes each token alone, from the keys and values of earlier ones,
    while there are at most `window`; beyond that, and without a cache, it computes the whole window
    for each token. The logits are the same up to rounding. Raises UsageError if an argument does
    not fit, or `model` returns other values than such logits, or NaN.

    >>> from tessera import nn
    >>> model = nn.GPT(nn.GPTConfig(vocab=16, seq=8, d=8, layers=1, heads=2))
    >>> len(generate(model, [1, 2, 3], 4))
    7
    """
    config = model.config if isinstance(model, GPT) else None
    most = config.vocab - 1 if config else MOST
    several = f"the ids of one text, from 0 to {most}; call it once for each of several texts"
    ids = _ids("the prompt", prompt, most, f"give {several}")
    ends = [] if stop is None else stop
    stops = _ids("stop", ends, most, f"give an id from 0 to {most}, or several", one=True)
    if not ids:
        raise UsageError("generate: the prompt has no token", fix="give at least one")
    window = _window(config, len(ids) + tokens) if window is None else window
    whole("generate", "window", window, 1, None if config is None else config.seq)
    cached = cache and isinstance(model, GPT) and _has_cache(model)
    full, prefill, decode = _programs(window, mesh, config, getattr(model, "__code__", None))
    draw = np.random.Generator(np.random.Philox(seed))
    key_cache: Cache | None = None

    def on(*values: int) -> Tensor:
        return tensor(np.array(values, np.int32), mesh=mesh)

    for _ in range(tokens):
        window_ids = ids[-window:]
        at = on(len(window_ids) - 1)
        padded = np.zeros((1, window), np.int32)
        padded[0, : len(window_ids)] = window_ids
        if not cached or len(ids) > window:
            logits = full(model, tensor(padded, mesh=mesh), at)
        elif key_cache is None:
            logits, key_cache = prefill(model, tensor(padded, mesh=mesh), at)
        else:
            logits, key_cache = decode(model, on(ids[-1]), key_cache, at)
        chosen = sample(to_host(logits).reshape(-1), draw, temperature, top_k)
        if chosen in stops:
            break
        ids.append(chosen)
    return ids


def _ids(argument: str, value: Any, most: int, fix: str, one: bool = False) -> list[int]:
    """The ids in `value`, which may be a single id if `one`. Raises UsageError if one of them is no
    whole number from 0 to `most`."""
    try:
        is_one = hasattr(value, "__array__") or is_whole(value)
        found = np.asarray(value if is_one else list(value))
    except (TypeError, ValueError):  # not of several, or of lists that differ in length
        raise unfit("generate", argument, value, fix) from None
    if found.ndim not in ((0, 1) if one else (1,)) or (found.size and found.dtype.kind not in "iu"):
        raise unfit("generate", argument, value, fix)
    ids = [int(i) for i in found.reshape(-1)]
    for at, i in enumerate(ids):
        if not 0 <= i <= most:
            raise UsageError(f"generate: {argument} has the id {i} at [{at}]", fix=fix)
    return ids


def _logits(result: Any, window: int) -> Tensor:
    """The model's result as logits [1, window, V]. Raises UsageError if it is anything else."""
    logits, came = None, "None" if result is None else f"a {type(result).__name__}"
    fix = f"return logits for each token of the window, [1, {window}, V]"
    if isinstance(result, (Tensor, np.ndarray)):
        logits = as_tensor(result)
        came = str(logits.type)
        if logits.shape[:1] == (1,) and logits.ndim == 2:
            fix = f"return those of each token, not of the last alone: [1, {window}, V]"
    elif hasattr(result, "logits") or (isinstance(result, dict) and "logits" in result):
        part = ".logits" if hasattr(result, "logits") else '["logits"]'
        fix = f"give lambda ids: model(ids){part} and window="
    elif isinstance(result, (tuple, list)):
        fix = "give lambda ids: model(ids)[0] and window=, if the logits come first"
    if logits is None or logits.ndim != 3 or logits.shape[:2] != (1, window):
        raise UsageError(f"generate: the model gave {came}, not logits [1, {window}, V]", fix=fix)
    return logits


def _window(c: GPTConfig | None, count: int) -> int:
    """The window for a text of `count` tokens: a power of two, so that texts of similar length
    share a program, but at most the model's own limit."""
    if c is None:
        fix = "give the number of tokens that the model sees"
        raise UsageError("generate: a function needs a window", fix=fix)
    shorter = [r.original for r in (c.rope, c.local_rope) if r and r.by_length]
    return min([1 << max(count - 1, 0).bit_length(), c.seq, *(n for n in shorter if n >= count)])


def _has_cache(model: GPT) -> bool:
    """Returns whether `prefill` and `decode` compute the same as the model; if not, an
    OptionWarning has the reason."""
    c, kind = model.config, type(model)
    for wrong, why, fix in (
        (c.context, f"the sequence is split by context={c.context!r}", "context=None"),
        (
            c.experts and c.capacity is not None,
            "experts with a capacity serve a token depending on the others",
            "capacity=None",
        ),
        (
            kind.features is not GPT.features or kind.__call__ is not GPT.__call__,
            f"{kind.__name__} computes in a way of its own",
            "nothing of its own",
        ),
    ):
        if wrong:
            warn_no_effect(
                "generate: cache=True",
                why,
                means="the whole window is computed for each token",
                fix=f"load the weights into an nn.GPT with {fix}, or give cache=False",
            )
            return False
    return True


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


@checked
def sample(
    logits: Like,
    draw: Annotated[np.random.Generator, Given("give np.random.default_rng(0)")],
    temperature: Rate = 1.0,
    top_k: Natural = 0,
) -> int:
    """An index drawn with softmax(logits / temperature) among the `top_k` largest (0: all).

    Temperature 0 takes the largest. `logits` are an array or convertible to one. Raises ShapeError
    if they are not those of one token, UsageError for numbers below 0, for a NaN, and for
    infinities where finite logits are needed.

    >>> draw = np.random.Generator(np.random.Philox(0))
    >>> sample(np.array([0.0, 3.0, 1.0]), draw, temperature=0.0)
    1
    >>> {sample(np.array([0.0, 3.0, 2.5]), draw, top_k=2) for _ in range(50)} == {1, 2}
    True
    """
    x = logits if isinstance(logits, np.ndarray) else as_tensor(logits).numpy()
    if x.ndim != 1 or not x.size:
        raise ShapeError(
            f"sample: logits are those of one token, [V], not {list(x.shape)}",
            fix="of several texts give one at a time: [sample(x, draw) for x in logits.numpy()]",
        )
    largest = float(x.max())
    if not math.isfinite(largest) and (temperature or largest != math.inf):
        raise UsageError(
            f"sample: no token can be chosen, as the largest logit is {largest}",
            logits=f"{int(np.isnan(x).sum())} of {x.size} are NaN",
            fix="find where it begins: ts.debug.nan_origin(model, ids)",
        )
    if temperature == 0:
        return int(x.argmax())
    with np.errstate(over="ignore"):  # far below the largest
        z = (x.astype(np.float64) - largest) / temperature
    if 0 < top_k < z.size:
        z[np.argpartition(z, -top_k)[:-top_k]] = -np.inf
    p = np.exp(z)
    return int(draw.choice(z.size, p=p / p.sum()))


not_callable(__name__)  # from tessera.train import generate
