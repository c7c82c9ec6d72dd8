"""Text generation: prompts of any lengths, continued token by token in compiled loops.

A GPT keeps the keys and values of earlier tokens: the prompts are one program, the loop over all
further tokens another. A model without such a cache computes the whole window for each token. The
window has a fixed shape: shorter texts are padded at their end, which a causal model does not see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import numpy as np

from ..core.checks import MOST, unfit, whole
from ..core.declared import Called, Flag, Natural, Number, Rate, Share
from ..core.errors import UsageError, warn_no_effect
from ..core.mesh import Mesh
from ..core.public import checked, not_callable
from ..lang.math.create import tensor
from ..lang.record.to_host import to_host
from ..lang.value.tensor import Tensor
from ..nn.cache import Cache
from ..nn.gpt_config import GPTConfig
from ..nn.transformer import GPT
from .decoding import NO_TOKEN, Given, State, programs
from .prompts import TOKENIZER, Text, stops_of, texts_of
from .sampling import LEAST_TEMPERATURE, ranks_for, sample, uniform

CHUNK = 16
"""Tokens between two reads of the host, if it looks for strings that end a text."""
NO_END = -2
"""An id that no text has."""
LEAST_PROMPT = 16
"""Shorter prompts are padded to this length, so that they share a program."""

Positive = Annotated[float, Number(above=0)]
Model = Annotated[
    Callable[[Tensor], Tensor], Called("give an nn.GPT, or a function of ids [B, window]")
]
Listener = Annotated[Callable[[Any], Any], Called("give a function of what each step adds")]


@checked
def generate(
    model: Model,
    prompt: Any,
    tokens: Natural,
    *,
    window: int | None = None,
    temperature: Rate = 0.8,
    top_k: Natural = 40,
    top_p: Share = 1.0,
    min_p: Share = 0.0,
    repetition: Positive = 1.0,
    seed: Natural = 0,
    stop: Any = None,
    tokenizer: Any = None,
    stream: Listener | None = None,
    mesh: Mesh | None = None,
    cache: Flag = True,
) -> Any:
    """`prompt` continued by at most `tokens` tokens; it ends early before the token or string
    `stop`, or before any of several.

    `prompt` is a sequence of ids, or a text if there is a `tokenizer`, or a list of such prompts of
    any lengths; the result has the same form, a list for each prompt. A tokenizer is any object
    with `encode(text)` and `decode(ids)`, such as those of transformers. `stream` is called with
    the piece that each step adds, ids or text; for several prompts with a list of pieces.

    `model` maps ids [B, window] to logits [B, window, V] and is causal. It sees the last `window`
    tokens; None: for an `nn.GPT` all tokens, but at most its `config.seq`. A module computes as
    after `eval()`.

    Temperature 0 takes the likeliest token. Above, a token is drawn with softmax(logits /
    temperature) among the `top_k` largest (0: all), of those the fewest whose probabilities add up
    to `top_p`, and of those the ones with at least `min_p` of the largest probability. First,
    logits of tokens that the text has already are divided by `repetition` if above 0, else
    multiplied by it. The same seed gives the same tokens; prompt i of several draws as if it were
    alone with seed + i.

    With `cache` an `nn.GPT` computes each token alone, from the keys and values of earlier ones,
    while there are at most `window`; beyond that, and without a cache, it computes the whole window
    for each token. The logits are the same up to rounding. Raises UsageError if an argument does
    not fit, or `model` returns other values than such logits, or NaN.

    >>> from tessera import nn
    >>> model = nn.GPT(nn.GPTConfig(vocab=16, seq=8, d=8, layers=1, heads=2))
    >>> len(generate(model, [1, 2, 3], 4))
    7
    >>> [len(ids) for ids in generate(model, [[1, 2, 3], [4]], 4)]
    [7, 5]
    """
    config = model.config if isinstance(model, GPT) else None
    most = config.vocab - 1 if config else MOST
    if tokenizer is not None and not all(hasattr(tokenizer, n) for n in ("encode", "decode")):
        raise unfit("generate", "tokenizer", tokenizer, TOKENIZER)
    ends, strings = stops_of(stop, tokenizer, most)
    found = texts_of(prompt, tokenizer, strings, most)
    texts = [found] if isinstance(found, Text) else found
    longest = max(len(t.ids) for t in texts)
    window = _window(config, longest + tokens) if window is None else window
    whole("generate", "window", window, 1, None if config is None else config.seq)
    cached = cache and isinstance(model, GPT) and _has_cache(model)
    capacity = max(window, _power(longest + tokens))

    def on(values: Any) -> Tensor:
        return tensor(values, mesh=mesh)

    filters = (
        np.float32(max(temperature, LEAST_TEMPERATURE)), np.int32(min(top_k, MOST)),
        np.float32(top_p), np.float32(min_p), ranks_for(min(top_k, most + 1)),
    )  # fmt: skip
    draws = temperature > 0
    lengths = np.array([len(t.ids) for t in texts], np.int32)
    seeds = [seed + i for i in range(len(texts))]
    given = Given(
        on(lengths),
        on(np.array(ends + [NO_END] * (_power(max(len(ends), 8)) - len(ends)), np.int32)),
        None if repetition == 1 else on(np.float32(repetition)),
        on(uniform(seeds, capacity)) if draws else None,
        tuple(map(on, filters)) if draws else None,
    )
    code = getattr(model, "__code__", None)
    run = programs(window, mesh, config, code, None if config else (len(texts), capacity))
    state = {
        "ids": on(_padded(texts, capacity)),
        "length": on(lengths),
        "done": on(np.zeros(len(texts), bool)),
    }
    key_cache: Cache | None = None
    step = 1 if stream else CHUNK if strings else max(tokens, 1)
    for until in range(step, tokens + step, step):
        at_most = on(np.int32(min(until, tokens)))
        if cached and key_cache is None:
            prompts = on(_padded(texts, min(window, max(LEAST_PROMPT, _power(longest)))))
            state, key_cache = run.prefill(model, prompts, state, given)
        if key_cache is not None:
            state, key_cache = run.cached(model, state, key_cache, given, at_most)
        if key_cache is None or longest + min(until, tokens) > window:
            state = run.whole(model, state, given, at_most)
        goes_on = _read(texts, state, tokens)
        if stream is not None:
            pieces = [t.piece(not g) for t, g in zip(texts, goes_on, strict=True)]
            stream(pieces if isinstance(found, list) else pieces[0])
        if not any(goes_on):
            break
        state["done"] = on(~np.array(goes_on))
    return [t.result for t in texts] if isinstance(found, list) else found.result


def _padded(texts: list[Text], width: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The first `width` ids of each prompt, i32[B, width], with zeros after its end."""
    ids = np.zeros((len(texts), width), np.int32)
    for row, t in zip(ids, texts, strict=True):
        row[: len(t.ids)] = t.ids[:width]
    return ids


def _read(texts: list[Text], state: State, tokens: int) -> list[bool]:
    """Adds the new ids of `state` to `texts`; returns for each whether it goes on, up to `tokens`.
    Raises UsageError if logits gave no token."""
    host = to_host(state)
    for i, (t, ids, length) in enumerate(zip(texts, host["ids"], host["length"], strict=True)):
        if t.closed:
            continue
        new = ids[len(t.ids) + len(t.new) : length].tolist()
        if NO_TOKEN in new:
            raise UsageError(
                "generate: no token can be chosen, as the largest logit is not finite",
                text=i,
                position=len(t.ids) + len(t.new) + new.index(NO_TOKEN) - 1,
                fix="find where it begins: ts.debug.nan_origin(model, ids)",
            )
        t.add(new)
    return [
        not (t.closed or done) and len(t.new) < tokens
        for t, done in zip(texts, host["done"], strict=True)
    ]


def _power(count: int) -> int:
    """The least power of two that is at least `count`."""
    return 1 << max(count - 1, 0).bit_length()


def _window(c: GPTConfig | None, count: int) -> int:
    """The window for a text of `count` tokens: a power of two, so that texts of similar length
    share a program, but at most the model's own limit."""
    if c is None:
        fix = "give the number of tokens that the model sees"
        raise UsageError("generate: a function needs a window", fix=fix)
    shorter = [r.original for r in (c.rope, c.local_rope) if r and r.by_length]
    return min([_power(count), c.seq, *(n for n in shorter if n >= count)])


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


__all__ = ["generate", "sample"]

not_callable(__name__)  # from tessera.train import generate
