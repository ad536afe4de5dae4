"""What is kept of a layer when its trial has ended, and over which folder there is one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from zerotune.trial_lib.launch import trial_files
from zerotune.trial_lib.launch.rank_starter import Program
from zerotune.trial_lib.launch.trial_files import hidden_folders, layer_for, put_away, uncovered, uncovered_after_all
from zerotune.trial_lib.messages.folders import Layer, store_of
from zerotune.trial_lib.rank.user_files import LayeredFiles
from zerotune.trial_lib.records.folders import FULL_EXPERIMENTS, PLANS, STUDIES


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
    layer = Layer(str(folder), str(store_of(tmp_path / "scratch")), elsewhere=str(tmp_path / "elsewhere"))
    layer.upper.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
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
    [
        *(("checkout/scripts", "checkout"), ("plain/scripts", "plain/scripts"), ("home/project", "home/project")),
        # Git's own files of the last three are in the checkout around them, in a distant one, and nowhere.
        *(("checkout/submodule", "checkout"), ("plain/worktree/scripts", "plain/worktree"), ("home", "home")),
    ],
)
def test_a_layer_is_over_the_checkout_or_the_programs_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, covered: str
) -> None:
    for folder in ("checkout/.git/modules/submodule", "home/.git", "checkout/submodule", "plain/worktree", program):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    write(tmp_path, "checkout/submodule/.git", "plain/worktree/.git")
    (tmp_path / "checkout/submodule/.git").write_text("gitdir: ../.git/modules/submodule\n")
    (tmp_path / "plain/worktree/.git").write_text(f"gitdir: {tmp_path}/checkout/.git/worktrees/worktree\n")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    scratch = tmp_path / program / "studies" / "0001" / "scratch"
    scratch.mkdir(parents=True)
    layer = layer_for(program_in(tmp_path / program), scratch, [scratch.parent])
    assert layer is not None
    assert layer.folder == str(tmp_path / covered)
    assert layer.records == layer.hidden == (str(scratch.parent),)


STORES = ("mlflow.db", "mlflow.db-journal", "mlartifacts")


def program_in(folder: Path, *arguments: str) -> Program:
    return Program("python", {"script": "train.py"}, list(arguments), False, folder, {})


def test_zerotunes_folders_are_hidden_and_what_the_command_names_in_them_is_seen(tmp_path: Path) -> None:
    program = tmp_path / "checkout" / "scripts"
    study, named = program / STUDIES / "today", tmp_path / "checkout" / FULL_EXPERIMENTS / "earlier" / "checkpoints"
    for folder in (tmp_path / "checkout/.git", study / "trials/0001/scratch", named, tmp_path / PLANS / "first"):
        folder.mkdir(parents=True)
    write(program, "mlflow.db", "mlartifacts/1/file")
    write(tmp_path / "other", "mlflow.db")
    arguments = ("--steps=3", f"--begin_with=../{named.relative_to(tmp_path / 'checkout')}", str(study / "trials/0001"))
    # What is named twice, or in something named, is shown once.
    (named / "model.bin").touch()
    arguments += (str(named / "model.bin"), str(named))
    trial = study / "trials" / "0001"
    layer = layer_for(program_in(program, *arguments), trial / "scratch", [trial, trial / "as_typed"])
    assert layer is not None
    assert layer.records == (str(trial),)
    stores = [folder / name for folder in (program, tmp_path / "checkout", tmp_path) for name in STORES]
    hidden = (program / STUDIES, tmp_path / "checkout" / FULL_EXPERIMENTS, tmp_path / PLANS, *stores)
    assert set(layer.hidden) == set(map(str, hidden))
    assert layer.named == (str(named),)


def test_a_study_that_was_moved_is_hidden_too(tmp_path: Path) -> None:
    trial = tmp_path / "program" / "kept" / "trials" / "0001"
    trial.mkdir(parents=True)
    write(tmp_path / "program" / "kept", "study.json")
    assert hidden_folders(tmp_path / "program", [trial]) == [tmp_path / "program" / "kept"]


def test_the_trials_processes_and_the_driver_name_the_records_differently(tmp_path: Path) -> None:
    layer = Layer("/program", "/program/zerotune-studies/ä/0001/scratch/layer", ("/program/zerotune-studies/ä/0001",))
    mounted = replace(layer, elsewhere="/tmp/zerotune-trial-1")
    order = {"log": f"{layer.records[0]}/rank0.log", "arguments": [f"--config={layer.records[0]}/c.json", "/program/x"]}
    seen = json.loads(mounted.as_seen(json.dumps(order)))
    there = "/tmp/zerotune-trial-1/records/0001"
    assert seen == {"log": f"{there}/rank0.log", "arguments": [f"--config={there}/c.json", "/program/x"]}
    assert json.loads(mounted.as_recorded(json.dumps(seen))) == order


def test_there_is_no_layer_where_it_would_be_on_another_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "trials" / "0001" / "scratch"
    scratch.mkdir(parents=True)
    for folder, has_layer in ((tmp_path, True), (Path("/proc"), False), (Path("/"), False)):
        monkeypatch.setattr(trial_files, "_checkout", lambda _, folder=folder: folder)
        assert (layer_for(program_in(tmp_path), scratch, [scratch.parent]) is not None) == has_layer


@pytest.mark.parametrize(
    ("over_hosts", "folder", "refusal", "reason"),
    [
        (True, None, None, "several hosts"),
        (False, "/", None, "root of the file system"),
        (False, "/proc", None, "another file system"),
        (False, None, "Operation not permitted", "no layers: Operation not permitted"),
    ],
)
def test_a_study_without_layers_says_what_its_trials_do_not_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over_hosts: bool, folder: str, refusal: str, reason: str
) -> None:
    covered = Path(folder) if folder else tmp_path
    monkeypatch.setattr(trial_files, "_checkout", lambda _: covered)
    monkeypatch.setattr(trial_files, "layer_refusal", lambda _: refusal)
    sentence = uncovered(tmp_path, tmp_path, over_hosts)
    assert sentence.startswith(f"Trials see {covered} itself (")
    assert reason in sentence
    assert "find, git, rm" in sentence


def test_a_study_with_layers_has_nothing_to_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_files, "layer_refusal", lambda _: None)
    monkeypatch.setattr(trial_files, "mounts_within", lambda folder, table: ())
    assert uncovered(tmp_path, tmp_path, over_hosts=False) == ""
    monkeypatch.setattr(trial_files, "mounts_within", lambda folder, table: (f"{folder}/data",))
    monkeypatch.setattr(trial_files, "may_mount", lambda: True)
    assert f"Trials see {tmp_path}/data itself" in uncovered(tmp_path, tmp_path, over_hosts=False)
    # The kernel lets no user make a layer over a folder with a disk in it.
    monkeypatch.setattr(trial_files, "may_mount", lambda: False)
    sentence = uncovered(tmp_path, tmp_path, over_hosts=False)
    assert sentence.startswith(f"Trials see {tmp_path} itself ({tmp_path}/data is mounted in it")


def test_a_study_names_what_lies_outside_of_its_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, data, git = tmp_path / "program", tmp_path / "data", tmp_path / "main/.git/worktrees/program"
    study = program / STUDIES / "today"
    for folder in (study, data, git, program / "run"):
        folder.mkdir(parents=True)
    monkeypatch.setattr(trial_files, "layer_refusal", lambda _: None)
    monkeypatch.setattr(trial_files, "may_mount", lambda: True)
    mounts = [f"{program}/{STUDIES}/volume"]
    monkeypatch.setattr(trial_files, "mounts_within", lambda folder, table: mounts)
    (program / "latest").symlink_to("run")
    assert uncovered(program, study, over_hosts=False) == ""
    mounts += [f"{program}/disk", f"{program}/other"]
    (program / "data").symlink_to(data)
    (program / ".git").write_text(f"gitdir: {git}")
    disks = (f"{program}/{name} itself (it is a file system of its own)" for name in ("disk", "other"))
    led = (f"{target} itself ({program}/{name} leads there)" for name, target in (("data", data), (".git", git)))
    assert uncovered(program, study, over_hosts=False).startswith(f"Trials see {', '.join((*disks, *led))}. There only")
    assert uncovered_after_all(program, [uncovered(program, study, over_hosts=False)]).startswith("The kernel made no")
    assert uncovered_after_all(program, [uncovered(program, study, over_hosts=True)]) == ""


def test_links_to_where_nobody_can_go_are_nothing_that_trials_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_files, "layer_refusal", lambda _: None)
    monkeypatch.setattr(trial_files, "mounts_within", lambda folder, table: ())
    # Even root gets an error for a name of this length, as another user does for a folder that is closed to him.
    for name in ("data", STUDIES):
        (tmp_path / name).symlink_to("x" * 300)
    assert uncovered(tmp_path, tmp_path, over_hosts=False) == ""
