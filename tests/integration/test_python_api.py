"""`zerotune.tune` from Python: errors are exceptions. An interrupt or a kill of the caller ends the study in order."""

import json
import signal
import sys
from pathlib import Path

import pytest
from study_fixtures import Running, Zerotune

import zerotune as public

TUNE = "import zerotune; zerotune.tune('python train.py --deepspeed_config ds_config.json --step_seconds 0.05')"


def test_wrong_input_is_an_exception_with_the_sentence(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with pytest.raises(public.CommandError, match=r"none\.json does not exist") as refused:
        public.tune("python train.py --deepspeed none.json", folder=tmp_path, progress=False)
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)


def test_an_option_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(public.CommandError, match="No such option '--max-trails'"):
        public.plan(["python", "train.py"], folder=tmp_path, progress=False, max_trails=2)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_study_ends_in_order_with_its_caller(tmp_path: Path, home: Path, number: signal.Signals) -> None:
    zerotune = Zerotune(tmp_path, home)
    caller = Running([sys.executable, "-c", TUNE], zerotune.model, zerotune.environment)
    studies = zerotune.model / "zerotune-studies"
    caller.wait_until(lambda: any(studies.glob("*/trials/0001/candidate.json")), "a second trial", 200)
    caller.process.send_signal(number)
    ended = caller.end(timeout=60)
    assert caller.left_over(within_s=30) == []
    (record,) = studies.glob("*/study.json")
    assert json.loads(record.read_text())["status"] == "cancelled"
    if number is signal.SIGINT:
        assert "KeyboardInterrupt" in ended.stderr
