"""What does someone hear who writes a name of TT-NN that is not here? That it exists there and is
not provided, or which name they may mean."""

from __future__ import annotations

from collections.abc import Iterable

from ..core.errors import UnknownNameError, fail
from ..core.wording import nearest

# Names of TT-NN (2024 to 2025) that have no counterpart here.
_TEXT = """
    adaptive_avg_pool2d adaptive_max_pool2d all_gather_matmul angle attach_golden_function
    avg_pool2d backward batch_norm bcast BcastOpDim BcastOpMath bernoulli BinaryOpType bitcast
    cb_descriptor_from_sharded_tensor CBDescriptor CBFormatDescriptor clamp_tss CloseDevices
    command_queue complex_tensor ComputeConfigDescriptor conj conv1d conv2d Conv2dConfig
    Conv2dDRAMSliceHeight Conv2dDRAMSliceWidth Conv2dL1Full Conv2dL1FullSliceConfig
    Conv2dSliceConfig conv3d Conv3dConfig conv_transpose2d corerange_to_cores CoreType
    create_global_circular_buffer create_group_norm_input_mask create_group_norm_input_negative_mask
    create_group_norm_reciprocals create_group_norm_weight_bias_rm create_module_if_not_exists
    create_sharded_memory_config_ create_socket_pair CreateDevices D2HSocket
    DataMovementConfigDescriptor DataMovementProcessor deepseek_moe dequantize
    determine_expected_group_norm_sharded_config_and_grid_size digamma dot
    dram_group_norm_params_from_torch dram_prefetcher dump_device_memory_state dump_operations
    dump_stack_trace_on_segfault ema FabricType fast_reduce_nc fill_implicit_tile_padding
    fill_ones_rm fill_rm fold from_buffer gcd generic_op get_conv_output_dim
    get_current_command_queue_id_for_thread get_fabric_config get_fallback_function
    get_global_semaphore_address get_golden_function get_max_worker_l1_unreserved_size
    get_memory_view GetPCIeDeviceID global_avg_pool2d graph grid_sample grid_to_cores group_norm
    H2DSocket halo has_storage_type_of has_tile_padding i0 i1 imag index_fill indexed_fill
    interleaved_to_sharded_partial is_imag is_real is_sharded KernelDescriptor
    LayerNormDistributedDefaultProgramConfig lcm lgamma light_metal_begin_capture
    light_metal_end_capture LightMetalReplay load_config_from_dictionary load_config_from_json_file
    logical_not_ matmul_batched_weights matmul_reduce_scatter max_pool2d MeshCoreCoord MeshSocket
    MinimalMatmulConfig moe moe_expert_token_remap moe_routing_remap moreh_layer_norm moreh_matmul
    moreh_mean moreh_softmax moreh_sum multigammaln neighbor_pad_async nextafter NOC NOC_MODE
    nonzero num_cores_to_corerangeset_in_subcoregrids outer pad_to_tile_shape padded_slice polar
    polygamma prelu_sfpu prepare_conv_bias prepare_conv_transpose2d_bias
    prepare_conv_transpose2d_weights prepare_conv_weights prepare_grid_sample_grid profiler
    ProgramDescriptor quantize query_registered_operations QueueId rand_like ReadDeviceProfiler
    ReaderConfigDescriptor real recv_async reduce_to_all reduce_to_root register_cpp_operation
    register_post_operation_hook register_pre_operation_hook register_python_operation requantize
    reshape_on_device reshard rsub_sfpu sampling save_config_to_json_file SemaphoreDescriptor
    send_async set_printoptions SetRootDir ShardDistributionStrategy sharded_to_interleaved_partial
    ShardShapeAlignment slice_write SlidingWindowParallelConfig SocketConfig SocketConnection
    SocketMemoryConfig SoftmaxProgramConfig sparse_matmul split_work_to_cores start_tracy_zone
    stop_tracy_zone strided_all_gather_async TensorAccessorArgs ThrottleLevel TileDescriptor
    TileReshapeMapMode tosa_gather tosa_scatter tracer tracy_frame tracy_message unary_chain uniform
    upsample where_tss WriterConfigDescriptor
"""
OF_TT_NN = frozenset(("_ttnn", *_TEXT.split()))
# What its tensors and mesh devices have, and those here do not.
OF_TENSORS = frozenset(
    """
    buffer_address devices extract_shard host_buffer pad pad_to_tile padding
    tensor_id to_torch_with_padded_shape unpad unpad_from_tile
    """.split()  # noqa: SIM905  # a list of words is easier to read so
)
OF_DEVICES = frozenset(
    """
    allocation_trace_mark disable_program_cache get_device get_devices get_noc_encoding
    get_worker_noc_coordinates num_hw_cqs num_worker_cores quiesce_devices sfpu_eps sfpu_inf
    sfpu_nan worker_core_from_logical_core
    """.split()  # noqa: SIM905
)


def no_name(name: str, have: Iterable[str], module: str = "tessera.ttnn") -> AttributeError:
    """The error for `ttnn.<name>`."""
    text = f"module {module!r} has no attribute {name!r}"
    return _missing(text, name, have, name in OF_TT_NN or name.endswith("_bw"))


def no_attribute(of: object, name: str) -> AttributeError:
    """The error for `tensor.<name>` and `device.<name>`."""
    kind = type(of).__name__
    known = OF_TENSORS if kind == "Tensor" else OF_DEVICES
    return _missing(f"{kind!r} object has no attribute {name!r}", name, dir(of), name in known)


def _missing(text: str, name: str, have: Iterable[str], known: bool) -> AttributeError:
    if name.startswith("_") and not known:
        return AttributeError(text)
    if known:
        return fail(
            UnknownNameError,
            f"{text}: TT-NN has it, and it is not provided here",
            fix="compute it with what is there (docs/ttnn.md), or with Tessera's own functions on"
            " tensor.value, each device's part",
        )
    close = nearest(name, [n for n in have if not n.startswith("_")], 3)
    return fail(
        UnknownNameError,
        f"{text}, and TT-NN is not known to have it",
        fix=f"the names most like it are {close.partition(', …')[0]}",
    )
