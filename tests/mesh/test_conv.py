"""Convolution, pooling and linear algebra on the engine against JAX's functions, on eight devices,
and the example's training on one device and on eight."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tessera as ts
from tessera import dist, nn
from tessera.core import flags
from tessera.core.dtypes import f32
from tessera.core.layout import parse_type
from tessera.runtime import compile_options, xp_jax
from tessera.runtime.devices import start
from tests.cases import LONG
from tests.core.table import apart, positive

MESH = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_convnet.py"
RNG = np.random.default_rng(3)


@pytest.fixture(scope="module", autouse=True)
def _devices() -> None:
    start()  # before any call of JAX, which counts its devices only once


def real(*shape: int) -> Any:
    return RNG.uniform(-1, 1, shape).astype(np.float32)


def alike(
    ours: Callable[..., ts.Tensor], theirs: Callable[..., Any], *rows: tuple[Any, str]
) -> None:
    """Compares values and all gradients with `theirs`; `rows` are (value, layout)."""
    values = [v for v, _ in rows]
    weight = real(*jax.eval_shape(theirs, *values).shape)
    want = jax.jit(jax.value_and_grad(lambda *a: (theirs(*a) * weight).sum(), range(len(rows))))
    value, grads = want(*values)

    @ts.jit
    def step(*args: ts.Tensor) -> Any:
        loss = (ours(*args) * weight).sum()
        return loss, ts.grad(loss, list(args))

    got, found = step(*(ts.tensor(v, mesh=MESH, layout=layout) for v, layout in rows))
    np.testing.assert_allclose(got.numpy(), value, rtol=1e-4, atol=1e-4)
    for a, b in zip(found, grads, strict=True):
        np.testing.assert_allclose(a.numpy(), b, rtol=1e-4, atol=1e-4)


def jax_conv(stride: int, pad: int, dilation: int, groups: int) -> Callable[..., Any]:
    def conv(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(
            x, w, (stride, stride), [(pad, pad)] * 2, rhs_dilation=(dilation, dilation),
            feature_group_count=groups,
        )  # fmt: skip

    return conv


@pytest.mark.parametrize(
    ("x", "w", "stride", "pad", "dilation", "groups"),
    [
        ("[8@dp, 8, 9, 7]", "[8, 8, 3, 3]", 1, 1, 1, 1),
        ("[8@(dp,tp), 8, 9, 7]", "[8, 8, 3, 3]", 2, 0, 1, 1),
        ("[8@dp, 8@tp, 9, 7]", "[8, 8@tp, 3, 3]", 2, 2, 2, 1),
        ("[8@dp, 8, 9, 7]", "[8@tp, 8, 3, 3]", 1, 3, 1, 1),
        ("[8@dp, 8@tp, 9, 7]", "[8@tp, 2, 3, 3]", 2, 1, 1, 4),
        ("[6@tp, 6@dp, 9, 7]", "[4, 3, 3, 3]", 1, 1, 1, 2),  # blocks of two, two, two and none
        ("[6, 6@tp, 9@dp, 7]", "[4, 6, 3, 3]", 1, 1, 1, 1),
    ],
)
def test_a_convolution_in_many_layouts(
    x: str, w: str, stride: int, pad: int, dilation: int, groups: int
) -> None:
    alike(
        lambda a, b: nn.conv2d(a, b, None, stride, pad, dilation, groups),
        jax_conv(stride, pad, dilation, groups),
        *((real(*parse_type(f"f32{layout}", MESH).shape), layout) for layout in (x, w)),
    )


def program_text(run: Any) -> str:
    """The compiled program's text of a function called once."""
    (program,) = run.programs
    shapes = [jax.ShapeDtypeStruct(t.shape, t.dtype.numpy) for t in program.wants]
    text: str = program.run.lower(*shapes).compile().as_text()
    return text


def preferred() -> bool:
    """Returns whether the engine's YNN library takes convolutions; that of jaxlib 0.10.0 does
    not."""
    x, w = real(2, 32, 8, 8), real(32, 32, 3, 3)
    text = jax.jit(jax_conv(1, 1, 1, 1)).lower(x, w).compile().as_text()
    return "ynn_fusion" in text


@pytest.mark.parametrize(
    ("cores", "channels", "level", "other"),
    [
        (2, 32, "fast", True),
        (2, 32, "run_to_run", False),  # its bits depend on the number of cores
        (2, 32, "mesh_invariant", False),
        (2, 128, "fast", False),  # a kernel that is large enough
        (1, 32, "fast", False),
    ],
)
def test_several_cores_work_at_one_convolution(
    monkeypatch: pytest.MonkeyPatch, cores: int, channels: int, level: Any, other: bool
) -> None:
    monkeypatch.setattr(compile_options, "cores_of_a_device", lambda mesh: cores)
    x, w = real(2, channels, 8, 8), real(channels, channels, 3, 3)

    @ts.jit
    def net(x: ts.Tensor, w: ts.Tensor) -> ts.Tensor:
        y: ts.Tensor = ts.scan(lambda h, _: (nn.conv2d(h, w, padding=1), None), x, ts.zeros(2))[0]
        return y

    with dist.deterministic(level=level) if level != "fast" else nullcontext():
        got = net(ts.tensor(x), ts.tensor(w))
        text = program_text(net)
    conv = jax_conv(1, 1, 1, 1)
    np.testing.assert_allclose(got.numpy(), conv(conv(x, w), w), rtol=1e-3, atol=1e-3)
    # The preferred library's instructions are in a separate function.
    alone = bool(re.search(r"= f32\S+ convolution\((?!%param)", text))
    assert alone == (other or not preferred())


@pytest.mark.parametrize(
    ("batch", "size", "groups", "parts"),
    [
        *[(48, 8, 1, 3), (32, 9, 2, 2), (256, 8, 1, 8), (160, 8, 1, 5)],
        *[(16, 8, 1, 1), (40, 8, 1, 1), (48, 6, 1, 1), (176, 8, 1, 1)],
    ],
)
def test_a_cpu_takes_some_images_at_a_time_for_the_gradient_of_a_weight(
    batch: int, size: int, groups: int, parts: int
) -> None:
    """On other devices it is one convolution."""
    x, g = real(groups, batch, 2, size, size), real(batch, 4, size, size)
    kernel = g.reshape(batch, groups, 4 // groups, size, size).transpose(1, 2, 0, 3, 4)
    pads = ((1, 1), (1, 1))
    x = x.transpose(2, 0, 1, 3, 4)  # [channels, groups, what is summed, *sizes]
    run = jax.jit(lambda x, w: xp_jax.conv(x, w, (1, 1), pads, (1, 1), (1, 1), f32)).trace(
        x, kernel
    )
    flat = x.reshape(2, -1, size, size), kernel.reshape(4, batch, size, size)
    want = lax.conv_general_dilated(*flat, (1, 1), pads, feature_group_count=groups)
    got = run.lower().compile()(x, kernel)
    np.testing.assert_allclose(got.reshape(want.shape), want, rtol=1e-4, atol=1e-4)
    assert run.lower().as_text().count("stablehlo.convolution") == parts
    there = run.lower(lowering_platforms=("cuda",)).as_text()
    assert there.count("stablehlo.convolution") == 1


# x [N, groups, in, *sizes], w [groups, out, in, *kernel], the number of library calls on a CPU
FORMS = {
    "one channel a group": ((3, 6, 1, 7, 8), (6, 2, 1, 3, 2), 0),
    "one channel a group, a large kernel": ((3, 6, 1, 30, 29), (6, 1, 1, 9, 8), 0),
    "few channels a group": ((3, 24, 4, 7, 8), (24, 2, 4, 3, 2), 3),
    "many": ((3, 2, 20, 7, 8), (2, 4, 20, 3, 2), 2),
    "one place": ((3, 1, 6, 7, 8), (1, 5, 6, 1, 1), 0),
    "a result of one place": ((3, 1, 6, 3, 2), (1, 5, 6, 3, 2), 0),
    "the weights of one channel a group": ((1, 6, 3, 11, 12), (6, 2, 3, 9, 10), 0),
    "the weights of few": ((4, 24, 3, 11, 12), (24, 2, 3, 9, 10), 3),
    "the weights of one place": ((6, 1, 4, 9, 8), (1, 5, 4, 9, 8), 0),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("spread", [1, 2])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_what_a_cpu_computes_by_other_ways(form: str, stride: int, spread: int, dtype: Any) -> None:
    """On other devices it is one convolution."""
    shape, of_w, calls = FORMS[form]
    pads = ((0, 0), (0, 0)) if "one place" in form else ((1, 2), (0, 1))
    if "a result" in form or "weights of one place" in form:
        stride, spread, dilation = 1, 1, (spread, 1)
        shape = tuple(n * d - d + 1 for n, d in zip(shape, (1, 1, 1, *dilation)))
    else:
        dilation = (1, 2) if "place" not in form and "weights" not in form else (1, 1)
        spread = 1 if "weights" in form else spread
    x, w = (jnp.asarray(real(*s), dtype) for s in (shape, of_w))
    how = (stride,) * 2, pads, dilation, (spread,) * 2
    run = jax.jit(lambda x, w: xp_jax.conv(x, w, *how, f32)).trace(x, w)
    flat = (v.astype(jnp.float32) for v in (x, w))
    groups = shape[1]
    want = lax.conv_general_dilated(
        next(flat).reshape(shape[0], -1, *shape[3:]), next(flat).reshape(-1, *of_w[2:]),
        how[0], pads, how[3], dilation, feature_group_count=groups,
    )  # fmt: skip
    got = run.lower().compile()(x, w)
    np.testing.assert_allclose(got.reshape(want.shape), want, rtol=1e-4, atol=1e-4)
    assert run.lower().as_text().count("stablehlo.convolution") == calls
    there = run.lower(lowering_platforms=("cuda",)).as_text()
    assert there.count("stablehlo.convolution") == 1


def test_a_large_window_is_a_small_program() -> None:
    """A window over the whole image is a sum; its gradient has no separate term for each
    element."""
    x = ts.tensor(real(2, 3, 32, 32))
    for pool, most in ((nn.adaptive_avg_pool2d, 30), (nn.adaptive_max_pool2d, 450)):
        graph = ts.graph.trace(lambda x, pool=pool: ts.grad(ts.sum(pool(x, 1) ** 2), [x]), x)
        assert len(graph.nodes) < most


def test_the_users_own_word_on_the_library_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_options, "cores_of_a_device", lambda mesh: 2)
    monkeypatch.setattr(flags, "_fuses", [False])
    net = ts.jit(lambda x, w: nn.conv2d(x, w))
    net(ts.tensor(real(2, 32, 8, 8)), ts.tensor(real(32, 32, 3, 3)))
    assert ("ynn_fusion" in program_text(net)) == preferred()


def test_between_convolutions_no_image_is_turned_around() -> None:
    """Only the input is transposed, once, into the order of the convolution."""
    norm = nn.BatchNorm(8)

    @ts.jit
    def net(norm: Any, x: ts.Tensor, w: ts.Tensor, b: ts.Tensor) -> ts.Tensor:
        h = nn.conv2d(x, w, b, padding=1)
        h = nn.relu(norm(h)) + h
        return nn.conv2d(h, w, padding=1).mean((0, 2, 3))

    given = [ts.tensor(real(*shape)) for shape in ((4, 8, 16, 16), (8, 8, 3, 3), (8,))]
    net(norm, *given)
    turned = re.findall(r"= f32\[([\d,]+)\]\S* transpose\(", program_text(net))
    images = [t for t in turned if math.prod(map(int, t.split(","))) >= given[0].size]
    assert images == ["4,16,16,1,8"]


def test_no_function_of_the_c_library_is_called_for_each_number() -> None:
    """The engine's own erf is called on CPUs without fused multiply-add."""
    x = np.concatenate([np.linspace(-6, 6, 20001), [0.0, np.inf, -np.inf, np.nan]])
    x = x.astype(np.float32)
    run = ts.jit(ts.erf)
    got = run(ts.tensor(x)).numpy()
    want = np.vectorize(math.erf)(x.astype(np.float64))
    units = np.spacing(np.abs(want[:-1]).astype(np.float32))
    assert np.all(np.abs(got[:-1] - want[:-1]) <= 6 * units) and np.isnan(got[-1])
    assert " erf(" not in program_text(run)


def test_a_transposed_convolution() -> None:
    def theirs(x: Any, w: Any) -> Any:
        return lax.conv_transpose(
            x, w, (2, 2), [(1, 2), (1, 2)], dimension_numbers=("NCHW", "OIHW", "NCHW"),
            transpose_kernel=True,
        )  # fmt: skip

    alike(
        lambda x, w: nn.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1),
        theirs,
        (real(4, 6, 5, 4), "[4@dp, 6, 5, 4]"),
        (real(6, 8, 3, 3), "[6, 8@tp, 3, 3]"),
    )


@pytest.mark.parametrize(
    ("size", "stride", "pad", "image"),
    [(2, 2, 0, (9, 8)), (2, 2, 0, (8, 6)), (3, 2, 1, (9, 8)), (3, 1, 1, (9, 8)), (3, 3, 1, (9, 6))],
)
def test_pooling(size: int, stride: int, pad: int, image: tuple[int, int]) -> None:
    def windows(x: Any, start: Any, fold: Any) -> Any:
        how = (1, 1, size, size), (1, 1, stride, stride), ((0, 0), (0, 0), (pad, pad), (pad, pad))
        return lax.reduce_window(x, start, fold, *how)

    # Few distinct values, so that the maximum often occurs twice.
    x = np.round(2 * real(4, 8, *image)), "[4@dp, 8@tp, {}, {}]".format(*image)
    alike(lambda x: nn.max_pool2d(x, size, stride, pad), lambda x: windows(x, -jnp.inf, lax.max), x)
    alike(
        lambda x: nn.avg_pool2d(x, size, stride, pad),
        lambda x: windows(x, 0.0, lax.add) / size**2,
        x,
    )


def test_resizing() -> None:
    x = real(4, 8, 5, 6), "[4@dp, 8@tp, 5, 6]"
    alike(
        lambda x: nn.interpolate(x, (12, 9), "bilinear"),
        lambda x: jax.image.resize(x, (4, 8, 12, 9), "bilinear"),
        x,
    )


def test_narrow_convolutions_add_up_in_f32() -> None:
    x = np.full((1, 4096, 1, 1), 1 + 2**-7, np.float32)
    x[:, ::2] = -1
    for dtype in (ts.bf16, ts.f16):
        a, w = (ts.tensor(v, dtype=dtype) for v in (x, np.ones_like(x)))
        y = nn.conv2d(a, w)
        assert y.dtype is dtype
        assert y.item() == 2048 * 2**-7


@pytest.mark.parametrize(
    ("ours", "theirs", "rows"),
    [
        (ts.linalg.cholesky, jnp.linalg.cholesky, [(positive(8, 3, 3), "[8@dp, 3, 3]")]),
        (ts.linalg.inv, jnp.linalg.inv, [(apart(8, 3, 3), "[8@(dp,tp), 3, 3]")]),
        (ts.linalg.det, jnp.linalg.det, [(apart(6, 3, 3), "[6@tp, 3, 3]")]),
        (ts.linalg.solve, jnp.linalg.solve,
         [(apart(8, 4, 4), "[8@dp, 4@tp, 4]"), (real(8, 4, 2), "[8@dp, 4, 2]")]),
        (lambda a: ts.linalg.eigh(a)[0], lambda a: jnp.linalg.eigh(a)[0],
         [(positive(8, 3, 3), "[8@dp, 3, 3]")]),
        (lambda a: ts.linalg.svd(a)[1], lambda a: jnp.linalg.svd(a, full_matrices=False)[1],
         [(apart(8, 4, 3), "[8@dp, 4, 3]")]),
        (lambda a: ts.linalg.norm(a, 2, 1), lambda a: jnp.linalg.norm(a, 2, 1),
         [(real(8, 5), "[8@dp, 5@tp]")]),
        (lambda a: ts.logsumexp(a, 1), lambda a: jax.nn.logsumexp(a, 1),
         [(real(8, 12), "[8@dp, 12@tp]")]),
        (lambda a: ts.sort(a)[0], jnp.sort, [(real(8, 12), "[8@dp, 12@tp]")]),
        (lambda a: ts.einsum("bii->b", a), lambda a: jnp.einsum("bii->b", a),
         [(real(8, 4, 4), "[8@dp, 4@tp, 4]")]),
    ],
)  # fmt: skip
def test_matrices_on_a_mesh(ours: Any, theirs: Any, rows: list[tuple[Any, str]]) -> None:
    alike(ours, theirs, *rows)


def test_factors_are_those_of_the_oracle() -> None:
    # Signs are free in theory: we fix them, so that all backends agree.
    a = real(16, 4, 3)
    split = ts.tensor(a, mesh=MESH, layout="[16@dp, 4, 3]")
    q, r = (t.numpy() for t in ts.linalg.qr(split))
    np.testing.assert_allclose(q @ r, a, rtol=1e-4, atol=1e-5)
    assert (np.diagonal(r, axis1=1, axis2=2) > 0).all()
    for t in (ts.linalg.svd(split)[0], ts.linalg.eigh(split.transpose(-2, -1) @ split)[1]):
        v = t.numpy()
        first = np.argmax(np.abs(v) >= 0.9 * np.abs(v).max(1, keepdims=True), axis=1)
        assert (np.take_along_axis(v, first[:, None], 1) > 0).all()


def test_a_batch_norm_sees_the_whole_batch() -> None:
    x = real(16, 3, 4, 4) + np.arange(16, dtype=np.float32).reshape(16, 1, 1, 1)
    norm = nn.BatchNorm(3)

    @ts.jit
    def run(norm: nn.BatchNorm, x: ts.Tensor) -> ts.Tensor:
        return norm(x)

    y = run(norm, ts.tensor(x, mesh=MESH, layout="[16@(dp,tp), 3, 4, 4]")).numpy()
    mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), ddof=1)
    np.testing.assert_allclose(y.mean((0, 2, 3)), 0, atol=1e-5)
    np.testing.assert_allclose(y.var((0, 2, 3)), 1, rtol=1e-4)
    np.testing.assert_allclose(norm.running_mean.numpy(), 0.1 * mean, rtol=1e-4)
    np.testing.assert_allclose(norm.running_var.numpy(), 0.9 + 0.1 * var, rtol=1e-4)


# ---- the example -------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("train_convnet", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_convnet"] = module  # its dataclass looks up its annotations there
    spec.loader.exec_module(module)
    return module


SMALL: dict[str, Any] = {"batch": 32, "width": 4, "lr": 1e-2, "noise": 0.3, "seed": 0}


@LONG
def test_the_example_trains_the_same_network_on_one_device_and_on_eight(example: Any) -> None:
    steps = 30
    eight, linear = example.main("dp=8", steps, **SMALL)
    how = {k: v for k, v in SMALL.items() if k != "width"}
    console = example.Console(quiet=True)
    ts.seed(SMALL["seed"])
    alone = example.ConvNet(SMALL["width"])
    one = example.fit(alone, dist.Mesh(("dp",), devices=1), steps, **how, console=console)
    assert len(one.losses) == len(eight.losses) == steps
    np.testing.assert_allclose(one.losses, eight.losses, rtol=0, atol=1e-4)
    np.testing.assert_allclose(one.accuracy, eight.accuracy, atol=0.01)
    assert eight.losses[-1] < eight.losses[0] / 2
    assert eight.accuracy > linear.accuracy + 0.3


def test_the_example_draws_its_curve(example: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    curve = tmp_path / "loss.png"
    small = {**SMALL, "batch": 16, "width": 2}
    convnet, linear = example.main("dp=2", 3, **small, curve=curve)
    assert len(convnet.losses) == len(linear.losses) == 3
    assert curve.read_bytes().startswith(b"\x89PNG")
    image, label = example.Stripes(9, 0.3, 0, 0)[8]
    assert image.shape == (1, example.SIDE, example.SIDE) and 0 <= label < example.CLASSES


def test_a_wrong_mesh_is_one_line(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(example.typer.Exit) as stop:
        example.main("tp=8", 1, **SMALL)
    assert stop.value.exit_code == 2
    assert capsys.readouterr().err == "error: --mesh: name the axis dp alone, not tp\n"
