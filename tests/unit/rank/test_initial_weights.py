"""The fingerprint of initial weights, which does not depend on the ranks that keep them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zerotune.trial_lib.rank import first_steps, tensor_parallel
from zerotune.trial_lib.rank.first_steps import InitialWeights


def stage(layers: dict[int, nn.Module], tied: nn.Module | None = None) -> SimpleNamespace:
    """Returns the engine of a pipeline's stage. DeepSpeed names each layer by its place in the whole model."""
    module = nn.Module()
    module._layer_specs = (None,)
    for place, layer in layers.items():
        module.add_module(str(place), layer)
    module.tied_modules = nn.ModuleDict({} if tied is None else {"embed": tied})
    return SimpleNamespace(module=module, dp_world_size=1)


def sums(monkeypatch: pytest.MonkeyPatch, *engines: SimpleNamespace) -> list[float]:
    """Returns the fingerprint over the ranks of some engines."""
    monkeypatch.setattr(first_steps, "total", lambda values, engine: values)
    found = [InitialWeights(each).over_ranks(each) for each in engines]
    return [sum(column) for column in zip(*found, strict=True)]


def test_the_stages_of_a_pipeline_start_as_one_stage_does(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    layers = dict(enumerate(nn.Linear(3, 3) for _ in range(3)))
    whole = sums(monkeypatch, stage(layers))
    first, last = (stage({place: layers[place] for place in places}) for places in ((0, 1), (2,)))
    assert sums(monkeypatch, first, last) == pytest.approx(whole)
    changed = stage({0: layers[1], 1: layers[0]})
    assert sums(monkeypatch, changed, last) != pytest.approx(whole)


def test_a_layer_that_two_stages_share_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    layer, tied, copied = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
    copied.load_state_dict(tied.state_dict())
    for parameter in copied.parameters():
        parameter.ds_pipe_replicated = True
    whole = sums(monkeypatch, stage({1: layer}, tied))
    assert sums(monkeypatch, stage({}, tied), stage({1: layer}, copied)) == pytest.approx(whole)


class Experts(nn.Module):
    """Keeps the experts of a rank as DeepSpeed's class of this name does. A program may have another of this name."""

    def __init__(self, experts: list[nn.Module]) -> None:
        super().__init__()
        self.deepspeed_experts = nn.ModuleList(experts)


def test_experts_on_two_ranks_start_as_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    first, last, *experts = (nn.Linear(3, 3) for _ in range(6))
    for parameter in nn.ModuleList(experts).parameters():
        parameter.group_name = "ep_size_2"

    def over(ranks: int, experts: list[nn.Module]) -> list[float]:
        parts = [experts[rank * 4 // ranks : (rank + 1) * 4 // ranks] for rank in range(ranks)]
        ranks_of = {id(each): rank for rank, part in enumerate(parts) for each in nn.ModuleList(part).parameters()}
        monkeypatch.setattr(first_steps, "_expert_rank", lambda parameter: ranks_of[id(parameter)])
        monkeypatch.setattr(
            first_steps, "_holders", lambda engine, each, shard: 1 if id(each) in ranks_of else engine.dp_world_size
        )
        models = (nn.Sequential(first, Experts(part), last) for part in parts)
        return sums(monkeypatch, *(SimpleNamespace(module=model, dp_world_size=ranks) for model in models))

    whole = over(1, experts)
    assert over(2, experts) == pytest.approx(whole)
    assert over(4, experts) == pytest.approx(whole)
    assert over(2, experts[::-1]) != pytest.approx(whole)


def test_a_class_of_the_name_that_keeps_no_experts_is_a_module_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    layer = nn.Linear(3, 3)
    own = type("Experts", (nn.Sequential,), {})(layer)
    found, plain = (sums(monkeypatch, SimpleNamespace(module=each, dp_world_size=1)) for each in (own, layer))
    assert found == plain


class TensorParallelLayer(nn.Module):
    """Stands for the base class of DeepSpeed's divided layers."""

    dim = 0

    def __init__(self, whole: nn.Linear, index: int) -> None:
        super().__init__()
        self._partition_sizes, self.tp_index = (11, 5), index
        self.weight = nn.Parameter(whole.weight.split(self._partition_sizes, dim=self.dim)[index].clone())
        bias = whole.bias if self.dim else whole.bias.split(self._partition_sizes)[index]
        self.bias = nn.Parameter(bias.clone())


class LinearLayer(TensorParallelLayer):
    """Divided by its outputs."""


class LinearAllreduce(TensorParallelLayer):
    """Divided by its inputs, with a whole bias."""

    dim = 1


class FusedLayer(LinearLayer):
    """Divided in an order of its own."""


def group_of_two(monkeypatch: pytest.MonkeyPatch, layers: dict[Any, nn.Linear], norm: nn.Module) -> list[float]:
    """Returns the fingerprint of a model that groups of two ranks have divided unevenly, in two replicas."""
    monkeypatch.setattr(tensor_parallel, "_divided_layer", lambda: TensorParallelLayer)
    ranks = []
    for index in (0, 1):
        module = nn.ModuleList([*(kind(layer, index) for kind, layer in layers.items()), norm])
        ranks += [SimpleNamespace(module=module, dp_world_size=2, autotp_size=lambda: 2)] * 2
    return sums(monkeypatch, *ranks)


def test_a_divided_model_starts_as_the_whole_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    layers: dict[Any, nn.Linear] = {LinearLayer: nn.Linear(3, 16), LinearAllreduce: nn.Linear(16, 40)}
    norm = nn.LayerNorm(4)
    nn.init.normal_(norm.weight)
    whole = SimpleNamespace(module=nn.ModuleList([*layers.values(), norm]), dp_world_size=1)
    expected = sums(monkeypatch, whole)
    assert group_of_two(monkeypatch, layers, norm) == pytest.approx(expected, rel=1e-12)
    other: dict[Any, nn.Linear] = {LinearLayer: nn.Linear(3, 16), LinearAllreduce: nn.Linear(16, 40)}
    assert group_of_two(monkeypatch, other, norm) != pytest.approx(expected)


def test_a_division_in_an_order_of_its_own_leaves_the_weights_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert group_of_two(monkeypatch, {FusedLayer: nn.Linear(3, 16)}, nn.LayerNorm(4)) == []
