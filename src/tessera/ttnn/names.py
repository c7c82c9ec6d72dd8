"""Errors for names of TT-NN that are not here: it exists there and is not provided, or the names
most like it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..core.errors import UnknownNameError
from ..core.wording import nearest

# Names of TT-NN (2024 to 2025) that have no counterpart here.
_TEXTS = {
    "tessera.ttnn": """
    _ttnn
    adaptive_avg_pool2d adaptive_max_pool2d all_gather_matmul alt_complex_rotate90 angle
    attach_golden_function avg_pool2d backward batch_norm bcast BcastOpDim BcastOpMath bernoulli
    BinaryOpType bitcast cb_descriptor_from_sharded_tensor CBDescriptor CBFormatDescriptor
    clamp_tss CloseDevices command_queue complex_tensor composite_example
    composite_example_multiple_return ComputeConfigDescriptor CONFIG_OVERRIDES CONFIG_PATH conj
    conv1d Conv1dConfig conv2d Conv2dConfig Conv2dDRAMSliceHeight Conv2dDRAMSliceWidth
    Conv2dL1Full Conv2dL1FullSliceConfig Conv2dSliceConfig conv3d Conv3dConfig conv_transpose2d
    core corerange_to_cores CoreType create_global_circular_buffer create_group_norm_input_mask
    create_group_norm_input_negative_mask create_group_norm_reciprocals
    create_group_norm_weight_bias_rm create_module_if_not_exists create_sharded_memory_config_
    create_socket_pair CreateDevices D2HSocket database DataMovementConfigDescriptor
    DataMovementProcessor decorators deepseek_moe dequantize
    determine_expected_group_norm_sharded_config_and_grid_size digamma dot dot_access
    dram_group_norm_params_from_torch dram_prefetcher dump_device_memory_state dump_operations
    dump_stack_trace_on_segfault ema examples experimental_loader FabricManagerMode FabricType
    fast_reduce_nc fill_implicit_tile_padding fill_ones_rm fill_rm fold from_buffer gcd
    generic_op get_all_programs_perf_data get_conv_output_dim
    get_current_command_queue_id_for_thread get_fabric_config get_fallback_function
    get_global_semaphore_address get_golden_function get_latest_programs_perf_data
    get_max_worker_l1_unreserved_size get_memory_view GetPCIeDeviceID global_avg_pool2d graph
    graph_tracer_utils grid_sample grid_to_cores group_norm H2DSocket halo has_storage_type_of
    has_tile_padding i0 i1 IDevice imag index_fill indexed_fill interleaved_to_sharded_partial
    is_imag is_real is_sharded KernelDescriptor LayerNormDistributedDefaultProgramConfig lcm
    lgamma light_metal_begin_capture light_metal_end_capture LightMetalReplay
    load_config_from_dictionary load_config_from_json_file logical_not_ matmul_batched_weights
    matmul_reduce_scatter MatmulMultiCoreReuseMultiCastBatchedDRAMShardedProgramConfig
    max_pool2d MaxPool2d MeshCoreCoord MeshSocket MinimalMatmulConfig moe moe_expert_token_remap
    moe_routing_remap multigammaln neighbor_pad_async nextafter NOC NOC_MODE nonzero
    num_cores_to_corerangeset_in_subcoregrids Op2DDRAMSliceHeight Op2DDRAMSliceWidth
    Op2DSliceConfig operations outer pad_to_tile_shape padded_slice
    pearson_correlation_coefficient polar polygamma prelu_sfpu prepare_conv_bias
    prepare_conv_transpose2d_bias prepare_conv_transpose2d_weights prepare_conv_weights
    prepare_grid_sample_grid prim profiler ProgramDescriptor quantize
    query_registered_operations QueueId rand_like ReadDeviceProfiler ReaderConfigDescriptor real
    recv_async reduce_to_all reduce_to_root reflection register_cpp_operation
    register_post_operation_hook register_pre_operation_hook register_python_operation
    ReplicateTensorToMeshWrapper requantize reshape_on_device reshard rotate rsub_sfpu
    RuntimeArgs sampling save_config_to_json_file SemaphoreDescriptor send_async
    set_printoptions SetRootDir ShardDistributionStrategy sharded_to_interleaved_partial
    ShardShapeAlignment slice_write SlidingWindowParallelConfig SocketConfig SocketConnection
    SocketMemoryConfig SoftmaxProgramConfig sparse_matmul split_work_to_cores start_tracy_zone
    stop_tracy_zone strided_all_gather_async TensorAccessorArgs ThrottleLevel TileDescriptor
    TileReshapeMapMode torch_tracer tosa_gather tosa_scatter tracer tracy_frame tracy_message
    types unary_chain uniform upsample where_tss WriterConfigDescriptor
""",
    "tessera.ttnn.experimental": """
    all_gather_concat all_gather_matmul all_reduce_create_qkv_heads attn_matmul
    attn_matmul_from_cache broadcast_to concatenate_heads conv conv3d convert_to_chw
    convert_to_hwc create_qkv_heads create_qkv_heads_from_separate_tensors deepseek_grouped_gate
    deepseek_minimal_broadcast device dropout fast_reduce_nc fused_rms_minimal gelu_bw
    group_attn_matmul hc_sum_reduce intimg llama_all_gather_matmul_async llama_reduce_scatter
    llama_rs_create_heads llama_rs_matmul matmul_reduce_scatter_async minimal_matmul
    neighbor_pad_async nlp_concat_heads_boltz nlp_create_qkv_heads_boltz
    nlp_create_qkv_heads_falcon7b nlp_create_qkv_heads_segformer nlp_create_qkv_heads_vit
    nlp_kv_cache_load_slice prefix_scan recv_async repeat_and_interleave_eltwise_mul
    ring_attention_all_gather_async rotary_embedding_llama_fused_qk rotate_half send_async
    slice_reshard_async split_query_key_value_and_split_heads strided_all_gather_async
    strided_all_gather_minimal_matmul_async tensor wan_fused_rmsnorm_post_allgather
    wan_fused_rmsnorm_pre_allgather
""",
    "tessera.ttnn.transformer": """
    attention_softmax_ chunked_flash_mla_prefill fill_cache_for_user_ flash_mla_prefill
    flash_multi_latent_attention_decode joint_scaled_dot_product_attention
    paged_flash_multi_latent_attention_decode ring_distributed_scaled_dot_product_attention
    ring_joint_scaled_dot_product_attention update_cache_for_token_
    windowed_scaled_dot_product_attention
""",
    "Tensor": """
    buffer_address devices element_size extract_shard host_buffer nd_shard_spec pad pad_to_tile
    padding tensor_id to_torch_with_padded_shape unpad unpad_from_tile
""",
    "MeshDevice": """
    allocation_trace_mark disable_program_cache get_device get_devices get_noc_encoding
    get_worker_noc_coordinates num_hw_cqs num_worker_cores quiesce_devices sfpu_eps sfpu_inf
    sfpu_nan worker_core_from_logical_core
""",
}
OF_TT_NN = {owner: frozenset(text.split()) for owner, text in _TEXTS.items()}
_FAMILIES = re.compile("moreh_.*|.*_bw")  # older ops, and gradients


def no_name(name: str, names: Iterable[str], module: str = "tessera.ttnn") -> AttributeError:
    """The error for `ttnn.<name>`."""
    text = f"module {module!r} has no attribute {name!r}"
    known = name in OF_TT_NN[module] or bool(_FAMILIES.fullmatch(name))
    return _missing(text, name, names, known)


def no_attribute(of: object, name: str) -> AttributeError:
    """The error for `tensor.<name>` and `device.<name>`."""
    kind = type(of).__name__
    return _missing(
        f"{kind!r} object has no attribute {name!r}", name, dir(of), name in OF_TT_NN[kind]
    )


def no_member(enumeration: str, name: str, names: Iterable[str]) -> AttributeError:
    """The error for a member that an enumeration does not have."""
    return UnknownNameError(
        f"{enumeration}.{name} is not provided here", fix=f"it has {', '.join(names)}"
    )


def _missing(text: str, name: str, names: Iterable[str], in_ttnn: bool) -> AttributeError:
    if name.startswith("_") and not in_ttnn:
        return AttributeError(text)
    if in_ttnn:
        return UnknownNameError(
            f"{text}: TT-NN has it, and it is not provided here",
            fix="compute it with what is there (docs/ttnn.md), or with Tessera's own functions on"
            " tensor.value, each device's part",
        )
    close = nearest(name, [n for n in names if not n.startswith("_")], 3)
    return UnknownNameError(
        f"{text}, and TT-NN is not known to have it",
        fix=f"the names most like it are {close.partition(', …')[0]}",
    )
