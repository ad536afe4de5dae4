"""A command in the place of an experiment's YAML: what it becomes, and what it is refused for."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nvml_fixtures import PretendGpu, pretend_gpus
from study_setups import setup_of

from zerotune.trial_lib.deepspeed_config.overrides import ACCUMULATION, TRAIN_BATCH
from zerotune.trial_lib.device import cuda
from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.device.this_host import this_host
from zerotune.trial_lib.inputs.read_experiment import Experiment, read_experiment
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.measurement import BatchSizes, ProgramProfile
from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.study.program import KnownProgram, environment_of, interpreter_of, program_of
from zerotune.trial_lib.study.training_command import training_command
from zerotune.trial_lib.study.typed_command import check_mappings, devices_of, read_command

CPUS = Host("cpu", ["4", "5", "6", "7"], 2**30)
GPUS = Host("cuda", ["0", "1", "2", "3"], 2**30)
UUIDS = {"GPU-a0": 2**30, "GPU-b1": 2**30, "GPU-c2": 2**30, "GPU-d3": 2**30}
MICRO_BATCH = "train_micro_batch_size_per_gpu"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").touch()
    (tmp_path / "ds.json").write_text(json.dumps({MICRO_BATCH: 2, "zero_optimization": {"stage": 1}}))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}/usr/bin")
    return tmp_path


def read(folder: Path, command: str, host: Host = GPUS, **mappings: str) -> Experiment:
    return read_command(command.split(" "), mappings, folder, host)


def kept(folder: Path, experiment: Experiment) -> Experiment:
    """Returns the experiment as a resumed study reads it."""
    path = folder / "kept.yaml"
    path.write_text(experiment.text)
    return read_experiment(path, folder)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))))
def test_arguments_reach_the_program_byte_for_byte_and_are_kept_so(folder: Path, words: list[str]) -> None:
    arguments = [
        "a b",
        'it\'s "x"',
        "",
        "--",
        "-z",
        "1",
        "2",
        "1e-4",
        "ünï \U0001f600",
        "line\nline",
        "$HOME *",
        *words,
    ]
    experiment = read_command(["deepspeed", "train.py", *arguments], {}, folder, GPUS)
    for one in (experiment, kept(folder, experiment)):
        assert one.entrypoint.arguments == tuple(arguments)
        program = program_of(one, {}, folder / "trial.json", {}, folder / "training.json")
        assert program.arguments == arguments or one.entrypoint.config_positions


def test_a_word_that_is_no_text_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="is not UTF-8"):
        read_command(["python", "train.py", os.fsdecode(b"\xff")], {}, folder, GPUS)


@pytest.mark.parametrize(
    ("command", "host", "slots", "devices"),
    [
        ("deepspeed train.py", GPUS, 4, ["0", "1", "2", "3"]),
        ("deepspeed --num_gpus 2 train.py", GPUS, 2, ["0", "1", "2", "3"]),
        ("deepspeed --include localhost:1,3 train.py", GPUS, 2, ["1", "3"]),
        ("deepspeed --include localhost:1,3 train.py", CPUS, 2, ["5", "7"]),
        ("deepspeed --exclude localhost:0 train.py", GPUS, 3, ["1", "2", "3"]),
        ("torchrun train.py", GPUS, 1, ["0", "1", "2", "3"]),
        ("torchrun --nproc_per_node gpu train.py", GPUS, 4, ["0", "1", "2", "3"]),
        ("torchrun --nproc_per_node cpu train.py", CPUS, 4, ["4", "5", "6", "7"]),
        ("torchrun --nproc_per_node auto train.py", CPUS, 4, ["4", "5", "6", "7"]),
        ("CUDA_VISIBLE_DEVICES=2,3 torchrun --nproc_per_node auto train.py", GPUS, 2, ["2", "3"]),
        ("CUDA_VISIBLE_DEVICES=2,3 deepspeed train.py", GPUS, 2, ["2", "3"]),
        ("CUDA_VISIBLE_DEVICES=2,3 deepspeed --num_gpus 1 train.py", GPUS, 1, ["0", "1", "2", "3"]),
        ("python train.py", GPUS, 1, ["0", "1", "2", "3"]),
    ],
)
def test_the_launcher_says_how_many_ranks_start_and_where(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: str, host: Host, slots: int, devices: list[str]
) -> None:
    pretend_gpus(monkeypatch, UUIDS)
    experiment = read(folder, command, host)
    for one in (experiment, kept(folder, experiment)):
        assert one.config.resources.slots_per_trial == slots
        assert devices_of(one.entrypoint, host).slots == devices


@pytest.mark.parametrize("visible", ["GPU-c, 1", "2,GPU-b1"])
def test_a_typed_device_is_the_same_one_however_it_is_spelt(
    folder: Path, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    pretend_gpus(monkeypatch, UUIDS)
    command = [f"CUDA_VISIBLE_DEVICES={visible}", "deepspeed", "train.py"]
    host = devices_of(read_command(command, {}, folder, GPUS).entrypoint, GPUS)
    assert [host.device_of(slot) for slot in host.slots] == ["GPU-c2", "GPU-b1"]


def test_a_typed_index_means_what_it_means_to_cuda_in_the_typed_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    pretend_gpus(monkeypatch, [PretendGpu("GPU-small", model="NVIDIA RTX A2000"), PretendGpu("GPU-large")])
    monkeypatch.setattr(cuda, "cuda_order", lambda variables: ["GPU-large", "GPU-small"])

    def device(command: str) -> str:
        host = devices_of(read(folder, command).entrypoint, GPUS)
        return host.device_of(host.slots[0])

    assert device("CUDA_VISIBLE_DEVICES=0 python train.py") == "GPU-large"
    seen = this_host()
    included = devices_of(read(folder, "deepspeed --include localhost:0 train.py", seen).entrypoint, seen)
    assert [included.device_of(slot) for slot in included.slots] == ["GPU-large"]
    assert device("CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0 python train.py") == "GPU-small"


def test_a_typed_variable_that_names_no_device_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, UUIDS)
    with pytest.raises(InputError, match="CUDA_VISIBLE_DEVICES=7 names no GPU of this host"):
        read(folder, "CUDA_VISIBLE_DEVICES=7 torchrun train.py")


def test_on_processors_deepspeed_starts_a_rank_for_each_memory_node(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_SIZE", "3")
    assert read(folder, "deepspeed train.py", CPUS).config.resources.slots_per_trial == 3
    monkeypatch.delenv("LOCAL_SIZE")
    numactl = folder / "numactl"
    numactl.write_text("#!/bin/sh\nprintf 'available: 2 nodes (0-1)\\nnode 0 cpus: 0 1\\nnode 1 cpus: 2 3\\n'\n")
    numactl.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    assert read(folder, "deepspeed train.py", CPUS).config.resources.slots_per_trial == 2


@pytest.mark.parametrize(
    ("command", "host", "said"),
    [
        ("torchrun --nproc_per_node gpu train.py", CPUS, "ranks on every GPU, and this host has cpu slots"),
        ("deepspeed --include localhost:4 train.py", GPUS, "device 4, but this host has 4 cuda slot"),
        ("deepspeed --exclude localhost:0,1,2,3 train.py", GPUS, "left no device"),
        ("model_def:MyTrial", GPUS, "MyTrial"),
        ("deepspeed trian.py", GPUS, "the script trian.py is not in"),
        ("python -m no_such_module_here", GPUS, "the module no_such_module_here is neither in"),
        (
            "deepspeed train.py --deepspeed_config none.json",
            GPUS,
            "the DeepSpeed configuration none.json does not exist",
        ),
        ("deepspeed train.py --deepspeed ds.json --deepspeed none.json", GPUS, "names two DeepSpeed configurations"),
    ],
)
def test_what_cannot_work_here_is_refused_in_one_sentence(folder: Path, command: str, host: Host, said: str) -> None:
    with pytest.raises(InputError) as refused:
        read(folder, command, host)
    assert said in refused.value.what
    assert refused.value.where == "the command"


@pytest.mark.parametrize(
    "arguments", ["--deepspeed ds.json", "--deepspeed_config=ds.json", "--deepspeed --deepspeed_config ds.json"]
)
def test_the_configuration_is_found_in_the_arguments(folder: Path, arguments: str) -> None:
    experiment = read(folder, f"deepspeed train.py {arguments}")
    assert experiment.ds_config["zero_optimization"] == {"stage": 1}
    program = program_of(experiment, {}, Path("/trial/ds.json"), {}, Path("/trial/training.json"))
    assert program.arguments[-1].endswith("/trial/ds.json")


def test_a_file_that_holds_a_configuration_is_found_behind_any_flag(folder: Path) -> None:
    experiment = read(folder, "python train.py --my-config ds.json --data data.json")
    assert experiment.entrypoint.config_values == ("ds.json",)
    assert experiment.ds_config["zero_optimization"] == {"stage": 1}
    (folder / "other.json").write_text('{"zero_optimization": {}}')
    assert read(folder, "python train.py --a ds.json --b other.json").ds_config == {}


def test_a_configuration_that_no_argument_names_is_left_to_the_code(folder: Path) -> None:
    assert read(folder, "deepspeed train.py --deepspeed").ds_config == {}


def test_the_program_is_the_one_that_the_shell_would_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert interpreter_of(read(folder, "python train.py")) == sys.executable
    other = folder / "env" / "bin"
    other.mkdir(parents=True)
    for name in ("python", "deepspeed"):
        (other / name).write_text("#!/bin/sh\n")
        (other / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(other), prepend=os.pathsep)
    experiment = read(folder, "deepspeed train.py")
    monkeypatch.undo()
    for one in (experiment, kept(folder, experiment)):
        assert interpreter_of(one) == str(other / "python")
    monkeypatch.setenv("PATH", "/nowhere")
    assert interpreter_of(read(folder, "deepspeed train.py")) == sys.executable


def test_mapped_flags_and_variables_are_set_for_a_trial(folder: Path) -> None:
    mappings = {MICRO_BATCH: "--batch", "gradient_accumulation_steps": "ACCUMULATE"}
    experiment = read(folder, "A=1 python train.py --batch 2 -- --batch", **mappings)
    config = {MICRO_BATCH: 8, "gradient_accumulation_steps": 3}
    environment = environment_of(experiment, (), "cuda")
    program = program_of(experiment, environment, Path("/t/ds.json"), config, Path("/t/training.json"))
    assert program.arguments == ["--batch", "8", "--", "--batch"]
    assert (program.environment["A"], program.environment["ACCUMULATE"]) == ("1", "3")
    assert program.environment["ZEROTUNE_TRAINING_SPEC"] == "/t/training.json"
    found = program_of(experiment, environment, Path("/t/ds.json"), config, Path("/t/training.json"), {})
    assert found.arguments == ["--batch", "2", "--", "--batch"]


@pytest.mark.parametrize(
    ("mapping", "said"),
    [
        ("batch=--b", 'the key "batch" cannot be mapped'),
        (MICRO_BATCH, '"" is no place in a command'),
        (f"{MICRO_BATCH}=", '"" is no place'),
        (f"{MICRO_BATCH}=9b", '"9b" is no place'),
        (f"{MICRO_BATCH}=--b c", '"--b c" is no place'),
        (f"{MICRO_BATCH}=--b=", '"--b=" is no place'),
        (f"{MICRO_BATCH}=8", '"8" is no place'),
        (f"{MICRO_BATCH}=argv:0", '"argv:0" is no place'),
        (f"{MICRO_BATCH}=conf.ini:batch", '"conf.ini:batch" is no place'),
        ("train_batch_size=--x", "mapped twice"),
    ],
)
def test_a_mapping_that_cannot_be_is_refused(mapping: str, said: str) -> None:
    with pytest.raises(InputError) as refused:
        check_mappings(["gradient_accumulation_steps=--x", mapping])
    assert said in refused.value.what
    assert refused.value.where == f"--map {mapping}"


@pytest.mark.parametrize(
    ("command", "mappings", "line"),
    [
        (
            "deepspeed --num_gpus 2 --master_port 1 train.py --deepspeed_config ds.json",
            {},
            "deepspeed --num_gpus 2 --master_port 1 train.py --deepspeed_config {best}",
        ),
        ("A=x torchrun -m train --deepspeed=ds.json", {}, "A=x torchrun -m train --deepspeed={best}"),
        (
            "python train.py --deepspeed ds.json --b 2",
            {MICRO_BATCH: "--b"},
            "python train.py --deepspeed {best} --b 8",
        ),
        (
            "BATCH=2 python train.py --deepspeed ds.json",
            {MICRO_BATCH: "BATCH"},
            "BATCH=8 python train.py --deepspeed {best}",
        ),
    ],
)
def test_the_best_command_is_the_users_own(
    folder: Path, command: str, mappings: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    paths = StudyPaths(folder / "study")
    experiment = read(folder, command, **mappings)
    written = training_command(setup_of(experiment, paths.root), KnownProgram.of(experiment), {MICRO_BATCH: 8})
    assert written.splitlines() == [f"cd {folder}", line.format(best=paths.best_ds_config)]


def test_where_the_configuration_is_in_the_code_the_best_command_is_one_that_needs_no_change_of_it(
    folder: Path,
) -> None:
    paths = StudyPaths(folder / "study")
    config = {MICRO_BATCH: 8, "zero_optimization": {"stage": 2}}
    experiment = read(folder, "python train.py")
    setup = setup_of(experiment, paths.root)
    *told, command = training_command(setup, KnownProgram.of(experiment), config).splitlines()
    assert f"# The DeepSpeed configuration is in the code. Set these values there, from {paths.best_ds_config}:" in told
    assert {f"#   {MICRO_BATCH}: 8", "#   zero_optimization.stage: 2"} <= set(told)
    assert any(line.endswith("python train.py") for line in told)
    assert all(line.startswith("#") for line in told)
    assert command.split()[-5:] == [
        "train",
        str(paths.experiment),
        str(folder),
        "--ds-config",
        str(paths.best_ds_config),
    ]


AS_TYPED = BatchSizes(train_batch_size=16, micro_batch_size=2, gradient_accumulation_steps=4)
BEST = {MICRO_BATCH: 8, ACCUMULATION: 1, TRAIN_BATCH: 16, "zero_optimization": {"stage": 1}}


def best_of(folder: Path, command: str, **found: Any) -> list[str]:
    """Returns the lines of the best command for a program whose configuration no option names."""
    experiment = read(folder, command)
    program = ProgramProfile(typed_batch=AS_TYPED, ds_config={"zero_optimization": {"stage": 2}}, **found)
    known = KnownProgram.of(experiment).learned(program)
    return training_command(setup_of(experiment, folder / "study"), known, BEST).splitlines()


def test_training_arguments_in_a_file_of_the_command_are_set_in_a_copy_of_it(folder: Path) -> None:
    """As for `llamafactory-cli train lf.yaml`."""
    text = "deepspeed: ds.json\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 4  # steps\n"
    (folder / "lf.yaml").write_text(text)
    *before, line = best_of(folder, "torchrun --nproc_per_node 2 train.py lf.yaml", batch={MICRO_BATCH: 2})
    assert before == [f"cd {folder}"]
    copy = yaml.safe_load(Path(line.split()[-1]).read_text())
    best = str(StudyPaths(folder / "study").best_ds_config)
    assert copy == {"deepspeed": best, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    assert (folder / "lf.yaml").read_text() == text


def test_a_program_that_calls_accelerates_launcher_gets_the_configuration_by_its_variables(folder: Path) -> None:
    """As for `trl sft --config sft.yaml --accelerate_config acc.yaml`."""
    (folder / "sft.yaml").write_text("per_device_train_batch_size: 2\ngradient_accumulation_steps: 4\n")
    variables = (
        "ACCELERATE_USE_DEEPSPEED=true ACCELERATE_CONFIG_DS_FIELDS=zero_stage,zero3_init_flag "
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4"
    )
    command = f"{variables} torchrun --nproc_per_node 2 train.py --config sft.yaml"
    *before, line = best_of(folder, command, batch={MICRO_BATCH: 2})
    assert before == [f"cd {folder}"]
    # accelerate refuses fields of its own beside a file.
    assert {
        f"ACCELERATE_DEEPSPEED_CONFIG_FILE={StudyPaths(folder / 'study').best_ds_config}",
        "ACCELERATE_CONFIG_DS_FIELDS=zero3_init_flag",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=1",
    } <= set(line.split())


def test_lightning_is_told_the_accumulation_where_it_takes_it(folder: Path) -> None:
    lines = best_of(folder, "torchrun --nproc_per_node 2 train.py", by_lightning=True)
    told = "\n".join(line for line in lines if line.startswith("#"))
    assert "gradient_accumulation_steps" not in told
    assert "#   stage=1\n#   batch_size=8\n#   accumulate_grad_batches=1\n" in told


BY_VARIABLES = "BATCH=8 ACC=2 deepspeed --no_local_rank --num_gpus 2 train.py -v train --zero 1"


@pytest.mark.parametrize(
    ("command", "targets", "line"),
    [
        (BY_VARIABLES, ("BATCH", "ACC"), BY_VARIABLES.replace("BATCH=8 ACC=2", "ACC=4 BATCH=16")),
        (
            "torchrun --nproc_per_node 2 train.py run --batch=8 --acc=2",
            ("--batch", "--acc"),
            "torchrun --nproc_per_node 2 train.py run --batch=16 --acc=4",
        ),
        (
            "deepspeed --num_gpus 2 train.py trainer.batch=8 ds=zero1 --config-name x",
            ("trainer.batch", "+trainer.acc"),
            "deepspeed --num_gpus 2 train.py trainer.batch=16 ds=zero1 +trainer.acc=4 --config-name x",
        ),
    ],
)
def test_where_the_command_sets_all_that_was_won_the_best_command_is_the_users_own(
    folder: Path, command: str, targets: tuple[str, str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    paths = StudyPaths(folder / "study")
    batch, accumulation = targets
    experiment = read(folder, command, **{MICRO_BATCH: batch, ACCUMULATION: accumulation})
    base = {MICRO_BATCH: 8, ACCUMULATION: 2, TRAIN_BATCH: 32, "zero_optimization": {"stage": 1}}
    config = {**base, MICRO_BATCH: 16, ACCUMULATION: 4, TRAIN_BATCH: 128}
    setup, known = setup_of(experiment, paths.root), replace(KnownProgram.of(experiment), base_config=base)
    written = training_command(setup, known, config)
    assert written.splitlines() == [f"cd {folder}", line]
    faster = {**config, "zero_optimization": {"stage": 2, "overlap_comm": False}}
    told = training_command(setup, known, faster).splitlines()
    assert told[1:3] == ["#   zero_optimization.stage: 2", "#   zero_optimization.overlap_comm: false"]
    assert f"# {line}" in told
    assert all(text.startswith("#") for text in told[:-1])


def test_a_value_in_a_file_of_the_command_is_won_in_a_copy_of_that_file(folder: Path) -> None:
    (folder / "conf.yaml").write_text("trainer: {batch: 8}  # small\n")
    paths = StudyPaths(folder / "study")
    experiment = read(folder, "python train.py --config conf.yaml", **{MICRO_BATCH: "conf.yaml:trainer.batch"})
    known = replace(KnownProgram.of(experiment), base_config={MICRO_BATCH: 8})
    *_, line = training_command(setup_of(experiment, paths.root), known, {MICRO_BATCH: 16}).splitlines()
    copy = Path(line.split()[-1])
    assert line.endswith(f"python train.py --config {copy}")
    assert copy.is_relative_to(paths.root)
    assert copy.read_text() == "trainer: {batch: 16}  # small\n"


def test_where_the_training_arguments_are_in_the_code_the_best_command_says_what_to_set(folder: Path) -> None:
    paths = StudyPaths(folder / "study")
    config = {MICRO_BATCH: 8, "gradient_accumulation_steps": 2}
    experiment = read(folder, "python train.py --deepspeed ds.json")
    known = KnownProgram.of(experiment).learned(ProgramProfile(batch={MICRO_BATCH: 8}))
    assert known.is_batch_in_code
    written = training_command(setup_of(experiment, paths.root), known, config)
    assert "#   per_device_train_batch_size=8\n#   gradient_accumulation_steps=2\n" in written
    assert written.splitlines()[-1].endswith(f"--ds-config {paths.best_ds_config}")


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_code_that_partitions_its_model_is_trained_plainly_at_stage_3_alone(folder: Path, stage: int) -> None:
    paths = StudyPaths(folder / "study")
    experiment = read(folder, "python train.py --deepspeed ds.json")
    known = KnownProgram.of(experiment).learned(ProgramProfile(partitions_its_model=True))
    config = {MICRO_BATCH: 8, "zero_optimization": {"stage": stage}}
    written = training_command(setup_of(experiment, paths.root), known, config)
    assert (f"deepspeed.zero.Init: give it enabled=False at stage {stage}." in written) is (stage != 3)
    last = written.splitlines()[-1]
    assert last.endswith(f"--ds-config {paths.best_ds_config}" if stage != 3 else f"--deepspeed {paths.best_ds_config}")
