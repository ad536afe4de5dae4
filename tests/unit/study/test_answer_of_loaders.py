"""The line to write for a winner whose loader or Adam ZeroTune has turned."""

import pytest

from zerotune.trial_lib.messages.measurement import Loading, ProgramProfile
from zerotune.trial_lib.messages.turned import (
    FUSED,
    LOADER_OPTIONS,
    OPTIMIZER_OPTION,
    PERSISTENT,
    PINNED,
    PREFETCH,
    WORKERS,
)
from zerotune.trial_lib.study.training_command import left_to_write, lines_to_write, options_to_remove, trainer_options

OWN = {WORKERS: 0, PINNED: False, FUSED: False}
SCRIPT = ProgramProfile(
    loading=Loading(share=0.4, num_workers=0, made_at="train.py:41"), optimizer="torch.optim.adamw.AdamW"
)
TRAINER = ProgramProfile(
    loading=Loading(share=0.4, num_workers=0, made_at="train.py:60", by_trainer=True),
    batch={"train_micro_batch_size_per_gpu": 4},
)


def test_a_script_has_a_line_for_its_loader_and_one_for_its_optimizer() -> None:
    loader, adam = lines_to_write({WORKERS: 2, PINNED: False, FUSED: True}, OWN, SCRIPT)
    assert loader.endswith("num_workers=2 in the DataLoader at train.py:41.")
    assert adam.endswith("fused=True in AdamW(...).")


def test_without_the_fused_form_torch_chooses_one_as_in_the_trials() -> None:
    (adam,) = lines_to_write({**OWN, FUSED: False}, {**OWN, FUSED: True}, SCRIPT)
    assert adam.endswith("In the code that is AdamW(...) without fused=True.")


def test_an_adam_that_deepspeed_makes_has_its_form_in_the_configuration() -> None:
    made_by_deepspeed = ProgramProfile()
    (on,) = lines_to_write({**OWN, FUSED: True}, OWN, made_by_deepspeed)
    assert on.endswith('In the code that is "fused": true in optimizer.params of the DeepSpeed configuration.')
    (off,) = lines_to_write({**OWN, FUSED: False}, {**OWN, FUSED: True}, made_by_deepspeed)
    assert off.endswith('no "fused" in optimizer.params of the DeepSpeed configuration.')


def test_a_trainer_has_options() -> None:
    workers, pinned, adam = lines_to_write({WORKERS: 2, PINNED: True, FUSED: True}, OWN, TRAINER)
    assert "--dataloader_num_workers 2, or dataloader_num_workers=2," in workers
    assert "--dataloader_pin_memory True" in pinned
    assert "--optim adamw_torch_fused, or optim='adamw_torch_fused'," in adam


def test_a_trainer_that_reads_its_command_is_told_there() -> None:
    turned, offered = {WORKERS: 2, PINNED: True, FUSED: True}, {OPTIMIZER_OPTION, *LOADER_OPTIONS.values()}
    assert trainer_options(turned, OWN, offered) == {
        "--dataloader_num_workers": "2",
        "--dataloader_pin_memory": "True",
        "--optim": "adamw_torch_fused",
    }
    assert not left_to_write(turned, OWN, offered)
    assert trainer_options({FUSED: False}, {FUSED: True}, offered) == {"--optim": "adamw_torch"}


def test_an_optimizer_of_the_code_stays_a_line_to_write() -> None:
    turned, offered = {WORKERS: 2, PINNED: False, FUSED: True}, LOADER_OPTIONS.values()
    assert trainer_options(turned, OWN, offered) == {"--dataloader_num_workers": "2"}
    assert left_to_write(turned, OWN, offered) == {FUSED: True}


@pytest.mark.parametrize("own", [{**OWN, PREFETCH: 2, PERSISTENT: False}, {WORKERS: 2, PREFETCH: 2, PERSISTENT: False}])
def test_a_winner_without_workers_has_no_setting_of_workers(own: dict[str, object]) -> None:
    """Torch and the Trainer refuse both without workers, and ranks leave them out."""
    turned, offered = {WORKERS: 0, PREFETCH: 4, PERSISTENT: True}, LOADER_OPTIONS.values()
    workers = {} if own[WORKERS] == 0 else {"--dataloader_num_workers": "0"}
    assert trainer_options(turned, own, offered) == workers
    assert len(lines_to_write(turned, own, SCRIPT)) == len(workers)
    assert not left_to_write(turned, own, offered)
    with_workers = trainer_options({**turned, WORKERS: 4}, own, offered)
    assert with_workers == {
        "--dataloader_num_workers": "4",
        "--dataloader_prefetch_factor": "4",
        "--dataloader_persistent_workers": "True",
    }


def test_a_line_without_workers_says_what_torch_refuses_with_it() -> None:
    (line,) = lines_to_write({WORKERS: 0}, {WORKERS: 2}, SCRIPT)
    expected = "num_workers=0 in the DataLoader at train.py:41, without prefetch_factor and persistent_workers."
    assert line.endswith(expected)
    (option,) = lines_to_write({WORKERS: 0}, {WORKERS: 2}, TRAINER)
    assert option.endswith(", without dataloader_prefetch_factor and dataloader_persistent_workers.")


@pytest.mark.parametrize(("turned", "own", "removed"), [(0, 2, True), (4, 2, False), (0, 0, False)])
def test_what_the_user_typed_of_workers_is_removed_if_the_winner_has_none(turned: int, own: int, removed: bool) -> None:
    options = options_to_remove({WORKERS: turned}, {WORKERS: own}, LOADER_OPTIONS.values())
    assert options == ([LOADER_OPTIONS[PREFETCH], LOADER_OPTIONS[PERSISTENT]] if removed else [])
    assert not options_to_remove({WORKERS: turned}, {WORKERS: own}, ()), "the code makes the loader"
