"""Modules of PyTorch as modules of ours: results, gradients, state, modes, meshes and errors."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as TF
from torch import nn

import tessera as ts
from tessera import dist
from tessera.interop.aten.higher_order import _checkpoint
from tests.messages import Golden

MESH = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 2})


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    ts.seed(0)


def host(t: torch.Tensor) -> np.ndarray[Any, Any]:
    return t.detach().float().numpy()


def near(got: ts.Tensor, want: torch.Tensor, limit: float = 1e-4) -> None:
    x, y = got.to(ts.f32).numpy(), host(want)
    assert x.shape == y.shape
    assert np.abs(x - y).max(initial=0.0) <= limit * max(1.0, np.abs(y).max(initial=0.0))


def weighted(y: ts.Tensor, w: Any) -> ts.Tensor:
    return ts.sum(y * w)


def compare(
    module: nn.Module, x: torch.Tensor, pick: Callable[[Any], Any] = lambda y: y
) -> ts.nn.Module:
    """Holds results, gradients and buffers of a recorded step against PyTorch's."""
    ours = ts.from_torch(module, (x,))
    want = pick(module(x))
    w = torch.rand_like(want)
    (want * w).sum().backward()

    @ts.jit
    def step(model: Any, x: Any, w: Any) -> Any:
        loss = lambda m: weighted(pick(m(x)), w)  # noqa: E731
        return ts.value_and_grad(loss)(model)

    value, grads = step(ours, x.numpy(), w.numpy())
    near(value, (want * w).sum())
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
    assert grads.keys() == trained.keys()
    for name, p in trained.items():
        near(grads[name], p.grad)
    assert list(ours.state_dict()) == list(module.state_dict()) or set(ours.state_dict()) == set(
        module.state_dict()
    )
    for name, t in module.state_dict().items():
        near(ours.state_dict()[name], t)
    return ours


# -- layers ---------------------------------------------------------------------------------------
def test_an_mlp_at_once_and_recorded() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3), nn.LogSoftmax(-1))
    x = torch.randn(5, 4)
    ours = compare(module, x)
    near(ours(x.numpy()), module(x))
    near(ours(x), module(x))  # a tensor of PyTorch is an array
    assert ours[0].weight.shape == (8, 4)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4 * 9, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = TF.max_pool2d(TF.relu(self.bn(self.conv(x))), 3, 2, 1)
        y = TF.adaptive_avg_pool2d(TF.silu(self.norm(self.up(y))), (3, 3))
        return self.head(y.flatten(1))


def test_batch_norm_trains_and_then_infers() -> None:
    module, x = ConvNet(), torch.randn(4, 3, 8, 8)
    ours = compare(module, x)
    assert ours.bn.num_batches_tracked.item() == 1
    assert ours.training
    ours.eval(), module.eval()
    near(ours(x.numpy()), module(x))
    near(ours.bn.running_mean, module.bn.running_mean)
    ours.train(), module.train()
    near(ours(x.numpy()), module(x))
    assert ours.bn.num_batches_tracked.item() == 2


def test_lstm() -> None:
    compare(nn.LSTM(4, 6, num_layers=2, batch_first=True), torch.randn(2, 3, 4), lambda y: y[0])


def test_a_transformer_layer() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    compare(layer, torch.randn(2, 5, 8))


def test_dropout_of_both_modes() -> None:
    module = nn.Sequential(nn.Dropout(0.25), nn.Identity())
    x = torch.ones(64, 64)
    ours = ts.from_torch(module, (x,))
    y = ours(x.numpy()).numpy()
    assert set(np.unique(y)) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs((y == 0).mean() - 0.25) < 0.03
    ts.seed(0)
    again = ours(x.numpy()).numpy()
    assert (again == y).all()
    assert (ours.eval()(x.numpy()).numpy() == 1).all()
    assert module.training  # the export of the other mode has changed nothing


# -- gradients that stop --------------------------------------------------------------------------
class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            fixed = self.b(x) * 2
        hard = self.a(x)
        through = hard + (hard.round() - hard).detach()
        return through * fixed + self.b(x)


def test_detach_and_no_grad_stop_gradients() -> None:
    compare(Detached(), torch.randn(3, 4))


class Pieces(nn.Module):
    """Functions whose gradients are PyTorch's choice, at 0, where pieces meet and at a constant."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = torch.sigmoid(x * 100)
        apart = TF.binary_cross_entropy(share, (x > 1).float(), reduction="none")
        meet = [TF.relu, TF.relu6, TF.hardtanh, TF.elu, TF.celu, TF.hardsigmoid, TF.hardswish]
        spread = torch.zeros_like(x) * x
        return torch.stack([apart, torch.sinc(x), *(f(x) for f in meet), spread.std() + x])


def test_gradients_where_pieces_meet() -> None:
    x = torch.tensor([0.0, 1.0, -1.0, 3.0, -3.0, 6.0], requires_grad=True)
    ours = ts.from_torch(Pieces(), (x.detach(),))
    value = Pieces()(x)
    w = torch.rand_like(value)
    (value * w).sum().backward()
    got = ts.value_and_grad(lambda x: weighted(ours(x), w.numpy()))(ts.tensor(host(x)))[1]
    near(got, x.grad)


# -- state ----------------------------------------------------------------------------------------
class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, padding_idx=0)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.full((4,), 2.0), requires_grad=False)
        self.register_buffer("shift", torch.arange(4.0), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids) * self.scale + self.shift + torch.tensor([1.0, 0, 0, 1]))


def test_tied_frozen_and_unsaved_tensors() -> None:
    module = Tied()
    ids = torch.tensor([[0, 3, 6], [5, 3, 0]])
    ours = compare(module, ids)
    assert ours.head.weight is ours.table.weight
    assert not ours.scale.requires_grad
    assert [n for n, _ in ours.named_buffers()] == ["shift"]
    assert "shift" not in ours.state_dict()


def test_state_goes_both_ways() -> None:
    module, x = ConvNet(), torch.randn(2, 3, 8, 8)
    ours = ts.from_torch(module, (x,))
    other = ConvNet()
    assert ours.load_state_dict(other.state_dict()) == ([], [])
    near(ours(x.numpy()), other(x))
    back = ConvNet()
    back.load_state_dict(ts.interop.to_torch(ours.state_dict()))
    for name, t in back.state_dict().items():
        assert torch.allclose(t, other.state_dict()[name], atol=1e-6), name


def test_tied_state_of_pytorch_loads() -> None:
    ours, other = ts.from_torch(Tied(), (torch.tensor([[1]]),)), Tied()
    ours.load_state_dict(other.state_dict())
    near(ours.head.weight, other.table.weight)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_stay(kind: torch.dtype) -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)).to(kind)
    x = torch.randn(3, 4).to(kind)
    ours = ts.from_torch(module, (x,))
    y = ours(ts.tensor(host(x)).to(ours[0].weight.dtype))
    assert y.dtype is ours[0].weight.dtype and y.dtype.bytes == 2
    near(y, module(x), 3e-2)
    assert ts.interop.to_torch(ours.state_dict())["0.weight"].dtype is kind


# -- arguments and results ------------------------------------------------------------------------
class Many(nn.Module):
    def forward(
        self, x: torch.Tensor, pair: Any, *, scale: float = 2.0, mask: Any = None
    ) -> dict[str, Any]:
        y = x * scale + pair["a"] - pair["b"][0]
        y = y if mask is None else y.masked_fill(mask, 0.0)
        return {"y": y, "more": (y.sum(), [y.argmax(-1), None])}


def test_arguments_by_name_and_results_in_their_structure() -> None:
    x, a, b = torch.randn(2, 3), torch.randn(3), torch.randn(2, 3)
    mask = torch.tensor([[True, False, True]])
    ours = ts.from_torch(Many(), (x, {"a": a, "b": [b]}), {"mask": mask})
    given = {"a": a.numpy(), "b": [b.numpy()]}
    got = ours(x.numpy(), mask=mask.numpy(), pair=given, scale=2.0)
    want = Many()(x, {"a": a, "b": [b]}, mask=mask)
    near(got["y"], want["y"])
    near(got["more"][0], want["more"][0])
    assert got["more"][1][0].numpy().tolist() == want["more"][1][0].tolist()
    assert got["more"][1][1] is None


class Half(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        z = x.reshape(rows * 2, -1).sum(1) + torch.arange(rows * 2)
        return z[:rows] * y.mean()


def test_sizes_that_vary() -> None:
    rows = torch.export.Dim("rows", min=2, max=16)
    shapes = {"x": {0: rows}, "y": {0: rows}}
    ours = ts.from_torch(Half(), (torch.randn(4, 6), torch.randn(4)), dynamic_shapes=shapes)
    run = ts.jit(lambda x, y: ours(x, y))
    for n in (4, 7):
        x, y = torch.randn(n, 6), torch.randn(n)
        near(run(x.numpy(), y.numpy()), Half()(x, y))
    with pytest.raises(ts.ShapeError, match="from 2 to 16"):
        ours(np.zeros((20, 6), np.float32), np.zeros(20, np.float32))
    with pytest.raises(ts.ShapeError, match="is dim 0 of x with 4 elements"):
        ours(np.zeros((4, 6), np.float32), np.zeros(5, np.float32))


# -- ops on functions -----------------------------------------------------------------------------
class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos() * 2, (x,))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_cond(sign: float) -> None:
    x = (torch.rand(3) * sign).requires_grad_()
    ours = ts.from_torch(Branches(), (x,))
    run = ts.jit(lambda x: (y := ours(x), ts.grad(ts.sum(y * y), x)))
    y, slope = run(ts.tensor(x.detach().numpy()))
    want = Branches()(x)
    (want * want).sum().backward()
    near(y, want)
    near(slope, x.grad)
    assert "cond" in {n.op for n in run.graph.nodes}  # one side runs


class Loop(nn.Module):
    def forward(self, n: torch.Tensor, x: torch.Tensor) -> Any:
        from torch._higher_order_ops.while_loop import while_loop

        return while_loop(lambda n, x: n > 0, lambda n, x: (n - 1, x * 2 + 1), (n, x))


def test_while_loop() -> None:
    n, x = torch.tensor(3), torch.ones(2)
    got = ts.from_torch(Loop(), (n, x))(n.numpy(), x.numpy())
    assert got[0].item() == 0 and got[1].numpy().tolist() == [15.0, 15.0]


class Scan(nn.Module):
    def forward(self, start: torch.Tensor, xs: torch.Tensor) -> Any:
        from torch._higher_order_ops.scan import scan

        return scan(lambda c, x: (c * 0.5 + x, c.clone()), start, xs)


def test_scan() -> None:
    start, xs = torch.ones(2), torch.randn(4, 2)
    got, want = ts.from_torch(Scan(), (start, xs))(start.numpy(), xs.numpy()), Scan()(start, xs)
    near(got[0], want[0])
    near(got[1], want[1])


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            y = checkpoint(self.a, x, use_reentrant=False)
        return y.tanh()


def test_checkpoint_and_autocast() -> None:
    compare(Checkpointed(), torch.randn(3, 4))


def test_a_checkpoint_is_computed_again() -> None:
    def f(x: ts.Tensor) -> Any:  # torch.export writes checkpoints out; programs of Dynamo have them
        (y,) = _checkpoint(lambda xs: [ts.exp(ts.sin(xs[0]))], x)
        return ts.grad(ts.sum(y), x)

    run = ts.jit(f)
    x = torch.tensor([0.1, -0.7], requires_grad=True)
    slope = run(ts.tensor(x.detach().numpy()))
    torch.exp(torch.sin(x)).sum().backward()
    near(slope, x.grad)
    assert "after" in {n.op for n in run.graph.nodes}


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.a(x)


def test_autocast_is_in_the_program() -> None:
    module, x = Narrow(), torch.randn(3, 4)
    y = ts.from_torch(module, (x,))(x.numpy())
    assert y.dtype is ts.bf16
    near(y, module(x), 1e-2)


# -- models of transformers -----------------------------------------------------------------------
def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    import transformers as tf

    config = tf.GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=32, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return tf.GPT2LMHeadModel(config), {"use_cache": False}


def llama() -> tuple[nn.Module, dict[str, Any]]:
    import transformers as tf

    config = tf.LlamaConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, intermediate_size=64, max_position_embeddings=32,
    )  # fmt: skip
    return tf.LlamaForCausalLM(config), {"use_cache": False}


def bert() -> tuple[nn.Module, dict[str, Any]]:
    import transformers as tf

    config = tf.BertConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=64,
        intermediate_size=64, max_position_embeddings=32, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return tf.BertForMaskedLM(config), {}


def mixtral() -> tuple[nn.Module, dict[str, Any]]:
    import transformers as tf

    config = tf.MixtralConfig(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, intermediate_size=48, num_local_experts=4, max_position_embeddings=32,
    )  # fmt: skip
    return tf.MixtralForCausalLM(config), {"use_cache": False}


COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "query", "key", "value",
           "intermediate.dense")  # fmt: skip
ROWS = ("o_proj", "down_proj", "output.dense")


def layout(name: str, shape: tuple[int, ...]) -> str | None:
    """A weight split over tp by its name; [in, out] in GPT-2, [out, in] elsewhere."""
    stem = name.removesuffix(".weight")
    dim = None
    if stem.endswith(("c_attn", "c_fc")) or stem.endswith(ROWS):
        dim = 1
    elif stem.endswith("c_proj") or stem.endswith(COLUMNS):
        dim = 0
    if dim is None or stem == name or len(shape) != 2:
        return None
    return f"[{', '.join(f'{n}@tp' if d == dim else str(n) for d, n in enumerate(shape))}]"


@pytest.mark.parametrize("family", [gpt2, llama, bert, mixtral], ids=lambda f: f.__name__)
def test_a_model_of_transformers(family: Callable[[], tuple[nn.Module, dict[str, Any]]]) -> None:
    pytest.importorskip("transformers")
    module, options = family()
    module.train()
    ids = torch.randint(1, 64, (4, 8))
    ours = ts.from_torch(module, (), {"input_ids": ids, **options})
    want = module(input_ids=ids, **options).logits
    w = torch.randn_like(want)
    (want * w).sum().backward()
    assert set(ours.state_dict()) == set(module.state_dict())

    @ts.jit
    def step(model: Any, ids: Any, w: Any) -> Any:
        def loss(m: Any) -> Any:
            out = m(input_ids=ids, **options)
            return weighted(out.logits, w), out["logits"]

        return ts.value_and_grad(loss, has_aux=True)(model)

    def check(ids: Any, w: Any) -> dict[str, ts.Tensor]:
        (_, logits), grads = step(ours, ids, w)
        near(logits, want)
        for name, p in module.named_parameters():
            near(grads[name], torch.zeros_like(p) if p.grad is None else p.grad)
        return grads

    check(ids.numpy(), w.numpy())
    if family is mixtral:
        return
    dist.place(ours, dist.strategy("data_parallel", "dp"), MESH)
    split = []
    for name, p in ours.parameters().items():
        if (text := layout(name, p.shape)) is not None:
            p.put(dist.redistribute(p.now(), text))
            split.append(name)
    assert len(split) >= 8
    rows = ts.tensor(ids.numpy(), mesh=MESH, layout="[4@dp, 8]")
    grads = check(rows, ts.tensor(w.numpy(), mesh=MESH, layout="[4@dp, 8, 64]"))
    assert "tp" in str(grads[split[0]].type)


def test_training_follows_pytorch() -> None:
    module, x = ConvNet(), torch.randn(4, 3, 8, 8)
    labels = torch.tensor([0, 1, 2, 3])
    ours = ts.from_torch(module, (x,))
    optimizer = ts.optim.SGD(0.1)
    state = optimizer.init(ours)

    @ts.jit
    def step(model: Any, state: Any, x: Any, labels: Any) -> Any:
        loss, grads = ts.value_and_grad(lambda m: ts.nn.cross_entropy(m(x), labels))(model)
        weights, new = optimizer.update(model, grads, state)
        model.load_parameters(weights)
        return loss, new

    peer = torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(3):
        peer.zero_grad()
        want = TF.cross_entropy(module(x), labels)
        want.backward()
        peer.step()
        loss, state = step(ours, state, x.numpy(), labels.numpy())
        near(loss, want)
    near(ours.bn.running_var, module.bn.running_var)


# -- what is refused ------------------------------------------------------------------------------
class Unknown(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.lgamma(x) + torch.digamma(x)


X = np.ones((2, 4), np.float32)
MISTAKES: dict[str, Callable[[], Any]] = {
    "missing rules": lambda: ts.from_torch(Unknown(), (torch.ones(2),)),
    "no module": lambda: ts.from_torch(lambda x: x, (torch.ones(2),)),
    "another shape": lambda: linear()(np.ones((3, 4), np.float32)),
    "another dtype": lambda: linear()(np.ones((2, 4), np.int32)),
    "no arguments": lambda: linear()(),
    "an argument more": lambda: many()(X, {"a": X, "b": [X]}, mask=X),
    "another structure": lambda: many()(X, {"a": X, "b": X}),
    "another number": lambda: many()(X, {"a": X, "b": [X]}, scale=3.0),
    "a part": lambda: ts.from_torch(nn.Sequential(nn.Linear(4, 2)), (torch.ones(2, 4),))[0](X),
    "mask": lambda: ts.from_torch(Masked(), (torch.ones(3),)),
    "name": lambda: ts.from_torch(Named(), (torch.ones(3),)),
    "strided": lambda: ts.from_torch(Strided(), (torch.ones(3, 3),)),
    "bicubic": lambda: ts.from_torch(Sampled(), (torch.ones(1, 1, 4, 4),))(
        np.ones((1, 1, 4, 4), np.float32)
    ),
    "an array for a number": lambda: ts.from_torch(Times(), (torch.ones(2, 4), 2))(X, X),
    "changed": lambda: ts.from_torch(Changes(), (torch.ones(3),)),
}


def linear() -> Any:
    return ts.from_torch(nn.Linear(4, 2), (torch.ones(2, 4),))


def many() -> Any:
    x = torch.ones(2, 4)
    return ts.from_torch(Many(), (x, {"a": x, "b": [x]}))


class Masked(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_complex(torch.stack([x, x], -1)).real


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.freeze = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.freeze(x)


class Times(nn.Module):
    def forward(self, x: torch.Tensor, k: Any) -> torch.Tensor:
        return x * k


class Strided(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.t().as_strided((2, 2), (1, 2))


class Sampled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grid = torch.zeros(1, 2, 2, 2, device=x.device)
        return TF.grid_sample(x, grid, mode="bicubic", align_corners=False)


class Changes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(1)


@pytest.mark.parametrize("name", MISTAKES)
def test_errors(name: str, golden: Golden) -> None:
    with pytest.raises(ts.TesseraError) as caught:
        MISTAKES[name]()
    golden(caught.value)


def test_a_rule_of_the_user() -> None:
    x = torch.tensor([0.3, 0.7])

    class Erfcx(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.special.erfcx(x)

    with pytest.raises(ts.UsageError, match="erfcx"):
        ts.from_torch(Erfcx(), (x,))

    @ts.interop.rule("aten.special_erfcx.default")
    def erfcx(x: ts.Tensor) -> ts.Tensor:
        return ts.exp(x * x) * ts.erfc(x)

    try:
        near(ts.from_torch(Erfcx(), (x,))(x.numpy()), torch.special.erfcx(x))
    finally:
        from tessera.interop.aten import ATEN

        del ATEN.table["aten.special_erfcx.default"]


def test_torch_is_not_needed_until_then() -> None:
    code = (
        "import sys\nsys.modules['torch'] = None\nimport tessera as ts\nts.interop.rule\n"
        "try:\n    ts.from_torch(1)\nexcept ts.UsageError as e:\n    print(e)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert "the `torch` library is not installed" in said and "[torch]" in said


def test_a_copy_is_another_model() -> None:
    ours = linear()
    other = copy.deepcopy(ours)
    other.weight.put(other.weight.now() * 2.0)
    assert not np.allclose(ours(X).numpy(), other(X).numpy())
