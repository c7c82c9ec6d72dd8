"""Options given as words, numbers or patterns: effective, or an error."""

from __future__ import annotations

import numpy as np

import tessera as ts
from tessera import dist, graph, nn, optim
from tessera.core import environment
from tests.mesh.silent.rows import row

# -- annotations -----------------------------------------------------------------------------------
FUSED, HEADS = ts.Tensor["D", "3*D_head*H"], ts.Tensor["H", "D_head", "D"]
ROWS, WIDTH = ts.Tensor["B"], ts.Tensor["D"]


@ts.function
def attend(qkv: FUSED, out: HEADS | None = None) -> WIDTH:
    return ts.sum(qkv, 1)


@row("a product of names that nothing else binds", error=ts.ShapeError, says="97, no multiple of 3")
def _() -> None:
    attend(ts.zeros((4, 96)))
    attend(ts.zeros((4, 97)))


@row("a product whose names are bound by a later argument", error=ts.ShapeError, says="not 108")
def _() -> None:
    attend(ts.zeros((4, 96)), ts.zeros((4, 8, 4)))
    attend(ts.zeros((4, 96)), ts.zeros((4, 9, 4)))


@row("a pair of results that is annotated", error=ts.ShapeError, says="result.1 : dim 0 ('B') is 3")
def _() -> None:
    @ts.function
    def halves(x: ROWS) -> tuple[ROWS, ROWS]:
        return x, x[1:]

    halves(ts.zeros(4))


@row("a function that forgets to return", error=ts.ShapeError, says="is a NoneType, not a tensor")
def _() -> None:
    @ts.function
    def lost(x: ROWS) -> ROWS:
        x + 1

    lost(ts.zeros(4))


# -- dtypes ----------------------------------------------------------------------------------------
for asked in ("uint16", np.int16, "int16"):

    @row(f"a tensor with dtype={asked!r}", error=ts.DTypeError, says="there is none: the nearest")
    def _(asked: object = asked) -> None:
        ts.tensor(np.ones(3), dtype=asked)


@row("x.to(np.float64)")
def _() -> None:
    assert ts.ones(3).to(np.float64).numpy().dtype == np.float64


@row("float64 data beyond f32", error=ts.DTypeError, says="do not fit f32")
def _() -> None:
    assert ts.tensor(np.array([1.0, np.inf, np.nan])).dtype is ts.f32
    ts.tensor(np.array([np.nan, np.finfo(np.float64).min]))


@row("numbers beyond f16", error=ts.DTypeError, says="full: 70000.0 does not fit f16")
def _() -> None:
    ts.full(3, 70000.0, ts.f16)


@row("NaN as an integer", error=ts.DTypeError, says="values from nan to nan do not fit i32")
def _() -> None:
    ts.tensor([1.0, np.nan], dtype=ts.int32)


# -- rules and patterns ----------------------------------------------------------------------------
TP = dist.Mesh(("tp",), devices=4)
SHAPES = {"enc.fc_in.weight": (64, 256), "enc.fc_in.bias": (256,), "enc.out.weight": (256, 64)}


def weights() -> dict[str, ts.Tensor]:
    return {name: dist.tensor(shape, name=name) for name, shape in SHAPES.items()}


@row("tensor parallelism whose rules know none of the weights", warns=ts.StrategyWarning,
     says="leaves 131,072 of 131,072 bytes of weights whole\n  enc.fc_in.weight")  # fmt: skip
def _() -> None:
    placed = dist.place(weights(), dist.strategy("tensor_parallel"), TP)
    assert placed["enc.out.weight"].layout == "[256, 64]"


@row("a placement rule with a typo", error=ts.StrategyError,
     says="the nearest names are enc.fc_in.weight")  # fmt: skip
def _() -> None:
    rules = [(r"fc_inn\.weight$", -1)]
    dist.place(weights(), dist.strategy("tensor_parallel", rules=rules), TP)


@row("one of two placement rules with a typo", warns=ts.StrategyWarning,
     says=r"'fc_inn\\.weight$' fits none of enc.fc_in.weight")  # fmt: skip
def _() -> None:
    rules = [(r"fc_inn\.weight$", -1), (r"out\.weight$", -2)]
    dist.place(weights(), dist.strategy("tensor_parallel", rules=rules), TP)


# `k\.weight$` fits tok.weight too.
PAIR = {"tok.weight": (64, 16), "k.weight": (16, 16)}
HOLDS = r"""does not follow each of its rules
  tok.weight fits 'k\\.weight$', dim 1, and 'tok\\.weight$', dim 0: the first holds
  'tok\\.weight$' never acts: a rule before it fits tok.weight
  let one rule fit each weight"""


def by_rules(*rules: tuple[str, int]) -> list[str]:
    """The layouts of the two weights under `rules`."""
    given = {name: dist.tensor(shape, name=name) for name, shape in PAIR.items()}
    placed = dist.place(given, dist.strategy("tensor_parallel", rules=rules), TP)
    return [w.layout for w in placed.values()]


@row("two rules that fit one weight, with different dims", warns=ts.StrategyWarning, says=HOLDS)
def _() -> None:
    assert by_rules((r"k\.weight$", 1), (r"tok\.weight$", 0)) == ["[64, 16@tp]", "[16, 16@tp]"]


@row("a rule for the rest, which fits a weight of another rule", warns=ts.StrategyWarning,
     says=r"'tok\\.weight$', dim 0, and 'weight$', dim 1: the first holds")  # fmt: skip
def _() -> None:
    assert by_rules((r"tok\.weight$", 0), (r"weight$", 1)) == ["[64@tp, 16]", "[16, 16@tp]"]


@row("a rule after one that fits all of its weights", warns=ts.StrategyWarning,
     says=r"'tok\\.weight$' never acts: a rule before it fits tok.weight")  # fmt: skip
def _() -> None:
    assert by_rules((r"weight$", 1), (r"tok\.weight$", -1)) == ["[64, 16@tp]", "[16, 16@tp]"]


@row("two rules for two weights")
def _() -> None:
    assert by_rules((r"^k\.weight$", 1), (r"tok\.weight$", 0)) == ["[64@tp, 16]", "[16, 16@tp]"]


@row("expert parallelism of a model without experts", warns=ts.StrategyWarning,
     says="of weights whole")  # fmt: skip
def _() -> None:
    dist.place(weights(), dist.strategy("expert_parallel", "tp"), TP)


@row("a training step under a strategy whose rules know none of its weights",
     warns=ts.StrategyWarning, says="fc.weight : f32[16, 64], 4,096 bytes on each")  # fmt: skip
def _() -> None:
    w = dist.tensor((16, 64), mesh=TP, name="fc.weight")

    @graph.training_step(module="m", strategy=dist.strategy("tensor_parallel"))
    def step(x: ts.Tensor) -> object:
        return graph.backward((x @ w).mean())

    step(ts.ones((4, 16)))
    step(ts.ones((8, 16)))


@row("weight decay for a pattern that is in no name", error=ts.UsageError, says="nothing decays")
def _() -> None:
    w = {"up": ts.ones((2, 2))}
    optim.AdamW(0.1, weight_decay=0.1, mask="weight$").init(w)


@row("a switch with a typo", warns=ts.EnvironmentVariableWarning,
     says="TESSERA_DETERMINSTIC : the nearest are TESSERA_DETERMINISTIC")  # fmt: skip
def _() -> None:
    environment.warn_of_unknown({"TESSERA_DETERMINSTIC": "1", "TESSERA_HEAP": "0", "TESS": "1"})


@row("rules for a strategy that goes by none", error=ts.StrategyError, says="goes by no rules")
def _() -> None:
    dist.strategy("data_parallel", rules=[(r"weight$", -1)])


@row("a kind of layout with a typo", error=ts.StrategyError, says="the kind cannot be 'weights'")
def _() -> None:
    dist.place(weights(), None, TP, kind="weights")


@row("gradients and parameters in each other's places", error=ts.UsageError,
     says="the gradients are parameters")  # fmt: skip
def _() -> None:
    params = {"w": nn.Parameter(2, 3)}
    grads, opt = {"w": ts.ones((2, 3))}, optim.SGD(0.1)
    opt.update(grads, params, opt.init(params))


@row("sizes where a norm takes a weight", error=ts.UsageError, says="no argument for sizes")
def _() -> None:
    ts.nn.layer_norm(ts.ones((4, 3, 2)), (3, 2))  # type: ignore[arg-type]


@row("classes in dim 1", error=ts.ShapeError, says="classes come last: x.permute(0, 2, 3, 1)")
def _() -> None:
    ts.nn.cross_entropy(ts.ones((2, 4, 3, 4)), np.zeros((2, 3, 4), np.int32))


@row("a cap of 0", error=ts.UsageError, says="give a number above 0")
def _() -> None:
    q = ts.ones((1, 1, 4, 4))
    ts.nn.attention(q, q, q, cap=0.0)
