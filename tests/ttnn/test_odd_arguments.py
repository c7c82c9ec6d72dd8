"""Odd values for each argument of each public function: a result, or an error of ours."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch

import tessera as ts
from tessera import ttnn

X = torch.arange(64.0).reshape(1, 1, 8, 8)
# They change the state of the process, or block for ever.
KEPT = {
    "close_mesh_device", "close_device", "CloseDevice", "SetDefaultDevice", "manage_config",
    "init_distributed_context",
    "distributed_context_barrier", "apply_device_delay", "create_mesh_device", "open_mesh_device",
    "open_device", "CreateDevice", "begin_trace_capture", "manual_seed", "set_fabric_config",
    "GetDefaultDevice", "distribute",
}  # fmt: skip
MODULES = {"": ttnn, "transformer.": ttnn.transformer, "experimental.": ttnn.experimental,
           "model_preprocessing.": ttnn.model_preprocessing}  # fmt: skip
CALLS = sorted(
    prefix + name
    for prefix, module in MODULES.items()
    for name in module.__all__
    if isinstance(getattr(module, name), FunctionType) and name not in KEPT
)
NUMBERS = {
    "dim": 3, "dim1": 2, "dim2": 3, "chunks": 2, "split_size": 4, "k": 2, "repeats": 2, "shifts": 1,
    "seed": 1, "initial_value": 0, "reset_value": 0, "cq_id": 0, "update_index": 0, "num_heads": 2,
    "fill_value": 1.0, "in_dim": 2, "out_dim": 3, "target_num_cores": 4, "chunk_start_idx": 0,
    "true_value": 1.0, "false_value": 0.0, "weight": 0.5, "file_name": "t.tensorbin",
    "sizes": (1, 1, 8, 8), "repeat_dims": (1, 1, 2, 1), "padding": ((0, 1), (0, 1)),
    "shape": (8, 8), "dims": (0, 1), "mesh_shape": (2, 4), "output_tensor_shape": (1, 1, 32, 32),
    "output_tensor_end": (0, 0, 3, 3), "distribution_shape": (2, 4), "name": "throw_exception",
    "value": True, "sender_coord": (0, 0), "receiver_coord": (0, 1), "reduction": "SUM",
    "delays": [[0] * 4] * 2, "normalized_shape": (8,), "starts": (0,) * 4, "ends": (1, 1, 2, 2),
}  # fmt: skip


@pytest.fixture
def known(device: ttnn.MeshDevice, pair: ttnn.MeshDevice) -> dict[str, Any]:
    """Returns a valid value for each argument name, and invalid ones."""
    t = ttnn.from_torch(X, layout=ttnn.TILE_LAYOUT, device=device)
    other = ttnn.from_torch(X, layout=ttnn.TILE_LAYOUT, device=pair)
    ids = ttnn.zeros((1, 1, 8, 8), ttnn.uint32, device=device)
    words = NUMBERS | {
        "mesh_device": device, "device": device, "tensors": [t, t], "index": ids, "indices": ids,
        "expert_indices_tensor": ids, "expert_mapping_tensor": ids, "expert_metadata_tensor": ids,
        "page_table": ids, "page_table_tensor": ids, "dtype": ttnn.float32,
        "layout": ttnn.TILE_LAYOUT, "memory_config": ttnn.DRAM_MEMORY_CONFIG,
        "host_tensor": t.cpu(), "grid_size": ttnn.CoreCoord(8, 8), "bias": X, "parameter": X,
        "config": ttnn.MeshMapperConfig([ttnn.PlacementReplicate()] * 2),
        "mapper": ttnn.ReplicateTensorToMesh(device), "weight": X[0, 0],
        "composer": ttnn.ConcatMeshToTensor(device, 0), "arch": ttnn.Arch.WORMHOLE_B0,
        "mesh_event": ttnn.record_event(device, 0), "tensor": t,
        "initialize_model": lambda: torch.nn.Linear(2, 2),
    }  # fmt: skip
    odd = [
        None, -1, 0, 99, 1.5, "x", [], (), object(), np.ones(2), ttnn.bfloat16, float("nan"),
        ttnn.CoreGrid(1, 1), other, True, [-1], [0, 0], {},
    ]  # fmt: skip
    return {"words": words, "tensor": t, "odd": odd}


def _calls(name: str, known: dict[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yields the arguments of each call: valid ones, with one replaced by an odd value. An argument
    takes every second of the values, its neighbours and other functions the rest."""
    prefix, _, short = name.rpartition(".")
    call = getattr(MODULES[prefix and prefix + "."], short)
    right: dict[str, Any] = {}
    places = inspect.signature(call).parameters.values()
    named = [p for p in places if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    for p in named:
        if p.default is p.empty:
            words = known["words"]
            is_tensor = "Tensor" in str(p.annotation) and p.name in ("weight", "tensor")
            right[p.name] = words[p.name] if p.name in words and not is_tensor else known["tensor"]
    extra = {"memory_config": 0, "dtype": 0, "output_tensor": 0, "cluster_axis": 0}
    for i, word in enumerate(dict.fromkeys([*(p.name for p in named), *extra]), len(name)):
        for value in known["odd"][i % 2 :: 2]:
            yield word, call, right | {word: value}


def _some(k: int, name: str) -> Any:
    return pytest.param(name, marks=[pytest.mark.long] if k % 10 else [])


@pytest.mark.parametrize("name", [_some(k, name) for k, name in enumerate(CALLS)])
def test_odd_arguments_are_answered(
    name: str, known: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    raw = []
    for word, call, arguments in _calls(name, known):
        try:
            with contextlib.redirect_stdout(None):
                call(**arguments)
        except ts.TesseraError as error:
            if "fix " not in str(error):
                raw.append((word, arguments[word], "no way out", str(error)))
        except Exception as error:
            raw.append((word, arguments[word], type(error).__name__, str(error)))
    assert not raw, raw


def test_the_callers_own_error_stays() -> None:
    def model() -> torch.nn.Module:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        ttnn.model_preprocessing.preprocess_model_parameters(initialize_model=model)


def test_the_argument_of_no_kind_is_named(known: dict[str, Any]) -> None:
    t = known["tensor"]
    for call, says in (
        (lambda: ttnn.chunk(t, 2, "x"), "chunk: dim cannot be 'x'"),
        (lambda: ttnn.concat([t, t], dim="x"), "concat: dim cannot be 'x'"),
        (lambda: ttnn.permute(t), "permute: missing a required argument: 'dims'"),
    ):
        with pytest.raises(ts.TesseraError, match=says):
            call()  # type: ignore[no-untyped-call]


ACCEPTED = {
    "a word as range": (lambda d, t: ttnn.record_event(d, 0, device_range="all"), "device_range"),
    "a number as sub-device": (lambda d, t: ttnn.record_event(d, 0, [0]), "sub_device_ids"),
    "and to wait": (lambda d, t: ttnn.synchronize_device(d, 0, ["a"]), "sub_device_ids"),
    "a word as buffer": (
        lambda d, t: ttnn.create_global_semaphore(d, ttnn.CoreRangeSet([]), 0, "L1"),
        "buffer_type",
    ),
    "a word as setting": (
        lambda d, t: ttnn.manage_config("enable_logging", "yes").__enter__(),
        "enable_logging cannot be 'yes'",
    ),
    "a keyword of no op": (
        lambda d, t: ttnn.to_memory_config(t, ttnn.L1_MEMORY_CONFIG, colour=1),
        "no argument 'colour'",
    ),
    "a keyword of shards": (
        lambda d, t: ttnn.from_host_shards([t.cpu()], (1, 1), colour=1),
        "no argument 'colour'",
    ),
    "a number as tile": (lambda d, t: ttnn.from_torch(X, tile=32), "tile cannot be 32"),
    "another mesh": (
        lambda d, t: ttnn.to_torch(
            t, device=d.create_submesh((1, 2)), mesh_composer=ttnn.ConcatMeshToTensor(d, 0)
        ),
        "the tensor is on another mesh",
    ),
    "another mesh's mapper": (
        lambda d, t: ttnn.from_torch(
            X, device=d.create_submesh((1, 2)), mesh_mapper=ttnn.ShardTensorToMesh(d, 3)
        ),
        "mesh",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_has_no_effect_is_still_asked(case: str, known: dict[str, Any]) -> None:
    call, says = ACCEPTED[case]
    with pytest.raises(ts.TesseraError, match=says):
        call(known["words"]["device"], known["tensor"])


def test_the_older_pad_and_full_into_a_tensor(known: dict[str, Any]) -> None:
    t, device = known["tensor"], known["words"]["device"]
    first = ttnn.to_torch(ttnn.get_device_tensors(ttnn.pad(t, [1, 2, 12, 9], [0, 1, 2, 0], 5))[0])
    assert torch.equal(first, torch.nn.functional.pad(X, (0, 1, 2, 2, 1, 0), value=5))
    into = ttnn.zeros((2, 3), ttnn.float32, device=device)
    ttnn.full((2, 3), 7.0, output_tensor=into)
    assert (ttnn.to_torch(ttnn.get_device_tensors(into)[0]) == 7).all()


METHODS = [
    "create_submesh", "create_submeshes", "get_device_id", "get_fabric_node_id", "reshape",
    "create_sub_device_manager", "load_sub_device_manager", "remove_sub_device_manager",
    "set_sub_device_stall_group",
]  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_devices_answer_odd_arguments(name: str, known: dict[str, Any]) -> None:
    for value in known["odd"]:
        with contextlib.suppress(ts.TesseraError):
            getattr(known["words"]["device"], name)(value)
