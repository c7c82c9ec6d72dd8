"""What is not run as a guide writes it, and why. The one table to review."""

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
)  # fmt: skip

# The snippets that run, in the order in which they run; a guide's share one namespace.
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
)

# Snippets that wait, each for what is named. Whoever builds that moves the name to RUN.
WAITING: dict[str, str] = {
    "2/5.2/code": "meshes that change between two steps",
}
