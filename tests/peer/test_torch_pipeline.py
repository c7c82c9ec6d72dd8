"""An imported model in the stages of a pipeline."""

from __future__ import annotations

import re

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
