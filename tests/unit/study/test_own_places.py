"""The answer in the user's own command and files: each setting that the winner changes is edited where it stands."""

import dataclasses
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from study_setups import setup_of

from zerotune.trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH
from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.inputs.entrypoint import Entrypoint
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.measurement import BatchSizes, ProgramProfile
from zerotune.trial_lib.messages.turned import PINNED, WORKERS
from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.folders import OwnCommand
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.search.knobs import STAGE
from zerotune.trial_lib.study import best_command
from zerotune.trial_lib.study.best_command import own_answers
from zerotune.trial_lib.study.own_command import NoPlaceError, suspected_places
from zerotune.trial_lib.study.program import KnownProgram
from zerotune.trial_lib.study.typed_command import read_command

AUTO = {TRAIN_BATCH: "auto", MICRO_BATCH: "auto", ACCUMULATION: "auto", "zero_optimization": {"stage": 2}}
BATCH = BatchSizes(train_batch_size=16, micro_batch_size=2, gradient_accumulation_steps=4)
TRAINER = ProgramProfile(typed_batch=BATCH, batch={MICRO_BATCH: 2, ACCUMULATION: 4, TRAIN_BATCH: 16})
SCRIPT = ProgramProfile(typed_batch=BATCH)
IN_CODE = ProgramProfile(typed_batch=BATCH, ds_config={"zero_optimization": {"stage": 2}})
BY_ACCELERATE = ProgramProfile(
    typed_batch=BATCH,
    batch={MICRO_BATCH: 2, ACCUMULATION: 4, TRAIN_BATCH: 16},
    ds_config={**AUTO, "zero_optimization": {"stage": 2}},
)
WINNER = {MICRO_BATCH: 8, ACCUMULATION: 1}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").touch()
    (tmp_path / "ds.json").write_text(json.dumps(AUTO, indent=2) + "\n")
    monkeypatch.setattr(best_command, "typed_before", lambda ranks: {"NPROC_PER_NODE": "2"})
    return tmp_path


def answer(
    folder: Path,
    command: str,
    found: ProgramProfile = TRAINER,
    zero: Mapping[str, Any] | None = None,
    switches: Mapping[str, Any] | None = None,
    mapped: Mapping[str, str] | None = None,
    wrapper: str = "",
    way: int = 0,
    **winner: Any,
) -> OwnCommand:
    """A way to have a winner in the user's command. It has WINNER's batch unless another is given, and ZeRO stage 2."""
    host = Host("cuda", ["0", "1"], 2**30)
    vary = {place: [value] for place, value in (switches or {}).items()}
    experiment = read_command(command.split(), mapped or {}, folder, host, vary=vary, wrapper=wrapper.split())
    setup = setup_of(experiment, folder / "study")
    known = KnownProgram.of(experiment, setup.environment).learned(found)
    base = known.base_config
    zero = {**base.get("zero_optimization", {}), **(zero or {})}
    config = {key: value for key, value in base.items() if key != TRAIN_BATCH or value == "auto"}
    ways = own_answers(setup, known, {**config, "zero_optimization": zero, **(winner or WINNER)}, switches or {})
    return next(itertools.islice(ways, way, None))


def copy_of(own: OwnCommand, name: str) -> str:
    (text,) = (text for path, text in own.copies.items() if Path(path).name == name)
    return text


def edits(own: OwnCommand) -> list[str]:
    return [line for line in own.diff.splitlines() if line[0] in "+-" and line[:3] not in ("+++", "---")]


TRAIN = "torchrun --nproc_per_node 2 train.py"


def test_options_and_the_json_file_change_where_they_stand(folder: Path) -> None:
    found = ProgramProfile(
        typed_batch=BATCH,
        batch=TRAINER.batch,
        arg_mappings={
            MICRO_BATCH: "--per_device_train_batch_size",
            ACCUMULATION: "--gradient_accumulation_steps",
        },
    )
    own = answer(folder, f"{TRAIN} --deepspeed ds.json --per_device_train_batch_size 2", found, {"stage": 1})
    words = " ".join(own.words)
    assert words.endswith(
        "train.py --deepspeed study/best/ds.json --per_device_train_batch_size 8 --gradient_accumulation_steps 1"
    )
    # What the Trainer fills in stays as it is.
    assert edits(own) == ['-    "stage": 2', '+    "stage": 1']
    assert json.loads(copy_of(own, "ds.json")) == {**AUTO, "zero_optimization": {"stage": 1}}
    assert " ".join(own.applied) == words.replace("study/best/", "")


LLAMAFACTORY = """\
### model
model_name_or_path: tiny
stage: sft            # no stage of ZeRO

deepspeed: ds.json
per_device_train_batch_size: 2
per_device_eval_batch_size: 2
gradient_accumulation_steps: 4
output_dir: out
"""


def test_a_variable_that_a_shell_script_gives_a_default_is_set_before_the_command(folder: Path) -> None:
    """The script writes the configuration and starts the program with an option of its own."""
    (folder / "launch.sh").write_text("MBS=${MBS:-2}\nGAS=${GAS-4}\nSTAGE=${STAGE:=2}\n./more --size ${MBS}\n")
    found = dataclasses.replace(IN_CODE, arg_mappings={MICRO_BATCH: "--batch-size"})
    command = f"{TRAIN} --batch-size 2"
    likeliest = answer(folder, command, found, {"stage": 1}, wrapper="bash launch.sh")
    assert likeliest.words == ("bash", "launch.sh", "--batch-size", "8")
    own = answer(folder, command, found, {"stage": 1}, wrapper="bash launch.sh", way=1)
    assert own.words == ("bash", "launch.sh")
    assert {name: own.variables[name] for name in ("MBS", "GAS", "STAGE")} == {"MBS": "8", "GAS": "1", "STAGE": "1"}


def test_a_yaml_file_and_the_json_that_it_names_change_together(folder: Path) -> None:
    (folder / "lf.yaml").write_text(LLAMAFACTORY)
    own = answer(folder, f"{TRAIN} lf.yaml", zero={"stage": 3, "reduce_bucket_size": 1000}, wrapper="cli train lf.yaml")
    assert (own.words, own.variables["NPROC_PER_NODE"]) == (("cli", "train", "study/best/lf.yaml"), "2")
    of_json = ['-    "stage": 2', '+    "stage": 3,', '+    "reduce_bucket_size": 1000']
    batch = ["-per_device_train_batch_size: 2", "+per_device_train_batch_size: 8"]
    accumulation = ["-gradient_accumulation_steps: 4", "+gradient_accumulation_steps: 1"]
    assert edits(own) == [*of_json, *batch, *accumulation]
    copied = copy_of(own, "lf.yaml")
    assert yaml.safe_load(copied)["deepspeed"] == str(folder / "study" / "best" / "ds.json")
    assert "stage: sft            # no stage of ZeRO" in copied
    assert own.applied == ("cli", "train", "lf.yaml")


def test_a_trainers_argument_that_is_not_in_its_file_is_added_beside_the_others(folder: Path) -> None:
    (folder / "lf.yaml").write_text(LLAMAFACTORY.replace("gradient_accumulation_steps: 4\n", ""))
    own = answer(folder, f"{TRAIN} lf.yaml", **{MICRO_BATCH: 2, ACCUMULATION: 2})
    assert edits(own) == ["+gradient_accumulation_steps: 2"]


def test_a_switch_of_the_loader_stands_in_the_trainers_file(folder: Path) -> None:
    (folder / "lf.yaml").write_text(LLAMAFACTORY)
    offered = ["--dataloader_num_workers", "--dataloader_pin_memory"]
    found = ProgramProfile(
        typed_batch=BATCH,
        batch=TRAINER.batch,
        trainer_options=offered,
        turnable={WORKERS: [0, 2], PINNED: [True, False]},
    )
    own = answer(folder, f"{TRAIN} lf.yaml", found, switches={WORKERS: 2, PINNED: False})
    assert edits(own)[-2:] == ["+dataloader_num_workers: 2", "+dataloader_pin_memory: false"]


ACCELERATE = """\
distributed_type: DEEPSPEED   # by hand
deepspeed_config:
  zero_stage: 2
  gradient_accumulation_steps: 4
  zero3_init_flag: false
mixed_precision: 'no'
num_processes: 2
"""


def test_accelerates_own_settings_change_in_its_yaml_file(folder: Path) -> None:
    (folder / "acc.yaml").write_text(ACCELERATE)
    (folder / "sft.yaml").write_text("per_device_train_batch_size: 2\ngradient_accumulation_steps: 4\n")
    wrapper = "trl sft --config sft.yaml --accelerate_config acc.yaml"
    own = answer(folder, f"{TRAIN} --config sft.yaml", BY_ACCELERATE, {"stage": 1}, wrapper=wrapper)
    assert own.words == ("trl", "sft", "--config", "study/best/sft.yaml", "--accelerate_config", "study/best/acc.yaml")
    stage = [
        "-  zero_stage: 2",
        "-  gradient_accumulation_steps: 4",
        "+  zero_stage: 1",
        "+  gradient_accumulation_steps: 1",
    ]
    assert edits(own)[:4] == stage
    assert copy_of(own, "acc.yaml").startswith("distributed_type: DEEPSPEED   # by hand\n")
    assert yaml.safe_load(copy_of(own, "sft.yaml")) == {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
    }


def test_what_accelerates_settings_cannot_say_comes_in_a_file_of_its_own(folder: Path) -> None:
    (folder / "acc.yaml").write_text(ACCELERATE)
    (folder / "sft.yaml").write_text("per_device_train_batch_size: 2\ngradient_accumulation_steps: 4\n")
    wrapper = "trl sft --config sft.yaml --accelerate_config acc.yaml"
    zero = {"stage": 1, "reduce_bucket_size": 1000}
    own = answer(folder, f"{TRAIN} --config sft.yaml", BY_ACCELERATE, zero, wrapper=wrapper)
    settings = yaml.safe_load(copy_of(own, "acc.yaml"))
    assert settings["deepspeed_config"] == {
        "zero3_init_flag": False,
        "deepspeed_config_file": "study/best/ds_config.study.json",
    }
    assert "mixed_precision" not in settings
    assert json.loads(copy_of(own, "ds_config.study.json"))["zero_optimization"] == zero
    (new,) = (change for change in own.changes if change.before is None)
    assert Path(new.path).parent == folder
    (applied,) = (change.after for change in own.changes if change.path.endswith("acc.yaml"))
    assert yaml.safe_load(applied)["deepspeed_config"]["deepspeed_config_file"] == Path(new.path).name


def test_a_presets_name_becomes_a_file(folder: Path) -> None:
    found = ProgramProfile(
        typed_batch=BATCH,
        batch=TRAINER.batch,
        ds_config=AUTO,
        arg_mappings={MICRO_BATCH: "--per_device_train_batch_size", ACCUMULATION: "--gradient_accumulation_steps"},
    )
    typed = "--deepspeed zero2 --per_device_train_batch_size 2 --gradient_accumulation_steps 4"
    own = answer(folder, f"{TRAIN} {typed}", found, {"stage": 1}, wrapper=f"swift sft {typed}", way=1)
    assert own.words[:5] == (
        "swift",
        "sft",
        "--deepspeed",
        "study/best/ds_config.study.json",
        "--per_device_train_batch_size",
    )
    assert json.loads(copy_of(own, "ds_config.study.json"))["zero_optimization"] == {"stage": 1}
    named = answer(folder, f"{TRAIN} {typed}", found, {"stage": 1}, wrapper=f"swift sft {typed}")
    assert (named.words[2:4], named.copies) == (("--deepspeed", "zero1"), {})
    unchanged = answer(folder, f"{TRAIN} {typed}", found, wrapper=f"swift sft {typed}")
    assert unchanged.words[2:4] == ("--deepspeed", "zero2")
    assert not unchanged.copies


def test_of_two_keys_with_one_value_the_name_decides(folder: Path) -> None:
    (folder / "conf.toml").write_text("[eval]\nbatch_size = 4\n[train]\naccumulate = 4\nbatch_size = 4 # mine\n")
    batch = BatchSizes(train_batch_size=32, micro_batch_size=4, gradient_accumulation_steps=4)
    found = ProgramProfile(typed_batch=batch, ds_config={"zero_optimization": {"stage": 2}})
    own = answer(folder, f"{TRAIN} --config=conf.toml", found, **{MICRO_BATCH: 8, ACCUMULATION: 2})
    assert own.words[-1] == "--config=study/best/conf.toml"
    # The batch of an evaluation has the same name and value, and stands first.
    assert "-batch_size = 4 # mine" in edits(own)
    assert "+accumulate = 2" in edits(own)
    assert copy_of(own, "conf.toml").startswith("[eval]\nbatch_size = 4\n")


def test_settings_of_deepspeed_in_a_programs_own_yaml_change_there(folder: Path) -> None:
    (folder / "configs").mkdir()
    text = "# NeoX\ntrain_micro_batch_size_per_gpu: 2\ngradient_accumulation_steps: 4\nzero_optimization:\n  stage: 2\n"
    (folder / "configs" / "small.yml").write_text(text)
    wrapper = "python deepy.py train.py -d configs small.yml"
    own = answer(folder, f"{TRAIN} --x", IN_CODE, {"stage": 1}, wrapper=wrapper)
    # The program joins the folder and the name, so the name is absolute.
    assert own.words[-1] == str(folder / "study" / "best" / "small.yml")
    assert copy_of(own, "small.yml") == text.replace(": 2\ng", ": 8\ng").replace(": 4", ": 1").replace(
        "stage: 2", "stage: 1"
    )


def test_an_option_of_the_users_mapping_changes_and_the_stage_with_it(folder: Path) -> None:
    (folder / "ds.json").write_text(json.dumps({TRAIN_BATCH: 16, MICRO_BATCH: 2, "zero_optimization": {"stage": 2}}))
    mapped = {MICRO_BATCH: "--micro-batch", STAGE: "--zero-stage"}
    command = f"{TRAIN} --deepspeed_config ds.json --zero-stage=2 --micro-batch 2"
    own = answer(folder, command, SCRIPT, {"stage": 1}, mapped=mapped)
    assert own.words[-4:] == ("study/best/ds.json", "--zero-stage=1", "--micro-batch", "8")
    written = json.loads(copy_of(own, "ds.json"))
    assert written[TRAIN_BATCH] == 16
    assert (written[MICRO_BATCH], written[ACCUMULATION], written["zero_optimization"]) == (8, 1, {"stage": 1})


def test_a_dictionary_that_the_code_makes_of_options_and_of_a_file_changes_there(folder: Path) -> None:
    (folder / "conf.yaml").write_text("comm: {overlap_comm: true, bucket: 5}\n")
    in_code = {"zero_optimization": {"stage": 2, "overlap_comm": True}}
    found = dataclasses.replace(SCRIPT, ds_config=in_code, arg_mappings={MICRO_BATCH: "--b", ACCUMULATION: "--a"})
    zero = {"stage": 1, "overlap_comm": False}
    own = answer(folder, f"{TRAIN} --config conf.yaml --zero 2 --b 2", found, zero)
    assert own.words[-6:] == ("--zero", "1", "--b", "8", "--a", "1")
    assert copy_of(own, "conf.yaml") == "comm: {overlap_comm: false, bucket: 5}\n"


def test_hydras_configuration_changes_by_overrides(folder: Path) -> None:
    engine = {MICRO_BATCH: "${loop.batch}", ACCUMULATION: "${loop.steps}", "zero_optimization": {"stage": 2}}
    composed = {"loop": {"batch": 2, "steps": 4}, "engine": engine}
    found = ProgramProfile(
        typed_batch=BATCH,
        ds_config={MICRO_BATCH: 2, ACCUMULATION: 4, "zero_optimization": {"stage": 2}},
        hydra_config=composed,
        arg_mappings={MICRO_BATCH: "loop.batch"},
    )
    own = answer(folder, f"{TRAIN} loop.batch=2 seed=1", found, {"stage": 1, "overlap_comm": True})
    places = ["engine.zero_optimization.stage=1", "++engine.zero_optimization.overlap_comm=true", "loop.steps=1"]
    assert list(own.words[-5:]) == ["loop.batch=8", "seed=1", *places]
    assert not own.copies


LIGHTNING = """\
trainer:
  strategy: deepspeed_stage_2   # sharded
  devices: 2
data: {batch_size: 2}
"""
BY_LIGHTNING = ProgramProfile(
    typed_batch=BATCH,
    ds_config={"zero_optimization": {"stage": 2}},
    by_lightning=True,
    arg_mappings={MICRO_BATCH: "fit.yaml:data.batch_size"},
)


@pytest.mark.parametrize(
    ("strategy", "zero", "lines"),
    [
        ("deepspeed_stage_2", {"stage": 1}, ["+  strategy: deepspeed_stage_1   # sharded"]),
        (
            "{class_path: DeepSpeedStrategy, init_args: {stage: 2}}",
            {"stage": 0, "overlap_comm": True},
            ["+  strategy: {class_path: DeepSpeedStrategy, init_args: {stage: 0, overlap_comm: true}}   # sharded"],
        ),
        (
            "deepspeed_stage_2",
            {"overlap_comm": True},
            [
                '+  strategy: {"class_path": "lightning.pytorch.strategies.DeepSpeedStrategy", "init_args": '
                '{"stage": 2, "overlap_comm": true}}   # sharded'
            ],
        ),
    ],
)
def test_lightnings_command_line_has_its_values_in_its_file(
    folder: Path, strategy: str, zero: Mapping[str, Any], lines: list[str]
) -> None:
    (folder / "fit.yaml").write_text(LIGHTNING.replace("deepspeed_stage_2", strategy))
    own = answer(folder, f"{TRAIN} fit --config fit.yaml", BY_LIGHTNING, zero)
    # Lightning counts the micro-batches of a step by an argument of its own.
    assert [line for line in edits(own) if line[0] == "+"] == [
        *lines,
        "+  accumulate_grad_batches: 1",
        "+data: {batch_size: 8}",
    ]


def test_options_of_lightnings_command_line_change_where_they_are_typed(folder: Path) -> None:
    found = dataclasses.replace(BY_LIGHTNING, arg_mappings={MICRO_BATCH: "--data.batch_size"})
    options = "--data.batch_size 2 --trainer.accumulate_grad_batches 4 --trainer.strategy.init_args.stage=2"
    own = answer(folder, f"{TRAIN} fit {options}", found, {"stage": 1, "overlap_comm": True})
    assert " ".join(own.words).endswith(
        "--data.batch_size 8 --trainer.accumulate_grad_batches 1 --trainer.strategy.init_args.stage=1 "
        "--trainer.strategy.init_args.overlap_comm=true"
    )


def test_an_option_that_is_named_as_the_accumulation_changes_with_it(folder: Path) -> None:
    (folder / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    found = dataclasses.replace(SCRIPT, arg_mappings={MICRO_BATCH: "--batch"})
    own = answer(folder, f"{TRAIN} --deepspeed_config ds.json --batch 2 --grad-accum-steps 4 --seed 4", found)
    assert own.words[-6:] == ("--batch", "8", "--grad-accum-steps", "1", "--seed", "4")


def test_a_variable_is_set_before_the_command(folder: Path) -> None:
    own = answer(folder, f"{TRAIN} --deepspeed ds.json", SCRIPT, mapped={MICRO_BATCH: "BATCH", ACCUMULATION: "GAS"})
    assert (own.variables["BATCH"], own.variables["GAS"]) == ("8", "1")
    assert own.words[-1] == "ds.json"


def test_what_stands_in_the_code_is_named(folder: Path) -> None:
    with pytest.raises(NoPlaceError, match="per_device_train_batch_size stands in the code"):
        answer(folder, f"{TRAIN} --deepspeed ds.json", TRAINER)
    with pytest.raises(NoPlaceError, match=r"zero_optimization\.stage stands in the code"):
        answer(folder, TRAIN, IN_CODE, {"stage": 1}, mapped={MICRO_BATCH: "--b", ACCUMULATION: "--a"})


def test_a_value_that_an_alias_shares_is_refused(folder: Path) -> None:
    text = "per_device_train_batch_size: &size 2\nper_device_eval_batch_size: *size\n"
    (folder / "lf.yaml").write_text(text)
    with pytest.raises(InputError, match="cannot be changed without another value"):
        answer(folder, f"{TRAIN} --deepspeed ds.json lf.yaml", **{MICRO_BATCH: 8, ACCUMULATION: 4})


def test_places_that_are_alike_are_ways_of_which_a_run_finds_the_right_one(folder: Path) -> None:
    (folder / "conf.yaml").write_text("curriculum: {stage: 2}\nzero: {stage: 2}\n")
    in_code = {"zero_optimization": {"stage": 2}}
    found = dataclasses.replace(SCRIPT, ds_config=in_code, arg_mappings={MICRO_BATCH: "--b", ACCUMULATION: "--a"})
    ways = [answer(folder, f"{TRAIN} --b 2 --a 4 conf.yaml", found, {"stage": 1}, way=way) for way in range(2)]
    assert [way.words[-5:-1] for way in ways] == [("--b", "8", "--a", "1")] * 2
    assert [edits(way)[1] for way in ways] == ["+curriculum: {stage: 1}", "+zero: {stage: 1}"]
    with pytest.raises(StopIteration):
        answer(folder, f"{TRAIN} --b 2 --a 4 conf.yaml", found, {"stage": 1}, way=2)


def test_of_two_configurations_that_of_the_studys_word_is_edited_first(folder: Path) -> None:
    (folder / "ref.json").write_text(json.dumps(AUTO))
    found = dataclasses.replace(TRAINER, arg_mappings={MICRO_BATCH: "--b", ACCUMULATION: "--a"})
    own = answer(folder, f"{TRAIN} --ref ref.json --deepspeed_config ds.json --b 2", found, {"stage": 1})
    assert own.words[-8:-4] == ("--ref", "ref.json", "--deepspeed_config", "study/best/ds.json")


def test_a_key_of_a_base_is_set_in_the_file_that_names_it_and_other_names_have_whole_paths(folder: Path) -> None:
    (folder / "conf").mkdir()
    (folder / "conf" / "words.txt").touch()
    (folder / "conf" / "base.yaml").write_text("batch: 2\naccumulation: 4\n")
    (folder / "conf" / "run.yaml").write_text("base: base.yaml\ndata: words.txt\nbatch: 2\n")
    found = dataclasses.replace(IN_CODE, ds_config={"zero_optimization": {"stage": 2}})
    own = answer(folder, f"{TRAIN} conf/run.yaml", found)
    # The base may be that of other trainings, and the key in it is not the one that counts.
    assert edits(own) == ["-batch: 2", "+batch: 8", "+accumulation: 1"]
    base, data = folder / "conf" / "base.yaml", folder / "conf" / "words.txt"
    assert copy_of(own, "run.yaml") == f"base: {base}\ndata: {data}\nbatch: 8\naccumulation: 1\n"


def ignored(reason: str, composed: Mapping[str, Any] | None = None) -> TrialResult:
    return TrialResult(
        trial_id="s-0000",
        number=0,
        purpose=Purpose.PROFILE,
        config_hash="0" * 16,
        outcome=Outcome.INVALID,
        reason=reason,
        program=ProgramProfile(hydra_config=dict(composed or {})),
    )


@pytest.mark.parametrize(
    ("reason", "words", "wrapper", "places"),
    [
        (
            "It has --size 4. Let each trial set it with --map train_micro_batch_size_per_gpu=--size (in a YAML: x).",
            "--batch_size 4",
            "",
            ["--size", "--batch_size", "BATCH"],
        ),
        ("", "--config conf.toml", "", ["conf.toml:train.batch_size", "BATCH"]),
        ("", "run.yaml", "", ["run.yaml:dev.batch", "run.yaml:+train.batch", "BATCH"]),
        ("", "--deepspeed_config ds.json", "", ["BATCH"]),
        ("", "--epochs 4 --n 4 --eval-n 4 -b=4", "", ["BATCH"]),
        ("", "--x", "python kit.py ds.json", ["ds.json:train_micro_batch_size_per_gpu", "BATCH"]),
    ],
)
def test_a_size_that_is_not_followed_is_suspected_where_its_name_and_value_stand(
    folder: Path, reason: str, words: str, wrapper: str, places: list[str]
) -> None:
    (folder / "conf.toml").write_text("[eval]\nbatch_size = 4\n[train]\nbatch_size = 4\n")
    (folder / "run.yaml").write_text("base: base.yaml\ndev: {batch: 4}\n")
    (folder / "base.yaml").write_text("train: {batch: 4}\n")
    (folder / "ds.json").write_text(json.dumps({**AUTO, MICRO_BATCH: 4}))
    entrypoint = Entrypoint(arguments=tuple(words.split()), wrapper=tuple(wrapper.split()))
    variables = {"BATCH": "4", "EVAL_BATCH": "4", "BATCHES": "3"}
    found = suspected_places(ignored(reason), 4, entrypoint, variables, folder)
    assert found == [(MICRO_BATCH, place) for place in places]


def test_a_size_that_hydra_has_composed_is_suspected_at_each_of_its_places(folder: Path) -> None:
    composed = {"batch": 4, "eval": {"batch": 4}, "data": {"batch": 4, "epochs": 4}}
    found = suspected_places(ignored("", composed), 4, Entrypoint(arguments=("+x=4",)), {}, folder)
    assert [place for _, place in found] == ["++batch", "data.batch"]
