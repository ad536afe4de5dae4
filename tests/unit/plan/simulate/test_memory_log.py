"""The log of memory, on real tensors of a CPU: lives, kinds and moments."""

import torch

from zerotune.trial_lib.messages.foreseen_run import KINDS, PLACES
from zerotune.trial_lib.plan.simulate import logs
from zerotune.trial_lib.plan.simulate.logs import MemoryLog


def log_with(moment):
    log = MemoryLog("cpu")
    log.begin(moment, 1, 0, 0)
    return log


def test_a_storage_lives_as_long_as_any_of_its_views():
    log = log_with(logs.INITIALIZE)
    tensor = torch.empty(10)
    log.made(tensor)
    view = tensor[2:4]
    log.made(view)
    del tensor
    assert [each.is_made for each in log.record()[1]] == [1]
    assert log.live_bytes == 40
    del view
    assert [each.is_made for each in log.record()[1]] == [1, 0]
    assert (log.live_bytes, log.peak_bytes) == (0, 40)


def test_setting_data_ends_the_life_of_what_was_there():
    log = log_with(logs.INITIALIZE)
    parameter = torch.nn.Parameter(torch.empty(10))
    log.made(parameter)
    parameter.data = torch.empty(0)
    assert log.live_bytes == 0


def test_what_the_forward_pass_frees_again_is_temporary_and_what_it_keeps_an_activation():
    log = log_with(logs.FORWARD)
    kept, freed = torch.empty(4), torch.empty(8)
    log.made(kept)
    log.made(freed)
    del freed
    log.begin(logs.BACKWARD, 1, 0, 0)
    storages = log.record()[0]
    assert [KINDS[each.kind] for each in storages] == ["activation", "temporary"]
    assert [each.size for each in storages] == [16, 32]


def test_numbers_that_a_program_copies_between_the_passes_are_a_batch():
    log = log_with(logs.INITIALIZE)
    table, batch, made = torch.empty(1), torch.empty(2), torch.empty(3)
    log.made_from_data(table)
    log.begin(logs.BETWEEN, 1, 0, 0)
    log.made_from_data(batch)
    log.made(made)
    assert [KINDS[each.kind] for each in log.record()[0]] == ["buffer", "input", "temporary"]


def test_the_last_name_of_a_kind_counts():
    log = log_with(logs.BACKWARD)
    tensor = torch.empty(4)
    log.made(tensor)
    log.name(tensor, logs.GRADIENT)
    log.name(tensor[:2], logs.OPTIMIZER)
    log.name(torch.empty(1), logs.PARAMETER)
    assert [KINDS[each.kind] for each in log.record()[0]] == ["optimizer"]


def test_pinned_memory_is_on_the_host():
    log = MemoryLog("another")
    log.begin(logs.INITIALIZE, 0, 0, 0)
    tensor, pinned = torch.empty(4), torch.empty(4)
    log.made(tensor)
    log.made(pinned)
    log.pinned(pinned)
    assert [PLACES[each.place] for each in log.record()[0]] == ["host", "pinned"]
    assert log.is_pinned(pinned)
    assert not log.is_pinned(tensor)
    assert log.live_bytes == 0
