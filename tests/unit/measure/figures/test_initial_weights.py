"""The fingerprint of initial weights, which does not depend on the ranks that keep them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trial_lib.measure.figures import initial_weights
from trial_lib.measure.figures.initial_weights import InitialWeights


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
    monkeypatch.setattr(initial_weights, "total", lambda values, engine: values)
    return [sum(column) for column in zip(*(InitialWeights(each).over_ranks(each) for each in engines), strict=True)]


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
