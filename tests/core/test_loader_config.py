"""Loader configurations: all errors at once, with corrections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera.core.mesh import Mesh
from tessera.core.peers import words
from tessera.data import (
    create_dataloader,
    create_distributed_dataloader,
)
from tessera.data.config import KEYS, LEGAL
from tessera.train.config import ALIASES
from tessera.train.config import KEYS as TRAINING_KEYS
from tests.core.loaders import S, loader, samples, text_of

pytestmark = pytest.mark.usefixtures("oracle")


# ---- configurations ----------------------------------------------------------------------------
def test_the_guide_s_configuration_is_enough() -> None:
    config = {
        "learning_rate": 1e-4, "weight_decay": 0.01, "gradient_clip_norm": 1.0,
        "warmup_steps": 1000, "total_steps": 100000, "batch_size": 2, "sequence_length": 64,
        "mixed_precision": True, "gradient_checkpointing": True,
    }  # fmt: skip
    one, other = (next(create_dataloader(config)) for _ in range(2))
    assert list(one) == ["input_ids", "labels"]
    assert [str(t.type) for t in one.values()] == ["i32[2, 64]"] * 2
    assert (one["input_ids"].numpy() == other["input_ids"].numpy()).all()
    assert bytes(one["input_ids"].numpy()[0].astype(np.uint8)).isascii()


def test_bad_configurations_name_all_that_is_wrong() -> None:
    assert text_of(lambda: loader(shufle=True, sequence_len=4, data_colum="x")) == (
        "dataloader: unknown data keys 'shufle', 'data_colum'\n"
        "shufle : is 'shuffle' meant?\ndata_colum : is 'data_column' meant?\n"
        "fix : the data keys are " + ", ".join(KEYS)
    )
    assert text_of(lambda: loader(prefetch=-1, packing="tight", hosts=(2, 2))) == (
        "dataloader: packing cannot be 'tight', prefetch cannot be -1, hosts cannot be (2, 2)\n"
        'fix : packing is "concat", "documents" or "padded"; prefetch is a whole number from 0 '
        "to 2147483647; "
        "hosts is a pair (which, of how many), e.g. (0, 1)"
    )
    assert text_of(lambda: create_dataloader({"batch_size": 4})).startswith(
        "dataloader: the config has no sequence_length"
    )


@pytest.mark.parametrize(("key", "way_out"), words()["loader"].items())
def test_a_key_of_another_loader_says_what_to_write(key: str, way_out: str) -> None:
    """The key would have no effect. Keys of a model's sizes may stand beside the loader's."""
    key = key.removeprefix(".")
    config = {"data": samples(20), "batch_size": 4, "sequence_length": S, key: 3}
    if way_out == "sequence_length":
        assert len(create_dataloader(config)) == 5
        del config["sequence_length"]
    said = f"is {way_out!r} meant?" if way_out in KEYS else way_out
    assert text_of(lambda: create_dataloader(config)).startswith(
        f"dataloader: unknown data keys {key!r}\n{key} : {said}\nfix : "
    )
    assert key not in TRAINING_KEYS and key not in ALIASES
    assert text_of(lambda: create_dataloader({"sequence_length": 4})).startswith(
        "dataloader: the config has no batch_size"
    )
    assert text_of(lambda: loader(hosts=(0, 3))).startswith(
        "dataloader: a batch of 4 rows does not divide over 3 hosts"
    )
    assert text_of(lambda: loader(3)) == (
        "dataloader: the training data hold 3 rows of 4 tokens, a batch takes 4\n"
        "data : TokenSource('array', 13 tokens)\n"
        "fix : take more data, a smaller batch or shorter rows, or say drop_last=False"
    )


def test_keys_that_the_data_do_not_read_are_errors(tmp_path: Path) -> None:
    np.arange(40, dtype=np.uint16).tofile(tmp_path / "row.bin")
    np.save(tmp_path / "row.npy", np.arange(40))
    unread = {"data_dtype": "uint16", "data_column": "text", "data_split": "train",
              "tokenizer": list, "pad_token": 0}  # fmt: skip
    both = {"data_axes": ("dp",), "batch_size_per_gpu": 4}
    assert text_of(lambda: loader(**unread, **both)) == (
        "dataloader: data_dtype has no effect, data_column has no effect, data_split has no effect,"
        " tokenizer has no effect, pad_token has no effect, data_axes has no effect,"
        " batch_size_per_gpu has no effect\n"
        "data_dtype : no .bin file is read\ndata_column : no table is read\n"
        "data_split : no data with several splits are read\ntokenizer : no table is read\n"
        "pad_token : the rows of one stream have no empty places\n"
        "data_axes : it is about a mesh: call create_distributed_dataloader(config, mesh)\n"
        "batch_size_per_gpu : it is about a mesh: call create_distributed_dataloader(config, mesh)"
        "\ndata : array\nfix : leave them out, or name other data"
    )
    file, config = tmp_path / "row.bin", {"batch_size": 4, "sequence_length": S}
    for key, value in unread.items():
        with pytest.raises(ts.UsageError, match=f"{key} has no effect"):
            create_distributed_dataloader(
                {**config, "data": tmp_path / "row.npy", key: value}, Mesh.parse("dp=2")
            )
    wide = {**config, "data": file, "data_dtype": "uint16"}
    assert create_dataloader(wide).samples == 9
    assert create_dataloader({**wide, "data": [np.arange(8), file]}).samples == 11
    for more in ({"packing": "padded", "eos_token": 3}, {"drop_last": False},
                 {"validation_fraction": 0.5, "batch_size": 1}):  # fmt: skip
        loader(**{"pad_token": 0, **more})
    assert text_of(lambda: loader(global_batch_size=8)).startswith(
        "dataloader: batch_size=4 and global_batch_size=8 are both the rows of a batch"
    )
    assert next(loader(global_batch_size=4))["labels"].shape == (4, S)


NONSENSE: tuple[Any, ...] = (
    None, "abc", object(), 1.5, -3, 10**12, float("nan"), 1 + 2j, True, [], [1, "x"], {}, (2, 3),
    np.array(["a", "b"]), np.array([], np.float32), np.zeros((2, 0)), np.array([None, 1]), [None],
    lambda *a: 0,
)  # fmt: skip


@pytest.mark.parametrize("key", [*LEGAL, "data", "tokenizer"])
def test_nonsense_is_answered_in_our_own_words(key: str) -> None:
    mesh = Mesh.parse("dp=2")
    for bad in NONSENSE:
        config = {"data": samples(9), "batch_size": 2, "sequence_length": 4, "prefetch": 0}
        for make in (create_dataloader, lambda c: create_distributed_dataloader(c, mesh)):
            try:
                data = make({**config, key: bad})
                next(data)
            except ts.TesseraError as error:
                assert "  fix" in str(error)
            except StopIteration:
                pytest.fail(f"{key}={bad!r}: no batch")
    for bad in NONSENSE:
        for call in (create_dataloader, lambda c: create_distributed_dataloader(c, c)):
            with pytest.raises(ts.TesseraError, match=r"config cannot be|sequence_length"):
                call(bad)
