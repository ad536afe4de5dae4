"""The share of a step that the code waits for its data loader."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from zerotune.trial_lib.messages.turned import PINNED, WORKERS
from zerotune.trial_lib.rank import surveys
from zerotune.trial_lib.rank.loader_batches import LoaderBatches
from zerotune.trial_lib.rank.program_facts import ProgramFacts
from zerotune.trial_lib.rank.surveys import LoadingSurvey


def survey_of(facts: ProgramFacts) -> LoadingSurvey:
    return LoadingSurvey(facts, lambda values: values, is_apart=False)


def test_a_program_without_a_data_loader_has_that_for_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surveys, "loader_batches", LoaderBatches())
    facts = ProgramFacts()
    assert not survey_of(facts).step_ended()
    assert facts.found.not_turnable[WORKERS] == "the program trains from no data loader of torch's"
    assert facts.found.loading is None


def test_a_loader_that_gives_at_once_leaves_nothing_to_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = LoaderBatches()
    loader = DataLoader(TensorDataset(torch.zeros(8)))
    monkeypatch.setattr(LoaderBatches, "training_loader", loader)
    monkeypatch.setattr(surveys, "loader_batches", batches)
    facts = ProgramFacts(trainer_options=["--dataloader_num_workers", "--optim"])
    survey = survey_of(facts)
    assert survey.step_ended()
    assert not survey.step_ended()
    assert facts.found.trainer_options == ["--optim"], "the code makes the loader, not the Trainer"
    assert facts.found.loading is not None
    assert facts.found.loading.share == 0.0
    assert "too little to gain" in facts.found.not_turnable[WORKERS]
    assert "too little to gain" in facts.found.not_turnable[PINNED]
    assert not facts.found.turnable
