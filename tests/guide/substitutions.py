"""The table of substitutions: guide code that is changed before it runs, with reasons."""

from __future__ import annotations

from tests.guide.runner import Substitution

SUBSTITUTIONS: tuple[Substitution, ...] = (
    Substitution(
        1, "7.6", "range(72))", 'range(72)).fold(onto="tp=6,pp=1,dp=1")',
        "72 places on 6 of a test's 8 devices; the mesh stays 6 × 4 × 3",
    ),
    Substitution(
        1, "7.6", "(100_000, 100_000)", "(100, 100)", "a test's width, uneven over 6 too"
    ),
    Substitution(
        2, "3.2", "range(16))", "range(16)).fold(onto=8)", "16 places on a test's 8 devices"
    ),
    Substitution(
        2, "3.4", "range(64))", "range(64)).fold(onto=8)", "64 places on a test's 8 devices"
    ),
    Substitution(
        4, "Basic Training Setup", '"learning_rate": 1e-4', '"learning_rate": 1e-2',
        "the small model learns its small data in the few steps of a test",
    ),
    Substitution(
        4, "Basic Training Setup", '"warmup_steps": 1000', '"warmup_steps": 10, **SMALL',
        "SMALL holds the sizes of a model that a test can train",
    ),
    Substitution(
        4, "Basic Training Setup", '"total_steps": 100000', '"total_steps": 101',
        "two lines of log rather than a thousand",
    ),
    Substitution(
        4, "Basic Training Setup", '"batch_size": 32', '"batch_size": 8', "a test's size"
    ),
    Substitution(
        4, "Basic Training Setup", '"sequence_length": 2048', '"sequence_length": 16',
        "a test's size",
    ),
    Substitution(
        3, "4.4", "mesh=mesh, axis=\"pp\"", "mesh=STAGES, axis=\"pp\"",
        "the mesh of section 4.1 has no axis pp; STAGES is dp=2 pp=2",
    ),
    Substitution(
        4, "Multi-GPU Data Parallelism", "dataloader = setup_data_parallel_training()",
        "dataloader = setup_data_parallel_training()\n"
        "    config = {**create_training_config(), 'optimizer_state': optimizer_state}",
        "the text uses a config that it does not define; Adam finds its state there",
    ),
    Substitution(
        4, "Tensor Parallelism Implementation", "    # Output",
        "    output = ts.matmul(local_attn_out, w_out)\n"
        '    return ts.distributed.all_reduce(output, axis="tp")',
        "the text ends in the middle of the function; this finishes it",
    ),
    Substitution(
        5, "2.1.1", "ttnn.visualize_system_mesh()",
        "import tessera.ttnn as ttnn\nttnn.visualize_system_mesh()",
        "the import stands in the section below",
    ),
    Substitution(
        5, "2.2.1", "import ttnn\n", "import tessera.ttnn as ttnn\n", "the one import that changes"
    ),
    Substitution(
        5, "3.2", "import ttnn\n", "import tessera.ttnn as ttnn\n", "the one import that changes"
    ),
    Substitution(
        5, "5.2.1", "import ttnn\n", "import tessera.ttnn as ttnn\n", "the one import that changes"
    ),
    Substitution(
        5, "5.2.2", "import ttnn\n", "import tessera.ttnn as ttnn\n", "the one import that changes"
    ),
    Substitution(
        5, "6.1", "import ttnn\n", "import tessera.ttnn as ttnn\n", "the one import that changes"
    ),
    Substitution(
        5, "7.1", "import ttnn\n", "import tessera.ttnn as ttnn\n", "the one import that changes"
    ),
    Substitution(
        5, "9.2", "import ttnn\n", "import tessera.ttnn as ttnn\n", "the one import that changes"
    ),
    Substitution(
        5, "4.2.1", "torch_input_tensor", "torch_tensor", "a slip: the name of the line above"
    ),
    Substitution(
        5, "4.2.2", "torch_input_tensor", "torch_tensor", "a slip: the name of the line above"
    ),
    Substitution(
        5, "5.2.2", "torch_input_tensor", "torch_tensor", "a slip: the name of the line above"
    ),
    Substitution(
        5, "6.1", 'FalconConfig.from_pretrained("tiiuae/falcon-7b-instruct")',
        "FalconConfig(hidden_size=128, num_attention_heads=4)",
        "random weights of a test's width: nothing is downloaded",
    ),
    Substitution(
        5, "6.1", "torch_model.forward", "model.forward", "a slip: the model is called model"
    ),
    Substitution(
        5, "7.1", 'FalconConfig.from_pretrained("tiiuae/falcon-7b-instruct")',
        "FalconConfig(hidden_size=128, num_attention_heads=4)",
        "random weights of a test's width: nothing is downloaded",
    ),
    Substitution(
        5, "7.1", "t3k_mesh_device", "mesh_device", "a slip: the mesh is called mesh_device"
    ),
    Substitution(
        5, "8.3.2", "MeshShape(2, 4)", "MeshShape(1, 4)", "two parts of a test's 8 devices"
    ),
    Substitution(
        5, "8.3.2", "model.forward(activations, device=submesh_device, ...)",
        "results[submesh_device] = hybrid(activations, device=submesh_device)",
        "the text leaves the model to its reader: hybrid is the MLP of section 7",
    ),
    Substitution(
        5, "9.2", "cluster_axis=0", "cluster_axis=1",
        "along axis 0 of a mesh of 1 x 2 nothing is gathered",
    ),
    Substitution(
        5, "9.2", "torch.cuda.device_count()", "2", "PyTorch's half runs on CPUs too"
    ),
    Substitution(
        5, "9.2", "torch.device(f'cuda:{i}')", "torch.device('cpu')",
        "PyTorch's half runs on CPUs too",
    ),
    Substitution(
        5, "9.2", "torch.cuda.device(devices[i])", "torch.device(devices[i])",
        "PyTorch's half runs on CPUs too",
    ),
)  # fmt: skip

# The snippets that run, in order; those of one guide share a namespace.
RUN: tuple[str, ...] = (
    "1/7.2/code",
    "1/7.3/code",
    "1/7.4/code",
    "1/7.6/code",
    "1/7.6/step",
    "1/7.7/code",
    "2/2.1/code",
    "2/3.1/code",
    "2/3.2/code",
    "2/3.3/code",
    "2/3.3/step",
    "2/3.4/code",
    "2/3.4/train_step",
    "2/5.1/code",
    "2/5.2/code",
    "3/4.1/code",
    "3/4.2/code",
    "3/4.3/code",
    "3/4.3/dp_step",
    "3/4.4/code",
    "3/4.4/encoder",
    "3/4.4/decoder",
    "3/4.4/model",
    "3/4.5/step",
    "4/Basic Training Setup/code",
    "4/Basic Training Setup/compute_loss",
    "4/Basic Training Setup/training_step",
    "4/Basic Training Setup/create_training_config",
    "4/Basic Training Setup/train_single_gpu",
    "4/Mixed Precision Training/mixed_precision_step",
    "4/Multi-GPU Data Parallelism/data_parallel_step",
    "4/Multi-GPU Data Parallelism/setup_data_parallel_training",
    "4/Multi-GPU Data Parallelism/train_data_parallel",
    "4/Advanced Data Parallel Features/gradient_accumulation_step",
    "4/Advanced Data Parallel Features/zero_optimizer_step",
    "4/Tensor Parallelism Implementation/tensor_parallel_linear",
    "4/Tensor Parallelism Implementation/tensor_parallel_attention",
    "5/2.1.1/code",
    "5/2.2.1/code",
    "5/2.2.1/code 2",
    "5/2.2.1/code 3",
    "5/3.2/code",
    "5/3.2/code 2",
    "5/3.2/code 3",
    "5/3.2/code 4",
    "5/3.2/code 5",
    "5/4.2.1/code",
    "5/4.2.2/code",
    "5/5.2.1/code",
    "5/5.2.2/code",
    "5/6.1/code",
    "5/6.1/TtFalconMLP",
    "5/6.1/code 2",
    "5/6.1/code 3",
    "5/6.1/code 4",
    "5/7.1/code",
    "5/7.1/TtFalconMLP",
    "5/7.1/code 2",
    "5/7.1/code 3",
    "5/8.3.2/code",
    "5/8.3.2/code 2",
    "5/8.3.2/code 3",
    "5/8.3.2/code 4",
    "5/9.2/code",
    "5/9.2/code 2",
)

# Snippets that wait for the named feature. When it is built, move the name to RUN.
WAITING: dict[str, str] = {}
