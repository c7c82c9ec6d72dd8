"""What do keys about data of PyTorch, transformers, TensorFlow and Grain mean here? The
table that the loader's error reads."""

from __future__ import annotations

_AFTER = "is not offered: go over the batches, and change each there"
_ORDER = "is not offered: seed decides the order, and shuffle=False is that of the data"
_TAKE = "is not offered: give a part of the data"
_THREAD = "leave it out: a thread prepares batches ahead"
_HOSTS = 'write "hosts": (which, of how many)'
_BEGIN = "is not offered: put it into the data, or let the tokenizer do so"

PEER_KEYS: dict[str, str] = {
    **dict.fromkeys(("dataset", "train_dataset", "datasets"), "data"),
    **dict.fromkeys(("split", "train_split"), "data_split"),
    **dict.fromkeys(
        ("column", "text_column", "text_field", "dataset_text_field"), "data_column"
    ),
    **dict.fromkeys(("cache_dir", "cache_folder"), "data_cache"),
    **dict.fromkeys(("num_epochs", "num_train_epochs", "max_epochs", "n_epochs"), "epochs"),
    **dict.fromkeys(("eos_token_id", "eos_id", "eod_token", "eod_token_id"), "eos_token"),
    **dict.fromkeys(("pad_token_id", "pad_id", "padding_value"), "pad_token"),
    **dict.fromkeys(
        ("validation_split", "validation_size", "val_fraction", "val_split", "val_size",
         "valid_fraction", "eval_fraction", "test_size", "test_fraction"),
        "validation_fraction",
    ),
    **dict.fromkeys(("drop_remainder", "dataloader_drop_last", "drop_last_batch"), "drop_last"),
    **dict.fromkeys(("pack", "sample_packing", "pack_sequences"), "packing"),
    **dict.fromkeys(("prefetch_factor", "prefetch_size", "prefetch_batches"), "prefetch"),
    **dict.fromkeys(("buckets", "bucket_boundaries", "length_buckets"), "sequence_buckets"),
    # Where sequence_length is there too, they may be sizes of a model. ("rank" may be LoRA's; whose
    # processes have ranks says how many there are, too.)
    **dict.fromkeys(
        ("seq_len", "seq_length", "sequence_len", "max_seq_len", "max_seq_length", "max_length",
         "block_size", "context_length"),
        "sequence_length",
    ),
    "shuffle_seed": "seed",
    **dict.fromkeys(("process_index", "host_id", "shard_index", "shard_id"), _HOSTS),
    **dict.fromkeys(
        ("world_size", "process_count", "num_hosts", "num_shards", "num_replicas"), _HOSTS
    ),
    **dict.fromkeys(("collate_fn", "transform", "transforms", "map_fn"), _AFTER),
    **dict.fromkeys(("sampler", "batch_sampler", "generator"), _ORDER),
    **dict.fromkeys(
        ("shuffle_buffer_size", "shuffle_buffer", "buffer_size"),
        "leave it out: all rows of an epoch are shuffled",
    ),
    **dict.fromkeys(
        ("max_samples", "num_samples", "max_train_samples"), _TAKE
    ),
    **dict.fromkeys(
        ("skip", "skip_batches", "skip_samples", "start_sample"),
        "a loader goes on where another one stood: loader.load_state_dict(other.state_dict())",
    ),
    "streaming": "leave it out: what is read is mapped from files",
    **dict.fromkeys(
        ("num_workers", "dataloader_num_workers", "worker_init_fn", "persistent_workers",
         "multiprocessing_context"),
        _THREAD,
    ),
    "pin_memory": _THREAD,
    **dict.fromkeys(("bos_token", "bos_token_id", "add_bos", "bos_id"), _BEGIN),
}  # fmt: skip
"""A peer's key, and the key of ours that it is, or a sentence on what to do."""
