"""A trial at another ZeRO stage is what a user gets by typing that stage.

What the engine was given, whether `zero.Init` was entered and the first losses are those of a plain run. So it is for
each library that derives one from the other in its own way.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from conftest import PROGRAMS
from device_fixtures import need
from server_fixtures import free_port

from benchmarks.programs.trials import Trials
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.result import Outcome
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.open_study import new_study
from zerotune.trial_lib.study.training_command import training_command

BIN = Path(sys.executable).parent
OBSERVED = PROGRAMS / "observed"
TRAINER = (
    "--output_dir out --max_steps 60 --per_device_train_batch_size 2 --use_cpu --report_to none --save_strategy no "
    "--learning_rate 1e-3 --warmup_steps 0.1"
)
STAGES = (0, 1, 2, 3)
STEPS = 5  # whose losses are compared
FRAMEWORKS = Path(os.environ.get("ZEROTUNE_FRAMEWORKS", PROGRAMS.parents[1] / "build" / "frameworks"))
"""An environment for each framework, which `make frameworks` builds."""


@dataclass(frozen=True)
class Way:
    """A way in which users start a training, and where they type its ZeRO stage.

    Attributes:
        command: what they type. Its stage is 2.
        file: the file with the stage.
        stage: the text in the file at stage 2.
        prepare: makes in a folder what the command needs.
        variables: of the shell.
        bin: the folder of programs that comes first on PATH.
        plainly: the command at another stage, if it names the configuration by another word.
    """

    command: str
    file: str
    stage: str
    prepare: Callable[[Path], None]
    variables: dict[str, str] = field(default_factory=dict)
    bin: Path = BIN
    plainly: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """What the shell exports."""
        path = os.pathsep.join([str(self.bin), os.environ["PATH"]])
        return {"OMP_NUM_THREADS": "1", **self.variables, "PATH": path, "PYTHONPATH": str(OBSERVED)}

    def typed(self, folder: Path, stage: int) -> None:
        """Types a stage."""
        file = folder / self.file
        before = file.read_text()
        assert before.count(self.stage) == 1
        file.write_text(before.replace(self.stage, self.stage.replace("2", str(stage))))


@dataclass(frozen=True)
class Engine:
    """What an engine is built from and trains on, as `observed` prints it.

    Attributes:
        config: the whole configuration that it was given.
        batch: its micro-batch and its accumulation.
        in_zero_init: whether the model was made within `zero.Init`.
        losses: rank 0's losses of the first steps, one for each micro-batch.
    """

    config: dict[str, Any]
    batch: list[int]
    in_zero_init: bool
    losses: list[float]


def engine_in(said: str) -> Engine:
    """Returns the engine that a rank's output is about."""
    lines = [line.partition("OBSERVED ")[2] for line in said.splitlines() if "OBSERVED " in line]
    seen = [json.loads(line) for line in lines]
    named = {name: [each[name] for each in seen if name in each] for name in ("config", "batch", "zero_init", "loss")}
    assert named["config"], said[-4000:]
    (_, accumulation), losses = named["batch"][0], named["loss"]
    assert len(losses) >= STEPS * accumulation
    return Engine(named["config"][0], named["batch"][0], any(named["zero_init"]), losses[: STEPS * accumulation])


def plain_engine(way: Way, folder: Path) -> Engine | str:
    """Returns the engine of the program when it runs as it is typed, without ZeroTune.

    If it fails, the result is the exception of rank 0 instead.
    """
    port = str(free_port())
    environment = {**os.environ, **way.environment, "PET_MASTER_PORT": port, "MASTER_PORT": port}
    ended = subprocess.run(
        (way.plainly or way.command).split(),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    said = ended.stdout + ended.stderr
    if ended.returncode == 0:
        return engine_in(said)
    raised = re.findall(r"^\[rank0\]: (\w+Error: .*)$", said, re.MULTILINE)
    assert raised, said[-4000:]
    return str(raised[-1])


@contextmanager
def trials_of(way: Way, folder: Path) -> Iterator[Trials]:
    """Profiles the program as it is typed at stage 2, and yields its trials."""
    with patch.dict(os.environ, way.environment):
        study = new_study(StudyArguments(command=tuple(way.command.split()), model_dir=folder), folder.parent)
        try:
            yield Trials(study.driver)
        finally:
            study.close()


def trial_engine(trials: Trials, stage: int) -> Engine | str:
    """Returns the engine of a trial that differs from what is typed in the stage alone, or why the trial failed."""
    assert trials.own is not None, trials.profile.reason
    own = trials.own.model_dump()
    result = trials.measured(Candidate(**{**own, "knobs": {"zero_optimization": {"stage": stage}}}))
    if result.outcome is not Outcome.COMPLETED:
        return result.reason
    return engine_in(Path(result.logs[0]).read_text())


def expect_typed(trials: Trials, way: Way, folder: Path, stage: int) -> None:
    """Checks that a trial at a stage is the plain run at that stage."""
    way.typed(folder, stage)
    plain, tried = plain_engine(way, folder), trial_engine(trials, stage)
    if isinstance(plain, str):
        # Some libraries cannot train at a stage on a CPU, with ZeroTune or without it.
        assert isinstance(tried, str)
        assert plain in tried
        return
    assert isinstance(tried, Engine), tried
    assert tried.config == plain.config
    assert tried.batch == plain.batch
    assert tried.in_zero_init == plain.in_zero_init
    assert tried.losses == pytest.approx(plain.losses, rel=1e-5)


def _small_gpt2(folder: Path) -> None:
    """Copies the stand-ins, with a model for them."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    shutil.copytree(PROGRAMS / "typed_stages", folder, ignore=shutil.ignore_patterns("__pycache__"))
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "n_positions": 32, "n_embd": 64, "n_layer": 1, "n_head": 4}
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    GPT2LMHeadModel(GPT2Config(**sizes, **none, bos_token_id=0, eos_token_id=0)).save_pretrained(folder / "model")


def _lightning_model(folder: Path) -> None:
    pytest.importorskip("lightning")
    shutil.copytree(
        PROGRAMS.parents[1] / "examples" / "lightning", folder, ignore=shutil.ignore_patterns("__pycache__")
    )


BY_FIELDS = Way(
    f"accelerate launch --config_file plugin.yaml sft.py {TRAINER} --gradient_accumulation_steps 2",
    "plugin.yaml",
    "zero_stage: 2",
    _small_gpt2,
)
BY_NAME = Way(
    f"torchrun --nproc_per_node 2 sft.py --deepspeed zero2 {TRAINER} --gradient_accumulation_steps 2",
    "presets/zero2.json",
    '"stage": 2',
    _small_gpt2,
)
LOOP = Way("accelerate launch --config_file file.yaml loop.py", "ds_auto.json", '"stage": 2', _small_gpt2)
STAND_INS = {
    "a loop with Accelerate": LOOP,
    "Lightning": Way("python train.py --batch_size 2", "train.py", '"--stage", type=int, default=2', _lightning_model),
    "a name of the program's own": BY_NAME,
    "fields of accelerate's file": BY_FIELDS,
    "a file for accelerate": Way(
        f"accelerate launch --config_file file.yaml sft.py {TRAINER} --gradient_accumulation_steps 2",
        "ds_auto.json",
        '"stage": 2',
        _small_gpt2,
    ),
    "the Trainer's option": Way(
        f"torchrun --nproc_per_node 2 sft.py --deepspeed ds_auto.json {TRAINER} --gradient_accumulation_steps 2",
        "ds_auto.json",
        '"stage": 2',
        _small_gpt2,
    ),
}


# What they say about a machine without GPUs and a network.
_ALONE = {
    **{"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
    **{"DISABLE_VERSION_CHECK": "1", "FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2"},
}
_SWIFT = (
    "swift sft --model ./tiny --model_type llama --template dummy --dataset ./messages.jsonl --tuner_type full "
    "--deepspeed {} --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --max_steps 60 --max_length 128 "
    "--output_dir out/swift --use_cpu true --torch_dtype float32 --fp16 false --report_to none "
    "--save_strategy no --eval_strategy no --split_dataset_ratio 0"
)


def _framework(name: str, command: str, file: str, stage: str, plainly: str = "") -> Way:
    """Returns the way of a framework that is installed in an environment of its own."""
    root = FRAMEWORKS / name

    def prepare(folder: Path) -> None:
        shutil.copytree(PROGRAMS / "frameworks", folder, ignore=shutil.ignore_patterns("__pycache__"))
        for preset in root.glob("lib/python*/site-packages/swift/config/zero2.json"):
            shutil.copy(preset, folder / "preset.json")
        subprocess.run([root / "bin" / "python", "make_model.py"], cwd=folder, check=True, capture_output=True)

    variables = {**_ALONE, "TORCH_EXTENSIONS_DIR": str(root / "extensions")}
    return Way(command, file, stage, prepare, variables, root / "bin", plainly)


INSTALLED = {
    "trl": _framework(
        "trl", "trl sft --config sft.yaml --accelerate_config plugin.yaml", "plugin.yaml", "zero_stage: 2"
    ),
    "llamafactory": _framework("llamafactory", "llamafactory-cli train lf_sft.yaml", "ds_z2.json", '"stage": 2'),
    "swift": _framework("swift", _SWIFT.format("zero2"), "preset.json", '"stage": 2', _SWIFT.format("preset.json")),
}


@pytest.mark.timeout(1800)
@pytest.mark.long
@pytest.mark.parametrize("name", INSTALLED)
def test_a_frameworks_own_program_gets_what_typing_the_stage_gives(tmp_path: Path, name: str) -> None:
    need(2)
    way = INSTALLED[name]
    if not (way.bin / "python").exists():
        pytest.skip(f"{name} is not installed in {way.bin.parent} (make frameworks)")
    expect_typed_at_every_stage(way, tmp_path / "program")


def expect_typed_at_every_stage(way: Way, folder: Path) -> None:
    """Checks a program's trials at every stage."""
    way.prepare(folder)
    with trials_of(way, folder) as trials:
        typed = (folder / way.file).read_text()
        for stage in STAGES:
            (folder / way.file).write_text(typed)
            expect_typed(trials, way, folder, stage)


@pytest.mark.long
def test_a_model_that_is_read_before_the_process_group_exists_trains_at_stage_3(tmp_path: Path) -> None:
    need(2)
    folder = tmp_path / "program"
    BY_FIELDS.prepare(folder)
    with trials_of(BY_FIELDS, folder) as trials:
        expect_typed(trials, BY_FIELDS, folder, 3)
        assert trials.driver.state.results[2].outcome is Outcome.COMPLETED


@pytest.mark.long
def test_a_configuration_that_only_the_program_finds_is_what_the_engine_got(tmp_path: Path) -> None:
    """ms-swift's `--deepspeed zero2` names a file of the package."""
    need(2)
    folder = tmp_path / "program"
    BY_NAME.prepare(folder)
    with trials_of(BY_NAME, folder) as trials:
        assert "zero2 is no file" in trials.driver.setup.experiment.notes[-1]
        assert trials.driver.known.base_config["zero_optimization"]["stage"] == 2
        expect_typed(trials, BY_NAME, folder, 1)
        known, paths = trials.driver.known, trials.driver.setup.paths
        command = training_command(trials.driver.setup, known, known.base_config)
    # The same option takes the answer's path.
    assert f"--deepspeed {paths.best_ds_config} " in command


@pytest.mark.timeout(600)
@pytest.mark.long
@pytest.mark.parametrize("name", STAND_INS)
def test_a_trial_at_a_stage_is_what_typing_the_stage_gives(tmp_path: Path, name: str) -> None:
    need(2)
    expect_typed_at_every_stage(STAND_INS[name], tmp_path / "program")
