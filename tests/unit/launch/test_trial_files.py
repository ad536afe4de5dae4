"""What is kept of a layer when its trial has ended, and over which folder there is one."""

import json
from pathlib import Path

import pytest

from trial_lib.launch import trial_files
from trial_lib.launch.trial_files import layer_for, put_away
from trial_lib.leave_alone.layered_files import LayeredFiles
from trial_lib.records.study_folder import TrialPaths
from trial_lib.wire.layer import Layer, store_of


def write(folder: Path, *paths: str) -> None:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(f"{folder.name}: {path}")


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def layer(tmp_path: Path) -> Layer:
    """A layer as the kernel leaves it, without the kernel: what is below is the folder itself."""
    folder = tmp_path / "user"
    write(folder, "train.py", "out/old.pt")
    layer = Layer(str(folder), str(store_of(tmp_path / "scratch")))
    layer.upper.mkdir(parents=True)
    layer.below.symlink_to(folder)
    layer.write()
    return layer


def test_what_was_prepared_is_kept_and_what_training_has_written_is_not(layer: Layer, tmp_path: Path) -> None:
    write(layer.upper, "data/a.bin", "data/deep/b.bin", "out/index.json", "out/old.pt")
    LayeredFiles(layer).note_prepared(filled=())
    write(layer.upper, "data/cache.lock", "data/deep/late/c.bin", "out/new.pt", "results/score.txt")
    before = contents(tmp_path / "user")
    put_away(tmp_path / "scratch")
    kept = {path: f"upper: {path}" for path in ("data/a.bin", "data/deep/b.bin", "out/index.json")}
    assert contents(tmp_path / "user") == {**before, **kept}
    assert not (tmp_path / "scratch").exists()


def test_what_a_trial_had_half_prepared_when_it_failed_is_gone(layer: Layer, tmp_path: Path) -> None:
    write(layer.upper, "data/a.bin")
    before = contents(tmp_path / "user")
    put_away(tmp_path / "scratch")
    assert contents(tmp_path / "user") == before


def test_of_two_trials_that_prepare_at_once_the_first_is_kept_whole(layer: Layer, tmp_path: Path) -> None:
    write(layer.upper, "data/a.bin", "data/b.bin")
    LayeredFiles(layer).note_prepared(filled=())
    write(tmp_path / "user", "data/a.bin")
    before = contents(tmp_path / "user")
    put_away(tmp_path / "scratch")
    assert contents(tmp_path / "user") == before


def test_the_list_is_of_what_is_there_when_training_begins(layer: Layer) -> None:
    write(layer.upper, "data/a.bin", "out/old.pt")
    LayeredFiles(layer).note_prepared(filled=())
    assert json.loads(layer.prepared.read_text()) == ["data", "data/a.bin"]


@pytest.mark.parametrize(
    ("program", "covered"),
    [("checkout/scripts", "checkout"), ("plain/scripts", "plain/scripts"), ("home/project", "home/project")],
)
def test_a_layer_is_over_the_checkout_or_the_programs_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, covered: str
) -> None:
    for folder in ("checkout/.git", "home/.git", program):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    paths = TrialPaths(tmp_path / program / "studies" / "trials" / "0001")
    paths.scratch.mkdir(parents=True)
    layer = layer_for(tmp_path / program, paths, {"HF_HOME": str(tmp_path / program / "hub"), "TORCH_HOME": "/else"})
    assert layer is not None
    assert layer.folder == str(tmp_path / covered)
    assert layer.through == (str(paths.root.parent), str(tmp_path / program / "hub"))


def test_there_is_no_layer_where_it_would_be_on_another_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = TrialPaths(tmp_path / "trials" / "0001")
    paths.scratch.mkdir(parents=True)
    assert layer_for(tmp_path, paths, {}) is not None
    monkeypatch.setattr(trial_files, "_checkout", lambda folder: Path("/proc"))
    assert layer_for(tmp_path, paths, {}) is None
    monkeypatch.setattr(trial_files, "_checkout", lambda folder: Path("/"))
    assert layer_for(tmp_path, paths, {}) is None


def test_a_folder_that_holds_the_records_themselves_has_no_layer(tmp_path: Path) -> None:
    paths = TrialPaths(tmp_path / "0000")
    paths.scratch.mkdir(parents=True)
    assert layer_for(tmp_path, paths, {}) is None
