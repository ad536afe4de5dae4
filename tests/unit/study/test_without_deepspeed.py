"""The training without DeepSpeed: which programs can have it, where it is turned on, and what is said of it."""

import json
import math
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.inputs.accelerate import ACCUMULATION_VARIABLE, without_deepspeed
from zerotune.trial_lib.inputs.read_experiment import Experiment
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.measurement import ProgramProfile
from zerotune.trial_lib.messages.turned import beside_kind, in_command, turned_among
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.records.units import name_of
from zerotune.trial_lib.search.arms import CandidateNames
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.beside import besides_of, require_a_switch, require_found_switch, way_to
from zerotune.trial_lib.study.confirmation import Confirmation, Contender
from zerotune.trial_lib.study.finding import Finding
from zerotune.trial_lib.study.typed_command import read_command

MICRO_BATCH, ACCUMULATION = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
TRAINER = ProgramProfile(batch={MICRO_BATCH: 4, ACCUMULATION: 1})
ACCELERATE = ProgramProfile(batch={ACCUMULATION: 1})
BASE = {"zero_optimization": {"stage": 1}}


# Which programs can have it


def read(folder: Path, command: str, code: str = "from transformers import Trainer\n", **files: str) -> Experiment:
    for name, text in {"train.py": code, "ds.json": json.dumps(BASE), **files}.items():
        (folder / name.replace("_yaml", ".yaml")).write_text(text)
    return read_command(command.split(), {}, folder, Host("cpu", ["0", "1"], 2**30))


@pytest.mark.parametrize(
    "code",
    [
        "import deepspeed\n\nengine, *_ = deepspeed.initialize(model=model)\n",
        "from deepspeed import initialize\n\nengine, *_ = initialize(model=model)\n",
    ],
)
def test_code_that_makes_its_engine_itself_is_refused_before_anything_starts(tmp_path: Path, code: str) -> None:
    with pytest.raises(InputError) as refused:
        require_a_switch(read(tmp_path, "torchrun --nproc_per_node 2 train.py", code))
    assert "train.py:3 calls deepspeed.initialize itself" in str(refused.value)
    assert "\n" not in str(refused.value)
    require_a_switch(read(tmp_path, "torchrun --nproc_per_node 2 train.py"))


def test_a_librarys_engine_is_refused_when_the_profile_has_shown_it() -> None:
    for found in (TRAINER, ACCELERATE, ProgramProfile(by_lightning=True), None):
        require_found_switch(found)
    with pytest.raises(InputError, match="none of Accelerate, the Hugging Face Trainer and Lightning"):
        require_found_switch(ProgramProfile())


def test_a_method_without_a_confirmation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--beside is for methods that confirm a winner, not for micro-batch"):
        StudyArguments(command=("train.py",), model_dir=tmp_path, method="micro_batch", beside=("ddp",))


# The place that turns it off


def way(kind: str, found: ProgramProfile, experiment: Experiment, on_processor: bool = False) -> str:
    return way_to(kind, experiment, found, on_processor)


def test_a_trainers_option_a_key_of_a_file_and_the_code_are_named(tmp_path: Path) -> None:
    typed = read(tmp_path, "torchrun --nproc_per_node 2 train.py --deepspeed ds.json")
    assert way("ddp", TRAINER, typed) == "leave out --deepspeed ds.json"
    assert 'give --fsdp "full_shard auto_wrap"' in way("fsdp2", TRAINER, typed)
    in_file = read(tmp_path, "torchrun --nproc_per_node 2 train.py lf.yaml", lf_yaml="deepspeed: ds.json\nlr: 1\n")
    assert way("ddp", TRAINER, in_file) == "leave out `deepspeed` in lf.yaml"
    code = "from transformers import TrainingArguments\n\nTrainingArguments('out', deepspeed='ds.json')\n"
    in_code = read(tmp_path, "torchrun --nproc_per_node 2 train.py", code)
    assert way("ddp", TRAINER, in_code) == "deepspeed=None of TrainingArguments at train.py:3"


def test_accelerates_file_and_lightnings_strategy_are_named(tmp_path: Path) -> None:
    typed = read(tmp_path, "torchrun --nproc_per_node 2 train.py acc.yaml", acc_yaml="distributed_type: DEEPSPEED\n")
    assert way("ddp", ACCELERATE, typed) == "distributed_type: MULTI_GPU in place of DEEPSPEED in acc.yaml"
    assert "FSDP, with fsdp_version: 2" in way("fsdp2", ACCELERATE, typed)
    code = "import lightning as L\n\nL.Trainer(devices=2, strategy='deepspeed')\n"
    by_lightning = read(tmp_path, "torchrun --nproc_per_node 2 train.py", code)
    found = ProgramProfile(by_lightning=True)
    assert way("ddp", found, by_lightning) == 'strategy="ddp" of Lightning\'s Trainer at train.py:3'


def test_on_processors_accelerates_launcher_starts_one_rank_so_another_is_named(tmp_path: Path) -> None:
    launched = read(tmp_path, "torchrun --nproc_per_node 2 train.py acc.yaml", acc_yaml="distributed_type: DEEPSPEED\n")
    entrypoint = launched.entrypoint.model_copy(update={"launched_by": "accelerate"})
    launched = replace(launched, entrypoint=entrypoint)
    said = way("ddp", ACCELERATE, launched, on_processor=True)
    assert said.startswith("ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 train.py in place of")


def test_the_strategy_of_lightnings_command_line_is_named_where_it_stands(tmp_path: Path) -> None:
    strategy = "trainer:\n  strategy:\n    class_path: main.AnyDevice\n"
    typed = read(tmp_path, "torchrun --nproc_per_node 2 train.py fit --config fit.yaml", fit_yaml=strategy)
    assert way("ddp", ProgramProfile(by_lightning=True), typed) == "strategy: ddp of `trainer` in fit.yaml"


def test_ranks_get_the_variables_of_a_launch_without_deepspeed() -> None:
    config = {ACCUMULATION: 4, "bf16": {"enabled": True}, "fp16": {"enabled": False}}
    given = {"PATH": "/bin", "ACCELERATE_USE_DEEPSPEED": "true"}
    wanted = {"PATH": "/bin", "ACCELERATE_MIXED_PRECISION": "bf16", ACCUMULATION_VARIABLE: "4"}
    assert without_deepspeed(given, "ddp", config, on_processor=False) == wanted
    more = without_deepspeed(given, "fsdp2", {ACCUMULATION: 4}, on_processor=True)
    assert (more["FSDP_VERSION"], more["ACCELERATE_USE_CPU"], more["ACCELERATE_MIXED_PRECISION"]) == ("2", "true", "no")


# What is measured, and what is said


def contender(stage: int, micro_batch: int, speed: float) -> Contender:
    candidate = Candidate(
        knobs={} if stage == 1 else {"zero_optimization": {"stage": stage}},
        micro_batch_size=micro_batch,
        gradient_accumulation_steps=16 // micro_batch,
        data_parallel_size=1,
    )
    reading = trial(candidate.config_hash(BASE), 9, speed, Purpose.SEARCH)
    return Contender(candidate, candidate.complete(BASE), reading)


def trial(key: str, number: int, speed: float, purpose: Purpose = Purpose.CONFIRM, **fields: object) -> TrialResult:
    given = {"outcome": Outcome.COMPLETED, "losses": [2.0, 1.9, 1.8], "phases": {"steps": 1.0}, **fields}
    metrics = {"throughput": speed} if given["outcome"] is Outcome.COMPLETED else {}
    return TrialResult(
        trial_id=f"s-{number}", number=number, purpose=purpose, config_hash=key, metrics=metrics, **given
    )


OWN, BEST = contender(1, 4, 100.0), contender(2, 8, 150.0)


def confirmed(
    kinds: tuple[str, ...],
    seed: int = 1,
    noise: float = 0.01,
    best: float = 150.0,
    losses: tuple[float, ...] = (2.0, 1.9, 1.8),
    **besides: object,
) -> tuple[Finding, list[str]]:
    """The finding, and the names of what each trial measured. `besides` are speeds, losses or a failure by kind.

    `losses` are the best candidate's.
    """
    draws, names, order = random.Random(seed), CandidateNames(), list[str]()
    confirmation = Confirmation(OWN, [BEST], "throughput", 60.0, beside=partial(besides_of, kinds, base_config=BASE))
    while (candidate := confirmation.next) is not None:
        kind, key = beside_kind(candidate.switches), candidate.config_hash(BASE)
        order.append(names.of(candidate))
        speed, fields = (100.0 if candidate == OWN.candidate else best), {}
        if candidate == BEST.candidate:
            fields = {"losses": list(losses)}
        found = besides.get(kind)
        if isinstance(found, float):
            speed = found
        elif isinstance(found, dict):
            fields = found
        confirmation.tell(trial(key, len(order), speed * math.exp(draws.gauss(0, noise)), **fields))
    return confirmation.finding(), order


def test_it_is_measured_in_each_round_with_the_best_batch_and_the_users_own() -> None:
    found, order = confirmed(("ddp",), ddp=300.0)
    assert order[:8] == ["mbs4", "z2-mbs8", "ddp-mbs8", "ddp-mbs4", "z2-mbs8", "ddp-mbs8", "ddp-mbs4", "mbs4"]
    assert [one.measured.name for one in found.beside] == [
        "engine:ddp, micro-batch 8, accumulation 2",
        "engine:ddp, micro-batch 4, accumulation 4",
    ]
    gain = found.beside[0].gain
    assert gain is not None
    assert gain.low < 2.0 < gain.high
    assert found.winner is not None
    assert found.winner.name == name_of(BEST.candidate)
    said = f"Plain DDP is {gain.value:.2f}x faster than the best DeepSpeed configuration"
    assert any(line.startswith(said) and "), with micro-batch 8, accumulation 2." in line for line in found.lines)
    assert "x faster than your configuration" in found.sentence
    assert "x faster than the best DeepSpeed configuration" in found.sentence
    assert Finding.of_document(found.document()) == found


def test_a_slower_one_an_equal_one_and_one_that_did_not_run_are_told_apart() -> None:
    slower = confirmed(("ddp",), ddp=50.0)[0]
    assert "DDP" not in slower.sentence
    assert "of the speed of the best DeepSpeed configuration" in slower.lines[1]
    equal = confirmed(("ddp",), ddp=150.0)[0]
    assert "is not surely faster or slower" in equal.lines[1]
    full = {"outcome": Outcome.OUT_OF_MEMORY, "reason": "It ran out of memory."}
    failed, order = confirmed(("fsdp2",), fsdp2=full)
    assert failed.lines[1] == "FSDP2, micro-batch 8, accumulation 2, was not measured. It ran out of memory."
    assert failed.winner is not None
    assert failed.winner.verdict == "faster"
    assert order.count("fsdp2-mbs8") == 1


def test_if_no_candidate_trains_alike_it_is_compared_with_the_users_configuration() -> None:
    found, order = confirmed(("ddp",), ddp=300.0, losses=(3.0, 2.9, 2.8))
    assert found.winner is not None
    assert found.winner.name == name_of(OWN.candidate)
    assert found.rounds == order.count("ddp-mbs8") == order.count("mbs4") > 2
    gain = found.beside[0].gain
    assert gain is not None
    assert gain.low < 3.0 < gain.high
    assert "Plain DDP is" in found.sentence


def test_another_training_is_no_faster_one() -> None:
    found, _ = confirmed(("ddp",), ddp={"losses": [3.0, 2.9, 2.8]})
    assert not any(one.is_faster for one in found.beside)
    assert "So it is another training." in found.lines[1]


def test_a_division_by_the_accumulation_that_deepspeed_repeats_is_no_other_training() -> None:
    """As Lightning's under DeepSpeed: with your batch and with another, all losses are 4 times as large without."""
    found, _ = confirmed(("ddp",), ddp={"losses": [8.0, 7.6, 7.2]})
    assert [one.measured.verdict for one in found.beside] == ["uncompared", "uncompared"]
    assert all("but for the factor 4" in one.measured.losses for one in found.beside)


def test_a_study_that_does_not_ask_for_it_measures_what_it_did() -> None:
    found, order = confirmed(())
    assert set(order) == {"mbs4", "z2-mbs8"}
    assert not found.beside


def test_only_a_rank_turns_it() -> None:
    (one, _) = besides_of(("ddp",), BEST, OWN, BASE)
    assert turned_among(one.candidate.switches) == {"engine:ddp": True}
    assert in_command(one.candidate.switches) == {}
    assert one.key not in (BEST.key, OWN.key)
