"""Files that a user names and that are none."""

import os
import threading
from pathlib import Path

import pytest

from zerotune.trial_lib.deepspeed_config.overrides import read_deepspeed_json
from zerotune.trial_lib.inputs.yaml_document import read_yaml
from zerotune.trial_lib.messages import files
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.files import read_bounded


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(files, "_PIPE_S", 0.2)
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.mark.parametrize("read", [read_deepspeed_json, read_yaml])
def test_a_pipe_to_which_nothing_writes_is_bad_input(pipe: Path, read: object) -> None:
    with pytest.raises(InputError, match="it is a pipe, and its end has not come"):
        read(pipe)  # type: ignore[operator]


def test_a_pipe_that_stays_open_is_not_waited_for(pipe: Path) -> None:
    writer = os.open(pipe, os.O_RDWR)
    with pytest.raises(TimeoutError, match="its end has not come"):
        read_bounded(pipe)
    os.close(writer)


def test_a_pipe_with_a_text_is_read(pipe: Path) -> None:
    writer = threading.Thread(target=lambda: pipe.write_text("a: 1"))
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    writer.start()
    assert read_bounded(pipe) == "a: 1"
    writer.join()
    os.close(reader)
