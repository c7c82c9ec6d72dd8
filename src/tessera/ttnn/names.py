"""What does someone hear who writes a name of TT-NN that is not here? That it exists there and is
not provided, or which name they may mean."""

from __future__ import annotations

from collections.abc import Iterable

from ..core.errors import UnknownNameError, fail
from ..core.wording import nearest

# Names of TT-NN (2024 to 2025) that have no counterpart here.
_TEXT = """
    Config CONFIG manage_config load_config_from_json_file load_config_from_dictionary
    save_config_to_json_file FabricType   
    get_fabric_config MeshSocket SocketConfig SocketMemoryConfig SocketConnection MeshCoreCoord
    create_socket_pair H2DSocket D2HSocket create_global_circular_buffer 
    get_global_semaphore_address  send_async recv_async
    light_metal_begin_capture light_metal_end_capture LightMetalReplay
     split_work_to_cores grid_to_cores corerange_to_cores
    dump_device_memory_state get_memory_view ReadDeviceProfiler start_tracy_zone stop_tracy_zone
    graph profiler tracer tracy_message attach_golden_function get_golden_function
    register_python_operation query_registered_operations dump_operations command_queue
    generic_op ProgramDescriptor KernelDescriptor CBDescriptor SemaphoreDescriptor
     TensorAccessorArgs 
    conv1d conv2d conv3d conv_transpose2d prepare_conv_weights prepare_conv_bias Conv2dConfig
    max_pool2d avg_pool2d adaptive_avg_pool2d global_avg_pool2d upsample grid_sample fold
    batch_norm group_norm fast_reduce_nc moreh_sum moreh_mean moreh_matmul moreh_softmax
    moreh_layer_norm bcast bernoulli uniform gather scatter sort index_fill nonzero sampling
    moe swiglu geglu reglu glu tanhshrink hardshrink softshrink threshold lerp addcmul addcdiv mac
    hypot atan2 erfc erfinv i0 i1 digamma lgamma polygamma multigammaln rad2deg deg2rad asin acos
    atan sinh cosh asinh acosh atanh cbrt hardtanh celu prelu logit frac heaviside signbit
    triu tril cumprod gcd lcm isclose floor_div div_no_nan outer dot matmul_batched_weights
    sparse_matmul polyval ema normalize_global normalize_hw var_hw std_hw backward
    reallocate move assign copy indexed_fill padded_slice slice_write reshard
    interleaved_to_sharded_partial sharded_to_interleaved_partial tosa_gather tosa_scatter
    plus_one quantize dequantize requantize rand_like bitcast reduce_to_all deepseek_moe
    all_gather_matmul matmul_reduce_scatter strided_all_gather_async neighbor_pad_async
"""
OF_TT_NN = frozenset(_TEXT.split())
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


def no_name(name: str, have: Iterable[str]) -> AttributeError:
    """The error for `ttnn.<name>`."""
    text = f"module 'tessera.ttnn' has no attribute {name!r}"
    return _missing(text, name, have, name in OF_TT_NN or name.endswith("_bw"))


def no_attribute(of: object, name: str) -> AttributeError:
    """The error for `tensor.<name>` and `device.<name>`."""
    kind = type(of).__name__
    known = OF_TENSORS if kind == "Tensor" else OF_DEVICES
    return _missing(f"{kind!r} object has no attribute {name!r}", name, dir(of), name in known)


def _missing(text: str, name: str, have: Iterable[str], known: bool) -> AttributeError:
    if name.startswith("_"):
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
