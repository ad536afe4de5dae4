"""Three ranks save checkpoints together and come back to them: they share the work and agree on everything."""

import errno
import json
import multiprocessing
import os
import random
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from zerotune.trial_lib.training import checkpoints
from zerotune.trial_lib.training.checkpoints import CheckpointStore, load_rank_state, save_rank_state
from zerotune.trial_lib.training.data import capture, restore
from zerotune.trial_lib.training.distributed import DistributedContext, InvalidTrialError

RANKS = 3


@pytest.fixture(scope="module")
def pool():
    with ProcessPoolExecutor(RANKS, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture
def on_all_ranks(pool, tmp_path):
    """Calls a function on each rank, with its context and the folder of the checkpoints; returns all answers."""
    calls = iter(range(100))

    def call(function):
        meeting_point = f"file://{tmp_path}/meeting-point-{next(calls)}"
        ranks = [pool.submit(as_rank, rank, meeting_point, function, tmp_path / "checkpoints") for rank in range(RANKS)]
        return [rank.result(timeout=120) for rank in ranks]

    return call


def as_rank(rank, meeting_point, function, root):
    dist.init_process_group(
        "gloo", init_method=meeting_point, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    try:
        return function(DistributedContext.from_torch(), root)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def save(distributed, root, batch, metric=None):
    def write(folder):
        save_rank_state(folder, distributed.rank, {"rank": distributed.rank})
        (folder / "model0").mkdir(exist_ok=True)
        (folder / "model0" / f"zero_pp_rank_{distributed.rank}_states.pt").write_text("weights")

    return CheckpointStore(root, distributed, smaller_is_better=True).save(batch, metric, {"epoch": 1}, write)


def find(distributed, root):
    notes = []
    return CheckpointStore(root, distributed, smaller_is_better=True).newest_intact(notes.append), notes


def find_alone(root):
    return find(DistributedContext(), root)


def save_two(distributed, root):
    return [save(distributed, root, 10, 0.5), save(distributed, root, 20, 0.4)]


def save_and_say_what_was_sealed(distributed, root):
    sealed, seal = [], checkpoints.seal
    checkpoints.seal = lambda paths: (sealed.extend(path.name for path in paths), seal(paths))[1]
    try:
        return save(distributed, root, 10), sealed
    finally:
        checkpoints.seal = seal


def test_ranks_write_into_one_checkpoint_and_share_the_sealing(on_all_ranks, tmp_path):
    answers = on_all_ranks(save_and_say_what_was_sealed)
    saved = answers[0][0]
    assert [checkpoint for checkpoint, _ in answers] == [saved] * RANKS
    assert [len(sealed) for _, sealed in answers] == [2] * RANKS
    names = {name for _, sealed in answers for name in sealed}
    assert names == {f"rank{rank}.pt" for rank in range(RANKS)} | {
        f"zero_pp_rank_{rank}_states.pt" for rank in range(RANKS)
    }
    manifest = json.loads((saved.path / "manifest.json").read_text())
    assert manifest["world_size"] == RANKS
    assert {name.rpartition("/")[2] for name in manifest["files"]} == names
    assert on_all_ranks(find) == [(saved, [])] * RANKS


@pytest.mark.parametrize("rank", range(RANKS))
def test_damage_that_one_rank_finds_counts_for_all(on_all_ranks, tmp_path, rank):
    older, newer = on_all_ranks(save_two)[0]
    os.truncate(newer.path / f"rank{rank}.pt", 7)
    answers = on_all_ranks(find)
    assert [found for found, _ in answers] == [older] * RANKS
    assert [len(notes) for _, notes in answers] == [1, 0, 0]
    assert f"checkpoint batch-00000020 is damaged (rank{rank}.pt has 7 bytes, not " in answers[0][1][0]
    assert on_all_ranks(find) == [(older, [])] * RANKS


def save_on_a_disk_that_fails_rank_1(distributed, root):
    seal = checkpoints.seal

    def fails(paths):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(paths[0]))

    checkpoints.seal = fails if distributed.rank == 1 else seal
    try:
        return raised(lambda: save(distributed, root, 30))
    finally:
        checkpoints.seal = seal


def raised(call):
    try:
        call()
    except OSError as error:
        return str(error)
    return None


def test_a_disk_that_fails_one_rank_is_an_error_on_all_and_leaves_no_checkpoint(on_all_ranks, tmp_path):
    _, newer = on_all_ranks(save_two)[0]
    errors = on_all_ranks(save_on_a_disk_that_fails_rank_1)
    assert errors == errors[:1] * RANKS
    assert "rank 1: [Errno 28] No space left on device" in errors[0]
    assert find_alone(tmp_path / "checkpoints") == (newer, [])


def search_where_rank_2_has_a_disk_of_its_own(distributed, root):
    own = root if distributed.rank < 2 else root.with_name("other")
    return raised(lambda: find(distributed, own)), raised(lambda: save(distributed, own, 40))


def test_a_rank_that_does_not_see_the_folder_is_an_error_and_no_damage(on_all_ranks, tmp_path):
    _, newer = on_all_ranks(save_two)[0]
    for errors in on_all_ranks(search_where_rank_2_has_a_disk_of_its_own):
        assert all("Rank 2 does not see the folder" in error for error in errors)
        assert all("on a file system that all hosts share" in error for error in errors)
    assert find_alone(tmp_path / "checkpoints") == (newer, [])


def save_where_a_file_is_in_the_way(distributed, root):
    return raised(lambda: save(distributed, root, 10))


def test_an_error_of_rank_0_is_one_of_all(on_all_ranks, tmp_path):
    (tmp_path / "checkpoints").write_text("")
    errors = on_all_ranks(save_where_a_file_is_in_the_way)
    assert errors == errors[:1] * RANKS
    assert "checkpoints" in errors[0]


def save_and_draw(distributed, root):
    random.seed(distributed.rank)
    CheckpointStore(root, distributed, smaller_is_better=True).save(
        10, None, {}, lambda folder: save_rank_state(folder, distributed.rank, capture())
    )
    return random.random()


def load_and_draw(distributed, root):
    found, _ = find(distributed, root)
    restore(load_rank_state(found.path, distributed.rank))
    return random.random()


def test_every_rank_gets_its_own_state_back(on_all_ranks):
    draws = on_all_ranks(save_and_draw)
    assert len(set(draws)) == RANKS
    assert on_all_ranks(load_and_draw) == draws


def test_fewer_ranks_find_the_checkpoint_whole(on_all_ranks, tmp_path):
    saved = on_all_ranks(save_two)[0][1]
    found, notes = find_alone(tmp_path / "checkpoints")
    assert (found, notes) == (saved, [])


def verify_and_say_what_was_read(distributed, root):
    read, problem_of_content = [], checkpoints.problem_of_content
    checkpoints.problem_of_content = lambda path, *others: (read.append(path.name), problem_of_content(path, *others))[
        1
    ]
    try:
        find(distributed, root)
        return sorted(read)
    finally:
        checkpoints.problem_of_content = problem_of_content


def save_a_large_first_file(distributed, root):
    def write(folder):
        # By name, rank 0 would have the large one and a fourth of the others.
        (folder / f"{distributed.rank}-large.bin").write_bytes(bytes(1000 if distributed.rank == 0 else 10))
        (folder / f"{distributed.rank}-small.bin").write_bytes(bytes(5))

    CheckpointStore(root, distributed, smaller_is_better=True).save(10, None, {}, write)


def test_the_rank_with_the_largest_file_reads_no_other(on_all_ranks):
    on_all_ranks(save_a_large_first_file)
    shares = on_all_ranks(verify_and_say_what_was_read)
    assert shares[0] == ["0-large.bin"]
    assert len({name for share in shares for name in share}) == sum(map(len, shares)) == 2 * RANKS


def fail_to_write_on_rank_1(distributed, root):
    def write(folder):
        if distributed.rank == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return raised_by(lambda: CheckpointStore(root, distributed, smaller_is_better=True).save(30, None, {}, write))


def raised_by(call):
    """Returns the kind of an error; the process group ends with this rank, as it does where the process ends."""
    try:
        call()
    except (OSError, RuntimeError) as error:
        return type(error).__name__
    finally:
        dist.destroy_process_group()


def test_an_error_within_the_writing_ends_the_rank_at_once_and_the_others_with_it(on_all_ranks, tmp_path):
    _, newer = on_all_ranks(save_two)[0]
    assert on_all_ranks(fail_to_write_on_rank_1) == ["RuntimeError", "OSError", "RuntimeError"]
    assert find_alone(tmp_path / "checkpoints") == (newer, [])


def convert_what_is_no_state_of_zero(distributed, root):
    def write(folder):
        if distributed.rank == 0:
            (folder / "model0").mkdir()
            (folder / "model0" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_text("weights")

    saved = CheckpointStore(root, distributed, smaller_is_better=True).save(10, None, {}, write)
    try:
        checkpoints.convert(saved, distributed)
    except InvalidTrialError as error:
        return str(error)


@pytest.mark.long
def test_what_deepspeed_cannot_convert_is_an_error_on_all_ranks_with_its_last_words(on_all_ranks, tmp_path):
    errors = on_all_ranks(convert_what_is_no_state_of_zero)
    assert errors == errors[:1] * RANKS
    folder = tmp_path / "checkpoints" / "batch-00000010" / "model0"
    assert errors[0].startswith(f"DeepSpeed could not convert {folder} for another number of ranks (")
    assert "Error: " in errors[0]
    assert errors[0].endswith("resume on as many slots as saved it.")
    assert find_alone(tmp_path / "checkpoints")[0].batch == 10
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["batch-00000010"]
