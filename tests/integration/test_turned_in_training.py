"""The training that follows a study has what a trial with the same switches had, and trains as it did."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import CONFIG, PROGRAMS
from study_fixtures import Zerotune

from zerotune.flows.prefect_server import PrefectServer
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.messages.turned import (
    ATTENTION,
    CHECKPOINTING,
    COMPILE,
    FUSED,
    PERSISTENT,
    PINNED,
    PREFETCH,
    WORKERS,
)
from zerotune.trial_lib.records.result import Outcome

pytestmark = [pytest.mark.alone, pytest.mark.long, pytest.mark.timeout(1200)]

FOLDER = PROGRAMS / "turned"
STEPS = 5
STEP = re.compile(r"^step \d+ .*$", re.MULTILINE)
LLAMA = ("train.py", "--layers", "2", "--steps", "20")
LOADER = ("loads.py",)


def in_trial(trials: Any, program: tuple[str, ...], turned: dict[str, Any]) -> list[str]:
    # A trial ends in the last step of its window.
    window = StepWindow(1, STEPS + 2, max_steps=STEPS + 2)
    plan = replace(trials.plan(*program, model_dir=FOLDER, window=window, deadline_s=900.0), turned=turned)
    result = trials.start(plan).result()
    assert result.outcome is Outcome.COMPLETED, result.reason
    return STEP.findall(trials.log(result))[:STEPS]


@pytest.fixture
def zerotune(tmp_path: Path, home: Path, server: PrefectServer, empty_store: Path) -> Zerotune:
    found = Zerotune(tmp_path / "training", home)
    shutil.copytree(FOLDER, found.folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(empty_store, found.folder / "mlflow.db")
    config = {**CONFIG, "train_micro_batch_size_per_gpu": 2}
    (found.folder / "ds_config.json").write_text(json.dumps(config))
    found.environment |= {"PREFECT_API_URL": server.api_url, "OMP_NUM_THREADS": "1"}
    return found


def in_training(zerotune: Zerotune, program: tuple[str, ...], turned: dict[str, Any]) -> list[str]:
    """Trains by `zerotune train`, with the section that `best_experiment.yaml` has."""
    entrypoint = " ".join(["deepspeed --num_gpus 1", program[0], "--deepspeed_config ds_config.json", *program[1:]])
    document = {"name": "following", "entrypoint": entrypoint, "max_restarts": 0, "turned": turned}
    zerotune.config.write_text(yaml.safe_dump(document))
    ended = zerotune.run("train", zerotune.config, zerotune.folder, timeout=900)
    assert ended.returncode == 0, ended.stderr
    (log,) = zerotune.folder.glob("zerotune-experiments/*/rank0.log")
    return STEP.findall(log.read_text())[:STEPS]


@pytest.mark.parametrize(
    ("program", "turned", "seen"),
    [
        pytest.param(LLAMA, {}, "graphs 0 attention sdpa fused 2 recomputed 0", id="as typed"),
        pytest.param(LLAMA, {COMPILE: True}, "attention sdpa", id="compile"),
        pytest.param(LLAMA, {ATTENTION: "eager"}, "graphs 0 attention eager fused 0 recomputed 0", id="attention"),
        pytest.param(
            LLAMA,
            {CHECKPOINTING: "every_second"},
            "graphs 0 attention sdpa fused 3 recomputed 1",
            id="every second block",
        ),
        pytest.param(LOADER, {}, "workers 0 prefetch None pinned False persistent False", id="loader as typed"),
        pytest.param(
            LOADER, {WORKERS: 1, PREFETCH: 4, PINNED: True}, "workers 1 prefetch 4 pinned True", id="prefetch, pinned"
        ),
        pytest.param(LOADER, {WORKERS: 1, PERSISTENT: True, FUSED: True}, "workers 1 prefetch 2", id="persistent"),
    ],
)
def test_a_training_has_what_a_trial_with_the_switch_had(
    trials: Any, zerotune: Zerotune, program: tuple[str, ...], turned: dict[str, Any], seen: str
) -> None:
    shown = in_trial(trials, program, turned)
    assert len(shown) == STEPS
    assert all(seen in line for line in shown)
    made = [int(graphs) for graphs in re.findall(r"graphs (\d+)", "\n".join(shown))]
    assert any(made) == bool(turned.get(COMPILE))
    if program is LOADER:
        last = shown[-1]
        assert f"elsewhere {WORKERS in turned}" in last
        # The second epoch has begun by then.
        assert f"makers {1 if PERSISTENT in turned or WORKERS not in turned else 2}" in last
        assert f"persistent {PERSISTENT in turned}" in last
        assert f"fused {turned.get(FUSED)}" in last
    # The lines have the losses too.
    assert in_training(zerotune, program, turned) == shown
