"""One process saves checkpoints and comes back to them: which are kept, which is best, what damage does."""

import enum
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from zerotune.trial_lib.training.checkpoints import Checkpoint, CheckpointStore, dealt, load_rank_state, save_rank_state
from zerotune.trial_lib.training.distributed import DistributedContext, InvalidTrialError


class Color(enum.Enum):
    RED = 1


@pytest.fixture
def root(tmp_path):
    return tmp_path / "training" / "checkpoints"


@pytest.fixture
def store(root):
    return CheckpointStore(root, DistributedContext(), smaller_is_better=True)


def writes(text="weights"):
    def write(folder):
        (folder / "rank0.pt").write_text(text)
        (folder / "model0" / "experts").mkdir(parents=True)
        (folder / "model0" / "mp_rank_00_model_states.pt").write_text(text * 10)
        (folder / "model0" / "experts" / "7.pt").write_text("")

    return write


def save(store, batch, metric=None, text="weights"):
    return store.save(batch, metric, {"epoch": batch // 10}, writes(text))


def newest(store):
    """Returns the newest intact checkpoint, and what was said about damaged ones."""
    notes = []
    return store.newest_intact(notes.append), notes


def names(root):
    return sorted(entry.name for entry in root.iterdir())


def test_a_saved_checkpoint_is_found_as_it_was_saved(root, store):
    saved = save(store, 120, 0.5)
    assert saved == Checkpoint(root / "batch-00000120", 120, 1, 0.5, {"epoch": 12})
    assert saved.name == "batch-00000120"
    assert (saved.path / "model0" / "mp_rank_00_model_states.pt").read_text() == "weights" * 10
    assert newest(CheckpointStore(root, DistributedContext(), smaller_is_better=True)) == (saved, [])


def test_the_manifest_names_every_file_with_its_size_and_hash(store):
    manifest = json.loads((save(store, 120, 0.5).path / "manifest.json").read_text())
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert manifest["files"]["model0/experts/7.pt"] == {"bytes": 0, "sha256": empty}
    assert {name: file["bytes"] for name, file in manifest["files"].items()} == {
        "model0/experts/7.pt": 0,
        "model0/mp_rank_00_model_states.pt": 70,
        "rank0.pt": 7,
    }
    assert {key: manifest[key] for key in ("format", "batch", "world_size", "metric", "state")} == {
        "format": 1,
        "batch": 120,
        "world_size": 1,
        "metric": 0.5,
        "state": {"epoch": 12},
    }


def test_nothing_is_found_where_nothing_was_saved(root, store):
    assert newest(store) == (None, [])
    assert (store.complete(), store.best()) == ([], None)
    assert not root.exists()


def test_the_newest_is_that_of_the_last_batch(store):
    for batch in (99_999_999, 100_000_000):  # names of different lengths
        save(store, batch)
    assert newest(store)[0].batch == 100_000_000
    assert [found.batch for found in store.complete()] == [99_999_999, 100_000_000]


@pytest.mark.parametrize(("smaller_is_better", "best"), [(True, 20), (False, 30)])
def test_the_best_and_the_last_two_are_kept(root, smaller_is_better, best):
    store = CheckpointStore(root, DistributedContext(), smaller_is_better)
    for batch, metric in ((10, 0.5), (20, 0.1), (30, 0.9), (40, 0.4), (50, 0.5)):
        save(store, batch, metric)
    assert names(root) == [f"batch-{best:08d}", "batch-00000040", "batch-00000050"]
    assert store.best().batch == best


def test_where_the_best_is_old_a_damaged_latest_costs_no_more_than_the_batches_since_the_one_before(store):
    for batch, metric in ((10, 0.1), (20, 0.9), (30, None), (40, 0.9)):
        save(store, batch, metric)
    flip(store.complete()[-1].path)
    assert newest(store)[0].batch == 30


def test_the_last_two_are_all_while_the_best_is_one_of_them(root, store):
    for batch, metric in ((10, 0.5), (20, 0.4), (30, 0.3)):
        save(store, batch, metric)
    assert names(root) == ["batch-00000020", "batch-00000030"]


def test_without_a_metric_none_is_best_and_the_last_two_are_kept(root, store):
    for batch, metric in ((10, None), (20, float("nan")), (30, float("-inf"))):
        save(store, batch, metric)
    assert names(root) == ["batch-00000020", "batch-00000030"]
    assert store.best() is None
    assert [found.metric for found in store.complete()] == [None, None]


def test_of_equally_good_ones_the_first_is_best(store):
    for batch in (10, 20, 30):
        save(store, batch, 0.5)
    assert [found.batch for found in store.complete()] == [10, 20, 30]
    assert store.best().batch == 10


def test_a_batch_that_is_saved_again_is_replaced(root, store):
    save(store, 10)
    save(store, 20, text="before")
    again = save(store, 20, 0.5, text="validated")
    assert again.metric == 0.5
    assert newest(store) == (again, [])
    assert (again.path / "rank0.pt").read_text() == "validated"
    assert names(root) == ["batch-00000010", "batch-00000020"]


def test_what_killed_processes_left_behind_is_removed_by_the_next_save(root, store):
    save(store, 10)
    for kind in ("partial", "pruned", "universal"):
        shutil.copytree(root / "batch-00000010", root / f".batch-00000020.{kind}")
    save(store, 20)
    assert names(root) == ["batch-00000010", "batch-00000020"]


def test_a_checkpoint_that_was_being_replaced_comes_back(root, store):
    saved = save(store, 10)
    (root / "batch-00000010").rename(root / ".batch-00000010.replaced")
    assert newest(store) == (saved, [])
    assert names(root) == ["batch-00000010"]


def test_a_save_that_fails_leaves_the_checkpoints_as_they_were(root, store):
    saved = save(store, 10)

    def fails(folder):
        (folder / "rank0.pt").write_text("half")
        raise RuntimeError("no space left")

    with pytest.raises(RuntimeError, match="no space left"):
        store.save(20, None, {}, fails)
    with pytest.raises(RuntimeError, match="no space left"):
        store.save(10, None, {}, fails)
    assert newest(store) == (saved, [])
    assert names(root) == ["batch-00000010"]


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = CheckpointStore(Path("checkpoints"), DistributedContext(), smaller_is_better=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert save(store, 10).path == tmp_path / "checkpoints" / "batch-00000010"


def cut(checkpoint):
    os.truncate(checkpoint / "model0" / "mp_rank_00_model_states.pt", 10)


def flip(checkpoint):
    content = bytearray((checkpoint / "rank0.pt").read_bytes())
    content[3] ^= 1
    (checkpoint / "rank0.pt").write_bytes(content)


def edit(**changes):
    def change(checkpoint):
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        (checkpoint / "manifest.json").write_text(json.dumps({**manifest, **changes}))

    return change


DAMAGES = {
    "model0/mp_rank_00_model_states.pt has 10 bytes, not 70": cut,
    "rank0.pt has the right size and another content": flip,
    "rank0.pt is missing": lambda checkpoint: (checkpoint / "rank0.pt").unlink(),
    "model0/experts/7.pt is missing": lambda checkpoint: shutil.rmtree(checkpoint / "model0" / "experts"),
    "manifest.json is missing": lambda checkpoint: (checkpoint / "manifest.json").unlink(),
    "manifest.json cannot be read: JSONDecodeError": lambda checkpoint: os.truncate(checkpoint / "manifest.json", 100),
    "manifest.json cannot be read: TypeError": lambda checkpoint: (checkpoint / "manifest.json").write_text("[]"),
    "manifest.json has the format 2, and this program reads 1": edit(format=2),
    "manifest.json is that of batch-00000010": edit(batch=10),
}


@pytest.mark.parametrize("problem", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(root, store, problem):
    older, newer = save(store, 10, 0.5), save(store, 20, 0.4)
    DAMAGES[problem](newer.path)
    found, notes = newest(store)
    assert found == older
    assert len(notes) == 1
    assert notes[0].startswith(f"checkpoint batch-00000020 is damaged ({problem}")
    assert "; the one before is used" in notes[0]
    assert names(root) == ["batch-00000010", "damaged-batch-00000020"]
    assert store.best() == older
    assert newest(store) == (older, [])


def test_a_batch_that_was_damaged_is_saved_again_and_the_damaged_one_stays(root, store):
    save(store, 10)
    for _ in range(2):
        flip(save(store, 20).path)
        newest(store)
    assert newest(store)[0].batch == 10
    saved = save(store, 20)
    assert newest(store) == (saved, [])
    assert names(root) == ["batch-00000010", "batch-00000020", "damaged-batch-00000020"]


def test_where_all_are_damaged_it_says_that_the_training_begins_anew(store):
    for batch in (10, 20):
        save(store, batch)
    for checkpoint in store.complete():
        cut(checkpoint.path)
    found, notes = newest(store)
    assert found is None
    assert len(notes) == 2
    assert "there is none before it, so the training begins anew" in notes[1]


def test_files_are_dealt_by_size_whatever_their_names():
    sizes = {"a": 1, "b": 60, "c": 1, "d": 50, "e": 1, "f": 40}
    assert dealt(sizes, 2) == [["b", "a", "c", "e"], ["d", "f"]]
    assert dealt(dict(reversed(sizes.items())), 2) == dealt(sizes, 2)
    assert dealt({"a": 0, "b": 0, "c": 0}, 3) == [["a"], ["b"], ["c"]]
    assert dealt({}, 2) == [[], []]


def test_a_file_that_was_added_later_is_no_damage(store):
    saved = save(store, 10)
    (saved.path / "universal").mkdir()
    (saved.path / "universal" / "notes.txt").write_text("converted")
    assert newest(store) == (saved, [])


def test_files_of_any_name_and_links_are_kept(store, tmp_path):
    (tmp_path / "shared.txt").write_text("shared")

    def write(folder):
        (folder / os.fsdecode(b"\xff name\n")).write_text("odd")
        (folder / "link.txt").symlink_to(tmp_path / "shared.txt")
        (folder / "broken").symlink_to(tmp_path / "nowhere")
        (folder / "folder").symlink_to(tmp_path)
        os.mkfifo(folder / "pipe")

    saved = store.save(10, None, {}, write)
    assert newest(store) == (saved, [])
    (tmp_path / "shared.txt").write_text("edited")
    assert newest(store)[0] is None


def test_a_trial_may_not_take_the_name_of_the_manifest(store):
    with pytest.raises(InvalidTrialError, match="has saved a file manifest"):
        store.save(10, None, {}, lambda folder: (folder / "manifest.json").write_text("{}"))
    store.save(
        10, None, {}, lambda folder: ((folder / "model").mkdir(), (folder / "model/manifest.json").write_text(""))
    )
    assert newest(store)[0].batch == 10


def test_the_loops_state_has_to_be_json(root, store):
    with pytest.raises(InvalidTrialError, match=r"cannot be written as JSON .*Color"):
        store.save(10, None, {"color": Color.RED}, writes())
    assert not root.exists()


def test_a_ranks_state_comes_back(tmp_path):
    shared = torch.arange(6.0).reshape(2, 3)
    state = {
        "callbacks": {"ema": {"weights": shared, "row": shared[0], "decay": 0.5}, "moments": [shared, (shared,)]},
        "parameter": torch.nn.Parameter(shared),
        "tuple": (1, 2**62, -1.5, "a", [None, True]),
        3: torch.tensor([1, 2], dtype=torch.uint8),
        "size": shared.shape,
        "dtype": torch.bfloat16,
        "bytes": b"\x00\xff",
    }
    save_rank_state(tmp_path, 1, state)
    assert [entry.name for entry in tmp_path.iterdir()] == ["rank1.pt"]
    loaded = load_rank_state(tmp_path, 1)
    torch.testing.assert_close(loaded.pop("callbacks"), state.pop("callbacks"), rtol=0, atol=0)
    assert torch.equal(loaded.pop("parameter"), state.pop("parameter"))
    assert torch.equal(loaded.pop(3), state.pop(3))
    assert loaded == state


class Plain:
    pass


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"callbacks": {"ema": Path("ema")}}, r"callbacks\.ema is a pathlib"),
        ({"callbacks": {"best": [1, (2, Color.RED)]}}, r"callbacks\.best\.1\.1 is a test_checkpoints\.Color"),
        ({"callbacks": {"best": {Color.RED: 1}}}, r"a key of callbacks\.best is a test_checkpoints\.Color"),
        ({"callbacks": {"model": Plain()}}, r"callbacks\.model is a test_checkpoints\.Plain"),
        ({"callbacks": {"rule": lambda: 1}}, r"callbacks\.rule is a function"),
        ({"callbacks": {"open": iter([])}}, r"callbacks\.open is a list_iterator"),
        ({"random": torch.Generator()}, r"random is a torch\._C\.Generator"),
    ],
)
def test_a_state_that_cannot_be_read_back_is_refused_when_it_is_saved(tmp_path, state, problem):
    with pytest.raises(
        InvalidTrialError, match=rf"^The state of rank 0 cannot be saved: {problem}.* holds tensors, numbers"
    ):
        save_rank_state(tmp_path, 0, {"fine": torch.zeros(2), **state})


def test_an_error_of_the_disk_is_no_fault_of_the_state(tmp_path):
    with pytest.raises(Exception, match="nowhere") as caught:
        save_rank_state(tmp_path / "nowhere", 0, {"a": 1})
    assert not isinstance(caught.value, InvalidTrialError)
