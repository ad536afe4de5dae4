"""Studies of a trial class and of a program with the Core API that vary switches, and train with the answer's."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from study_fixtures import Zerotune
from training_fixtures import TRIAL_CLASSES

from zerotune.flows.prefect_server import PrefectServer
from zerotune.trial_lib.records.result import Outcome

ANY = Path(__file__).parents[1] / "programs" / "any"
CHECKPOINTING = "model:activation_checkpointing"
SHOWN = re.compile(r"^own (\w+) twice (\w+)$", re.MULTILINE)

pytestmark = [pytest.mark.alone, pytest.mark.long, pytest.mark.timeout(900), pytest.mark.devices(1, "cpu")]


@pytest.fixture
def zerotune(tmp_path: Path, home: Path, server: PrefectServer) -> Zerotune:
    found = Zerotune(tmp_path, home)
    found.environment["PREFECT_API_URL"] = server.api_url
    return found


def program(zerotune: Zerotune, folder: Path, module: str, head: str) -> None:
    """Gives a study a program that prints what its switches are."""
    config = (zerotune.model / "ds_config.json").read_text()
    shutil.rmtree(zerotune.model)
    shutil.copytree(folder, zerotune.model, ignore=shutil.ignore_patterns("__pycache__"))
    if not (zerotune.model / "ds_config.json").exists():
        (zerotune.model / "ds_config.json").write_text(config)
    text = (zerotune.model / module).read_text()
    print_own = f'import os, sys\nprint("own", os.environ.get("OWN"), "twice", {head}, flush=True)\n'
    (zerotune.model / module).write_text(print_own + text.split('"""', 2)[2])


def tuned(zerotune: Zerotune, places: tuple[str, ...]) -> None:
    """Tunes, trains at full length, and looks whether each run had the switches of its candidate."""
    options = ("--max-trials", "6", "-z", "1", "--max-micro-batch", "4", "--run-full-experiment")
    ended = zerotune.run("random", *options, timeout=600)
    assert ended.returncode == 0, ended.stderr
    study = zerotune.study
    seen = []
    for number, result in study.results.items():
        if result.outcome is not Outcome.COMPLETED:
            continue
        knobs = json.loads(study.paths.trial(number).candidate.read_text())["knobs"].get("program", {})
        shown = SHOWN.search(study.paths.trial(number).log(0).read_text())
        assert shown is not None
        assert shown.groups() == (str(knobs.get("OWN")), str(knobs.get("--twice", False)))
        seen.append(knobs)
    for place in places:
        assert len({repr(knobs.get(place)) for knobs in seen}) > 1, place
    best = json.loads(study.paths.trial(study.record["best_number"]).candidate.read_text())["knobs"].get("program", {})
    shown = SHOWN.search(study.paths.full_experiment.log(0).read_text())
    assert shown is not None
    assert shown.groups() == (str(best.get("OWN")), str(best.get("--twice", False)))


def test_a_trial_class_reads_a_varied_variable_in_its_trials_and_in_its_training(zerotune: Zerotune) -> None:
    program(zerotune, TRIAL_CLASSES, "model_def.py", "False")
    experiment = {
        "name": "tiny-class",
        "entrypoint": "python3 -m determined.launch.deepspeed --trial model_def:Tiny",
        "hyperparameters": {"deepspeed_config": "ds_config.json", "samples": 64},
        "resources": {"slots_per_trial": 1},
        "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"epochs": 2}},
        "search_space": {"program": {"OWN": ["a", "b"]}},
    }
    zerotune.config.write_text(yaml.safe_dump(experiment))
    tuned(zerotune, ("OWN",))
    experiment["search_space"] = {"program": {"--twice": [True, False]}}
    zerotune.config.write_text(yaml.safe_dump(experiment))
    refused = zerotune.run("random")
    assert refused.returncode == 2
    assert "model_def:Tiny is a trial class, which has no command line." in refused.stderr


def test_a_program_of_the_core_api_has_varied_options_variables_and_turned_blocks(zerotune: Zerotune) -> None:
    program(zerotune, ANY, "core_api.py", "'--twice' in sys.argv")
    script = zerotune.model / "core_api.py"
    option = 'parser.add_argument("--steps"'
    script.write_text(
        script.read_text().replace(option, f'parser.add_argument("--twice", action="store_true")\n    {option}')
    )
    experiment = yaml.safe_load((ANY / "deepspeed.yaml").read_text())
    experiment["resources"] = {"slots_per_trial": 1, "memory_per_slot": "560 MiB"}
    places = {"--twice": [True], "OWN": [None, "a"], CHECKPOINTING: ["none", "full"]}
    zerotune.config.write_text(yaml.safe_dump({**experiment, "search_space": {"program": places}}))
    tuned(zerotune, ("--twice", "OWN", CHECKPOINTING))
