"""The hyperparameters as training code reads them, and where the DeepSpeed configuration stands in them.

It may be a file that `deepspeed_config` names, a mapping there, or DeepSpeed's own keys among the other
hyperparameters; and `overwrite_deepspeed_args` is merged into the first two.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trial_lib.experiment.config import Hyperparameters
from trial_lib.experiment.overrides import MICRO_BATCH, TRAIN_BATCH

CONFIG, OVERWRITES = "deepspeed_config", "overwrite_deepspeed_args"

# What makes hyperparameters a DeepSpeed configuration: there is none without a batch size.
_BATCH_SIZES = (TRAIN_BATCH, MICRO_BATCH)

# The sections and values that DeepSpeed 0.16 to 0.19 reads (runtime/config.py).
_SECTIONS = """
activation_checkpointing aio autotuning bf16 bfloat16 checkpoint comms_logger communication_data_type compile
compression_training csv_monitor curriculum_learning data_efficiency data_types dataloader_drop_last
disable_allgather dump_state elasticity expert_parallel flops_profiler fp16 gradient_accumulation_steps
gradient_allreduce_op gradient_clipping gradient_predivide_factor hybrid_engine log_level memory_breakdown
monitor_config optimizer pipeline prescale_gradients progressive_layer_drop scheduler
seq_parallel_communication_data_type sparse_attention sparse_gradients steps_per_print tensor_parallel tensorboard
timers torch_autocast train_batch_size train_micro_batch_size_per_gpu use_data_before_expert_parallelism wandb
wall_clock_breakdown zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
"""
_DEEPSPEED_KEYS = frozenset(_SECTIONS.split())


def inline_ds_config(hyperparameters: Hyperparameters) -> dict[str, Any] | None:
    """Returns the DeepSpeed configuration that stands among the hyperparameters; None where there is none."""
    others = hyperparameters.model_extra or {}
    if hyperparameters.deepspeed_config is not None or not any(key in others for key in _BATCH_SIZES):
        return None
    return {key: value for key, value in others.items() if key in _DEEPSPEED_KEYS}


def merged_hparams(
    hyperparameters: Hyperparameters, ds_config: Mapping[str, Any], ds_config_path: Path
) -> dict[str, Any]:
    """Returns the hyperparameters with another DeepSpeed configuration in the place of the user's, in its form.

    Args:
        hyperparameters: the experiment's.
        ds_config: the complete configuration to train with: the user's overwrites are in it, so that none is left to
            merge; their key stays, empty, where the file has it, for code that reads it.
        ds_config_path: the file that it stands in.
    """
    hparams = hyperparameters.as_dict()
    if OVERWRITES in hparams:
        hparams[OVERWRITES] = {}
    if inline_ds_config(hyperparameters) is not None:
        rest = {key: value for key, value in hparams.items() if key not in _DEEPSPEED_KEYS}
        return {**rest, **ds_config}
    if isinstance(hyperparameters.deepspeed_config, Mapping):
        return {**hparams, CONFIG: dict(ds_config)}
    return {**hparams, CONFIG: str(ds_config_path)}
