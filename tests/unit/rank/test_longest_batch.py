"""What becomes of the batches of torch's loaders, and what is found out about them."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from zerotune.trial_lib.rank import surveys
from zerotune.trial_lib.rank.flops import ModelCounter
from zerotune.trial_lib.rank.loader_batches import LoaderBatches, tokens_per_row
from zerotune.trial_lib.rank.program_facts import ProgramFacts
from zerotune.trial_lib.rank.surveys import SequenceSurvey, StretchedWarmUp

LENGTHS = [3, 4, 5, 9, 3, 4, 5, 4, 4, 4]


@pytest.fixture
def loaders(monkeypatch):
    monkeypatch.setattr(_BaseDataLoaderIter, "__next__", _BaseDataLoaderIter.__next__)
    batches = LoaderBatches()
    monkeypatch.setattr(surveys, "loader_batches", batches)
    batches.install()
    return batches


def loader(lengths=LENGTHS):
    return DataLoader([torch.arange(length) for length in lengths], batch_size=1)


def lengths_of(batches):
    return [tokens_per_row(batch) for batch in batches]


class Watch(SimpleNamespace):
    """As much of an `EngineWatch` as is looked at."""

    def __init__(self, accumulation=1):
        super().__init__(
            engine=SimpleNamespace(gradient_accumulation_steps=lambda: accumulation),
            model=ModelCounter(with_activations=True),
            micro_batches=0,
            shortest_sequence=None,
            longest_sequence=None,
        )

    def train_on(self, batch):
        length = tokens_per_row(batch)
        self.micro_batches += 1
        if length is not None:
            self.shortest_sequence = min(length, self.shortest_sequence or length)
            self.longest_sequence = max(length, self.longest_sequence or length)


def survey(watch, keep=lambda: None):
    facts = ProgramFacts()
    return SequenceSurvey(watch, facts, lambda values: values, keep), facts


def profiled(watch, batches, keep=lambda: None):
    """Trains on one batch after the other for as long as a survey wants to."""
    found, facts = survey(watch, keep)
    for batch in batches:
        watch.train_on(batch)
        if not found.step_ended():
            break
    return facts


def test_as_many_batches_as_asked_are_made_longer(loaders):
    batches = iter(loader())
    first = next(batches)
    loaders.stretch(7, 2)
    assert lengths_of([first, *batches]) == [3, 7, 7, *LENGTHS[3:]]


def test_a_batch_that_is_long_already_counts_as_one(loaders):
    loaders.stretch(7, 4)
    assert lengths_of(loader()) == [7, 7, 7, 9, *LENGTHS[4:]]


def test_the_batches_of_two_loaders_side_by_side_become_as_long(loaders):
    loaders.stretch(7, 1)
    both = [lengths_of(pair) for pair in zip(loader(), loader(), strict=True)]
    assert both == [[7, 7], *([length, length] for length in LENGTHS[1:])]


def test_batches_that_are_read_without_gradients_stay_as_they_are(loaders):
    loaders.stretch(7, 1)
    with torch.no_grad():
        assert lengths_of(loader()) == LENGTHS
    assert lengths_of(loader()) == [7, *LENGTHS[1:]]


def test_batches_without_tokens_stay_as_they_are(loaders):
    loaders.stretch(7, 1)
    images = list(DataLoader(torch.randn(3, 2, 4), batch_size=1))
    assert [tuple(batch.shape) for batch in images] == 3 * [(1, 2, 4)]
    assert lengths_of(loader())[0] == 7


def test_the_code_gets_the_batches_that_were_looked_at_ahead(loaders):
    batches = iter(loader())
    next(batches)
    assert loaders.lengths_ahead(most=6, at_first=2, seconds=60) == LENGTHS[1:7]
    assert lengths_of(batches) == LENGTHS[1:]


def test_looking_ahead_ends_early_where_all_batches_are_of_one_length(loaders):
    batches = iter(loader([6] * 20))
    next(batches)
    assert loaders.lengths_ahead(most=15, at_first=8, seconds=60) == [6] * 8


def test_looking_ahead_ends_with_the_data_or_the_time(loaders):
    batches = iter(loader())
    next(batches)
    assert loaders.lengths_ahead(most=100, at_first=8, seconds=0) == []
    assert loaders.lengths_ahead(most=100, at_first=8, seconds=60) == LENGTHS[1:]
    assert lengths_of(batches) == LENGTHS[1:]


def test_nothing_is_looked_at_where_no_loader_gave_sequences(loaders):
    assert not loaders.has_source
    assert loaders.lengths_ahead(most=100, at_first=8, seconds=60) == []


def test_a_survey_finds_the_longest_and_sees_that_it_can_be_trained_on(loaders):
    kept = []
    watch = Watch()
    facts = profiled(watch, loader(), lambda: kept.append(watch.micro_batches))
    assert (facts.found.shortest_sequence, facts.found.longest_sequence, facts.found.is_stretchable) == (3, 9, True)
    assert kept == [1]
    # One more than is needed: Accelerate holds a batch in advance.
    assert watch.micro_batches == 3


def test_a_survey_sees_batches_that_were_held_in_advance(loaders):
    def one_in_advance(batches):
        held = next(batches)
        for batch in batches:
            yield held
            held = batch

    assert profiled(Watch(), one_in_advance(iter(loader()))).found.is_stretchable


def test_a_batch_that_the_program_cuts_back_cannot_be_made_longer(loaders):
    facts = profiled(Watch(), (batch[:, :5] for batch in loader()))
    assert facts.found.longest_sequence == 9
    assert not facts.found.is_stretchable


def test_a_survey_of_data_of_one_length_or_of_none_ends_at_once(loaders):
    for batches in (loader([6] * 20), DataLoader(torch.randn(5, 3), batch_size=1)):
        watch = Watch()
        facts = profiled(watch, batches)
        assert (facts.found.longest_sequence, facts.found.shortest_sequence) == (None, None)
        assert watch.micro_batches == 1


@pytest.mark.parametrize(("own", "trained", "longest"), [([*LENGTHS, *([3] * 100)], 64, 9), ([6] * 100, 8, None)])
def test_a_survey_trains_on_where_the_batches_come_from_the_programs_own_hands(loaders, own, trained, longest):
    watch = Watch()
    facts = profiled(watch, (torch.zeros(1, length, dtype=torch.long) for length in own))
    assert (facts.found.longest_sequence, facts.found.is_stretchable) == (longest, False)
    assert watch.micro_batches == trained


def trained_on(warm_up, watch, batches, steps):
    warm_up.begin(watch)
    batches = iter(batches)
    for step in range(1, steps + 1):
        watch.train_on(next(batches))
        warm_up.step_ended(watch, step)


def test_a_warm_up_tries_again_until_its_last_step(loaders):
    watch = Watch()
    # The first batch is not one of the loader's.
    first = torch.zeros(1, 2, dtype=torch.long)
    warm_up = StretchedWarmUp(9, warm_up_steps=2)

    def batches():
        batches = iter(loader())
        next(batches)
        yield first
        yield from batches

    trained_on(warm_up, watch, batches(), 2)
    assert watch.longest_sequence == 9
    assert warm_up.note(9) == ""


def test_a_warm_up_that_saw_nothing_as_long_says_so_and_counts_what_it_sees(loaders):
    watch = Watch()
    warm_up = StretchedWarmUp(9, warm_up_steps=2)
    trained_on(warm_up, watch, [torch.zeros(1, 4, dtype=torch.long)] * 3, 3)
    assert "sequences of 4 tokens, and the data has some of 9" in warm_up.note(4)
    assert lengths_of(loader()) == LENGTHS


def test_without_a_length_or_a_warm_up_nothing_is_made_longer(loaders):
    for warm_up in (StretchedWarmUp(None, 2), StretchedWarmUp(9, 0)):
        watch = Watch()
        warm_up.begin(watch)
        assert lengths_of(loader()) == LENGTHS
