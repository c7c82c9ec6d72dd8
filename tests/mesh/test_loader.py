"""Data loaders on a mesh: the layout of batches, and exact resumption."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn, optim
from tessera.data import create_dataloader, create_distributed_dataloader
from tessera.lang.value.engine import engine

S = 8
DATA = np.arange(64 * S + 1) % 251
CONFIG = {"data": DATA, "sequence_length": S, "batch_size": 2, "seed": 3}


@pytest.mark.parametrize(
    "mesh", ["dp=8", "dp=2 tp=4", "tp=4 dp=2", "tp=8", "dp=2 fsdp=2 tp=2", "dp=3"]
)
def test_each_device_gets_its_rows(mesh: str) -> None:
    where = dist.Mesh.parse(mesh)
    with create_distributed_dataloader(CONFIG, where) as loader:
        batch = next(loader)
    axes = [a for a in where.axes if a in ("dp", "fsdp")]
    ways = int(np.prod([where.sizes[a] for a in axes], dtype=int))
    with create_dataloader({**CONFIG, "batch_size": 2 * ways}) as one:
        want = next(one)
    for name in ("input_ids", "labels"):
        whole = want[name].numpy()
        assert batch[name].mesh == where
        np.testing.assert_array_equal(batch[name].numpy(), whole)
        for shard in batch[name].jax().addressable_shards:
            part = 0
            for axis in axes:
                part = part * where.sizes[axis] + where.coords(shard.device.id)[axis]
            np.testing.assert_array_equal(
                np.asarray(shard.data), whole[part * 2 : part * 2 + 2] if axes else whole
            )


def test_the_guide_s_data_parallel_batches() -> None:
    mesh = ts.mesh.auto()
    config = {"batch_size": 2, "sequence_length": 16}
    config["global_batch_size"] = config["batch_size"] * mesh.size
    config["batch_size_per_gpu"] = config["batch_size"]
    with create_distributed_dataloader(config, mesh) as loader:
        batch = next(loader)
    assert {name: str(t.type) for name, t in batch.items()} == {
        "input_ids": "i32[16@dp, 16]",
        "labels": "i32[16@dp, 16]",
    }


def test_a_run_that_is_taken_up_again_sees_the_same_losses(mesh: dist.Mesh) -> None:
    """Five steps; and two, then three more with a new loader on another mesh."""

    def losses(where: dist.Mesh, weight: ts.Tensor, loader: object, steps: int) -> list[float]:
        optimizer = optim.SGD(0.5)
        found = []
        for _ in range(steps):
            batch = next(loader)  # type: ignore[call-overload]
            logits = ts.take(weight, batch["input_ids"], 0)
            loss = nn.cross_entropy(logits, batch["labels"])
            grads = ts.grad(loss, {"w": weight})
            new, _ = optimizer.update({"w": weight}, grads, optimizer.init({"w": weight}))
            weight = new["w"]
            found.append(loss.item())
        weights.append(weight.numpy())
        return found

    weights: list[np.ndarray] = []
    config = {**CONFIG, "global_batch_size": 8, "packing": "documents", "eos_token": 250}
    start = np.zeros((251, 251), np.float32)
    with create_distributed_dataloader(config, mesh) as whole:
        want = losses(mesh, ts.tensor(start, mesh=mesh), whole, 5)
    with create_distributed_dataloader(config, mesh) as first:
        got = losses(mesh, ts.tensor(start, mesh=mesh), first, 2)
        state = first.state_dict()
    other = dist.Mesh.parse("dp=8")
    with create_distributed_dataloader(config, other) as second:
        second.load_state_dict(state)
        got += losses(other, ts.tensor(weights[-1], mesh=other), second, 3)
    np.testing.assert_allclose(got, want, 1e-5)
    assert len(set(want)) == 5


def test_a_process_reads_the_rows_of_all_places_that_its_devices_take() -> None:
    """One process reads the rows of all its devices, on a folded mesh too."""
    for onto in ("dp=4", "dp=2", "dp=1"):
        mesh = dist.Mesh.parse("dp=4").fold(onto=onto)
        x = ts.tensor(np.ones((7, 3)), mesh=mesh, layout="[7@dp, 3]")
        assert engine().local_row_indices(x.type).tolist() == [*range(7)]


def test_attention_can_be_kept_within_documents() -> None:
    """A mask from `segment_ids` makes a packed row equal to its separate documents."""
    ends = np.array([3, 8])
    source = ts.data.TokenSource([np.arange(8)], ends)
    loader = create_dataloader(
        {"data": source, "sequence_length": 8, "batch_size": 1, "packing": "documents"}
        | {"segment_ids": True, "shuffle": False}
    )
    batch = next(loader)
    loader.close()
    segment = batch["segment_ids"]
    mask = segment.reshape(1, 8, 1) == segment.reshape(1, 1, 8)
    want = np.zeros((8, 8), bool)
    want[:3, :3] = want[3:, 3:] = True
    np.testing.assert_array_equal(mask.numpy()[0], want)
    assert batch["positions"].numpy().tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
