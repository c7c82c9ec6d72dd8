"""Ops against PyTorch's, on parts that fill no tile, different on each device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as T

from tessera import ttnn
from tests.cases import grid

RNG = np.random.default_rng(0)
Op = Callable[..., Any]


def on(device: ttnn.MeshDevice, *shape: int, kind: str = "normal", dtype: Any = None) -> Any:
    """Returns a tensor with different parts on each device, and a PyTorch tensor of them with the
    devices as dim 0."""
    n = device.get_num_devices()
    made: Any = RNG.normal(size=(n, *shape)).astype(np.float32)
    if kind == "positive":
        made = np.abs(made) + 0.1
    if kind == "int":
        made = RNG.integers(0, 50, (n, *shape)).astype(np.int32)
    x = torch.from_numpy(made)
    cut = ttnn.ShardTensorToMesh(device, 0)
    there = ttnn.from_torch(x.reshape(n * shape[0], *shape[1:]), dtype, device=device,
                            layout=ttnn.TILE_LAYOUT, mesh_mapper=cut)  # fmt: skip
    return there, x


def same(found: ttnn.Tensor, want: Any, tolerance: float = 2e-5) -> None:
    got = torch.stack([ttnn.to_torch(t).float() for t in ttnn.get_device_tensors(found)])
    assert tuple(found.shape) == tuple(want.shape[1:])
    torch.testing.assert_close(got, want.float(), rtol=tolerance, atol=tolerance)


UNARY: dict[str, Op] = {
    "abs": torch.abs, "neg": torch.neg, "exp": torch.exp, "sin": torch.sin, "cos": torch.cos,
    "tan": torch.tan, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "relu": T.relu,
    "relu6": T.relu6, "silu": T.silu, "swish": T.silu, "erf": torch.erf, "sign": torch.sign,
    "floor": torch.floor, "ceil": torch.ceil, "trunc": torch.trunc, "round": torch.round,
    "expm1": torch.expm1, "square": torch.square, "mish": T.mish, "hardswish": T.hardswish,
    "hardsigmoid": T.hardsigmoid, "log_sigmoid": T.logsigmoid, "selu": T.selu, "gelu": T.gelu,
    "softplus": T.softplus, "softsign": T.softsign, "exp2": torch.exp2, "elu": T.elu,
    "leaky_relu": T.leaky_relu, "isnan": torch.isnan, "isfinite": torch.isfinite,
    "logical_not": torch.logical_not, "eqz": lambda x: x == 0, "gtz": lambda x: x > 0,
    "lez": lambda x: x <= 0, "identity": lambda x: x, "clone": lambda x: x,
}  # fmt: skip
POSITIVE: dict[str, Op] = {
    "log": torch.log, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal,
    "log1p": torch.log1p, "log2": torch.log2, "log10": torch.log10,
}  # fmt: skip


SHAPES = [(5, 33), (2, 3, 17, 31), (1, 1, 32, 64), (7,), (3, 1, 40)]


@pytest.mark.parametrize(("name", "shape"), grid([*UNARY, *POSITIVE], SHAPES))
def test_ops_of_one(name: str, shape: tuple[int, ...], pair: ttnn.MeshDevice) -> None:
    x, want = on(pair, *shape, kind="positive" if name in POSITIVE else "normal")
    same(getattr(ttnn, name)(x), (UNARY | POSITIVE)[name](want))


BINARY: dict[str, Op] = {
    "add": torch.add, "subtract": torch.sub, "multiply": torch.mul, "divide": torch.div,
    "maximum": torch.maximum, "minimum": torch.minimum, "eq": torch.eq, "ne": torch.ne,
    "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "rsub": lambda x, y: y - x,
    "squared_difference": lambda x, y: (x - y) ** 2, "remainder": torch.remainder,
    "fmod": torch.fmod, "logaddexp": torch.logaddexp, "logical_and": torch.logical_and,
    "logical_xor": torch.logical_xor,
}  # fmt: skip


@pytest.mark.parametrize(("name", "shape"), grid(BINARY, SHAPES))
def test_ops_of_two(name: str, shape: tuple[int, ...], pair: ttnn.MeshDevice) -> None:
    other = shape if len(shape) < 2 else (*shape[:-2], 1, shape[-1])
    (x, a), (y, b) = on(pair, *shape), on(pair, *other)
    same(getattr(ttnn, name)(x, y), BINARY[name](a, b))


def test_numbers_functions_around_and_writing_in_place(pair: ttnn.MeshDevice) -> None:
    (x, a), (y, b) = on(pair, 3, 8), on(pair, 3, 8)
    same(x * 2 + 1, a * 2 + 1)
    same(1 - x, 1 - a)
    same(2 / (x * x + 1), 2 / (a * a + 1))
    same(-x, -a)
    same(ttnn.pow(x, 2), a**2)
    same(ttnn.maximum(x, 0.5), a.clamp(min=0.5))
    same(ttnn.clamp(x, -0.5, 0.5), a.clamp(-0.5, 0.5))
    same(ttnn.where(x > 0, x, 0.0), a.clamp(min=0))
    same(ttnn.where(x > y, x, y), torch.maximum(a, b))
    same(ttnn.add(x, y, activations=[ttnn.UnaryWithParam(ttnn.UnaryOpType.RELU)]), T.relu(a + b))
    silu = ttnn.mul(x, y, input_tensor_a_activations=[ttnn.UnaryOpType.SILU])
    same(silu, T.silu(a) * b)
    handle = x
    assert ttnn.add_(x, y) is handle
    same(handle, a + b)
    ttnn.multiply(y, 2.0, output_tensor=handle)
    same(handle, b * 2)
    i, c = on(pair, 3, 8, kind="int", dtype=ttnn.uint32)
    same(ttnn.bitwise_and(i, 6), c & 6)
    same(ttnn.bitwise_left_shift(i, 2), c << 2)


def test_products(pair: ttnn.MeshDevice) -> None:
    (x, a), (w, b), (bias, c) = on(pair, 2, 7, 33), on(pair, 33, 5), on(pair, 1, 5)
    same(ttnn.matmul(x, w), torch.matmul(a, b[:, None]))
    same(x @ w, torch.matmul(a, b[:, None]))
    want = T.relu(torch.matmul(a, b[:, None]) + c[:, None])
    same(ttnn.linear(x, w, bias=bias, activation="relu"), want)
    turned = ttnn.transpose(w, 0, 1)
    config = ttnn.WormholeComputeKernelConfig(math_fidelity=ttnn.MathFidelity.HiFi4)
    found = ttnn.matmul(x, turned, transpose_b=True, compute_kernel_config=config,
                        core_grid=ttnn.CoreGrid(y=4, x=8))  # fmt: skip
    same(found, torch.matmul(a, b[:, None]))
    low = ttnn.matmul(x, w, dtype=ttnn.bfloat16)
    assert low.dtype is ttnn.bfloat16
    same(low, torch.matmul(a, b[:, None]), 2e-2)


def test_norms_and_sums(pair: ttnn.MeshDevice) -> None:
    (x, a), (r, d) = on(pair, 2, 6, 40), on(pair, 2, 6, 40)
    (w, b), (bias, c) = on(pair, 1, 40), on(pair, 1, 40)
    for k in (0, 1):
        want = T.layer_norm((a + d)[k], (40,), b[k, 0], c[k, 0], 1e-5)
        found = ttnn.layer_norm(x, epsilon=1e-5, weight=w, bias=bias, residual_input_tensor=r)
        got = ttnn.to_torch(ttnn.get_device_tensors(found)[k])
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    same(ttnn.rms_norm(x, epsilon=1e-6, weight=w), torch.stack(
        [T.rms_norm(a[k], (40,), b[k, 0], 1e-6) for k in (0, 1)]))  # fmt: skip
    same(ttnn.softmax(x, dim=-1), a.softmax(-1))
    same(ttnn.softmax(x, dim=1), a.softmax(2))
    for name in ("sum", "mean", "std", "var"):
        op = getattr(torch, name)
        same(getattr(ttnn, name)(x, dim=-1, keepdim=True), op(a, dim=-1, keepdim=True))
        same(getattr(ttnn, name)(x, dim=(0, 1)), op(a, dim=(1, 2)))
    same(ttnn.max(x, dim=1), a.amax(2))
    same(ttnn.min(x), a.amin((1, 2, 3)))
    same(ttnn.cumsum(x, dim=1), a.cumsum(2))
    same(ttnn.argmax(x, dim=-1), a.argmax(-1))
    assert ttnn.argmax(x, dim=-1).dtype is ttnn.uint32
    values, places = ttnn.topk(x, 5, dim=-1)
    want_values, want_places = a.topk(5, -1)
    same(values, want_values)
    same(places, want_places)


def test_the_same_elements_elsewhere(pair: ttnn.MeshDevice) -> None:
    x, a = on(pair, 2, 6, 10)
    same(ttnn.reshape(x, (3, -1)), a.reshape(2, 3, 40))
    same(ttnn.permute(x, (2, 0, 1)), a.permute(0, 3, 1, 2))
    same(ttnn.transpose(x, -1, -2), a.transpose(-1, -2))
    same(ttnn.concat([x, x], dim=1), torch.cat([a, a], 2))
    same(ttnn.stack([x, x], dim=0), torch.stack([a, a], 1))
    same(ttnn.slice(x, [0, 1, 0], [2, 5, 10], [1, 2, 3]), a[:, :, 1:5:2, ::3])
    starts, ends = (
        ttnn.from_torch(torch.tensor(n, dtype=torch.int32), device=pair, dtype=ttnn.int32)
        for n in ([0, 1, 0], [2, 5, 10])
    )
    same(ttnn.slice(x, starts, ends), a[:, :, 1:5])
    same(x[:, 2:4, ..., 3], a[:, :, 2:4, 3])
    for got, want in zip(ttnn.split(x, 4, dim=2), a.split(4, 3), strict=True):
        same(got, want)
    for got, want in zip(ttnn.chunk(x, 3, dim=1), a.chunk(3, 2), strict=True):
        same(got, want)
    same(ttnn.unsqueeze(x, 1), a[:, :, None])
    same(ttnn.squeeze(ttnn.unsqueeze(x, -1)), a)
    same(ttnn.unsqueeze_to_4D(x), a[:, None])
    same(ttnn.repeat(x, (2, 1, 3)), a.repeat(1, 2, 1, 3))
    same(ttnn.repeat_interleave(x, 2, dim=1), a.repeat_interleave(2, 2))
    same(ttnn.expand(x[:, :1], (2, 4, 10)), a[:, :, :1].expand(2, 2, 4, 10))
    same(ttnn.pad(x, [(0, 0), (1, 2), (0, 3)], 1.5), T.pad(a, (0, 3, 1, 2), value=1.5))
    same(ttnn.tilize(ttnn.untilize(x)), a)


def test_embedding(pair: ttnn.MeshDevice) -> None:
    ids, i = on(pair, 3, 4, kind="int", dtype=ttnn.uint32)
    weight, w = on(pair, 50, 6)
    want = torch.stack([T.embedding(i[k], w[k]) for k in (0, 1)])
    same(ttnn.embedding(ids, weight, layout=ttnn.TILE_LAYOUT), want)


@pytest.mark.parametrize(("causal", "groups"), [(True, 4), (False, 2), (True, 1)])
def test_attention(causal: bool, groups: int, pair: ttnn.MeshDevice) -> None:
    q, a = on(pair, 2, 4, 9, 16)
    (k, b), (v, c) = on(pair, 2, groups, 9, 16), on(pair, 2, groups, 9, 16)
    want = T.scaled_dot_product_attention(a, b, c, is_causal=causal, enable_gqa=True)
    sdpa = ttnn.transformer.scaled_dot_product_attention
    same(sdpa(q, k, v, is_causal=causal), want)
    mask, m = on(pair, 2, 1, 9, 9)
    want = T.scaled_dot_product_attention(a, b, c, attn_mask=m, enable_gqa=True)
    same(sdpa(q, k, v, attn_mask=mask, is_causal=False), want)


def test_decoding_with_a_cache(pair: ttnn.MeshDevice) -> None:
    """Decoding with a cache equals the whole sequence at once, at each user's own position."""
    users, heads, groups, d, most = 3, 4, 2, 8, 12
    lengths = [4, 7, 1]
    cache_k, keys = on(pair, users, groups, most, d)
    cache_v, values = on(pair, users, groups, most, d)
    q, a = on(pair, 1, users, heads, d)
    new, n = on(pair, 1, users, groups, d)
    handle = cache_k
    ttnn.experimental.paged_update_cache(cache_k, new, update_idxs=lengths)
    assert cache_k is handle
    for u, at in enumerate(lengths):
        keys[:, u, :, at] = n[:, 0, u]
    same(cache_k, keys)
    found = ttnn.transformer.scaled_dot_product_attention_decode(q, cache_k, cache_v,
                                                                 cur_pos=lengths)  # fmt: skip
    want = torch.zeros(2, 1, users, heads, d)
    for k in (0, 1):
        for u, at in enumerate(lengths):
            rows = a[k, 0, u][:, None]
            seen = keys[k, u, :, : at + 1], values[k, u, :, : at + 1]
            want[k, 0, u] = T.scaled_dot_product_attention(rows, *seen, enable_gqa=True)[:, 0]
    same(found, want)
    prompt, p = on(pair, 1, groups, 5, d)
    ttnn.fill_cache(cache_v, prompt, 1)
    values[:, 1, :, :5] = p[:, 0]
    same(cache_v, values)
    token, t = on(pair, 1, groups, users, d)
    ttnn.update_cache(cache_v, token, 6)
    values[:, :, :, 6] = t[:, 0].permute(0, 2, 1, 3)
    same(cache_v, values)


def test_heads_and_rotary_positions(pair: ttnn.MeshDevice) -> None:
    x, a = on(pair, 2, 5, (4 + 2 * 2) * 8)
    q, k, v = ttnn.transformer.split_query_key_value_and_split_heads(
        x, num_heads=4, num_kv_heads=2, transpose_key=False
    )
    parts = a.split([32, 16, 16], -1)
    heads = [p.reshape(2, 2, 5, -1, 8).transpose(2, 3) for p in parts]
    for got, want in zip((q, k, v), heads, strict=True):
        same(got, want)
    same(ttnn.transformer.concatenate_heads(q), parts[0])
    angles = torch.outer(torch.arange(5.0), 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8))
    both = torch.cat([angles, angles], -1)
    table = [ttnn.from_torch(f(both)[None, None], device=pair) for f in (torch.cos, torch.sin)]
    half = torch.cat([-heads[0][..., 4:], heads[0][..., :4]], -1)
    want = heads[0] * both.cos() + half * both.sin()
    same(ttnn.experimental.rotary_embedding(q, *table), want)
    pairs = angles.repeat_interleave(2, -1)
    table = [ttnn.from_torch(f(pairs)[None, None], device=pair) for f in (torch.cos, torch.sin)]
    turn = torch.zeros(1, 1, 8, 8)
    turn[..., range(0, 8, 2), range(1, 8, 2)] = 1
    turn[..., range(1, 8, 2), range(0, 8, 2)] = -1
    other = torch.stack([-heads[0][..., 1::2], heads[0][..., ::2]], -1).flatten(-2)
    want = heads[0] * pairs.cos() + other * pairs.sin()
    matrix = ttnn.from_torch(turn, device=pair)
    same(ttnn.experimental.rotary_embedding_llama(q, *table, matrix), want)


def test_results_are_rounded_once(pair: ttnn.MeshDevice) -> None:
    """A bfloat16 op computes in f32 and rounds its result once."""
    x, a = on(pair, 4, 64, dtype=ttnn.bfloat16)
    exact = a.bfloat16().float()
    want = (exact.softmax(-1)).bfloat16()
    got = torch.stack([ttnn.to_torch(t) for t in ttnn.get_device_tensors(ttnn.softmax(x))])
    assert (got.float() - want.float()).abs().max() <= 2.0**-8 * want.float().max()
    gelu = torch.stack([ttnn.to_torch(t) for t in ttnn.get_device_tensors(ttnn.gelu(x))])
    torch.testing.assert_close(gelu.float(), T.gelu(exact).bfloat16().float(), rtol=1e-2, atol=1e-3)
    assert math.isclose(float(ttnn.to_torch(ttnn.get_device_tensors(ttnn.sum(x * 0 + 1))[0])), 256)
