"""What do names of PyTorch, NumPy, JAX and optax mean here? The table that errors read.

Names that exist in another public module, or as a method, need no row (`core/peers.py`).
"""

from __future__ import annotations

INSTEAD: dict[str, str] = {
    # shapes
    "view": "x.reshape(...)", "view_as": "x.reshape(y.shape)", "reshape_as": "x.reshape(y.shape)",
    "contiguous": "x itself", "clone": "x itself", "copy": "x itself", "dim": "x.ndim",
    "numel": "x.size", "nelement": "x.size", "itemsize": "x.dtype.itemsize",
    "mT": "x.transpose()", "mH": "x.transpose()", "t": "x.T", "H": "x.T",
    "swapaxes": "x.transpose(a, b)", "swapdims": "x.transpose(a, b)",
    "movedim": "x.permute(...)", "moveaxis": "x.permute(...)",
    "ravel": "x.flatten()", "expand": "ts.broadcast_to(x, shape)",
    "expand_as": "ts.broadcast_to(x, y.shape)", "expand_dims": "x.unsqueeze(dim)",
    "newaxis": "None",
    "cat": "ts.concat", "concatenate": "ts.concat", "hstack": "ts.concat", "vstack": "ts.concat",
    "chunk": "ts.split", "array_split": "ts.split", "tensor_split": "ts.split",
    "unbind": "list(x)", "index_select": "ts.take", "take_along_axis": "ts.gather",
    "take_along_dim": "ts.gather", "index_add": "ts.scatter_add",
    "masked_fill": "ts.where(mask, value, x)", "select": "ts.take",
    # numbers
    "tolist": "x.numpy().tolist()", "pow": "x ** y", "power": "x ** y", "square": "x ** 2",
    "add": "x + y", "sub": "x - y", "subtract": "x - y", "mul": "x * y", "multiply": "x * y",
    "div": "x / y", "divide": "x / y", "true_divide": "x / y", "floor_divide": "x // y",
    "remainder": "x % y", "neg": "-x", "negative": "-x", "reciprocal": "1.0 / x",
    "eq": "x == y", "ne": "x != y", "lt": "x < y", "le": "x <= y", "gt": "x > y", "ge": "x >= y",
    "logical_and": "x & y", "logical_or": "x | y", "logical_not": "~x", "logical_xor": "x ^ y",
    "mm": "x @ y", "bmm": "x @ y", "dot": "x @ y", "mv": "x @ y", "amax": "ts.max",
    "amin": "ts.min", "norm": "ts.linalg.norm", "absolute": "ts.abs", "clamp": "ts.clip",
    "addmm": "b + x @ y",
    "allclose": "np.allclose(x.numpy(), y.numpy())", 
    "equal": "np.array_equal(x.numpy(), y.numpy())",
    # dtypes
    "astype": "x.to(dtype)", "type_as": "x.to(y.dtype)", "half": "x.to(ts.f16)",
    "float": "x.to(ts.f32)", "bfloat16": "ts.bf16", "int": "x.to(ts.int32)", "float32": "ts.f32",
    "float16": "ts.f16", "float8_e4m3fn": "ts.fp8_e4m3", "float8_e5m2": "ts.fp8_e5m2",
    # making them
    "array": "ts.tensor", "asarray": "ts.tensor", "as_tensor": "ts.tensor",
    "from_numpy": "ts.tensor", "new_tensor": "ts.tensor", "empty": "ts.zeros",
    "empty_like": "ts.zeros_like", "new_zeros": "ts.zeros", "new_ones": "ts.ones",
    "new_full": "ts.full", "randint": "ts.random.randint",
    "multinomial": "ts.random.multinomial", "categorical": "ts.random.multinomial",
    "randn": "ts.random.normal",
    "rand": "ts.random.uniform", "manual_seed": "ts.seed", "PRNGKey": "ts.seed",
    # gradients and programs
    "inference_mode": "ts.no_grad", "compile": "ts.jit", "custom_vjp": "ts.custom_gradient",
    "fori_loop": "ts.scan", "pmap": "ts.distribute", "shard_map": "ts.distribute",
    "remat": "dist.strategy", "block_until_ready": "x.item()",
    "value_and_gradient": "ts.value_and_grad", 
    # layers, losses
    "forward": "model(x)", "ReLU": "nn.relu", "GELU": "nn.gelu", "SiLU": "nn.silu",
    "Softmax": "nn.softmax", "Softplus": "nn.softplus", "ELU": "nn.elu",
    "LeakyReLU": "nn.leaky_relu", "MSELoss": "nn.mse_loss", "KLDivLoss": "nn.kl_div",
    "BCEWithLogitsLoss": "nn.binary_cross_entropy_with_logits",
    "sigmoid_binary_cross_entropy": "nn.binary_cross_entropy_with_logits",
    "CrossEntropyLoss": "nn.cross_entropy", "Dense": "nn.Linear",
    "BatchNorm1d": "nn.BatchNorm", "BatchNorm2d": "nn.BatchNorm", "Embed": "nn.Embedding",
    "scaled_dot_product_attention": "nn.attention", "MultiheadAttention": "nn.TransformerBlock",
    "MaxPool1d": "nn.max_pool1d", "MaxPool2d": "nn.max_pool2d", "AvgPool1d": "nn.avg_pool1d",
    "AvgPool2d": "nn.avg_pool2d", "AdaptiveAvgPool1d": "nn.adaptive_avg_pool1d",
    "AdaptiveAvgPool2d": "nn.adaptive_avg_pool2d",
    "AdaptiveMaxPool1d": "nn.adaptive_max_pool1d",
    "AdaptiveMaxPool2d": "nn.adaptive_max_pool2d", "Flatten": "lambda x: x.flatten(1)",
    "Conv": "nn.Conv2d", "RotaryEmbedding": "nn.Rope",
    "softmax_cross_entropy_with_integer_labels": "nn.cross_entropy",
    "children": "model.modules()", "named_modules": "model.modules()", "buffers":
    "dict(model.named_buffers())", "register_parameter": "model.name = nn.Parameter(t)",
    "register_buffer": "model.name = t", "named_children": "model.modules()",
    # optimizers
    "sgd": "optim.SGD", "adam": "optim.Adam", "adamw": "optim.AdamW", "lion": "optim.Lion",
    "adafactor": "optim.Adafactor", "clip_grad_norm_": "optim.clip_by_global_norm",
    "clip_grad_norm": "optim.clip_by_global_norm", "GradScaler": "optim.LossScale",
    "CosineAnnealingLR": "optim.cosine", "cosine_decay_schedule": "optim.cosine",
    "warmup_cosine_decay_schedule": "optim.warmup_cosine", "linear_schedule": "optim.linear",
    "constant_schedule": "optim.constant", "LinearLR": "optim.linear",
    "MultiStepLR": "optim.piecewise_constant", "SequentialLR": "optim.join_schedules",
    "piecewise_constant_schedule": "optim.piecewise_constant",
    # many devices
    "init_process_group": "dist.Mesh", "init_device_mesh": "dist.Mesh", "DeviceMesh": "dist.Mesh",
    "get_world_size": "mesh.size", "get_rank": "dist.process_index",
    "is_initialized": "dist.process_count",
    "distribute_tensor": "dist.shard", "DTensor": "ts.Tensor", "psum": "dist.all_reduce",
    "ppermute": "dist.permute", "psum_scatter": "dist.reduce_scatter",
    "all_gather_into_tensor": "dist.all_gather", "reduce_scatter_tensor": "dist.reduce_scatter",
    "all_to_all_single": "dist.all_to_all", "DistributedDataParallel": "dist.strategy",
    "FullyShardedDataParallel": "dist.strategy", "fully_shard": "dist.place",
}  # fmt: skip
"""A peer's name, and what to write for it."""

_GRADS = "gradients are values: grads = ts.grad(loss, model)"
_STEP = "write params, state = optimizer.update(params, grads, state), with state of optimizer.init"
_PLACE = "a value lies where its mesh is: x = ts.tensor(data, mesh=mesh); x.numpy() is the host's"
_PLACED = "weights lie where the mesh is: dist.place(model, strategy, mesh)"
_WIDE = "the widest dtypes are ts.f32 and ts.int32; host data is narrowed on the way in"
_MODEL_DTYPE = 'compute in another dtype: with ts.autocast("bf16")'
ADVICE: dict[str, str] = {
    "backward": _GRADS, "zero_grad": f"leave it out: {_GRADS}",
    "Tensor.grad": _GRADS, "Tensor.requires_grad": "ask a parameter: nn.Parameter(x).requires_grad",
    "requires_grad_": "make it a parameter: nn.Parameter(x); ts.grad takes any tensor",
    "Tensor.is_leaf": _GRADS, "retain_grad": _GRADS, "grad_fn": _GRADS,
    "enable_grad": "leave it out: gradients are computed where ts.grad asks for them",
    "set_grad_enabled": "use ts.no_grad, or leave it out",
    "step": _STEP,
    "param_groups": "give mask=, a function of a weight's name, or use two optimizers",
    "apply_updates": _STEP, "add_param_group": "use two optimizers",
    "lr_scheduler": "give the optimizer a schedule: optim.AdamW(lr=optim.warmup_cosine(...))",
    "cpu": _PLACE, "cuda": _PLACE, "device_put": _PLACE, "Tensor.device": _PLACE,
    "device": "name a mesh of devices: dist.Mesh((\"dp\",), devices=8)", "is_cuda": _PLACE,
    "Tensor.real": "tensors are real; an optimizer of optax: optim.from_optax(tx)",
    "Module.to": f"{_PLACED}; ts.autocast(\"bf16\") computes in another dtype",
    "Module.cuda": _PLACED, "Module.cpu": _PLACED, "Module.device": _PLACED,
    "Module.half": _MODEL_DTYPE, "Module.float": _MODEL_DTYPE, "Module.bfloat16": _MODEL_DTYPE,
    "float64": _WIDE, "double": _WIDE, "int64": _WIDE, "long": _WIDE,
    "amp": _MODEL_DTYPE, "at": "make a new tensor: ts.where(mask, value, x), ts.scatter_add",
    "add_": "tensors do not change: x = x + y", "copy_": "tensors do not change: x = y",
    "zero_": "tensors do not change: x = ts.zeros_like(x)",
    "mul_": "tensors do not change: x = x * y",
    "fill_": "tensors do not change: x = ts.full(x.shape, value, x.dtype)",
    "Module.apply": "go through model.parameters(), and assign: model.weight = t",
    "ModuleList": "assign a list of modules: self.layers = [nn.Linear(4, 4)]",
    "ModuleDict": "assign a dict of modules: self.layers = {\"a\": nn.Linear(4, 4)}",
    "ParameterList": "assign a list of parameters: self.weights = [nn.Parameter(4, 4)]",
    "init": "say it where a weight is made: nn.Parameter(4, 4, init=\"normal\")",
    "utils": "use optim.clip_by_global_norm for gradients, ts.data for batches",
    "init_weights": "say it where a weight is made: nn.Parameter(4, 4, init=\"normal\")",
    "save": "use ts.checkpoint.save_hf, or save what model.state_dict() gives",
    "load": "use ts.checkpoint.load_hf, or model.load_state_dict(values)",
}  # fmt: skip
"""A peer's name, also as `Owner.name` for one owner, and a sentence on what to do."""

ARGUMENTS: dict[str, tuple[str, ...]] = {
    "axis": ("dim", "dims"), "axes": ("dims", "dim"), "dim": ("axis", "dims"),
    "dims": ("dim",), "keepdim": ("keepdims",), "keep_dims": ("keepdims",),
    "ddof": ("correction",), "unbiased": ("correction",), 
    "input": ("x",), "inputs": ("x",), "a": ("x",), "tensor": ("x",),
    "tensors": ("xs",), "arrays": ("xs",), "other": ("y",), "size": ("shape",),
    "fill_value": ("value",), "index": ("ids",), "indices": ("ids",), "src": ("updates",),
    "num_classes": ("count",), "target": ("labels",), "targets": ("labels",),
    "num_embeddings": ("vocab",), "embedding_dim": ("d",),
    "embed_dim": ("d",), "normalized_shape": ("d",), "hidden_size": ("d",), "d_model": ("d",),
    "num_features": ("channels",), "num_channels": ("channels",), "num_groups": ("groups",),
    "use_bias": ("bias",), "features": ("out_features",), "num_heads": ("heads",),
    "n_heads": ("heads",), "num_layers": ("layers",), "n_layers": ("layers",),
    "vocab_size": ("vocab",), "is_causal": ("causal",), "attn_mask": ("mask", "attention_mask"),
    "attention_mask": ("mask",), "mask": ("attention_mask",), "input_ids": ("ids",),
    "key_padding_mask": ("mask", "attention_mask"), "positions": ("position_ids",),
    "position_ids": ("positions",), "learning_rate": ("lr",),
    "step_size": ("lr",), "epsilon": ("eps",), "b1": ("betas",), "b2": ("betas",),
    "beta1": ("betas",), "beta2": ("betas",), "decay": ("weight_decay",), "wd": ("weight_decay",),
    "device": ("mesh",), "sharding": ("layout",), "placements": ("layout",),
    "device_mesh": ("mesh",), "donate_argnums": ("donate",), "donate_argnames": ("donate",),
    "argnums": ("weights",), "in_axes": ("in_dims",), "out_axes": ("out_dims",),
    "init_value": ("start", "value", "peak"), "end_value": ("end",),
    "peak_value": ("peak",), "warmup_steps": ("warmup",), "decay_steps": ("total", "steps"),
    "total_steps": ("total",), "T_max": ("total",), "transition_steps": ("steps",),
    "mesh_shape": ("shape",), "axis_names": ("axes",), "mesh_dim_names": ("axes",),
    "axis_name": ("axis",), "group": ("axis",), "reduce_op": ("op",),
}  # fmt: skip
"""A peer's argument, and the names that it may have here."""

ARGUMENT_ADVICE: dict[str, str] = {
    "requires_grad": "leave it out: ts.grad takes any tensor; a module's weight is nn.Parameter(x)",
    "out": "use the result of the call", "inplace": "use the result of the call",
    "device": "leave it out: a mesh says where values lie",
    "dtype": "convert the result: .to(dtype)",
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
    "async_op": "leave it out: the schedule says what overlaps",
}  # fmt: skip
"""A peer's argument that has no counterpart, and a sentence on what to do."""
