"""What becomes of a refusal by the user's DeepSpeed: an error where the file is surely what it gets, else a warning."""

import logging
from pathlib import Path
from typing import Any

import pytest

from zerotune.trial_lib.inputs.read_experiment import Experiment, read_experiment
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.study.config_refused import ConfigCheck

REFUSALS = [
    {"keys": ["zero_optimization.reduce_bucketsize"], "value": 1, "said": "ValidationError: ...", "what": ""},
    {"keys": ["api_key"], "value": "s3cr3t-value", "said": "ValueError: no such thing", "what": None},
]
HANDS_OVER = """
import argparse, deepspeed
args = deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_args()
deepspeed.initialize(args=args, model=model)
"""
MENDS = """
import argparse, deepspeed, json
args = deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_args()
config = json.load(open(args.deepspeed_config))
config.pop("api_key")
deepspeed.initialize(model=model, config=config)
"""


class FakeStarter:
    """Answers as a DeepSpeed would.

    Attributes:
        asked: the configurations that it was asked about.
    """

    def __init__(self, refusals: list[dict[str, Any]]) -> None:
        self.asked: list[dict[str, Any]] = []
        self._refusals = refusals

    def check(self, ds_config: dict[str, Any], slots: int) -> dict[str, Any]:
        self.asked.append(ds_config)
        return {"deepspeed": "9.9.9", "refusals": self._refusals}


def experiment(folder: Path, code: str) -> Experiment:
    (folder / "train.py").write_text(code)
    (folder / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 1}')
    yaml = folder / "experiment.yaml"
    yaml.write_text(
        "name: a\nentrypoint: deepspeed train.py --deepspeed_config ds.json\nhyperparameters:\n"
        "  deepspeed_config: ds.json\nresources:\n  slots_per_trial: 1\nsearcher:\n  name: single\n"
    )
    return read_experiment(yaml, folder)


def refusal(folder: Path, code: str, refusals: list[dict[str, Any]]) -> InputError | None:
    starter: Any = FakeStarter(refusals)
    check = ConfigCheck(experiment(folder, code), starter, logging.getLogger("zerotune-test-config-check"))
    first, second = check.refusal(), check.refusal()
    assert (first is None) == (second is None)
    assert len(starter.asked) == 1
    return first


def test_what_deepspeed_surely_gets_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = str(refusal(tmp_path, HANDS_OVER, REFUSALS))
    assert said.startswith(f"{tmp_path / 'ds.json'}: 2 mistakes:")
    assert "zero_optimization.reduce_bucketsize: DeepSpeed 9.9.9 has no such key." in said
    assert "s3cr3t" not in said
    assert caplog.text == ""


def test_what_a_program_may_mend_is_told_once_and_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert refusal(tmp_path, MENDS, REFUSALS) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "zero_optimization.reduce_bucketsize: DeepSpeed 9.9.9 has no such key." in record.getMessage()
    assert "Your program still runs" in record.getMessage()
    assert "s3cr3t" not in record.getMessage()


def test_nothing_is_said_where_deepspeed_has_no_objection(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert refusal(tmp_path, MENDS, []) is None
    assert caplog.text == ""
