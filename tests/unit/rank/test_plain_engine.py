"""A model that trains without DeepSpeed stands for an engine: what is counted of its steps."""

from typing import Any

import pytest
import torch

from zerotune.trial_lib.messages.measurement import Arrival
from zerotune.trial_lib.rank.device import CpuDevice
from zerotune.trial_lib.rank.without_deepspeed import PlainEngine, PlainWatch

OVERRIDES = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}


class Steps:
    """Notes the ends of steps."""

    def __init__(self) -> None:
        self.ended = 0

    def first_batch_arrived(self, sizes: Any, tokens: Any) -> None: ...

    def optimizer_step_begins(self) -> None: ...

    def optimizer_step_ended(self, applied: bool) -> None:
        assert applied
        self.ended += 1


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_step_has_its_micro_batches_and_their_losses_before_any_scaling(scale: float) -> None:
    model = torch.nn.Linear(8, 1)
    optimizer, other = (torch.optim.SGD(each.parameters(), 0.1) for each in (model, torch.nn.Linear(1, 1)))
    engine, steps = PlainEngine(model, OVERRIDES), Steps()
    watch = PlainWatch(engine, CpuDevice(), 4, steps, with_activations=False, arrival=Arrival())
    try:
        assert not engine.owns(other)
        assert engine.owns(optimizer)
        losses = []
        for _ in range(2):
            # As Accelerate divides it, and a GradScaler scales it.
            loss = model(torch.randn(4, 8)).square().mean() / 2
            losses.append(float(loss.detach()))
            (engine.scale(loss) * scale).backward()
        engine.step(optimizer.step)
    finally:
        watch.end()
    assert steps.ended == 1
    arrived, loss_of_step = watch.take_arrived(), watch.take_loss()
    assert (arrived["micro_batches"], arrived["rows_in_first"]) == (2, 8)
    assert loss_of_step is not None
    assert float(loss_of_step) == pytest.approx(sum(losses), rel=1e-6)
    assert engine.train_batch_size() == 8
