"""Names of other libraries: each leads to an existing name of Tessera."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tessera as ts
from tessera import dist, nn, op, optim
from tessera.core import peers
from tessera.train.generate import generate, sample
from tests.core.numpy_engine import Oracle

HERE = {"ts": ts, "nn": nn, "optim": optim, "dist": dist, "np": np}
KINDS = {
    "x": ts.Tensor, "model": nn.Module, "optimizer": optim.Optimizer, "mesh": dist.Mesh,
    "self": None,
}  # fmt: skip
WORDS = peers.words()
NAMES, FIXES = WORDS["names"], WORDS["argument_fixes"]


@pytest.mark.parametrize("table", [t for t in WORDS if t != "arguments"])
def test_what_is_offered_exists(table: str) -> None:
    for name, text in WORDS[table].items():
        for root, path in re.findall(r"\b(ts|nn|optim|dist|np)\.([\w.]*\w)", text):
            found: Any = HERE[root]
            for part in path.split("."):
                found = getattr(found, part)
        for root, attribute in re.findall(r"\b(x|model|optimizer|mesh)\.(\w+)\b(?! = )", text):
            kind = nn.GPT if name.startswith("GPT.") and root == "model" else KINDS[root]
            assert attribute in ("dtype", "weight", "name") or hasattr(kind, attribute), text


def test_no_word_has_two_ways_out() -> None:
    """A later row would hide an earlier one."""
    rows = tomllib.loads(Path(peers.__file__).with_suffix(".toml").read_text("utf-8"))
    for table in rows:
        given = [len(o.split() or [""]) * len(w.split())
                 for o, _, w in (key.rpartition(":") for key in rows[table])]  # fmt: skip
        assert sum(given) == len(WORDS[table])


def offered(name: str) -> str:
    """The expression that the error message offers for `name`."""
    return str(peers.fix_for("names", name)).removeprefix("write ")


X = np.array([[1.0, -2.0, 0.0, 3.0], [0.5, 2.0, -1.0, 0.0], [4.0, 0.0, 1.5, -3.0]], np.float32)
Y = X[::-1].copy()
ODD = np.array([[1.0, np.nan, np.inf, np.inf], [np.inf, 2.0, -np.inf, np.nan]], np.float32)
OTHER = np.array([[1.0 + 1e-7, 1.0, np.inf, -np.inf], [3.0, 5.0, 2.0, np.nan]], np.float32)
PICTURE = np.arange(50, dtype=np.float32).reshape(1, 2, 5, 5) - 9
SIGN = np.where(X > 0, 1, -1)
IDS, BAG = np.array([[3, 0, 1], [2, 2, 0]]), np.array([[1, 0], [3, 2]])
# A name, the expression that the message offers, its arguments, and the meaning of the name in its
# own library, whose constants are torch tensors here.
F, L = torch.nn.functional, torch.tensor
FOLLOWED: list[tuple[str, str, dict[str, Any], Any]] = [
    *(
        (f"logical_{name}", offered(f"logical_{name}"), {"x": a, "y": b},
         getattr(np, f"logical_{name}")(*(a, b)[: 1 if name == "not" else 2]))
        for name in ("and", "or", "xor", "not")
        for a, b in ((np.array([0, 1, 2, 4]), np.array([0, 2, 0, 3])), (X, Y), (X > 0, Y > 0))
    ),
    *(
        (name, offered(name), {"x": X, "y": Y + 0.5}, getattr(np, name)(X, Y + np.float32(0.5)))
        for name in ("fmod", "copysign", "heaviside")
    ),
    *((name, offered(name), {"x": X}, getattr(np, name)(X))
      for name in ("signbit", "cbrt", "rint", "degrees", "radians")),
    ("frac", offered("frac"), {"x": X}, torch.frac(L(X))),
    ("segment_sum", offered("segment_sum"), {"x": X, "ids": np.array([1, 0, 1]), "n": 2, "d": 4},
     np.stack([X[1], X[0] + X[2]])),
    ("dynamic_slice", offered("dynamic_slice"), {"x": X, "start": np.array(1), "size": 2}, X[1:3]),
    ("logspace", offered("logspace"), {"start": 0.0, "end": 2.0, "n": 5}, np.logspace(0, 2, 5)),
    ("vdot", "ts.sum(x * y)", {"x": X, "y": Y}, np.vdot(X, Y)),
    ("fmax", offered("fmax"), {"x": ODD, "y": OTHER}, np.fmax(ODD, OTHER)),
    ("fmin", offered("fmin"), {"x": ODD, "y": OTHER}, np.fmin(ODD, OTHER)),
    ("isclose", offered("isclose"), {"x": ODD, "y": OTHER, "rtol": 1e-5, "atol": 1e-8},
     np.isclose(ODD, OTHER)),
    ("isclose", offered("isclose"), {"x": OTHER, "y": ODD, "rtol": 1e-5, "atol": 1e-8},
     np.isclose(OTHER, ODD)),
    ("xlogy", offered("xlogy"), {"x": X, "y": abs(Y)}, torch.xlogy(L(X), L(abs(Y)))),
    ("fliplr", "ts.flip(x, 1)", {"x": X}, np.fliplr(X)),
    ("flipud", "ts.flip(x, 0)", {"x": X}, np.flipud(X)),
    ("rot90", "ts.flip(x.T, 0)", {"x": X}, np.rot90(X)),
    ("hstack", "ts.concat([x, y], 1)", {"x": X, "y": Y}, np.hstack([X, Y])),
    ("hstack", "ts.concat([x, y])", {"x": X[0], "y": Y[0]}, np.hstack([X[0], Y[0]])),
    ("vstack", "ts.concat([x, y])", {"x": X, "y": Y}, np.vstack([X, Y])),
    ("vstack", "ts.stack([x, y])", {"x": X[0], "y": Y[0]}, np.vstack([X[0], Y[0]])),
    ("dstack", "ts.stack([x, y], 2)", {"x": X, "y": Y}, np.dstack([X, Y])),
    ("column_stack", "ts.concat([x, y], 1)", {"x": X, "y": Y}, np.column_stack([X, Y])),
    ("column_stack", "ts.stack([x, y], 1)", {"x": X[0], "y": Y[0]},
     np.column_stack([X[0], Y[0]])),
    ("hsplit", "ts.split(x, n, 1)", {"x": X, "n": 2}, np.hsplit(X, 2)),
    ("vsplit", "ts.split(x, n, 0)", {"x": X, "n": 3}, np.vsplit(X, 3)),
    *(
        (name, offered(name), {"x": X, "edges": np.array([0.0, 1.0, 2.0])}, want)
        for name, want in (
            ("digitize", np.digitize(X, [0, 1, 2])),
            ("searchsorted", np.searchsorted([0, 1, 2], X)),
            ("bucketize", torch.bucketize(L(X), L([0.0, 1.0, 2.0]))),
        )
    ),
    ("kthvalue", offered("kthvalue"), {"x": X, "k": 2}, torch.kthvalue(L(X), 2)[0]),
    ("msort", "ts.sort(x, 0)[0]", {"x": X}, torch.msort(L(X))),
    ("argwhere", "ts.stack(ts.nonzero(x), -1)", {"x": X}, torch.nonzero(L(X))),
    ("unique_consecutive", offered("unique_consecutive"), {"x": np.array([2.0, 2, 1, 1, 2])},
     torch.unique_consecutive(L([2.0, 2, 1, 1, 2]))),
    ("histc", offered("histc"), {"x": X}, torch.histc(L(X))),
    ("masked_select", "x[mask]", {"x": X, "mask": X > 0}, torch.masked_select(L(X), L(X > 0))),
    ("celu", offered("celu"), {"x": X, "alpha": 0.5}, F.celu(L(X), 0.5)),
    ("prelu", offered("prelu"), {"x": X, "weight": L([0.25]).numpy()}, F.prelu(L(X), L([0.25]))),
    ("pairwise_distance", offered("pairwise_distance"), {"x": X, "y": Y},
     F.pairwise_distance(L(X), L(Y))),
    ("cdist", offered("cdist"), {"x": X, "y": Y[:2]}, torch.cdist(L(X), L(Y[:2]))),
    ("cdist", offered("cdist"), {"x": PICTURE, "y": -PICTURE},
     torch.cdist(L(PICTURE), -L(PICTURE))),
    ("hinge_embedding_loss", offered("hinge_embedding_loss"), {"x": X, "y": SIGN, "margin": 1.0},
     F.hinge_embedding_loss(L(X), L(SIGN))),
    ("embedding_bag", "nn.embedding(ids, table).mean(1)", {"ids": IDS, "table": PICTURE[0, 0]},
     F.embedding_bag(L(IDS), L(PICTURE[0, 0]))),
    ("nansum", "ts.sum(ts.where(ts.isnan(x), 0.0, x))", {"x": ODD[:1]}, np.nansum(ODD[:1])),
    ("nanmean", "ts.sum(ts.where(ts.isnan(x), 0.0, x)) / ts.sum(~ts.isnan(x))", {"x": OTHER[1]},
     np.nanmean(OTHER[1])),
    ("nanmin", "ts.min(ts.where(ts.isnan(x), math.inf, x))", {"x": OTHER[1]}, 2.0),
    ("Tensor.split", "ts.split(x, [2, 2, 1])", {"x": PICTURE[0, 0]}, L(PICTURE[0, 0]).split(2)),
    ("Tensor.scatter", "ts.scatter(x, ids, src, dim)",
     {"x": X[:2], "ids": BAG, "src": Y[:2, :2], "dim": 1},
     L(X[:2]).scatter(1, L(BAG), L(Y[:2, :2]))),
    ("jacobian", offered("jacobian"), {"x": X[0], "fn": lambda x: x[:2] * x[2:]},
     [[0, 0, 1, 0], [0, 3, 0, -2]]),
    ("count_include_pad", "nn.avg_pool2d(x, k, s, p) / nn.avg_pool2d(ts.ones_like(x), k, s, p)",
     {"x": PICTURE, "k": 3, "s": 2, "p": 1},
     F.avg_pool2d(L(PICTURE), 3, 2, 1, count_include_pad=False)),
    ("max_pool2d.dilation", "ts.maximum(x[..., :-2], x[..., 2:])", {"x": PICTURE},
     F.max_pool2d(L(PICTURE), (1, 2), 1, dilation=(1, 2))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "given", "want"), FOLLOWED, ids=[r[0] for r in FOLLOWED])
def test_what_is_offered_gives_what_was_asked(
    name: str, text: str, given: dict[str, Any], want: Any, oracle: Oracle
) -> None:
    key = name if "." in name else f".{name}"
    assert text in (NAMES.get(key) or FIXES[key])
    values = {k: ts.tensor(v) if isinstance(v, np.ndarray) else v for k, v in given.items()}
    got = eval(text, {**HERE, "math": math, **values})
    if isinstance(got, list):
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5)
        return
    got = got.numpy() if isinstance(got, ts.Tensor) else got
    np.testing.assert_allclose(got, np.asarray(want), rtol=1e-5, atol=1e-6)


def test_what_writes_in_place_leads_to_what_does_not() -> None:
    x = ts.ones(3)
    for name, text in (("exp_", "x = ts.exp(...)"), ("reshape_", "x = ts.reshape(...)"),
                       ("lerp_", "x = x + w * (y - x)")):  # fmt: skip
        with pytest.raises(ts.UnknownNameError, match=re.escape(f"do not change: {text}")):
            getattr(x, name)


def test_a_name_in_another_spelling_needs_no_row() -> None:
    for name, text in (("ReLU", "write nn.relu"), ("MaxPool2d", "write nn.max_pool2d"),
                       ("soft_max", "write nn.softmax"), ("adamw", "write optim.AdamW"),
                       ("relu6_", "tensors do not change: x = nn.relu6(...)")):  # fmt: skip
        with pytest.raises(ts.UnknownNameError, match=f"fix : {re.escape(text)}$"):
            getattr(ts, name)


def test_numpy_checks_axes(oracle: Oracle) -> None:
    x = ts.ones((2, 3))
    for call in (lambda: np.expand_dims(x, 7), lambda: np.moveaxis(x, 0, 5),
                 lambda: np.squeeze(x, 0), lambda: np.transpose(x, (0, 0))):  # fmt: skip
        with pytest.raises(ts.UsageError, match="without a gradient, is x"):
            call()


def test_what_looks_inside_elsewhere_leads_to_what_does_here() -> None:
    for name, text in (("set_detect_anomaly", "ts.debug.nan_origin"),
                       ("callback", "ts.debug.breakpoint(hook"),
                       ("visualize_array_sharding", "ts.dist.inspect")):  # fmt: skip
        with pytest.raises(ts.UnknownNameError, match=re.escape(text)):
            getattr(ts.debug, name)


def test_what_is_like_no_name_leads_to_numpy_and_jax() -> None:
    for name, text in (("cov", "of a value alone np.cov(x.numpy()); in a program compose it of"),
                       ("cartesian_prod", "fix : compose it of functions of ts, or write"),
                       ("sotr", "the names most like it are sort")):  # fmt: skip
        with pytest.raises(ts.UnknownNameError, match=re.escape(text)):
            getattr(ts, name)


def test_sizes_and_dims_may_be_named(oracle: Oracle) -> None:
    x = ts.ones((4, 6))
    assert ts.reshape(x, shape=(6, 4)).shape == ts.reshape(x=x, shape=(6, 4)).shape == (6, 4)
    assert ts.permute(x, dims=(1, 0)).shape == x.permute(dims=[1, 0]).shape == (6, 4)
    assert (x.repeat(repeats=(2, 2)).shape, ts.tile(x, dims=2).shape) == ((8, 12), (4, 12))


def test_other_ways_of_a_ufunc_lead_to_what_is_the_same(oracle: Oracle) -> None:
    x, y = ts.tensor(X[0]), ts.tensor(Y[0])
    for call, text, want in (
        (lambda: np.add.outer(x, y), "np.add(x[:, None], y)", np.add.outer(X[0], Y[0])),
        (lambda: np.add.accumulate(x), "np.cumsum", np.cumsum(X[0])),
        (lambda: np.add.reduce(x), "np.sum", np.sum(X[0])),
    ):
        with pytest.raises(ts.UsageError) as caught:
            call()
        assert f"fix : write {text}" in str(caught.value)
        found = eval(text, {"np": np, "x": x, "y": y})
        np.testing.assert_allclose((found(x) if callable(found) else found).numpy(), want)


def test_other_edges_of_pools(oracle: Oracle) -> None:
    """`ceil_mode` and `divisor_override` by the expressions that their messages offer."""
    x, theirs = ts.tensor(PICTURE), L(PICTURE)
    edge = (0, 1, 0, 1)
    assert "ts.pad(x, (0, 1, 0, 1), value=-math.inf)" in FIXES[".ceil_mode"]
    most = nn.max_pool2d(ts.pad(x, edge, value=-math.inf), 2)
    np.testing.assert_array_equal(most.numpy(), F.max_pool2d(theirs, 2, ceil_mode=True))
    mean = nn.avg_pool2d(ts.pad(x, edge), 2) / nn.avg_pool2d(ts.pad(ts.ones_like(x), edge), 2)
    np.testing.assert_allclose(mean.numpy(), F.avg_pool2d(theirs, 2, ceil_mode=True))
    want = F.avg_pool2d(theirs, 2, divisor_override=3)
    np.testing.assert_allclose((nn.avg_pool2d(x, 2) * (4 / 3)).numpy(), want, rtol=1e-5)
    want = F.interpolate(theirs, scale_factor=2)
    np.testing.assert_array_equal(nn.interpolate(x, (10, 10)).numpy(), want)


def test_whole_channels_are_dropped(oracle: Oracle) -> None:
    x = ts.ones((8, 8, 3, 4))
    for text in (offered("dropout2d"), offered("Dropout2d").partition(", with")[0]):
        y = eval(text, {**HERE, "x": x, "p": 0.5, "drop": nn.Dropout(0.5)}).numpy()
        assert set(np.unique(y)) == {0.0, 2.0} and (y == y[:, :, :1, :1]).all()


def test_a_truncated_normal(oracle: Oracle) -> None:
    text = offered("truncated_normal").partition(": ")[2]
    end = math.erf(2 / 2**0.5)
    y = eval(text, {**HERE, "end": end, "shape": (20000,)}).numpy()
    assert abs(y).max() <= 2.0 and (abs(y) == 2.0).mean() < 1e-3
    assert abs(y.mean()) < 0.03 and abs(y.std() - 0.8796) < 0.02


def test_an_encoder_sees_both_ways_but_no_padding(oracle: Oracle) -> None:
    config = nn.GPTConfig(vocab=8, seq=8, d=8, layers=1, heads=2)
    there = ts.tensor(np.arange(5) < np.array([[4], [5]]))
    x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
    calls = {"TransformerEncoderLayer": ("block", nn.TransformerBlock(config), ts.tensor(x))}
    calls["TransformerEncoder"] = ("model", nn.GPT(config), ts.tensor([[1, 2, 3, 4, 5]] * 2))
    for name, (called, module, given) in calls.items():
        text = offered(name).partition("called as ")[2].partition(", with there")[0]
        found = []
        for last in (given[:, 4:], given[:, :1]):
            changed = ts.concat([given[:, :4], last], 1)
            values = {called: module, "x": changed, "ids": changed, "there": there}
            found.append(eval(text, values).numpy()[:, 0])
        assert (found[0][0] == found[1][0]).all() and abs(found[0][1] - found[1][1]).max() > 1e-6


def test_a_name_of_the_table_is_not_one_of_ours() -> None:
    """A row for an existing name would hide it."""
    for name in [n[1:] for n in NAMES if n.startswith(".")]:
        same = [m for m in (ts, nn, optim, dist, op) if name in m.__all__]
        assert not same or f".{name}" in offered(name) or name in ("grad", "init"), name
        assert name not in vars(ts.Tensor) or name in ("T", "astype", "requires_grad"), name


def test_an_argument_that_is_offered_is_one_of_a_function() -> None:
    here = {
        p
        for m in (ts, nn, optim, dist, op, ts.linalg, ts.checkpoint)
        for n in m.__all__
        if inspect.isfunction(f := getattr(m, n)) or inspect.isclass(f)
        if not (inspect.isclass(f) and issubclass(f, Exception))
        for call in (f, *filter(inspect.isfunction, [vars(f).get("__call__")]))
        for p in inspect.signature(call).parameters
    }
    here |= {p for f in (generate, sample) for p in inspect.signature(f).parameters}
    assert {n for names in WORDS["arguments"].values() for n in names} <= here


CALLED: list[tuple[str, dict[str, Any], str]] = [
    ("ts.scan", {"f": len, "init": 0.0, "xs": X}, "write body="),
    ("ts.scan", {"body": len, "init": 0.0, "xs": X}, "write carry="),
    ("optim.cosine", {"peak": 1.0, "total": 9, "eta_min": 0.1}, "write end="),
    ("optim.warmup_cosine", {"peak": 1.0, "num_warmup_steps": 2, "total": 9}, "write warmup="),
    ("optim.warmup_cosine", {"max_lr": 1.0, "warmup": 2, "total": 9}, "write peak="),
    ("optim.linear", {"start": 1.0, "end": 0.0, "total_iters": 9}, "write steps="),
    ("optim.linear", {"start": 1.0, "num_warmup_steps": 9},
     "write optim.warmup_linear(peak, warmup, total)"),
    ("optim.clip_by_global_norm", {"parameters": {}, "max_norm": 1.0}, "write grads="),
    ("ts.tril", {"x": X, "diagonal": 1}, "write k="),
    ("ts.split", {"x": X, "split_size_or_sections": 1}, "write sections="),
    ("ts.linspace", {"start": 0.0, "end": 1.0, "num": 5}, "write steps="),
    ("nn.cross_entropy", {"input": X, "labels": X}, "write logits="),
    ("ts.while_loop", {"cond_fun": len}, "write cond="),
    ("ts.while_loop", {"cond": len, "body_fun": len}, "write body="),
    ("ts.while_loop", {"cond": len, "body": len, "init_val": 0}, "write init="),
    ("ts.random.uniform", {"shape": (2,), "minval": 0.0}, "write low="),
    ("ts.random.uniform", {"shape": (2,), "maxval": 2.0}, "write high="),
    ("ts.linalg.solve_triangular", {"a": X, "b": X, "upper": True},
     "write lower=: it is the opposite"),
    ("ts.vmap", {"fn": len, "axis_name": "i"},
     "leave it out: no collective goes over its rows; reduce what it returns"),
    ("nn.attention", {"key_padding_mask": X}, "write mask=~key_padding_mask[:, None, None]: True"
     " is a key that is seen"),
    *(
        ("nn.GPTConfig", {name: 8}, fix) for name, fix in (
            ("tie_word_embeddings", "write tied="), ("head_dim", "write head_size="),
            ("hidden_act", "write activation="), ("hidden_size", "write d="),
            ("num_hidden_layers", "write layers="), ("resid_pdrop", "write dropout="),
            ("dim", "write d="),
            ("attn_pdrop", "0 is what it does; dropout= is of what attention and MLP give"),
            ("rope_theta", 'write positions="rotary", rope=nn.Rope(base=10000.0)'),
            ("rope_scaling", 'write positions="rotary", rope=nn.Rope(scaling=, factor=)'),
            ("sliding_window", "write windows=(4096,): those of the layers in turn, 0 for all"),
            ("bias", 'name the products that have one: biases=("qkv", "out", "mlp")'),
        )
    ),
    ("nn.GPT", {"vocab": 8},
     "sizes and choices are a config's, the first argument: nn.GPTConfig(d=256, heads=8)"),
    ("nn.TransformerBlock", {"d_model": 8},
     "sizes and choices are a config's, the first argument: nn.GPTConfig(d=256, heads=8)"),
    *(
        ("model", {"ids": IDS, name: IDS}, fix) for name, fix in (
            ("labels", "write model.loss(ids, labels): each label is the next token, as labels are"
             " not shifted here"),
            ("segment_ids", "write position_ids=: a document begins where they do not go on by"
             " one"),
            ("key_padding_mask", "write attention_mask=~key_padding_mask: 0 is where a token is"
             " padding"),
            ("mask", "write attention_mask="),
            ("use_cache", "nn.GPT.prefill makes a cache, and nn.GPT.decode takes it and one more"
             " token"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "given", "fix"), CALLED, ids=[f"{r[0]} {[*r[1]][-1]}" for r in CALLED]
)
def test_an_argument_of_others_leads_to_ours(
    name: str, given: dict[str, Any], fix: str, oracle: Oracle
) -> None:
    model = nn.GPT(nn.GPTConfig(vocab=8, seq=8, d=8, layers=1, heads=2))
    function = eval(name, {**HERE, "model": model})
    with pytest.raises(ts.UsageError, match=f"fix +: {re.escape(fix)}$"):
        function(**given)


@pytest.mark.parametrize("owner", [ts, nn, optim, dist, op, ts.linalg, ts.graph, ts.debug])
def test_a_public_module_offers_names(owner: Any) -> None:
    with pytest.raises(AttributeError, match=r"fix : write nn\.Linear$") as caught:
        owner.Dense  # noqa: B018
    assert type(caught.value) is ts.UnknownNameError
    with pytest.raises(AttributeError) as plain:
        owner._private  # noqa: B018
    assert type(plain.value) is AttributeError


@pytest.mark.parametrize("name", [n for n in ts.__all__ if inspect.ismodule(getattr(ts, n))])
def test_a_public_module_is_no_function(name: str) -> None:
    module = getattr(ts, name)
    if name in ("kernel", "op", "schedule"):  # decorators
        assert callable(module)
        return
    with pytest.raises(ts.UsageError, match=f"^{name}: a module is not a function"):
        module(ts.sum)


@pytest.mark.parametrize("name", ["EMA", "ema", "swa", "polyak", "update_ema"])
def test_averages_of_weights_lead_to_their_line(name: str) -> None:
    for owner in ts, nn, optim:
        with pytest.raises(ts.UnknownNameError, match="keep averages beside the weights: mean = "):
            getattr(owner, name)


@pytest.mark.parametrize(
    ("thing", "name", "says"),
    [
        (nn.GPTConfig(), "n_embd", "write d$"),
        (dist.Mesh.parse("dp=2"), "axis_names", "write axes$"),
        (dist.Mesh.parse("dp=2"), "devices", "write mesh.device_ids$"),
        (optim.LossScale(), "step", r"write optim\.apply_if_finite"),
        (optim.constant(0.1), "get_last_lr", r"write schedule\("),
    ],
)
def test_objects_of_public_classes_offer_names(thing: Any, name: str, says: str) -> None:
    with pytest.raises(ts.UnknownNameError, match=f"{name}'\n(.*\n)*.*fix : {says}"):
        getattr(thing, name)
    assert copy.deepcopy(thing) == thing


def test_objects_that_are_values_say_how_to_make_another() -> None:
    config, loss_scale, mesh = nn.GPTConfig(), optim.LossScale(), dist.Mesh.parse("dp=2")
    for thing, name, fix in (
        (config, "d", r"make another one: dataclasses\.replace\(x, d=\.\.\.\)"),
        (loss_scale, "step", "make another one"),
        (mesh, "axes", "make another one"),
    ):
        with pytest.raises(ts.UsageError, match=f"{name} cannot be set(.|\n)*fix : {fix}$"):
            setattr(thing, name, 3)


def test_a_package_that_is_not_imported_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ts, "train", raising=False)
    with pytest.raises(ts.UnknownNameError, match=r"from tessera\.train import"):
        ts.train  # noqa: B018


def test_a_module_within_a_public_one_is_no_function_either() -> None:
    with pytest.raises(ts.UsageError, match=r"write nn\.attention\(q, k, v\) of \[B, H, S, D\]"):
        nn.dot_product_attention(X, X, X)
    with pytest.raises(ts.UsageError, match=r"^base: a module is not a function"):
        optim.base()


def test_functions_are_found_where_pytorch_has_them() -> None:
    from tessera.nn import functional

    assert functional.cross_entropy is nn.cross_entropy and functional.gelu is nn.gelu
    assert not hasattr(functional, "Linear") and not hasattr(functional, "one_hot")


def test_what_asks_for_a_name_gets_an_answer(oracle: Oracle) -> None:
    x, layer, rule = ts.ones((2, 3)), nn.Linear(3, 2), optim.AdamW(0.1)
    for thing in (x, layer, rule, ts, nn):
        assert not hasattr(thing, "nothing_of_this_name") and getattr(thing, "cuda", 3) == 3
    assert pickle.loads(pickle.dumps([ts.sum, op.sum, dist.allreduce, nn.softmax])) == [
        ts.sum, op.sum, dist.all_reduce, nn.softmax,
    ]  # fmt: skip
    assert copy.deepcopy(rule) == rule and (copy.deepcopy(x).numpy() == x.numpy()).all()
    assert x.size == 6 and isinstance(x.size, int)


def test_functions_of_torch_do_not_take_tensors(oracle: Oracle) -> None:
    x = ts.ones((2, 3))
    with pytest.raises(ts.UsageError, match=r"torch\.exp does not compute with a Tensor"):
        torch.exp(x)
    with pytest.raises(ts.UsageError, match=r"torch\.add does not compute"):
        torch.add(torch.ones(2, 3), other=x)
    with pytest.raises(ts.UsageError, match=r"torch\.stack does not compute"):
        torch.stack([x, x])
    assert torch.as_tensor(x).shape == (2, 3)
