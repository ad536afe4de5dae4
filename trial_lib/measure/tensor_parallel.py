"""The parts of an engine's model on its ranks: divided parameters, heads, experts, and the batches of a group."""

from collections.abc import Callable
from typing import Any

import torch

from trial_lib.measure.batches.batch_shape import tensors_in
from trial_lib.measure.figures.over_ranks import of_each
from trial_lib.measure.figures.precision import elements
from trial_lib.measure.replicas import sequence_parallel_size

# The names of these numbers in the configurations of Hugging Face's models, of text or around it.
_HEADS = ("num_attention_heads", "num_key_value_heads")
_OF_TEXT = "text_config"
# A digest multiplies each number by its place, modulo a prime, so that the same tokens in another order differ.
_PLACES = 8191


def tensor_parallel_size(engine: Any) -> int:
    """Returns the ranks of a group of DeepSpeed's AutoTP; 1 without it, and before DeepSpeed had it."""
    size = getattr(engine, "autotp_size", None)
    return max(1, int(size())) if callable(size) else 1


def parameter_shares(engine: Any) -> list[float]:
    """Returns this rank's share of a replica's parameters: all, the trainable ones, of linear layers, of experts.

    The ranks of a group have divided some parameters. Each has a whole copy of the others, of which it takes its part.
    The sums over the ranks of a replica are those of the whole model. Experts count as on so many ranks as have others.
    """
    size, divides = tensor_parallel_size(engine) * sequence_parallel_size(engine), _divided_layer()
    total = trainable = linear = of_experts = 0.0
    seen: set[int] = set()
    for module in engine.module.modules():
        is_divided = divides is not None and isinstance(module, divides)
        for parameter in module.parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            # ZeRO 3 partitions what AutoTP has divided, so its counts are those of the part.
            experts_on = _experts_on(parameter)
            share = elements(parameter) * max(1, experts_on) / (1 if is_divided else size)
            total += share
            trainable += share if parameter.requires_grad else 0.0
            linear += share if is_divided or isinstance(module, torch.nn.Linear) else 0.0
            of_experts += share if experts_on else 0.0
    return [total, trainable, linear, of_experts]


def _experts_on(parameter: Any) -> int:
    """Returns the ranks over which the experts of a parameter are divided; 0 if it is of no expert."""
    if getattr(parameter, "allreduce", True):
        return 0
    from deepspeed.utils import groups

    name = str(getattr(parameter, "group_name", ""))
    return int(groups._get_expert_parallel_world_size(name)) if name.startswith("ep_size_") else 1


def head_counts(module: Any) -> list[int]:
    """Returns a model's attention heads and key-value heads; nothing if its configuration does not say."""
    config = getattr(module, "config", None)
    config = getattr(config, _OF_TEXT, config)
    counts = [getattr(config, name, None) for name in _HEADS]
    return [count for count in counts if type(count) is int]


def expert_counts(module: Any) -> list[int]:
    """Returns the numbers of experts of a model's layers of DeepSpeed's mixture of experts, each once."""
    layers = (each for each in module.modules() if type(each).__name__ == "MoE" and hasattr(each, "ep_size"))
    return sorted({int(layer.num_experts) for layer in layers})


def expert_ranks(module: Any) -> int:
    """Returns the most ranks over which the experts of a layer are divided; 1 without experts."""
    return max([1, *map(_experts_on, module.parameters())])


def layer_count(module: Any) -> int:
    """Returns the layers that the stages of a pipeline share; 0 for any other model."""
    return len(getattr(module, "_layer_specs", ()))


def digest(inputs: Any) -> float:
    """Returns a number that different batches do not share, from the values of all tensors."""
    summed = 0.0
    for tensor in tensors_in(inputs):
        flat = tensor.detach().reshape(-1).double().nan_to_num()
        places = torch.arange(1, flat.numel() + 1, device=flat.device) % _PLACES
        summed = 3.0 * summed + float((flat * places).sum())
    return summed


def refuse_unequal_batches(engine: Any, digested: float | None, refuse: Callable[[str, str], Any]) -> None:
    """Refuses a trial in which the ranks of a tensor-parallel group have different batches.

    Every rank calls it with its first batch. DeepSpeed's own check would end the program with an assertion.

    Args:
        engine: that trains.
        digested: the digest of this rank's batch; None without tensor parallelism.
        refuse: ends the trial with an outcome and a reason.
    """
    if digested is None:
        return
    from deepspeed.utils import groups

    group = min(torch.distributed.get_process_group_ranks(groups.get_tensor_model_parallel_group()))
    by_group: dict[float, set[float]] = {}
    for its_group, its_digest in of_each([float(group), digested], engine):
        by_group.setdefault(its_group, set()).add(its_digest)
    if all(len(digests) == 1 for digests in by_group.values()):
        return
    refuse(
        "invalid",
        "The ranks of one tensor-parallel group were fed different batches, because the script divides its data over "
        f"all {torch.distributed.get_world_size()} ranks. Let it divide them over the replicas of the model: "
        "DistributedSampler(..., num_replicas=engine.dp_world_size, "
        "rank=torch.distributed.get_rank(engine.data_parallel_group)).",
    )


def _divided_layer() -> Any:
    """Returns the class of the layers that AutoTP has divided; None in a DeepSpeed that has no such class."""
    try:
        from deepspeed.module_inject.layers import TensorParallel_Layer
    except ImportError:
        return None
    return TensorParallel_Layer
