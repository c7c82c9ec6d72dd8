"""Rows of the option table: data, its loaders, and the environment."""

from __future__ import annotations

import itertools
import json
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera.core import context, environment, limits
from tessera.data import TokenSource, create_dataloader, create_distributed_dataloader
from tests.core.option_rows import MESH, row, seen

# -- loaders ---------------------------------------------------------------------------------------
DOCUMENTS = np.array([*[5, 6, 7, 0, 8, 0, 9, 5, 4, 3, 2, 0], *range(1, 60), 0], np.int32)
LOADED: dict[str, Any] = {"data": DOCUMENTS, "batch_size": 4, "sequence_length": 4}


def batches(make: Any = create_dataloader, part: str = "", **config: Any) -> Any:
    """The first batches of a loader, and the number of threads that it started."""
    threads = threading.active_count()
    with make(config) as loader:
        found = [seen(next(loader))]
        threads = threading.active_count() - threads
        loops = 1 if config.get("epochs") else 3
        for _ in range(loops):
            found += [seen(batch) for batch in itertools.islice(loader, 12)]
        if config.get("validation_fraction"):
            found.append([seen(batch) for batch in loader.validation()])
        return found, loader.samples, threads


row("data", batches, LOADED, data=DOCUMENTS[::-1].copy(), seed=1, shuffle=False, batch_size=2,
    sequence_length=6, drop_last=False, validation_fraction=0.5, epochs=2, prefetch=0,
    hosts=(1, 2))  # fmt: skip
row("data of documents", batches, {**LOADED, "packing": "documents", "eos_token": 0},
    packing="padded", eos_token=5, segment_ids=True)  # fmt: skip
row("data of short documents", batches,
    {**LOADED, "packing": "padded", "eos_token": 0, "batch_size": 1}, sequence_buckets=(2,),
    pad_token=7)  # fmt: skip


def on_mesh(**config: Any) -> Any:
    return batches(lambda config: create_distributed_dataloader(config, MESH), **config)


GLOBAL = {"data": DOCUMENTS, "batch_size_per_gpu": 2, "sequence_length": 4}
row("data on a mesh", on_mesh, GLOBAL, batch_size_per_gpu=4, data_axes=("tp",))
row("data of a global batch", on_mesh,
    {"data": DOCUMENTS, "sequence_length": 4, "global_batch_size": 4},
    global_batch_size=8)  # fmt: skip


# -- files -----------------------------------------------------------------------------------------
def written(folder: Path) -> None:
    """Writes a table, a dataset of two splits and a file of numbers to `folder`."""
    table = pytest.importorskip("pyarrow").table
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [[f"{kind} text {i} " * 9 for i in range(9)] for kind in ("one", "another")]
    parquet.write_table(table({"text": texts[0], "more": texts[1]}), folder / "table.parquet")
    for split, rows in zip(("train", "test"), texts, strict=True):
        (folder / "set" / split).mkdir(parents=True)
        parquet.write_table(table({"text": rows}), folder / "set" / split / "rows.parquet")
        files = {"_data_files": [{"filename": "rows.parquet"}]}
        (folder / "set" / split / "state.json").write_text(json.dumps(files))
    (folder / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    DOCUMENTS.tofile(folder / "row.bin")


def read(file: str, **config: Any) -> Any:
    """The first tokens that a loader reads from a file, and the files in its folder afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        written(here)
        cache = here / config.pop("data_cache", "cache")
        loaded = batches(**{**LOADED, "data": here / file, "data_cache": cache, **config})
        return loaded[0][:4], sorted(p.name for p in here.iterdir())


row("data of a table", lambda **k: read("table.parquet", **k), data_column="more",
    tokenizer=lambda text: [len(word) for word in text.split()], data_cache="kept")  # fmt: skip
row("data of a dataset", lambda **k: read("set", **k), data_split="test")
row("data of a file", lambda **k: read("row.bin", **k), {"data_dtype": "int32"},
    data_dtype="uint16")  # fmt: skip


# -- sources ---------------------------------------------------------------------------------------
def source(**k: Any) -> Any:
    made = TokenSource([DOCUMENTS], **k)
    try:
        ends = made.document_ends().tolist()
    except ts.UsageError as error:
        return str(error)
    return ends, repr(made)


row("tessera.data.TokenSource", source, ends=np.array([9, DOCUMENTS.size]), eos=0, name="mine")


def loader(**k: Any) -> Any:
    given = create_dataloader({**LOADED, "validation_fraction": 0.5})
    made = ts.data.TokenLoader(given._source, given._config, 4, given._split, **k)
    with made:
        return seen(next(made))


row("tessera.data.TokenLoader", loader, part="validation")


def of_samples(**k: Any) -> Any:
    """The first batches of a data set, and the number of threads that make them."""
    threads = threading.active_count()
    with ts.data.DataLoader(np.arange(10), **k) as made:
        found = [seen(next(made))]
        threads = threading.active_count() - threads
        for _ in range(1 if k.get("epochs") else 3):
            found += [seen(batch) for batch in itertools.islice(made, 12)]
        return found, threads


row("tessera.data.DataLoader", of_samples, {"batch_size": 4, "shuffle": True}, batch_size=2,
    shuffle=False, seed=1, epochs=2, drop_last=True, collate_fn=lambda rows: {"x": rows},
    prefetch=0, mesh=MESH, hosts=(1, 2))  # fmt: skip
row("tessera.data.DataLoader on a mesh", of_samples, {"batch_size": 8, "mesh": MESH},
    data_axes=("tp",))  # fmt: skip


# -- the environment -------------------------------------------------------------------------------
def at_start(**variables: str) -> Any:
    """The settings of a program that starts with these environment variables."""
    with pytest.MonkeyPatch.context() as patch:
        for name in environment.ALL_VARIABLES:
            patch.delenv(name, raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        program = context._root.__wrapped__().settings.program
        return (
            str(limits._by_switches.__wrapped__()), program.determinism, program.comm_trace,
        )  # fmt: skip


row("environment of a program", at_start, TESSERA_COLLECTIVE_LIMIT="7", TESSERA_FLIGHT_RECORDS="9",
    TESSERA_COMM_TRACE="1", TESSERA_DETERMINISTIC="1")  # fmt: skip


def frames(**variables: str) -> int:
    """The number of frames in an error's traceback under these environment variables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(environment.TRACEBACK_FILTERING, raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        try:
            ts.ones((2, 3)) @ ts.ones((2, 3))
        except ts.ShapeError as error:
            return len(traceback.extract_tb(error.__traceback__))
    raise AssertionError


row("environment of errors", frames, TESSERA_TRACEBACK_FILTERING="off")


# -- looking ---------------------------------------------------------------------------------------
def stopped(**k: Any) -> Any:
    """The names passed to the hook, or a note that the debugger was opened."""
    found: list[Any] = []
    hook = k.get("hook")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.breakpoint", lambda: found.append("debugger"))
        args = [lambda here: found.append(sorted(here))] if hook else []
        ts.debug.breakpoint(*args, x=ts.tensor([1.0]))
    return found


row("tessera.debug.breakpoint", stopped, hook=True)
