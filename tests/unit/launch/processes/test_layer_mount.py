"""Which mounts a layer has to leave as they are, by the kernel's table."""

import errno
import os
from pathlib import Path

import pytest

from zerotune.trial_lib.launch.processes import layer_mount
from zerotune.trial_lib.launch.processes.layer_mount import enter, mounts_within, name_elsewhere
from zerotune.trial_lib.messages.folders import Layer

OF_THE_KERNEL = "34 29 0:30 / {} rw,nosuid shared:8 - ext4 /dev/sda rw\n"


def table(*points: bytes) -> bytes:
    before, after = OF_THE_KERNEL.encode().split(b"{}")
    return b"".join(before + point + after for point in points)


def test_a_mount_below_the_folder_is_found_and_no_other() -> None:
    assert mounts_within("/user", table(b"/", b"/user", b"/user/data", b"/users/data")) == ("/user/data",)


def test_a_mount_is_found_whatever_bytes_its_name_has() -> None:
    names = ["/user/a b", "/user/back\\slash", "/user/Übung", "/user/line\u2028end", "/user/next\x85line"]
    escaped = [os.fsencode(name).replace(b"\\", b"\\134").replace(b" ", b"\\040") for name in names]
    not_text = b"/user/\xff\xfe"
    assert mounts_within("/user", table(*escaped, not_text)) == (*names, os.fsdecode(not_text))


def test_no_other_user_can_foresee_the_name_of_a_trials_folder() -> None:
    requests: list[dict[str, object]] = [{}, {}]
    for request in requests:
        name_elsewhere(request)
    assert requests[0] != requests[1]


def test_a_trial_that_was_removed_as_it_started_does_not_come_back(tmp_path: Path) -> None:
    removed = tmp_path / "trials" / "0000" / "scratch"
    request = {"ranks": [{"environment": {"TMPDIR": str(tmp_path)}}]}
    name_elsewhere(request)
    enter(Layer(str(tmp_path / "program"), str(removed / "layer")), request)
    assert not (tmp_path / "trials").exists()


def test_a_journal_that_vanishes_as_it_is_covered_spoils_no_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, store = tmp_path / "mlflow.db-journal", tmp_path / "mlflow.db"
    layer = Layer(
        str(tmp_path / "program"),
        str(tmp_path / "store"),
        hidden=(str(journal), str(store)),
        elsewhere=str(tmp_path / "elsewhere"),
    )
    for folder in (layer.folder, layer.upper, layer.work, layer.elsewhere):
        Path(folder).mkdir(parents=True)
    journal.touch()
    store.touch()
    mounted = []

    def call(name: str, *arguments: object) -> None:
        if name == "mount":
            if arguments[1] == os.fsencode(journal):
                journal.unlink()
                raise OSError(errno.ENOENT, "mount: No such file or directory")
            mounted.append(arguments[1])

    monkeypatch.setattr(layer_mount, "_call", call)
    layer_mount._mount(layer, is_privileged=True)
    assert not journal.exists()
    assert os.fsencode(store) in mounted
