"""What does the model say? Sampling token by token from a compiled function of fixed shape.

The window never changes its shape, so the function is compiled once: shorter texts are padded
after their end, where a causal model cannot look.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.checks import number, whole
from ..core.errors import UsageError, fail
from ..core.mesh import Mesh
from ..lang import functions as F
from ..lang.create import tensor
from ..lang.jit import jit
from ..lang.tensor import Tensor


@lru_cache(maxsize=16)
def _program(window: int, mesh: Mesh | None) -> Callable[[Any, Tensor, Tensor], Tensor]:
    """A compiled function of (model, ids i32[1, window], at i32[1]): the logits f32[V] at `at`."""

    @jit
    def logits_at(model: Any, ids: Tensor, at: Tensor) -> Tensor:
        return F.take(model(ids)[0], at, 0)[0]

    return logits_at


def generate(
    model: Callable[[Tensor], Tensor],
    prompt: Sequence[int] | NDArray[Any],
    tokens: int,
    *,
    window: int,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
    stop: int | None = None,
    mesh: Mesh | None = None,
) -> list[int]:
    """`prompt` continued by at most `tokens` tokens; ends early before the token `stop`.

    `model` maps ids [1, window] to logits [1, window, V] and is causal. The last `window` tokens
    are what it sees. The same seed gives the same tokens. Raises UsageError.
    """
    ids = [int(i) for i in prompt]
    whole("generate", "tokens", tokens, 0)
    whole("generate", "window", window, 1)
    if not ids:
        raise fail(UsageError, "generate: the prompt has no token", fix="give at least one")
    logits_at = _program(window, mesh)
    draw = np.random.Generator(np.random.Philox(seed))
    for _ in range(tokens):
        seen = ids[-window:]
        padded = np.zeros((1, window), np.int32)
        padded[0, : len(seen)] = seen
        at = tensor(np.array([len(seen) - 1], np.int32), mesh=mesh)
        logits = logits_at(model, tensor(padded, mesh=mesh), at).numpy()
        chosen = sample(logits, draw, temperature, top_k)
        if chosen == stop:
            break
        ids.append(chosen)
    return ids


def sample(
    logits: NDArray[Any], draw: np.random.Generator, temperature: float = 1.0, top_k: int = 0
) -> int:
    """One index drawn with softmax(logits / temperature) among the `top_k` largest (0: all).

    Temperature 0 takes the largest. Raises UsageError for numbers below 0.

    >>> draw = np.random.Generator(np.random.Philox(0))
    >>> sample(np.array([0.0, 3.0, 1.0]), draw, temperature=0.0)
    1
    >>> {sample(np.array([0.0, 3.0, 2.5]), draw, top_k=2) for _ in range(50)} == {1, 2}
    True
    """
    number("sample", "temperature", temperature, least=0)
    whole("sample", "top_k", top_k, 0)
    if temperature == 0:
        return int(logits.argmax())
    z = logits.astype(np.float64) / temperature
    if 0 < top_k < z.size:
        z[np.argpartition(z, -top_k)[:-top_k]] = -np.inf
    p = np.exp(z - z.max())
    return int(draw.choice(z.size, p=p / p.sum()))
