"""Training on sixteen processes, with the bits of one."""

from __future__ import annotations

from pathlib import Path

from tests.cases import LONG
from tests.procs.launched import launch
from tests.quickly import FLAGS

STEP = """
import hashlib, os
import numpy as np
import tessera as ts
from tessera import dist, nn, optim
mesh = dist.Mesh.parse("dp=16")
if dist.process_count() == 1:
    mesh = mesh.fold("dp=1")
plan = dist.strategy("zero_redundancy_optimizer", stage=3)
ts.seed(7)
config = nn.GPTConfig(32, 8, 16, 2, 2, dropout=0.1, stacked=False)
model = dist.place(nn.GPT(config), plan, mesh)
optimizer = optim.AdamW(1e-2)
state = optimizer.init(model.parameters(), plan)

@ts.jit
def step(model, state, ids, labels):
    loss = model.loss(ids, labels)
    weights = model.parameters()
    weights, new = optimizer.update(weights, ts.grad(loss, weights, layout=plan), state)
    model.load_parameters(weights)
    state.update(new)
    return loss

ids = np.random.default_rng(0).integers(0, 32, (16, 9)).astype(np.int32)
batch = dist.place((ids[:, :-1], ids[:, 1:]), plan, mesh, kind="batch")
losses = [step(model, state, *batch).item() for _ in range(2)]
found = hashlib.sha256()
for name, w in sorted(model.parameters().items()):
    found.update(dist.to_host(w).tobytes())
print("end", losses[0].hex(), losses[1].hex(), found.hexdigest())
"""


@LONG
def test_sixteen_processes_train_to_the_bits_of_one(tmp_path: Path) -> None:
    (tmp_path / "step.py").write_text(STEP)
    said = {}
    for size in (1, 16):
        done = launch("-n", size, "step.py", folder=tmp_path, TESSERA_DETERMINISTIC="1",
                      XLA_FLAGS=FLAGS, TESSERA_JOIN_LIMIT="600", limit_s=900)  # fmt: skip
        assert done.code == 0, done.err
        said[size] = [x for x in done.out.splitlines() if x.startswith("end ")]
    assert said[16] == said[1] * 16 and len(said[1]) == 1
