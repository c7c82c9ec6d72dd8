"""Samples of PyTorch that are refused, and intended differences.

An entry that no sample meets fails the test: remove it when its cause is fixed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.peer.rows import Differs, Refused

REFUSED: list[Refused] = []
DIFFERS: list[Differs] = []


def refused(says: str, why: str, *ops: str) -> None:
    REFUSED.extend(Refused(op, says, why) for op in ops)


def differs(
    part: str,
    why: str,
    *ops: str,
    when: Callable[[Any], bool] = lambda sample: True,
    always: bool = True,
) -> None:
    DIFFERS.extend(Differs(op, part, why, when, always) for op in ops)


# ---- refused -----------------------------------------------------------------------------------
refused("there is no dim 1", "an empty vector among matrices, which PyTorch lets join all", "cat")
refused("need the same number of dims", "no ids in more dims than x has", "gather")
refused("does not hold every whole number", "counting with roundings", "arange")
refused("does not fit u8", "numbers below 0 in u8", "arange")
refused("start cannot be False", "truths as bounds of numbers", "arange")
refused("fractions do not fit", "rounding towards zero that nobody wrote", "arange")
refused(
    "a scalar has no dims", "dim= of a scalar",
    "transpose", "gather", "index_select", "scatter_add", "index_add",
)  # fmt: skip
refused("cannot take", "dim= of a scalar", "topk")
refused("does not fit u8", "a negative number beside a tensor of u8", "add", "sub", "index_add")
refused(
    "takes float or int or uint", "order and products of truths",
    "amax", "amin", "argsort", "sort", "scatter_add", "index_add",
)  # fmt: skip
refused("broadcast_to: shape cannot be (", "-1 for a size that stays", "expand")
refused("how many elements a mask picks", "a shape that depends on values", "__getitem__")
refused("is outside 0 to", "negative ids, of gather", "take_along_dim")
refused(
    "right side has not as many rows", "b [..., n] as a batch of vectors; here, as in NumPy, it "
    "is one matrix", "linalg.solve",
)  # fmt: skip
refused(
    "dims, not", "images without a batch",
    "nn.functional.conv1d", "nn.functional.conv2d", "nn.functional.conv3d",
    "nn.functional.conv_transpose1d", "nn.functional.conv_transpose2d",
    "nn.functional.max_pool1d", "nn.functional.max_pool2d",
    "nn.functional.adaptive_avg_pool1d", "nn.functional.adaptive_avg_pool2d",
    "nn.functional.adaptive_max_pool1d", "nn.functional.adaptive_max_pool2d",
)  # fmt: skip
refused(
    "shapes of q, k and v do not fit", "leading dims that broadcast",
    "nn.functional.scaled_dot_product_attention",
)  # fmt: skip
refused("labels must be integers", "probabilities as labels", "nn.functional.cross_entropy")

# ---- different on purpose ----------------------------------------------------------------------
differs("dtype", "floor and ceil are of floats, and give them", "floor", "ceil")
differs("dtype", "truths are bools, those of u8 too", "any", "all",
        when=lambda s: s.input.dtype.itemsize == 1)  # fmt: skip

differs("dtype", "losses are f32", "nn.functional.cross_entropy", "nn.functional.mse_loss",
        "nn.functional.binary_cross_entropy_with_logits", "nn.functional.kl_div",
        when=lambda s: s.input.dtype.itemsize < 4)  # fmt: skip


differs("value", "the default dim is the last", "argmax", "argmin",
        when=lambda s: s.kwargs.get("dim") is None)  # fmt: skip
ties = "equal values keep their order; PyTorch's is arbitrary"
differs("value", ties, "argsort", "sort",
        when=lambda s: not s.kwargs.get("stable"), always=False)  # fmt: skip
differs("gradient", ties, "sort", when=lambda s: not s.kwargs.get("stable"), always=False)
differs("value", ties, "topk", always=False)
differs("value", "b [..., n] as a batch of vectors; here one matrix", "linalg.solve",
        when=lambda s: not s.input.numel() and s.args[0].ndim < s.input.ndim)  # fmt: skip


def oblong(s: Any) -> bool:
    return bool(s.kwargs.get("is_causal") and s.input.shape[-2] != s.args[0].shape[-2])


ends = "causal: the last query sees the last key; PyTorch counts both from the start"
differs("value", ends, "nn.functional.scaled_dot_product_attention", when=oblong)
differs("gradient", ends, "nn.functional.scaled_dot_product_attention", when=oblong)
