"""What do arguments of functions of PyTorch, NumPy, JAX and optax mean here? The table that errors
read (`core/peers.py`)."""

from __future__ import annotations

from .peer_names import REMAT

ARGUMENTS: dict[str, tuple[str, ...]] = {
    "axis": ("dim", "dims"), "axes": ("dims", "dim"), "dim": ("axis", "dims", "d"),
    "dims": ("dim",), "keepdim": ("keepdims",), "keep_dims": ("keepdims",),
    "ddof": ("correction",), "unbiased": ("correction",),
    "input": ("x",), "inputs": ("x", "prompt"), "a": ("x",), "tensor": ("x",),
    "tensors": ("xs",), "arrays": ("xs",), "other": ("y",), "size": ("shape",),
    "fill_value": ("value",), "index": ("ids",), "indices": ("ids",), "src": ("updates",),
    "num_classes": ("count",), "num_samples": ("count",),
    "target": ("labels",), "targets": ("labels",),
    "num_embeddings": ("vocab",), "embedding_dim": ("d",),
    "embed_dim": ("d",), "normalized_shape": ("d",), "hidden_size": ("d",), "d_model": ("d",),
    "num_features": ("channels",), "num_channels": ("channels",), "num_groups": ("groups",),
    "use_bias": ("bias",), "features": ("out_features",), "num_heads": ("heads",),
    "n_heads": ("heads",), "num_layers": ("layers",), "n_layers": ("layers",),
    "vocab_size": ("vocab",), "is_causal": ("causal",), "attn_mask": ("mask", "attention_mask"),
    "attention_mask": ("mask",), "input_ids": ("ids", "prompt"),
    "mask": ("attention_mask",), "padding_mask": ("attention_mask", "mask"),
    "position_ids": ("positions",), "learning_rate": ("lr",),
    "step_size": ("lr",), "epsilon": ("eps",), "b1": ("betas",), "b2": ("betas",),
    "beta1": ("betas",), "beta2": ("betas",), "decay": ("weight_decay",), "wd": ("weight_decay",),
    "device": ("mesh",), "sharding": ("layout",), "placements": ("layout",),
    "device_mesh": ("mesh",), "donate_argnums": ("donate",), "donate_argnames": ("donate",),
    "argnums": ("weights",), "in_axes": ("in_dims",), "out_axes": ("out_dims",),
    "init_value": ("start", "value", "peak"), "end_value": ("end",),
    "peak_value": ("peak",), "warmup_steps": ("warmup",), "decay_steps": ("total", "steps"),
    "total_steps": ("total",), "T_max": ("total",), "transition_steps": ("steps",),
    "model": ("tensors",), "module": ("tensors",), "optimizer_state": ("optimizer", "state"),
    "opt_state": ("optimizer", "state"), "path": ("root",), "folder": ("root",),
    "monitor": ("metric",), "save_top_k": ("best",), "max_to_keep": ("last",),
    "greater_is_better": ("largest",), "keep_period": ("every",),
    "model_state": ("tensors",), "params": ("tensors",),
    "mesh_shape": ("shape",), "axis_names": ("axes",), "mesh_dim_names": ("axes",),
    "axis_name": ("axis",), "group": ("axis",), "reduce_op": ("op",),
    # of transformers and nanoGPT
    "n_embd": ("d",), "n_head": ("heads",), "num_attention_heads": ("heads",),
    "intermediate_size": ("hidden",), "n_inner": ("hidden",), "max_position_embeddings": ("seq",),
    "n_positions": ("seq",), "n_ctx": ("seq",), "block_size": ("seq",),
    "num_key_value_heads": ("kv_heads",), "num_hidden_layers": ("layers",),
    "top_k": ("k", "experts_per_token"), "k": ("experts_per_token",), "rate": ("balance_rate",),
    "num_experts_per_tok": ("experts_per_token", "k"), "num_local_experts": ("experts",),
    "n_routed_experts": ("experts",), "n_shared_experts": ("shared_experts", "shared"),
    "shared": ("shared_experts",), "norm_topk_prob": ("normalize_gates", "normalize"),
    "n_group": ("expert_groups",), "topk_group": ("topk_groups",), "scale": ("gate_scale",),
    "routed_scaling_factor": ("gate_scale", "scale"), "router_aux_loss_coef": ("aux_weight",),
    "capacity_factor": ("capacity",), "tie_word_embeddings": ("tied",), "head_dim": ("head_size",),
    "hidden_act": ("activation",), "activation_function": ("activation",),
    "ffn_dim": ("hidden",), "dim_feedforward": ("hidden",), "nhead": ("heads",),
    "max_seq_len": ("seq",), "seq_len": ("seq",), "context_length": ("seq",),
    "layer_norm_epsilon": ("norm_eps",), "resid_pdrop": ("dropout",),
    "theta": ("base",), "rope_theta": ("base",),
    "hidden_dropout": ("dropout",), "residual_dropout": ("dropout",),
    "max_new_tokens": ("tokens",), "max_tokens": ("tokens",), "eos_token_id": ("stop",),
    "stop_token_ids": ("stop",), "use_cache": ("cache",), "generator": ("seed", "draw"),
    "key": ("seed",), "rng": ("seed", "draw"),
    # of JAX's loops
    "init": ("carry",), "f": ("body", "fn"), "cond_fun": ("cond",), "body_fun": ("body",),
    "init_val": ("init",),
}  # fmt: skip
"""A peer's argument, and the names that it may have here."""

_CONFIG = "sizes and choices are a config's: nn.{}(nn.GPTConfig(d=256, heads=8))"
_OF_CONFIG = (
    "vocab",
    "vocab_size",
    "seq",
    "d",
    "d_model",
    "n_embd",
    "hidden_size",
    "layers",
    "num_layers",
    "n_layer",
    "num_hidden_layers",
    "heads",
    "num_heads",
    "n_head",
    "nhead",
    "num_attention_heads",
    "kv_heads",
    "hidden",
    "dim_feedforward",
    "norm",
    "activation",
    "positions",
    "tied",
    "dropout",
    "experts",
    "context",
)
_OF_TOKENS = ("GPT", "GPT.loss", "GPT.features", "TransformerBlock")
_DILATION = (
    "1 is what it does; for another take the maximum of shifted parts:"
    " ts.maximum(x[..., :-2], x[..., 2:])"
)
ARGUMENT_ADVICE: dict[str, str] = {
    "requires_grad": "leave it out: ts.grad takes any tensor; a module's weight is nn.Parameter(x)",
    "out": "use the result of the call", "inplace": "use the result of the call",
    "device": "leave it out: a mesh says where values lie",
    "dtype": "convert the result: .to(dtype)",
    "key_padding_mask": "write mask=~key_padding_mask[:, None, None]: True is a key that is seen",
    **dict.fromkeys(
        (f"{f}.{n}" for f in _OF_TOKENS for n in ("key_padding_mask", "src_key_padding_mask")),
        "write attention_mask=~key_padding_mask: 0 is where a token is padding",
    ),
    **dict.fromkeys(
        (f"{f}.{n}" for f in _OF_TOKENS for n in ("segment_ids", "document_ids", "cu_seqlens")),
        "write position_ids=: a document begins where they do not go on by one",
    ),
    **{f"{f}.{n}": _CONFIG.format(f) for f in ("GPT", "TransformerBlock") for n in _OF_CONFIG},
    "GPT.labels": "write model.loss(ids, labels): each label is the next token, as labels are not"
    " shifted here",
    **dict.fromkeys(
        ("GPT.use_cache", "GPT.past_key_values"),
        "nn.GPT.prefill makes a cache, and nn.GPT.decode takes it and one more token",
    ),
    "GPTConfig.transport": "say it of the function: schedule(comm_backend=, epoch=)",
    "GPTConfig.rope_theta": 'write positions="rotary", rope=nn.Rope(base=10000.0)',
    "GPTConfig.rope_scaling": 'write positions="rotary", rope=nn.Rope(scaling=, factor=)',
    "GPTConfig.sliding_window": "write windows=(4096,): those of the layers in turn, 0 for all",
    "GPTConfig.bias": 'name the products that have one: biases=("qkv", "out", "mlp")',
    "GPTConfig.attention_bias": 'name the products that have one: biases=("qkv", "out")',
    "GPTConfig.mlp_bias": 'name the products that have one: biases=("mlp",)',
    **dict.fromkeys(
        ("attn_pdrop", "attention_dropout", "embd_pdrop"),
        "0 is what it does; dropout= is of what attention and MLP give",
    ),
    "generate.do_sample": "leave it out: temperature=0 takes the likeliest token, above 0 it draws",
    "generate.top_p": "1 is what it does; top_k= bounds from how many it draws",
    "generate.num_beams": "1 is what it does; for beams, nn.GPT.prefill and nn.GPT.decode take"
    " several sequences at once",
    "generate.num_return_sequences": "1 is what it does; call it once for each, with another seed=",
    "generate.max_length": "write tokens=: it counts the new ones alone",
    **dict.fromkeys(
        ("generate.attention_mask", "generate.pad_token_id"),
        "leave it out: it continues one text, which has no padding",
    ),
    "enable_gqa": "leave it out: heads of k and v may be fewer than those of q",
    "dropout_p": "leave it out: attention has no dropout",
    "randomness": "draw random numbers outside of the function, and pass them",
    "chunk_size": "use ts.map_chunks, which takes blocks of rows",
    "spmd_axis_name": "leave it out: rows that are split over a mesh stay split",
    "generator": "use ts.seed", "key": "use ts.seed", "rng": "use ts.seed",
    "params": "leave it out: optimizer.init(params) makes the state",
    "foreach": "leave it out: a step is one program",
    "fused": "leave it out: a step is one program",
    "capturable": "leave it out: a step is one program",
    "static_argnums": "leave it out: what is not a tensor is static",
    "static_argnames": "leave it out: what is not a tensor is static",
    "strict": "only= names the part to load; what is not there is an error",
    "map_location": "leave it out: what it is given to fill says where values lie",
    "weights_only": "leave it out: nothing that is read is run",
    "pickle_module": "leave it out: nothing that is read is run",
    "overwrite": "leave it out: a tag that is there is replaced once the new one is whole",
    **dict.fromkeys(
        ("checkpoint_id", "storage_writer", "storage_reader"),
        'the tag comes first, then what is saved or filled: ("step_100", model, state, root=)',
    ),
    **dict.fromkeys(
        ("load.mesh", "load.layout", "load.shardings", "load.sharding", "load.restore_args"),
        "leave it out: the tensors that it is given to fill say where values lie",
    ),
    **dict.fromkeys(
        ("save.args", "save.item", "save.items", "save.extra", "save.metadata"),
        "tensors go into tensors= and optimizer=, all else that is JSON into state=",
    ),
    "save.force": "leave it out: a tag that is there is replaced once the new one is whole",
    "Tensor.numpy.force": "leave it out: it always gathers the value and copies it",
    "mesh": "a value comes to a mesh where it meets one: ts.tensor(x, mesh=mesh),"
    " dist.tensor(shape, mesh=mesh), or with mesh:",
    "length": "it is the length of xs; for turns without data give ts.arange(n)",
    **dict.fromkeys(
        ("grad.argnums", "grad.has_aux", "grad.argnum"),
        "of a function: value, grads = ts.value_and_grad(fn, argnums, has_aux)(*args)",
    ),
    **dict.fromkeys(("momentum", "nesterov"), "use optim.Momentum(lr, momentum=0.9, nesterov=)"),
    "maximize": "False is what it does; for True give it the gradients of -loss",
    "decoupled_weight_decay": "False is what optim.Adam does; for True use optim.AdamW",
    "track_running_stats": "True is what it does; False is not offered",
    "affine": "True is what it does; for False layer.freeze() keeps the weight at 1, the bias at 0",
    "max_norm": "None is what it does; a bound on rows is not offered",
    "size_average": "True is what it does; for False multiply by the number of elements",
    **dict.fromkeys(
        ("amsgrad", "differentiable", "centered", "dampening"),
        "it is off here; another rule comes from optax: optim.from_optax(tx)",
    ),
    "Mesh.*": 'give sizes by shape: dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4}), or'
    ' dist.Mesh.parse("dp=2 tp=4")',
    "repeat.axis": "write ts.repeat_interleave(x, repeats, dim=); x.repeat is PyTorch's",
    "repeat.dim": "write ts.repeat_interleave(x, repeats, dim=); x.repeat is PyTorch's",
    "load.state": "write optimizer= for the optimizer's; what save got as state= is .state of the"
    " result",
    "cross_entropy.reduction": "leave it out: it is the mean over the labels that count; times"
    " their number, with weight= the sum of their weights, it is the sum",
    "elementwise_affine": "leave it out: layer.freeze() keeps the weight at 1 and the bias at 0",
    "padding_idx": "leave it out: set the row to zero, and multiply by the mask of the ids",
    "count_include_pad": "True is what it does; for False divide by the same pool of ones:"
    " nn.avg_pool2d(x, k, s, p) / nn.avg_pool2d(ts.ones_like(x), k, s, p)",
    "ceil_mode": "False is what it does; for True add before what the last window lacks: for a"
    " maximum ts.pad(x, (0, 1, 0, 1), value=-math.inf), for a mean without padding zeros, and"
    " divide by the same pool of padded ones",
    "divisor_override": "multiply the mean by the size of the window over the divisor",
    "return_indices": "False is what it does; the places of the maxima are not offered",
    "max_pool1d.dilation": _DILATION, "max_pool2d.dilation": _DILATION,
    "scale_factor": "write size=: nn.interpolate(x, (2 * height, 2 * width))",
    "align_corners": "False is what it does; True is not offered",
    "antialias": "False is what it does; True is not offered",
    "padding_mode": "pad before: ts.pad(x, pad, padding_mode), and padding=0",
    **dict.fromkeys(
        ("create_dataloader.*", "create_distributed_dataloader.*"),
        'give one dict: {"data": ..., "batch_size": ..., "sequence_length": ...}',
    ),
    "shuffle": 'give it in the configuration: {"data": ..., "shuffle": False}',
    "num_workers": "leave it out: a thread prepares batches ahead",
    "copy": "leave it out: what is given is copied, and a tensor never changes",
    "memory_format": "leave it out: images lie with their channels last where that is faster",
    "non_blocking": "leave it out: the engine works behind the program",
    **dict.fromkeys(
        ("mode", "fullgraph", "dynamic", "backend"),
        "leave it out: a function is compiled whole, for the devices of its mesh",
    ),
    "assign": "leave it out: the values are written into the model's weights",
    "Keep.mode": "write largest=True for \"max\", and leave it out for \"min\"",
    "max_to_keep": "write keep=", "save_interval_steps": "call it after each so many steps",
    "epoch": "write step=, or state={\"epoch\": ...}", "blocking": "write async_io=",
    "directory": "write root=",
    "async_op": "leave it out: the schedule says what overlaps",
}  # fmt: skip
"""A peer's argument that has no counterpart, and a sentence on what to do."""

CALL_ADVICE: dict[str, str] = {
    "tessera.checkpoint()": f"to compute again in the backward pass: {REMAT}; it is for saving:"
    ' checkpoint.save("step_100", model, state)',
    "tessera.compile()": "write ts.jit",
    "tessera.mesh()": 'write dist.Mesh(("dp",), devices=8)',
    "tessera.dist()": 'write dist.Mesh(("dp",), devices=8)',
    "tessera.lang.random()": "write ts.random.uniform(shape) or ts.random.normal(shape)",
    "tessera.data()": "write ts.data.DataLoader(...)",
    "tessera.optim()": "write optim.AdamW(lr)",
    "tessera.train.generate()": "write from tessera.train.generate import generate",
    "tessera.graph()": "write ts.graph.trace(f, x)",
    "normal": "the shape is one tuple: ts.random.normal((2, 3)); mean= and std= go by name",
    "uniform": "the shape is one tuple: ts.random.uniform((2, 3)); low= and high= go by name",
    "where": "write ts.where(mask, x, y); where a mask is true: np.nonzero(mask.numpy())",
    "TransformerBlock": _CONFIG.format("TransformerBlock"),
    "transpose": "two dims are exchanged: x.transpose(0, 1); an order of all is x.permute(2, 0, 1)",
}
"""A function that is called with too few or too many arguments, and a sentence on what to do."""
