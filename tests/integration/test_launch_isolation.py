"""What a rank finds itself in: its own environment, output, cores and modules, and nothing of the driver's."""

import base64
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from zerotune.trial_lib.launch.starters import rank_environment
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.candidate import Purpose

SHORT = StepWindow(start_step=2, end_step=3, max_steps=2)


def found_by(trials, result, rank=0):
    assert result.outcome == "completed", result.reason
    match = re.search(r"^found (.*)$", trials.log(result, rank), re.MULTILINE)
    assert match
    return json.loads(match.group(1))


@pytest.fixture(params=["warm", pytest.param("cold", marks=pytest.mark.long)])
def inspected(trials, request, monkeypatch):
    """What two ranks found, in an environment that the driver does not have."""
    environment = {**rank_environment(), "ONLY_FOR_RANKS": "yes"}
    # What an import of MLflow leaves behind: another test's here, a new one in the rank.
    environment = {name: value for name, value in environment.items() if not name.startswith("_MLFLOW")}
    # What the driver gets after its servers were started is not the ranks' either.
    monkeypatch.setenv("ONLY_FOR_THE_DRIVER", "yes")
    result = trials.run(
        "inspects.py",
        starter=request.param,
        slots=2,
        window=SHORT,
        environment=environment,
        local_rank_option="--local_rank",
    )
    return environment, result, [found_by(trials, result, rank) for rank in range(2)]


@pytest.mark.devices(2, "cpu")
def test_a_rank_has_its_own_output_environment_and_cores(inspected):
    environment, result, ranks = inspected
    for number, found in enumerate(ranks):
        # A program in a layer finds the records at another place.
        seen = {key: Path(file).parts[-2:] for key, file in found["files"].items()}
        log = Path(result.logs[number]).parts[-2:]
        assert seen == {"0": ("dev", "null"), "1": log, "2": log}
        rank = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        # Libraries may add some of their own while they are imported.
        assert found["environment"].items() >= {**environment, **rank}.items()
        assert "ONLY_FOR_THE_DRIVER" not in found["environment"]
        assert len(found["cores"]) == 1
        assert found["argv"][:2] == ["inspects.py", f"--local_rank={number}"]
        assert found["name"] == "__main__"
        assert found["session"] != os.getsid(0)
    assert ranks[0]["cores"] != ranks[1]["cores"]
    assert [device.device for device in result.devices] == [str(core) for found in ranks for core in found["cores"]]
    assert ranks[0]["environment"]["MASTER_PORT"] == ranks[1]["environment"]["MASTER_PORT"]
    # What records and orchestrates stays with the driver. (DeepSpeed itself imports pydantic.)
    for found in ranks:
        assert not {"prefect", "zerotune.trial_lib.launch.trial", "zerotune.trial_lib.records.result"} & set(
            found["modules"]
        )


@pytest.mark.long
def test_a_rank_has_the_variables_that_deepspeeds_launcher_gives_it(trials, tmp_path):
    script = tmp_path / "dump.py"
    script.write_text(
        "import json, os\nwith open(os.environ['RANK'], 'w') as file: json.dump(dict(os.environ), file)\n"
    )
    host = base64.urlsafe_b64encode(b'{"localhost": [0, 1]}').decode()
    launcher = [sys.executable, "-m", "deepspeed.launcher.launch", f"--world_info={host}", "--master_addr=127.0.0.1"]
    environment = rank_environment()
    subprocess.run([*launcher, script], cwd=tmp_path, env=environment, capture_output=True, check=True, timeout=120)
    result = trials.run("inspects.py", slots=2, window=SHORT, environment=environment)
    # The rendezvous is a trial's own, there is no CUDA, and MLflow's is what its import leaves behind in the launcher.
    left_out = {"MASTER_PORT", "CUDA_VISIBLE_DEVICES", "_MLFLOW_TELEMETRY_SESSION_ID"}
    for rank in range(2):
        launched = json.loads((tmp_path / str(rank)).read_text())
        given = {name: value for name, value in launched.items() if environment.get(name) != value}
        assert {"LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"} <= set(given)
        expected = {name: value for name, value in given.items() if name not in left_out}
        assert found_by(trials, result, rank)["environment"].items() >= expected.items()


def test_what_we_run_in_a_rank_imports_neither_pydantic_nor_prefect_nor_mlflow():
    # DeepSpeed imports pydantic, and mlflow where there is one: so this interpreter only imports ours.
    source = """
        import sys
        from zerotune.trial_lib.launch.processes import fork_server
        from zerotune.trial_lib.launch.processes import supervisor
        from zerotune.trial_lib.launch.processes import jit_builds
        from zerotune.trial_lib.launch.processes import watchdog
        from zerotune.trial_lib.launch.processes import rank_process
        from zerotune.trial_lib.rank import probe, rank
        print([name for name in ("pydantic", "prefect", "mlflow", "deepspeed", "click") if name in sys.modules])
    """
    command = [sys.executable, "-c", textwrap.dedent(source)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_a_warm_rank_has_not_paid_for_mlflow(trials):
    assert "mlflow" not in found_by(trials, trials.run("inspects.py", window=SHORT))["modules"]


def write(folder, **files):
    for name, source in files.items():
        path = folder / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))


TRAIN = """
    import deepspeed, torch
    {imports}
    model = torch.nn.Linear(4, 1)
    import argparse
    args, _ = deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_known_args()
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    while True:
        engine.backward(engine(torch.ones(engine.train_micro_batch_size_per_gpu(), 4)).sum())
        engine.step()
"""


@pytest.mark.parametrize("starter", ["warm", pytest.param("cold", marks=pytest.mark.long)])
def test_a_model_directory_with_our_names_imports_its_own(trials, tmp_path, starter):
    model_dir = tmp_path / "model"
    imports = "import guard, tasks, channel, flows.tune as t; print('own', guard.OWN, tasks.OWN, channel.OWN, t.OWN)"
    modules = {name: f"OWN = '{name}'" for name in ("guard", "tasks", "channel", "flows__tune", "measure", "launch")}
    write(model_dir, train=TRAIN.format(imports=imports), **modules)
    result = trials.run("train.py", model_dir=model_dir, starter=starter, window=SHORT)
    assert result.outcome == "completed", result.reason
    assert "own guard tasks channel flows__tune" in trials.log(result)


def test_a_changed_program_is_seen_by_the_next_warm_trial(trials, tmp_path):
    model_dir = tmp_path / "model"
    for version in ("first", "second"):
        write(model_dir, train=TRAIN.format(imports="import own"), own=f"print('version {version}')")
        result = trials.run("train.py", model_dir=model_dir, window=SHORT)
        assert f"version {version}" in trials.log(result)


def test_a_failed_trial_leaves_no_trace_in_the_next_warm_one(trials):
    before = found_by(trials, trials.run("inspects.py", window=SHORT))["modules"]
    assert trials.run("ends.py", "--how", "raise", "--steps", "1").outcome == "crashed"
    assert found_by(trials, trials.run("inspects.py", window=SHORT))["modules"] == before


def test_the_users_own_modules_are_not_among_those_to_be_imported_once_for_all(trials):
    """One may read its rank, or a mapped variable, when it is imported: the fork server has neither."""
    imported = trials.run("uses_library.py", purpose=Purpose.PROFILE).imported
    assert "deepspeed" in imported
    assert not {"trainer_library", "toy"} & set(imported)
