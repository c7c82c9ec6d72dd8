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


def test_a_llama_is_cut_between_its_layers() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, use_cache=False,
    )  # fmt: skip
    peer = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 64, (8, 16))
    rows = {"input_ids": {0: torch.export.Dim("rows", min=2, max=64)}}
    model = ts.from_torch(peer, (), {"input_ids": ids}, dynamic_shapes=rows)
    mesh = dist.Mesh(("pp", "dp"), shape={"pp": 2, "dp": 2})
    data = dist.strategy("data_parallel")

    def loss(model: ts.nn.Module, ids: ts.Tensor, labels: ts.Tensor) -> ts.Tensor:
        logits = model(input_ids=ids)["logits"]
        return ts.nn.cross_entropy(logits.reshape(-1, 64), labels.reshape(-1))

    piped = pipeline.run(("pp",), "1F1B", 4, mesh=mesh)(loss)
    host = ids.numpy().astype(np.int32)
    batch = dist.place((host, host), data, mesh, kind="batch")
    dist.place(model, data, mesh)
    value, grads = ts.jit(ts.value_and_grad(piped))(model, *batch)
    expected = torch.nn.functional.cross_entropy(
        peer(input_ids=ids).logits.reshape(-1, 64), ids.reshape(-1)
    )
    expected.backward()
    assert abs(value.item() - expected.item()) < 1e-5
    for name, p in peer.named_parameters():
        found = grads[name].numpy()
        np.testing.assert_allclose(found, p.grad.numpy(), atol=1e-4 * float(p.grad.abs().max()))
    # The mask and the tables of positions cross as well, and yet both stages have two layers.
    shares = [int(x) for x in re.findall(r"(\d+)% of the slowest", piped.plan_text())]
    assert min(shares) > 75


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
