"""What a study leaves on a host of a Ray cluster goes with the last of its actors there, or with the next study's."""

from pathlib import Path

from zerotune.trial_lib.launch.locks import own_folder
from zerotune.trial_lib.launch.ray_host import HostFolder


def test_a_study_s_folder_goes_when_it_ends(tmp_path: Path) -> None:
    folder = HostFolder(tmp_path, "one")
    (folder.path / "0001").mkdir()
    folder.remove()
    assert not list((own_folder(tmp_path) / "trials").iterdir())


def test_the_folder_of_a_study_whose_actor_was_killed_goes_when_another_begins(tmp_path: Path) -> None:
    killed = own_folder(tmp_path) / "trials" / "killed"
    (killed / "0001").mkdir(parents=True)
    (own_folder(tmp_path) / "trials" / "killed.lock").touch()
    lives = HostFolder(tmp_path, "lives")
    begins = HostFolder(tmp_path, "begins")
    assert not killed.exists()
    assert sorted(path.name for path in (own_folder(tmp_path) / "trials").iterdir()) == [
        *("begins", "begins.lock"),
        *("lives", "lives.lock"),
    ]
    for folder in (lives, begins):
        folder.remove()


def test_two_nodes_on_one_machine_share_the_study_s_folder(tmp_path: Path) -> None:
    first, second = HostFolder(tmp_path, "one"), HostFolder(tmp_path, "one")
    other = HostFolder(tmp_path, "two")
    assert first.path == second.path
    assert first.path.exists()
    for folder in (first, second, other):
        folder.remove()
    assert not list((own_folder(tmp_path) / "trials").iterdir())
