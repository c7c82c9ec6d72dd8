"""An imported model in the stages of a pipeline."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, pipeline

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


MESH = dist.Mesh(("pp", "dp"), shape={"pp": 2, "dp": 2})


@pytest.fixture(scope="module")
def llama() -> Any:
    """(PyTorch's model, ours, ids [8, 16])."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, use_cache=False,
    )  # fmt: skip
    peer = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 64, (8, 16))
    rows = {"input_ids": {0: torch.export.Dim("rows", min=2, max=64)}}
    model = ts.from_torch(peer, (), {"input_ids": ids}, dynamic_shapes=rows)
    return peer, dist.place(model, "data_parallel", MESH), ids


def loss(model: ts.nn.Module, ids: ts.Tensor, labels: ts.Tensor) -> ts.Tensor:
    logits = model(input_ids=ids)["logits"]
    return ts.nn.cross_entropy(logits.reshape(-1, 64), labels.reshape(-1))


def expected(peer: Any, ids: Any) -> Any:
    return torch.nn.functional.cross_entropy(
        peer(input_ids=ids).logits.reshape(-1, 64), ids.reshape(-1)
    )


def placed(ids: Any) -> Any:
    host = ids.numpy().astype(np.int32)
    return dist.place((host, host), "data_parallel", MESH, kind="batch")


def test_a_llama_is_cut_between_its_layers(llama: Any) -> None:
    peer, model, ids = llama
    piped = pipeline.run(("pp",), "1F1B", 4, mesh=MESH)(loss)
    value, grads = ts.jit(ts.value_and_grad(piped))(model, *placed(ids))
    want = expected(peer, ids)
    want.backward()
    assert abs(value.item() - want.item()) < 1e-5
    for name, p in peer.named_parameters():
        found = grads[name].numpy()
        np.testing.assert_allclose(found, p.grad.numpy(), atol=1e-4 * float(p.grad.abs().max()))
    # The mask and the tables of positions cross as well, and yet both stages have two layers.
    shares = [int(x) for x in re.findall(r"(\d+)% of the slowest", piped.plan_text())]
    assert min(shares) > 75


def test_stages_begin_at_named_modules(llama: Any) -> None:
    peer, model, ids = llama
    uneven = pipeline.run(("pp",), "GPipe", 4, mesh=MESH, cut_at="layers.1")(loss)
    value = ts.jit(uneven)(model, *placed(ids))
    assert abs(value.item() - expected(peer, ids).item()) < 1e-5
    assert uneven.program is not None
    layers = [
        {m for n in part for m in re.findall(r"layers\.\d", n.scope)}
        for part in uneven.program.division.nodes
    ]
    assert layers == [{"layers.0"}, {"layers.1", "layers.2", "layers.3"}]
    wrong = pipeline.run(("pp",), "GPipe", 4, mesh=MESH, cut_at=("layers.2", "layers.1"))(loss)
    with pytest.raises(ts.UsageError, match=r"no module 'layers\.1' is called after"):
        ts.jit(wrong)(model, *placed(ids))


def test_graphs_have_the_paths_of_modules() -> None:
    peer = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.GELU(), torch.nn.Linear(4, 2))
    )
    model = ts.from_torch(peer, (torch.zeros(2, 4),))
    graph = ts.jit(lambda model, x: model(x)).plan(model, ts.zeros((2, 4))).text
    scopes = {s for s in ("sequential/0", "sequential/1.0", "sequential/1.1") if s in graph}
    assert len(scopes) == 3, graph


class Positioned(torch.nn.Module):
    """Layers after an embedding of positions, whose numbers are a buffer of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = torch.nn.Embedding(32, 8), torch.nn.Embedding(6, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("position_ids", torch.arange(6)[None])

    def forward(self, ids: Any) -> Any:
        x = self.words(ids) + self.places(self.position_ids)
        for layer in self.layers:
            x = x + layer(x).relu()
        return x


def test_buffers_of_a_module_are_not_the_batch() -> None:
    peer, ids = Positioned(), torch.randint(0, 32, (4, 6))
    free = {"ids": {0: torch.export.Dim.AUTO}}
    model = ts.from_torch(peer, (ids,), dynamic_shapes=free)
    mesh = dist.Mesh(("pp",), shape={"pp": 2})
    piped = pipeline.run(("pp",), "1F1B", 4, mesh=mesh)(lambda m, x: ts.mean(m(x) ** 2))
    batch = ts.tensor(ids.numpy().astype(np.int32))
    value, grads = ts.jit(ts.value_and_grad(piped))(model, batch)
    want = peer(ids).square().mean()
    want.backward()
    assert abs(value.item() - want.item()) < 1e-5
    for name, p in peer.named_parameters():
        np.testing.assert_allclose(grads[name].numpy(), p.grad.numpy(), atol=1e-5)
