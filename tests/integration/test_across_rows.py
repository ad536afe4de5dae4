"""Real ranks find whether the rows of a micro-batch depend on each other, and a study keeps the micro-batch then."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from conftest import CONFIG, PROGRAMS, Trials
from study_fixtures import Zerotune

from zerotune.trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH
from zerotune.trial_lib.messages.measurement import AcrossRows
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome


def found_as_typed(
    trials: Trials, *arguments: str, script: str = "across_rows.py", micro_batch: int = 6, stage: int = 0
) -> AcrossRows:
    """What the first run of a profile trial finds on two ranks."""
    plan = trials.plan(script, *arguments, slots=2, window=StepWindow(1, 1, max_steps=1), purpose=Purpose.PROFILE)
    own = {**CONFIG, MICRO_BATCH: micro_batch, ACCUMULATION: 2, "zero_optimization": {"stage": stage}}
    file = trials.root / f"own_{plan.number}.json"
    file.write_text(json.dumps(own))
    given = [plan.program.arguments[0], str(file), *plan.program.arguments[2:]]
    program = dataclasses.replace(plan.program, arguments=given)
    result = trials.start(dataclasses.replace(plan, as_typed=True, program=program)).result()
    assert result.outcome is Outcome.COMPLETED, result.reason
    assert result.program is not None
    assert result.program.across_rows is not None
    return result.program.across_rows


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("kind", "inside", "stage", "found", "names"),
    [
        ("batch_norm", 0, 3, "layers", ["BatchNorm2d"]),
        pytest.param("batch_norm", 1, 1, "layers", ["BatchNorm2d"], marks=LONG),
        pytest.param("whitened", 1, 2, "layers", ["Whitened"], marks=LONG),
        pytest.param("attention_over_samples", 0, 3, "layers", ["MultiheadAttention"], marks=LONG),
        pytest.param("info_nce", 0, 3, "loss", [], marks=LONG),
        ("info_nce", 1, 2, "loss", []),
        pytest.param("triplets", 0, 2, "loss", [], marks=LONG),
        pytest.param("experts", 1, 2, "loss", [], marks=LONG),
        ("padded", 1, 3, "unequal", []),
        ("group_norm", 0, 3, "", []),
        pytest.param("dropout", 1, 2, "", [], marks=LONG),
        pytest.param("layer_norm", 0, 0, "", [], marks=LONG),
        pytest.param("frozen_batch_norm", 0, 2, "", [], marks=LONG),
        pytest.param("regression", 0, 3, "", [], marks=LONG),
    ],
)
def test_what_depends_on_other_rows_is_found_on_real_ranks(
    trials: Trials, kind: str, inside: int, stage: int, found: str, names: list[str]
) -> None:
    across = found_as_typed(trials, "--kind", kind, "--inside", str(inside), stage=stage)
    assert (across.kind, across.names, across.undecided) == (found, names, "")


@pytest.mark.long
@pytest.mark.parametrize("flags", [(), ("--max-micro-batch", "32")])
def test_a_study_of_batch_norm_keeps_the_micro_batch_unless_it_is_freed(
    tmp_path: Path, home: Path, flags: tuple[str, ...]
) -> None:
    zerotune = Zerotune(tmp_path, home, slots=2)
    zerotune.folder = zerotune.model
    for name in ("across_rows.py", "toy.py"):
        shutil.copy(PROGRAMS / name, zerotune.model)
    own = {**CONFIG, MICRO_BATCH: 4, ACCUMULATION: 4}
    (zerotune.model / "own.json").write_text(json.dumps(own))
    command = ["deepspeed", "--num_gpus", "2", "across_rows.py", "--deepspeed_config", "own.json"]  # with a BatchNorm
    ended = zerotune.run("tune", "-mt", "4", "-m", "throughput", "-z", "1", "2", "--json", *flags, "--", *command)
    assert ended.returncode == 0, ended.stderr
    study = zerotune.study
    candidates = [
        Candidate.model_validate_json((study.paths.trial(number).root / "candidate.json").read_text())
        for number, result in study.results.items()
        if result.purpose in (Purpose.SEARCH, Purpose.CONFIRM)
    ]
    sizes = {each.micro_batch_size for each in candidates}
    why = "BatchNorm2d computes over the samples of a micro-batch, so another micro-batch is another training."
    if flags:
        assert max(sizes) > 4
        assert why in ended.stderr
    else:
        assert sizes == {4}
        assert f"{why} --max-micro-batch or --free-batch lets it vary." in ended.stderr
