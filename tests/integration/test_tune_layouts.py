"""A whole study in which layouts race on two ranks. Each keeps the global batch, and their losses are compared."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from study_fixtures import Zerotune

from zerotune.flows.prefect_server import PrefectServer
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.result import Outcome
from zerotune.trial_lib.search.knobs import get_knob

PROGRAMS = Path(__file__).parents[1] / "programs"
GLOBAL_BATCH = 8
CONFIG = {
    "train_batch_size": GLOBAL_BATCH,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 100000, "allgather_bucket_size": 100000},
}
STAGES = "program.--pipeline_stages"
SEQUENCES = "program.PARALLELISM_CONFIG_SP_SIZE"
GROUPS = "tensor_parallel.autotp_size"

OPTIONS = ("--json", "-z", "1", "--max-trials", "8", "-m", "throughput")

pytestmark = [pytest.mark.alone, pytest.mark.long, pytest.mark.timeout(900), pytest.mark.devices(2)]


@pytest.fixture
def zerotune(tmp_path: Path, home: Path, server: PrefectServer, empty_store: Path) -> Zerotune:
    found = Zerotune(tmp_path, home, slots=2).on_servers(server.api_url, empty_store)
    for script in ("layouts/stages.py", "layouts/trainer.py", "divided/train.py"):
        shutil.copy(PROGRAMS / script, tmp_path)
    (tmp_path / "ds_config.json").write_text(json.dumps(CONFIG))
    found.environment["OMP_NUM_THREADS"] = "1"
    return found


def raced(zerotune: Zerotune, path: str, *words: str) -> dict[str, Any]:
    """Runs a study, and returns its answer after a look at the batch and the losses of every trial."""
    ended = zerotune.run(*words, timeout=800)
    assert ended.returncode == 0, ended.stderr
    study, sizes = zerotune.study, set()
    own = study.results[1].losses
    for number, result in study.results.items():
        candidate = Candidate.model_validate_json(study.paths.trial(number).candidate.read_text())
        size = get_knob(candidate.knobs, path)
        if size is None or result.outcome not in (Outcome.COMPLETED, Outcome.TOO_SLOW):
            continue
        sizes.add(size)
        assert candidate.data_parallel_size == 2 // size
        assert candidate.micro_batch_size * candidate.gradient_accumulation_steps * (2 // size) == GLOBAL_BATCH
        assert result.losses[:2] == pytest.approx(own[:2], rel=1e-3)
    assert sizes == {1, 2}
    document: dict[str, Any] = json.loads(ended.stdout)
    return document


def test_stages_of_a_pipeline_race_by_a_switch(zerotune: Zerotune) -> None:
    vary = "--pipeline_stages={values: [1, 2], layout: pipeline}"
    command = ("deepspeed", "--num_gpus", "2", "stages.py", "--deepspeed_config", "ds_config.json")
    document = raced(zerotune, STAGES, "tune", *OPTIONS, "--vary", vary, "--", *command)
    best = document["best"]["knobs"].get("program", {}).get("--pipeline_stages", 1)
    assert best == 1 or f"--pipeline_stages {best}" in document["command"]
    assert not json.loads(zerotune.study.paths.best_ds_config.read_text()).keys() & {"program", "layouts"}


def test_the_ranks_of_a_trainer_share_tokens_by_accelerates_variable(zerotune: Zerotune) -> None:
    zerotune.environment |= {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": "sdpa",
    }
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    (zerotune.folder / "ds_config.json").write_text(json.dumps({**CONFIG, **dict.fromkeys(sizes, "auto")}))
    batch = ("--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2", "--learning_rate", "1e-3")
    script = ("trainer.py", "--deepspeed", "ds_config.json", "--output_dir", "out", "--use_cpu", *batch)
    command = ("deepspeed", "--num_gpus", "2", *script)
    vary = ("--vary", "PARALLELISM_CONFIG_SP_SIZE=1,2")
    document = raced(zerotune, SEQUENCES, "tune", *OPTIONS, *vary, "--", *command)
    best = document["best"]["knobs"].get("program", {}).get("PARALLELISM_CONFIG_SP_SIZE", 1)
    assert best == 1 or f"PARALLELISM_CONFIG_SP_SIZE={best}" in document["command"]


def shapes(zerotune: Zerotune) -> set[tuple[int, int]]:
    """Returns the rows and columns of a linear layer that each rank of a full experiment had, and its steps."""
    logs = sorted(zerotune.folder.glob("zerotune-experiments/*/rank*.log"))
    assert len(logs) == 2
    found = [re.search(r"q_proj holds \((\d+), (\d+)\)", log.read_text()) for log in logs]
    assert all(found)
    shutil.rmtree(zerotune.folder / "zerotune-experiments")
    return {(int(each[1]), int(each[2])) for each in found if each}


@pytest.mark.timeout(1500)
def test_tensor_parallel_groups_race_and_the_winner_trains(zerotune: Zerotune) -> None:
    """Your own groups of two race with none, and either trains at full length by its configuration alone."""
    own = {key: value for key, value in CONFIG.items() if key != "train_batch_size"}
    own |= {"gradient_accumulation_steps": GLOBAL_BATCH // 2, "tensor_parallel": {"autotp_size": 2}}
    typed = zerotune.folder / "ds_config.json"
    typed.write_text(json.dumps(own))
    command = ("deepspeed", "--num_gpus", "2", "train.py", "--deepspeed_config", "ds_config.json", "--steps", "40")
    document = raced(zerotune, GROUPS, "tune", *OPTIONS, "--", *command)
    paths = zerotune.study.paths
    best = json.loads(paths.best_ds_config.read_text())
    size = best["tensor_parallel"]["autotp_size"]
    assert size == document["best"]["knobs"].get("tensor_parallel", {"autotp_size": 2})["autotp_size"]
    replicas = 2 // size
    assert best["train_micro_batch_size_per_gpu"] * best["gradient_accumulation_steps"] * replicas == GLOBAL_BATCH
    for config, group in ((paths.best_ds_config, size), (typed, 2)):
        trained = zerotune.run("train", paths.experiment, zerotune.folder, "--ds-config", config, timeout=500)
        assert trained.returncode == 0, trained.stderr
        assert shapes(zerotune) == {(32 // group, 32)}
