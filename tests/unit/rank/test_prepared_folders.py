"""Where a program may save a model before it trains: never over a file that is older than the study."""

import os
import time
from pathlib import Path

import pytest

from zerotune.trial_lib.rank import user_files
from zerotune.trial_lib.rank.user_files import UserFiles


def files_of(folder: Path, began: float, layered_device: int | None = None) -> UserFiles:
    """Returns the files of a trial of a study that began then. Paths beside its folders are free, as in `/tmp`."""
    return UserFiles(folder / "study" / "scratch", began, folder / "program", layered_device)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for place in ("program/old", "free/old"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "model.safetensors").write_text("the user's")
    (tmp_path / "free" / "empty").mkdir()
    return tmp_path


@pytest.fixture
def later(folder: Path) -> UserFiles:
    return files_of(folder, time.time() + 60)


def test_a_folder_without_anything_old_takes_the_files_until_training_begins(folder: Path) -> None:
    files = files_of(folder, began=1.0)
    places = [folder / place for place in ("program/new", "program/old", "free/new", "free/old", "free/empty")]
    assert [files.to_prepare(place) for place in places] == places
    files.training_began()
    assert (
        {files.to_prepare(place) for place in places} == {files.to_prepare_model(place) for place in places} == {None}
    )


@pytest.mark.parametrize("place", ["free/old", "free/link"])
def test_an_older_model_that_nothing_protects_stays(folder: Path, place: str, later: UserFiles) -> None:
    (folder / "free" / "link").symlink_to(folder / "free" / "old")
    assert later.to_prepare(folder / place) is later.to_prepare_model(folder / place) is None


def test_a_new_link_to_an_older_file_keeps_that(folder: Path) -> None:
    theirs = folder / "free" / "old" / "model.safetensors"
    began = theirs.lstat().st_ctime + 0.01
    time.sleep(0.05)
    (folder / "free" / "empty" / "model.safetensors").symlink_to(theirs)
    assert files_of(folder, began).to_prepare_model(folder / "free" / "empty") is None


@pytest.mark.parametrize("place", ["program/old", "program/link"])
def test_without_a_layer_a_model_goes_to_the_copies(folder: Path, place: str, later: UserFiles) -> None:
    (folder / "program" / "link").symlink_to(folder / "free" / "old")
    assert later.to_prepare(folder / place) is None
    copy = later.to_prepare_model(folder / place)
    assert copy == later.copy_of(str(folder / place))
    Path(copy).mkdir()
    (Path(copy) / "model.safetensors").touch()
    assert later.seen(folder / place / "model.safetensors") == f"{copy}/model.safetensors"


def test_a_layer_takes_files_over_older_ones_and_notes_the_folder(folder: Path) -> None:
    place = folder / "program" / "old"
    files = files_of(folder, time.time() + 60, layered_device=folder.stat().st_dev)
    assert files.to_prepare(place) == files.to_prepare_model(place) == place
    assert files.filled == {os.path.realpath(place)}
    files.start_over()
    assert not files.filled


def test_names_that_lead_nowhere_or_vanish_meanwhile_are_not_old(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = folder / "free" / "empty"
    (place / "dangling").symlink_to("nothing")
    monkeypatch.setattr(user_files, "_real_listdir", lambda where: ["dangling", "vanished"])
    assert files_of(folder, began=1.0).to_prepare(place) == place
