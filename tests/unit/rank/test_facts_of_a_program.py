"""What is noted of a program's engine."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerotune.trial_lib.messages.measurement import BatchSizes
from zerotune.trial_lib.rank import torch_functions
from zerotune.trial_lib.rank.program_facts import ProgramFacts
from zerotune.trial_lib.search.knobs import STAGE


def engine(accumulation: int, **more: Any) -> SimpleNamespace:
    """An engine of two replicas, with micro-batches of 4 and 8 samples in all."""
    return SimpleNamespace(
        module=torch.nn.Linear(2, 1),
        device=torch.device("cpu"),
        fp16_enabled=lambda: False,
        bfloat16_enabled=lambda: False,
        zero_reduce_bucket_size=lambda: 500_000_000,
        train_batch_size=lambda: 8,
        train_micro_batch_size_per_gpu=lambda: 4,
        gradient_accumulation_steps=lambda: accumulation,
        zero_optimization_stage=lambda: 1,
        dp_world_size=2,
        **more,
    )


@pytest.mark.parametrize(
    ("built", "accumulation"),
    [(engine(1), 1), (engine(4, zenflow=True), 1), (engine(4, zenflow=False), 4)],
)
def test_the_interval_of_zenflow_is_no_accumulation(built: SimpleNamespace, accumulation: int) -> None:
    facts = ProgramFacts()
    facts.note_typed_engine(built)
    assert facts.found.typed_batch == BatchSizes(8, 4, accumulation)


def test_the_batch_of_a_tensor_parallel_group_counts_once() -> None:
    # DeepSpeed's own product is that of both ranks: 8.
    built = engine(1, autotp_size=lambda: 2)
    built.dp_world_size = 1
    facts = ProgramFacts()
    facts.note_typed_engine(built)
    assert facts.found.typed_batch == BatchSizes(4, 4, 1)


def test_an_optimizer_of_the_code_takes_the_option_of_the_trainer_away() -> None:
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    facts = ProgramFacts(trainer_options=["--optim", "--torch_compile"])
    facts.note_typed_engine(engine(1, basic_optimizer=adam))
    assert facts.found.turnable["optimizer:fused"] == [False, True]
    assert facts.found.trainer_options == ["--torch_compile"]
    facts = ProgramFacts(trainer_options=["--optim"])
    torch_functions.of_the_trainer.add(adam)
    facts.note_typed_engine(engine(1, basic_optimizer=adam))
    assert facts.found.trainer_options == ["--optim"]


def test_the_option_that_repeats_the_stage_is_set_for_a_trial_unless_the_search_varies_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--zero-stage", "1"])
    facts, varied = ProgramFacts(), ProgramFacts()
    facts.note_typed_engine(engine(1))
    varied.note_typed_engine(engine(1), {"--zero-stage": [1, 2]})
    assert (facts.found.arg_mappings, varied.found.arg_mappings) == ({STAGE: "--zero-stage"}, {})
