"""Arguments of a model from a batch: ids, and by name attention masks, positions and segments. Keys
that the model does not take cause a warning."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ..core.errors import UsageError, warn_no_effect
from ..lang.record.operands import as_tensor
from ..lang.value.tensor import Tensor

READ = ("input_ids", "labels")
# The loader's names of positions, and their names in transformers.
ALSO = {"positions": "position_ids"}
MEANS = {
    "attention_mask": "no token sees padding, or what the mask hides",
    "position_ids": "each token has this position, and sees its own document only",
    "segment_ids": "each token sees its own document only",
}


def checked_batch(call: str, batch: Any) -> Mapping[str, Any]:
    """`batch`, checked for `input_ids` and `labels`. Raises UsageError if one is missing."""
    there = list(map(str, batch)) if isinstance(batch, Mapping) else []
    lacking = [key for key in READ if key not in there]
    if not lacking:
        return batch  # type: ignore[no-any-return]  # a Mapping
    raise UsageError(
        f"{call}: the batch lacks " + " and ".join(map(repr, lacking)),
        batch=", ".join(there) or f"a {type(batch).__name__}",
        fix='give {"input_ids": ids, "labels": labels}, both [B, S]: the label of a token is the '
        "token after it, -100 where none counts",
    )


def told(call: str, model_fn: Callable[..., Tensor], batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """The entries of `batch` besides ids and labels, by the argument names of `model_fn`.

    `positions` are also passed as `position_ids`. Warns of each key that the model does not take.
    """
    takes = _arguments(model_fn)
    tensors: dict[str, Tensor] = {}
    unread: dict[str, str] = {}
    for key, value in batch.items():
        if key in READ or value is None:
            continue
        name = key if key in takes else ALSO.get(key, key)
        if name in takes and name not in tensors:
            tensors[name] = as_tensor(value)
        else:
            unread[key] = name
    # Positions restart at each segment: without a mask they keep documents apart.
    if "attention_mask" not in batch and {*ALSO, *ALSO.values()} & {*tensors}:
        unread.pop("segment_ids", None)
    for key, name in unread.items():
        has = ", ".join(n for n in takes if n in MEANS) or "none of this kind"
        warn_no_effect(
            f"{call}: batch[{key!r}]",
            f"it is given twice, as {name!r} too" if name in tensors else
            f"the model has no argument {name!r}; it has {has}",
            means=MEANS.get(name, "what the data says of each row"),
            fix="leave it out of the batch" if name in tensors else
            f"let the model take it, def model(inputs, weights, {name}), or leave it out",
        )  # fmt: skip
    return tensors


def _arguments(model_fn: Callable[..., Tensor]) -> list[str]:
    """The argument names of `model_fn` after the ids and the weights."""
    try:
        given = list(inspect.signature(model_fn).parameters.values())
    except (TypeError, ValueError):  # a callable of C
        return []
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in given[2:] if p.kind not in several]
