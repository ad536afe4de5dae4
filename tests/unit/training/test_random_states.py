"""Draws after a restore are those that followed the capture."""

import random

import numpy
import pytest
import torch

from zerotune.trial_lib.training.checkpoints import load_rank_state, save_rank_state
from zerotune.trial_lib.training.data import capture, restore


def draws():
    return [
        *(random.random() for _ in range(3)),
        random.gauss(0, 1),
        *numpy.random.rand(3).tolist(),
        numpy.random.randn(),
        *torch.rand(3).tolist(),
        *torch.randn(17).tolist(),
        *torch.randperm(5).tolist(),
    ]


def seed():
    random.seed(1)
    numpy.random.seed(2)
    torch.manual_seed(3)
    draws()


@pytest.fixture(autouse=True)
def _seeded():
    seed()


def test_draws_repeat_after_a_restore():
    states = capture()
    expected = draws()
    assert draws() != expected
    restore(states)
    assert draws() == expected


def test_the_second_half_of_a_pair_of_normal_numbers_is_kept():
    random.gauss(0, 1)  # both draw two at a time and keep one
    numpy.random.randn()
    states = capture()
    expected = random.gauss(0, 1), numpy.random.randn()
    draws()
    restore(states)
    assert (random.gauss(0, 1), numpy.random.randn()) == expected


def test_states_go_through_a_checkpoint(tmp_path):
    save_rank_state(tmp_path, 0, {"random": capture()})
    expected = draws()
    restore(load_rank_state(tmp_path, 0)["random"])
    assert draws() == expected


def test_a_generator_that_the_trial_gave_to_numpy_is_kept(tmp_path):
    original = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.Philox(7))
    try:
        save_rank_state(tmp_path, 0, {"random": capture()})
        expected = draws()
        restore(load_rank_state(tmp_path, 0)["random"])
        assert draws() == expected
    finally:
        numpy.random.set_bit_generator(original)


def test_capturing_draws_nothing():
    capture()
    first = draws()
    seed()
    assert draws() == first


def test_a_process_without_a_device_keeps_no_state_of_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert capture()["cuda"] is None


@pytest.mark.devices(1, "cuda")
def test_draws_on_the_device_repeat(tmp_path):
    torch.rand(3, device="cuda")
    save_rank_state(tmp_path, 0, {"random": capture()})
    expected = torch.rand(3, device="cuda").tolist()
    restore(load_rank_state(tmp_path, 0)["random"])
    assert torch.rand(3, device="cuda").tolist() == expected
