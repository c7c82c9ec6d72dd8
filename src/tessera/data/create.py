"""Loaders of tokens from configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.checks import divides
from ..core.errors import UsageError
from ..core.layout import shard_count
from ..core.mesh import Mesh
from ..lang.value.checks import mesh_or_none, needed_mesh
from .config import DataConfig, read_config
from .sources import TokenSource, open_source
from .split import Split, data_axes
from .token_loader import TokenLoader


def create_dataloader(config: Mapping[str, Any]) -> TokenLoader:
    """A loader of batches `{"input_ids": [B, S], "labels": [B, S]}`, int32; a label is the token
    after its input, or -100 (guide 4, 1.1).

    The data keys of `config`; other keys are ignored:

    | key | default | meaning |
    |---|---|---|
    | `batch_size` | required | rows of a batch, of all hosts together |
    | `sequence_length` | required | tokens of a row |
    | `data` | None | path, list of paths, array of tokens, `TokenSource`, `datasets.Dataset`; \
None: the standard library's source as bytes (257 tokens) |
    | `seed` | 0 | decides the order, with the epoch |
    | `shuffle` | True | False: in the order of the data |
    | `packing` | "concat" | one stream cut into rows; "documents": whole documents packed, \
no label across a joint; "padded": one document a row |
    | `sequence_buckets` | None | lengths below `sequence_length` that a batch of padded \
documents may have |
    | `segment_ids` | False | `segment_ids` and `positions` in each batch: documents of a row from \
1, 0 where it is empty |
    | `tokenizer` | None | for text: a function, an object with `encode`, or a saved \
tokenizer's path; None: bytes |
    | `eos_token` | the tokenizer's | what closes a document; put between rows of a table |
    | `pad_token` | `eos_token`, or 0 | what empty places hold |
    | `epochs` | None | None: one a `for`; a number: then it has ended; `math.inf`: no end |
    | `drop_last` | True | False: the last batch is filled up with rows whose labels are all -100 |
    | `prefetch` | 2 | batches made ahead by a thread; 0: none |
    | `validation_fraction` | 0 | the last part of the data, kept for `loader.validation()` |
    | `hosts` | (0, 1) | (which, of how many) processes: each makes its own rows alone |
    | `data_dtype` | None | of .bin files: "uint16", "uint32", "uint8" or "int32" |
    | `data_column` | None | of tables; None: input_ids, tokens, ids, text, content, or \
the only one |
    | `data_split` | "train" | of a folder or a `DatasetDict` with several splits |
    | `data_cache` | "runs/.cache" | where tokens made from tables are kept |

    Raises UsageError if a key is misspelt, is that of another library's loader or has no effect on
    these data, a value is not allowed, or the data cannot be read.
    """
    read = read_config(config)
    size = read.batch_size or read.global_batch_size
    if size is None:
        raise UsageError(
            "dataloader: the config has no batch_size",
            fix='say how many rows a batch has, e.g. "batch_size": 32',
        )
    if read.global_batch_size not in (None, size):
        raise UsageError(
            f"dataloader: batch_size={size} and global_batch_size={read.global_batch_size} are both"
            " the rows of a batch, over all hosts",
            fix="leave one of them out, or call create_distributed_dataloader(config, mesh)",
        )
    divides(
        "dataloader", size, read.hosts[1],
        "a batch of {count} rows does not divide over {parts} hosts",
        "give a batch_size that does", UsageError,
    )  # fmt: skip
    return TokenLoader(_opened(read, on_mesh=False), read, size, Split(hosts=read.hosts))


def create_distributed_dataloader(config: Mapping[str, Any], mesh: Mesh) -> TokenLoader:
    """A loader of global batches whose dim 0 is split over the data-parallel axes of `mesh` (guide
    4, 2.1).

    The keys are those of `create_dataloader`, and

    | key | default | meaning |
    |---|---|---|
    | `global_batch_size` | per GPU × devices that split the batch | rows of a global batch |
    | `batch_size_per_gpu` | `batch_size` | rows of one device |
    | `data_axes` | dp, fsdp, ddp, data | the mesh axes that split the batch |

    Each process reads only the rows that its devices hold. With `hosts=(which, of how many)`, for
    processes that are not connected, a batch is these rows as tensors without a mesh; devices
    belong to hosts in equal runs of their ids. Raises UsageError as `create_dataloader` does;
    MeshError if there is no mesh.
    """
    read = read_config(config)
    caller = "create_distributed_dataloader"
    where = needed_mesh(caller, mesh_or_none(caller, mesh))
    axes = data_axes(where, read.data_axes)
    size = _global_size(where, axes, read)
    split = Split(where, axes, read.hosts)
    return TokenLoader(_opened(read, on_mesh=True), read, size, split)


def _opened(read: DataConfig, on_mesh: bool) -> TokenSource:
    """The tokens that `read` names. Raises UsageError for a key without effect, and the errors of
    `open_source`."""
    how = read.reading
    source = open_source(read.data, how)
    filled = read.packing != "concat" or not read.drop_last or read.validation_fraction > 0
    mesh_only = "it is about a mesh: call create_distributed_dataloader(config, mesh)"
    why = {
        "data_dtype": None if "dtype" in how.read else "no .bin file is read",
        "data_column": None if "column" in how.read else "no table is read",
        "data_split": None if "split" in how.read else "no data with several splits are read",
        "tokenizer": None if "tokenizer" in how.read else "no table is read",
        "pad_token": None if filled else "the rows of one stream have no empty places",
        "data_axes": None if on_mesh else mesh_only,
        "batch_size_per_gpu": None if on_mesh else mesh_only,
    }
    idle = [(key, why[key]) for key in why if why[key] and getattr(read, key) is not None]
    if idle:
        raise UsageError(
            "dataloader: " + ", ".join(f"{key} has no effect" for key, _ in idle),
            rows=[*idle, ("data", source.name)],
            fix="leave " + ("it" if len(idle) == 1 else "them") + " out, or name other data",
        )
    return source


def _global_size(mesh: Mesh, axes: tuple[str, ...], config: DataConfig) -> int:
    """The number of rows of a batch over all processes. Raises UsageError if the config has none,
    or two that differ."""
    split = shard_count(axes, mesh.sizes)
    total, each = config.global_batch_size, config.batch_size_per_gpu
    # The guide counts every device of the mesh, including devices that share rows.
    if total and each and total not in (each * split, each * mesh.size):
        raise UsageError(
            f"dataloader: global_batch_size={total} is not batch_size_per_gpu={each} times "
            f"{split} devices",
            mesh=mesh.text(),
            split_over=", ".join(axes) or "nothing",
            fix="leave one of them out",
        )
    each = each or config.batch_size
    if not total and not each:
        raise UsageError(
            "dataloader: the config has no batch size",
            fix="give global_batch_size, or batch_size_per_gpu",
        )
    return total or (each or 0) * split
