"""What is noted of a program's engine."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerotune.trial_lib.rank import torch_functions
from zerotune.trial_lib.rank.program_facts import ProgramFacts
from zerotune.trial_lib.records.result import ProgramProfile


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
    assert facts.typed_batch == {
        "train_batch_size": 8,
        "micro_batch_size": 4,
        "gradient_accumulation_steps": accumulation,
    }


def test_the_batch_of_a_tensor_parallel_group_counts_once() -> None:
    # DeepSpeed's own product is that of both ranks: 8.
    built = engine(1, autotp_size=lambda: 2)
    built.dp_world_size = 1
    facts = ProgramFacts()
    facts.note_typed_engine(built)
    assert facts.typed_batch == {"train_batch_size": 4, "micro_batch_size": 4, "gradient_accumulation_steps": 1}


def test_an_optimizer_of_the_code_takes_the_option_of_the_trainer_away() -> None:
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    facts = ProgramFacts(trainer_options=["--optim", "--torch_compile"])
    facts.note_typed_engine(engine(1, basic_optimizer=adam))
    assert facts.turnable["optimizer:fused"] == [False, True]
    assert facts.trainer_options == ["--torch_compile"]
    facts = ProgramFacts(trainer_options=["--optim"])
    torch_functions.of_the_trainer.add(adam)
    facts.note_typed_engine(engine(1, basic_optimizer=adam))
    assert facts.trainer_options == ["--optim"]


def test_facts_have_the_fields_of_the_record_and_their_defaults() -> None:
    of_a_rank = ProgramFacts().to_json()
    assert list(of_a_rank) == list(ProgramProfile.model_fields)
    assert of_a_rank == ProgramProfile().model_dump(mode="json")
