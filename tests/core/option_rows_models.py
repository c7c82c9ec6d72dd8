"""Rows of the option table: models, their layers, positions and experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import tessera as ts
from tessera import dist, graph, nn, op
from tests.core.option_rows import (
    EP,
    EXPERTS,
    HEADS,
    IDS,
    IMAGE,
    MESH,
    RNG,
    SQUARE,
    TOKENS,
    A,
    gpt,
    row,
)
from tests.core.option_rows_programs import layer, traced


def said(call: Callable[[], object]) -> str:
    """The text of the call's result, or of its error."""
    try:
        return str(call())
    except ts.TesseraError as error:
        return str(error)


# -- a GPT -----------------------------------------------------------------------------------------
ROTARY = {"positions": "rotary"}
row("tessera.nn.GPTConfig of attention", gpt, ROTARY, rope=nn.Rope(100.0), qk_norm=True,
    query_scale=0.25, attention_cap=2.0, logit_cap=2.0, embed_scale=True, windows=(2, 0),
    attention_implementation="sequences",
    block="parallel")  # fmt: skip
row("tessera.nn.GPTConfig of local layers", gpt, {**ROTARY, "windows": (2, 0)},
    local_rope=nn.Rope(100.0))  # fmt: skip
row(
    "tessera.nn.GPTConfig of experts",
    gpt,
    {"experts": 4},
    experts_per_token=1,
    capacity=None,
    aux_weight=0.5,
    router="sigmoid",
    shared_experts=1,
    normalize_gates=False,
    gate_scale=2.0,
)
row("tessera.nn.GPTConfig of balanced experts", gpt, {"experts": 4, "balance": "bias"},
    balance_rate=0.5)  # fmt: skip
row("tessera.nn.GPTConfig balanced", gpt, {"experts": 4}, balance="bias")
row(
    "tessera.nn.GPTConfig of experts in groups",
    gpt,
    {"experts": 4, "expert_groups": 4, "topk_groups": 2},
    expert_groups=2,
    topk_groups=3,
)


def gpt_on(**k: Any) -> Any:
    """The program of a GPT whose weights are placed on a mesh."""
    mesh = dist.Mesh(("cp", "tp", "sp"), shape={"cp": 2, "tp": 2, "sp": 2})
    config = nn.GPTConfig(vocab=8, seq=8, d=8, layers=1, heads=4, **k)
    model = dist.place(nn.GPT(config), dist.strategy("tensor_parallel"), mesh)
    return graph.trace(lambda model, ids: model(ids), model, np.zeros((2, 8), np.int32)).text


row("tessera.nn.GPTConfig on a mesh", gpt_on, context="ring", sequence_parallel="tp")
row("tessera.nn.GPTConfig of a split sequence", gpt_on, {"context": "ring"}, context="all_to_all",
    context_axis="sp")  # fmt: skip


def of_tokens(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that gives the program of `call` on a GPT and token ids."""
    config = nn.GPTConfig(vocab=8, seq=4, d=8, layers=1, heads=2)
    ids = np.array([[1, 2, 3, 4]], np.int32)
    return lambda **k: graph.trace(lambda model: call(model, ids, **k), nn.GPT(config)).text


PADDING = {"attention_mask": np.array([[0, 1, 1, 1]]), "position_ids": np.array([[0, 1, 0, 1]])}
row("tessera.nn.GPT.features", of_tokens(nn.GPT.features), **PADDING)
row("tessera.nn.GPT.loss", of_tokens(lambda model, ids, **k: model.loss(ids, ids, **k)), **PADDING)
row("tessera.nn.GPTConfig.make_norm", lambda **k: nn.GPTConfig(d=8).make_norm(**k), size=4)
row("tessera.nn.RMSNorm of Gemma", layer(nn.RMSNorm, 4), offset=True)


# -- rates and positions ---------------------------------------------------------------------------
def turned(**k: Any) -> Any:
    """The rotary frequencies of a head of size 8 for 64 tokens, and the amplitude."""
    made = nn.Rope(**k)
    return made.rates(8, 64), made.amplitude


ONES, TWOS = (1.0, 1.0, 1.0, 1.0), (2.0, 1.0, 1.0, 1.0)
row("tessera.nn.Rope", turned, base=100.0, partial=0.5, attention=2.0)
row("tessera.nn.Rope by a factor", turned, {"scaling": "linear", "factor": 2.0}, factor=4.0,
    scaling="dynamic")  # fmt: skip
row("tessera.nn.Rope of Llama", turned, {"scaling": "llama3", "factor": 2.0, "original": 64},
    low=2.0, high=8.0, original=16)  # fmt: skip
row("tessera.nn.Rope of yarn", turned, {"scaling": "yarn", "factor": 2.0, "original": 4096},
    truncate=False, low=16.0, high=4.0)  # fmt: skip
LONG = {"scaling": "longrope", "factor": 2.0, "original": 32, "short": ONES, "long": ONES}
row("tessera.nn.Rope of long sequences", turned, LONG, long=TWOS)
row("tessera.nn.Rope of short sequences", turned, {**LONG, "original": 64}, short=TWOS)
row("tessera.nn.Rope.rates",
    lambda **k: nn.Rope(scaling="dynamic", factor=2.0, original=32).rates(8, **k),
    length=64)  # fmt: skip
row("tessera.nn.rotary by rates", lambda **k: nn.rotary(HEADS, **k), scale=2.0,
    rates=np.array([1.0, 0.5], np.float32))  # fmt: skip

# -- attention, losses and statistics --------------------------------------------------------------
for name in ("attention", "flash_attention"):
    row(f"tessera.nn.{name} bounded", lambda name=name, **k: traced(
        lambda x: getattr(nn, name)(x, x, x, **k), HEADS), cap=2.0)  # fmt: skip
row("tessera.nn.linear_cross_entropy bounded", lambda **k: traced(
    lambda x: nn.linear_cross_entropy(x, SQUARE, IDS, **k), A[:2]), bias=A[0], cap=2.0)  # fmt: skip
CP = dist.Mesh(("cp", "sp"), shape={"cp": 2, "sp": 2})


def split_attention(attend: Callable[..., Any]) -> Callable[..., Any]:
    def run(**k: Any) -> str:
        x = ts.tensor(HEADS, mesh=CP, layout=f"[1, 2, 4@{k.get('axis', 'cp')}, 4]")
        return traced(lambda x: attend(x, x, x, **k), x)

    return run


for name in ("ring_attention", "all_to_all_attention"):
    row(f"tessera.nn.{name}", split_attention(getattr(nn, name)), axis="sp", causal=True,
        scale=2.0, bias=A[:2], mask=np.tri(4, dtype=bool))  # fmt: skip
RUNNING = ts.tensor(A[0]), ts.tensor(np.abs(A[1]))
row("tessera.nn.batch_norm", lambda **k: nn.batch_norm(IMAGE, RUNNING, **k), weight=A[0], bias=A[0],
    training=False, momentum=0.5, eps=0.5)  # fmt: skip

# -- experts ---------------------------------------------------------------------------------------
row("tessera.nn.MoE on a mesh",
    lambda **k: traced(lambda m, x: m(x), nn.MoE(8, 4, 4, **{"mesh": EP, **k}), TOKENS),
    transport={"pack_dtype": "bf16"}, deterministic=True, axis="dp",
    placement=nn.place_experts(4, [3, 2, 1, 0]))  # fmt: skip
row("tessera.nn.MoE by groups", layer(nn.MoE, 8, 4, 8, on=TOKENS),
    {"k": 2, "expert_groups": 2, "topk_groups": 1}, expert_groups=4, topk_groups=2,
    scale=2.0)  # fmt: skip


def balanced(**k: Any) -> Any:
    ts.seed(0)
    made = nn.MoE(8, 4, 4, **k)
    ts.jit(lambda made, x: made.routed(x)[0])(made, TOKENS)
    return made.state_dict()


row("tessera.nn.MoE that is balanced", balanced, {"balance": "bias", "router": "sigmoid"},
    rate=0.5, balance=None)  # fmt: skip
row("tessera.nn.MoE.routed",
    lambda **k: traced(lambda m, x: m.routed(x, **k)[0], nn.MoE(8, 4, 4, capacity=1.0), TOKENS),
    zigzag=2, mask=np.zeros(TOKENS.shape[:-1], bool))  # fmt: skip


def own_experts(**k: Any) -> Any:
    """The program of a function that owns its experts' weights, with their names."""
    made = ts.jit(lambda x: op.moe(op.moe(x, 4, **k), 4, **k))
    return made.plan(TOKENS).text


row("tessera.nn.moe with weights of its own", own_experts, hidden=4, name="shared")
row("tessera.nn.moe on a mesh",
    lambda **k: traced(lambda x: op.moe(x, EXPERTS, mesh=EP, **k), TOKENS), block=2,
    transport={"pack_dtype": "bf16"}, mask=np.zeros(TOKENS.shape[:-1], bool))  # fmt: skip
row("tessera.nn.moe by groups", lambda **k: op.moe(TOKENS, EXPERTS, router="sigmoid", k=1, **k),
    {"expert_groups": 2, "topk_groups": 1}, expert_groups=4, topk_groups=2, scale=2.0,
    network=lambda rows, w: rows @ w["up"] @ w["down"])  # fmt: skip
row("tessera.nn.moe_inspection", lambda **k: nn.moe_inspection(EXPERTS, **{"mesh": EP, **k}),
    {"x": TOKENS, "capacity": 1.0}, x=None, k=1, transport={"pack_dtype": "bf16"},
    mesh=MESH, capacity=2.0, groups=2, axis="dp")  # fmt: skip
COPIED = {n: np.concatenate([w, w]) if n != "router" else w for n, w in EXPERTS.items()}
row("tessera.nn.moe_inspection of replicas",
    lambda **k: said(lambda: nn.moe_inspection(COPIED, mesh=EP, **k)),
    placement=nn.place_experts(4, 4, 4))  # fmt: skip
LOAD = [4.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0]
row("tessera.nn.balance_experts", lambda **k: nn.balance_experts(LOAD, 4, **k),
    {"nodes": 2, "groups": 4}, replicas=4, nodes=1, groups=8)  # fmt: skip
row("tessera.nn.place_experts", lambda **k: nn.place_experts(4, 4, **k), replicas=4)
row("tessera.nn.rehash_experts", lambda **k: nn.rehash_experts(nn.place_experts(4, 4), 2, **k),
    replicas=2)  # fmt: skip
row("tessera.nn.rehash_experts of none", lambda **k: nn.rehash_experts(None, 2, **k),
    {"experts": 4}, experts=6)  # fmt: skip
row("tessera.nn.updated_expert_bias",
    lambda **k: nn.updated_expert_bias(ts.tensor(A[0]), ts.tensor(LOAD[:4]), **k),
    rate=0.5)  # fmt: skip


def blocks(**k: Any) -> Any:
    def run(x: Any) -> Any:
        return op.transformer_block(op.transformer_block(x, **k), **k)

    made = ts.jit(run)
    return made.plan(RNG.normal(size=(2, 4, 8)).astype(np.float32)).text


row("tessera.op.transformer_block", blocks, depth=2, heads=2, hidden=4, name="shared")


# -- modules ---------------------------------------------------------------------------------------
class Two(nn.Module):
    """A module with two names for one weight, and a buffer."""

    def __init__(self) -> None:
        self.first = nn.Linear(4, 4, bias=False)
        self.weight = self.first.weight
        self.mean = ts.zeros(4)
        self.first.mean = self.mean


for name, more in (
    ("named_modules", {}),
    ("named_buffers", {"remove_duplicate": False}),
    ("named_parameters", {"remove_duplicate": False}),
):
    row(f"tessera.nn.Module.{name}",
        lambda name=name, **k: [n for n, _ in getattr(Two(), name)(**k)],
        prefix="model.", **more)  # fmt: skip


def frozen(**k: Any) -> Any:
    made = nn.Linear(4, 4).requires_grad_(**k)
    return [w.requires_grad for w in made.parameters().values()]


row("tessera.nn.Module.requires_grad_", frozen, requires_grad=False)
row("tessera.nn.Module.train", lambda **k: nn.Dropout(0.5).train(**k).training, mode=False)


for name in ("load_parameters", "load_state_dict"):
    row(f"tessera.nn.Module.{name}",
        lambda name=name, **k: said(lambda: getattr(nn.Linear(4, 4), name)(
            {"weight": SQUARE}, **k)), strict=False)  # fmt: skip
row("tessera.nn.Parameter that rests", lambda **k: nn.Parameter(3, 4, **k).requires_grad,
    requires_grad=False)  # fmt: skip


def adapted(**k: Any) -> Any:
    """The result of two layers whose adapters have a B of ones."""
    ts.seed(0)
    model = nn.lora(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2, **k)
    for name, p in model.trainable_parameters().items():
        if name.endswith("_b"):
            p.put(ts.ones(p.shape))
    return model(A)


row("tessera.nn.lora", adapted, alpha=8.0, targets="*1")

# -- activations, losses and distances, the rest ---------------------------------------------------
row("tessera.nn.hardtanh", lambda **k: nn.hardtanh(A, **k), min_val=-0.1, max_val=0.1)
row("tessera.nn.glu", lambda **k: nn.glu(SQUARE, **k), dim=0)
SIZES = np.abs(SQUARE[:3]) / 4
for name in ("l1_loss", "huber_loss", "smooth_l1_loss", "binary_cross_entropy"):
    more = {"huber_loss": {"delta": 0.3}, "smooth_l1_loss": {"beta": 0.3},
            "binary_cross_entropy": {"weight": A[0]}}.get(name, {})  # fmt: skip
    row(f"tessera.nn.{name}", lambda name=name, **k: getattr(nn, name)(SIZES, SIZES[::-1], **k),
        reduction="sum", **more)  # fmt: skip
row("tessera.nn.nll_loss", lambda **k: nn.nll_loss(A[:2], IDS, **k), ignore_index=2,
    weight=np.arange(4, dtype=np.float32), reduction="sum")  # fmt: skip
row("tessera.nn.normalize", lambda **k: nn.normalize(A, **k), p=1.0, dim=0, eps=10.0)
row("tessera.nn.cosine_similarity", lambda **k: nn.cosine_similarity(A, SQUARE[:3], **k), dim=0,
    eps=10.0)  # fmt: skip
row("tessera.diff", lambda **k: ts.diff(A, **k), n=2, dim=0)
row("tessera.count_nonzero", lambda **k: ts.count_nonzero(A, **k), dim=0)
row("tessera.meshgrid", lambda **k: ts.meshgrid(A[0], A[1, :2], **k), indexing="ij")
ODD = np.array([np.nan, np.inf, -np.inf, 1.0], np.float32)
row("tessera.nan_to_num", lambda **k: ts.nan_to_num(ODD, **k), nan=1.0, posinf=2.0, neginf=3.0)
