"""The parts of an engine's model on its ranks: divided parameters, heads, experts, and the batches of a group."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from zerotune.trial_lib.deepspeed_config.overrides import sequence_parallel_size
from zerotune.trial_lib.rank.loader_batches import tensors_in
from zerotune.trial_lib.rank.memory import elements
from zerotune.trial_lib.rank.rank_consensus import of_each

# The names of these numbers in the configurations of Hugging Face's models, of text or around it.
_HEADS = ("num_attention_heads", "num_key_value_heads")
_OF_TEXT = "text_config"
_BY_COLUMNS = ("LinearAllreduce", "LinearAllreduceWithReplicatedInput")
_BY_ROWS = ("LinearLayer", "VocabParallelLinear")
# A digest multiplies each number by its place, modulo a prime, so that the same tokens in another order differ.
_PLACES = 8191


def tensor_parallel_size(engine: Any) -> int:
    """The ranks of a group of DeepSpeed's AutoTP; 1 without it, and before DeepSpeed had it."""
    size = getattr(engine, "autotp_size", None)
    return max(1, int(size())) if callable(size) else 1


@dataclass(frozen=True)
class Shard:
    """The place of this rank's shard in a parameter that AutoTP has divided."""

    width: int  # columns of the shard
    whole_width: int  # columns of the whole parameter
    first_row: int  # the row of the whole parameter that the shard begins in
    first_column: int  # the column, likewise

    def places(self, numbers: torch.Tensor) -> torch.Tensor:
        """Places of elements in the whole parameter, by their places in the shard. Both are flattened."""
        rows, columns = numbers // self.width, numbers % self.width
        return (rows + self.first_row) * self.whole_width + columns + self.first_column


def shards(engine: Any) -> dict[int, Shard | None]:
    """The place of each divided parameter by its id; None for a layer whose division is not known here.

    By columns of inputs or by rows, as `LinearAllreduce` and `LinearLayer` of deepspeed/module_inject/layers.py do.
    """
    divides = _divided_layer()
    found: dict[int, Shard | None] = {}
    for module in engine.module.modules() if divides is not None and tensor_parallel_size(engine) > 1 else ():
        if isinstance(module, divides):
            for name, parameter in module.named_parameters(recurse=False):
                if type(module).__name__ not in _BY_COLUMNS or name == "weight":
                    found[id(parameter)] = _shard(module, parameter)
    return found


def _shard(layer: Any, parameter: Any) -> Shard | None:
    sizes, index = getattr(layer, "_partition_sizes", None), int(layer.tp_index)
    rows, *columns = getattr(parameter, "ds_shape", parameter.shape)
    if sizes is None or len(columns) > 1:
        return None
    width, before = int(columns[0]) if columns else 1, sum(sizes[:index])
    if type(layer).__name__ in _BY_COLUMNS:
        return Shard(width, sum(sizes), 0, before)
    is_by_rows = type(layer).__name__ in _BY_ROWS and rows == sizes[index]
    return Shard(width, width, before, 0) if is_by_rows else None


def parameter_shares(engine: Any) -> list[float]:
    """This rank's share of a replica's parameters: all, the trainable ones, of linear layers, of experts.

    The sums over the ranks of a replica are those of the whole model: each rank takes its part of the parameters of
    which all have a whole copy. Experts count as on so many ranks as have others.
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
    # The ranks over which the experts of a parameter are divided; 0 if it is of no expert.
    if getattr(parameter, "allreduce", True):
        return 0
    from deepspeed.utils import groups

    name = expert_group(parameter)
    return int(groups._get_expert_parallel_world_size(name)) if name else 1


def expert_group(parameter: Any) -> str:
    """The name of the group of ranks that share an expert's layer; empty for any other parameter."""
    name = str(getattr(parameter, "group_name", ""))
    return name if name.startswith("ep_size_") else ""


def head_counts(module: Any) -> list[int]:
    """A model's attention heads and key-value heads; nothing if its configuration does not say."""
    config = getattr(module, "config", None)
    config = getattr(config, _OF_TEXT, config)
    counts = [getattr(config, name, None) for name in _HEADS]
    return [count for count in counts if type(count) is int]


def expert_counts(module: Any) -> list[int]:
    """The numbers of experts of a model's layers of DeepSpeed's mixture of experts, each once."""
    layers = (each for each in module.modules() if type(each).__name__ == "MoE" and hasattr(each, "ep_size"))
    return sorted({int(layer.num_experts) for layer in layers})


def expert_ranks(module: Any) -> int:
    """The most ranks over which the experts of a layer are divided; 1 without experts."""
    return max([1, *map(_experts_on, module.parameters())])


def layer_count(module: Any) -> int:
    """The layers that the stages of a pipeline share; 0 for any other model."""
    return len(getattr(module, "_layer_specs", ()))


def digest(inputs: Any) -> float:
    """A number that different batches do not share, from the values of all tensors."""
    summed = 0.0
    for tensor in tensors_in(inputs):
        flat = tensor.detach().reshape(-1).double().nan_to_num()
        places = torch.arange(1, flat.numel() + 1, device=flat.device) % _PLACES
        summed = 3.0 * summed + float((flat * places).sum())
    return summed


def refuse_unequal_batches(engine: Any, digested: float | None, refuse: Callable[[str, str], Any]) -> None:
    """Refuses a trial in which the ranks of a tensor-parallel group have different batches.

    Every rank calls it with its first batch's digest; None without tensor parallelism. DeepSpeed's own check would end
    the program with an assertion.
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
    # The class of the layers that AutoTP has divided; None in a DeepSpeed that has no such class.
    try:
        from deepspeed.module_inject.layers import TensorParallel_Layer
    except ImportError:
        return None
    return TensorParallel_Layer
