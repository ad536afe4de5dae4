"""What a CPU's operators take beside their results, as the calls of the C library have shown it."""

import torch

from zerotune.trial_lib.messages.foreseen_run import PLACES
from zerotune.trial_lib.plan.simulate import logs
from zerotune.trial_lib.plan.simulate.logs import MemoryLog
from zerotune.trial_lib.plan.simulate.pretended_device import note_collective, note_made

X, Y, WEIGHT = torch.empty(2, 8, 4, 4), torch.empty(2, 16, 4, 4), torch.empty(16, 8, 3, 3)
BYTES = {name: each.numel() * 4 for name, each in (("x", X), ("y", Y), ("w", WEIGHT))}
NAMES = {size: name for name, size in BYTES.items()}


def log():
    found = MemoryLog("cpu")
    found.begin(logs.FORWARD, 1, 0, 0)
    return found


def shown(found):
    """Each event as the tensor's name, with + or -; a block of a kernel is in brackets."""
    storages, events, _ = found.record()
    words = []
    for storage, is_made in events:
        size, _, place, _ = storages[storage]
        name = NAMES.get(size, str(size))
        name = name if PLACES[place] == "device" else f"({name})"
        words.append(("+" if is_made else "-") + name)
    return " ".join(words)


def test_a_convolution_lies_behind_the_blocks_that_it_was_made_from():
    found = log()
    note_made("convolution", (X, WEIGHT), [Y], found)
    assert shown(found) == "+(x) +(y) -(x) +y -(y)"


def test_the_first_layer_reads_an_image_as_it_is():
    found = log()
    note_made("convolution", (torch.empty(2, 3, 4, 4), WEIGHT), [Y], found)
    assert shown(found) == "+(y) +y -(y)"


def test_tensors_with_their_channels_last_are_not_copied():
    found = log()
    last = Y.to(memory_format=torch.channels_last)
    note_made("convolution", (X, WEIGHT), [last], found)
    assert shown(found) == "+y"


def test_the_backward_pass_copies_both_tensors_for_the_weights():
    found = log()
    gradient = torch.empty_like(X), torch.empty_like(WEIGHT)
    note_made("convolution_backward", (Y, X, WEIGHT), gradient, found)
    assert shown(found) == "+(y) +(x) -(y) +x -(x) +(x) +(y) -(y) -(x) +w"


def test_a_backward_pass_without_the_inputs_gradient_has_the_weights_alone():
    found = log()
    weight = torch.empty_like(WEIGHT)
    note_made("convolution_backward", (Y, X, WEIGHT), [weight], found)
    assert shown(found) == "+(x) +(y) -(y) -(x) +w"


def test_gathering_takes_two_copies_of_the_whole():
    found = log()
    note_collective("all_gather", 1000, found)
    storages, _, _ = found.record()
    assert [(size, PLACES[place]) for size, _, place, _ in storages] == [(1000, "processor"), (1000, "thread")]
    assert found.live_bytes == 0


def test_a_reduction_takes_segments_however_large_it_is():
    found = log()
    note_collective("all_reduce", 2**30, found)
    note_collective("all_reduce", 1000, found)
    note_collective("broadcast", 1000, found)
    storages, events, _ = found.record()
    assert [size for size, *_ in storages] == [2 * 2**20, 1000]
    assert [each.is_made for each in events] == [1, 0, 1, 0]
