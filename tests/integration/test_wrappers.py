"""Commands that start their training by way of others: real shells, make and Python, followed to the launch."""

import os
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest
from case_fixtures import quick_first
from study_fixtures import Zerotune, left_in

from zerotune.trial_lib.deepspeed_config.overrides import MICRO_BATCH
from zerotune.trial_lib.inputs.entrypoint import parse_entrypoint
from zerotune.trial_lib.inputs.places import batch_places
from zerotune.trial_lib.launch.wrapper import NoLaunch, follow_wrapper
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.study.followed import Followed, followed, rewrapped
from zerotune.trial_lib.study.typed_command import read_command

BIN = str(Path(sys.executable).parent)
LAUNCHER = """
import os, subprocess, sys
n = os.environ.get("NPROC", "2")
open("prepared", "w").close()
subprocess.run(["torchrun", "--nproc_per_node", n, "train.py", *sys.argv[1:]], env={**os.environ, "LAUNCHED": "1"})
open("after", "w").close()
"""
JOINS = """
import os
from datetime import timedelta
import torch.distributed as dist
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
open("after", "w").close()
"""
CALLS_THE_RUNNER = """
import sys
from deepspeed.launcher import runner
runner.main(["--num_gpus", "2", "--master_port", "29519", "train.py", *sys.argv[1:]])
open("after", "w").close()
"""
READS = """
import os, subprocess, sys, yaml
settings = yaml.safe_load(open(os.path.join(*sys.argv[2:4])))
size, ranks = settings["micro"], settings["ranks"] if settings["micro"] < 64 else 1
words = ["--size", str(size), "--all", str(size * ranks)]
subprocess.run(["torchrun", "--nproc_per_node", str(ranks), "train.py", *words])
"""
MODULES = {
    "torch.distributed.launch --nproc_per_node 2 train.py --x": "",
    "torch.distributed.run --nproc_per_node 2 train.py": "",
    "deepspeed.launcher.runner --num_gpus 2 train.py": "",
    "deepspeed.launcher.launch --world_info=eyJsb2NhbGhvc3QiOiBbMSwgM119 --master_port=4 train.py": (
        "deepspeed.launcher.runner --include localhost:1,3 --master_port 4 train.py"
    ),
    "accelerate.commands.launch --use_deepspeed --num_processes 2 train.py": "",
}
IN_WORKERS = """
import torch.distributed as dist, torch.multiprocessing as mp
def work(rank):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29517", rank=rank, world_size=2)
if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    (tmp_path / "train.py").write_text(JOINS)
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    (tmp_path / "workers.py").write_text(IN_WORKERS)
    (tmp_path / "run.sh").write_text("export LAUNCHED=1\nPYTHONPATH=. torchrun train.py $1\ntouch after\n")
    (tmp_path / "Makefile").write_text("train:\n\tcd code && torchrun train.py && touch after\n")
    (tmp_path / "code").mkdir()
    return tmp_path


def follow(folder: Path, command: str) -> Followed:
    """Follows a command; nothing of what it does after the launch is done, and no process of it is left."""
    found = followed(command.split(), folder, lambda sentence: None)
    assert not list(folder.rglob("after"))
    assert not left_in(folder)
    return found


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("bash run.sh --x", "PYTHONPATH=. LAUNCHED=1 torchrun train.py --x"),
        pytest.param(
            "python launcher.py --x", "LAUNCHED=1 torchrun --nproc_per_node 2 train.py --x", marks=pytest.mark.long
        ),
        ("NPROC=3 python launcher.py", "LAUNCHED=1 NPROC=3 torchrun --nproc_per_node 3 train.py"),
        ("make train", "torchrun train.py"),
        pytest.param("env -u ABSENT torchrun train.py", "torchrun train.py", marks=pytest.mark.long),
    ],
)
def test_the_launcher_that_a_wrapper_starts_is_what_is_tuned(folder: Path, command: str, words: str) -> None:
    found = follow(folder, command)
    assert sorted(found.words[:2]) == sorted(words.split()[:2])
    assert list(found.words)[2:] == words.split()[2:]
    assert found.folder == (folder / "code" if command == "make train" else folder)
    assert f"`{' '.join(found.words)}`. ZeroTune tunes that command." in found.notes[0]
    assert (folder / "prepared").exists() == ("launcher.py" in command)


QUICK = ("torch.distributed.run", "deepspeed.launcher.launch")


@pytest.mark.parametrize(
    "module",
    [each if each.startswith(QUICK) else pytest.param(each, marks=pytest.mark.long) for each in MODULES],
)
def test_a_launcher_that_is_a_module_is_followed_wherever_it_stands(folder: Path, module: str) -> None:
    (folder / "run.sh").write_text(f"python -u -m {module}\ntouch after\n")
    words = ["python", "-m", *(MODULES[module] or module).split()]
    assert list(follow(folder, "bash run.sh").words) == words
    # As it is typed without a shell.
    assert parse_entrypoint(["python", "-m", *module.split()], folder=folder, shell=dict(os.environ)).slots == 2


@pytest.mark.long
def test_a_program_that_calls_deepspeeds_launcher_as_a_function_is_followed(folder: Path) -> None:
    """As GPT-NeoX's `deepy.py` does."""
    (folder / "deepy.py").write_text(CALLS_THE_RUNNER)
    words = "python -m deepspeed.launcher.runner --num_gpus 2 --master_port 29519 --log_level info train.py --x"
    assert list(follow(folder, "python deepy.py --x").words) == words.split()


def test_ranks_of_torchs_launcher_are_known_before_they_run(folder: Path) -> None:
    """As Accelerate calls it. What a rank imports takes long, and its command is known without."""
    calls = (
        "import sys\nfrom torch.distributed.run import main\nmain(['--nproc_per_node=2', 'train.py', *sys.argv[1:]])"
    )
    (folder / "calls.py").write_text(calls)
    (folder / "train.py").write_text("open('after', 'w')\n")
    words = "OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 train.py --x"
    assert list(follow(folder, "python calls.py --x").words) == words.split()


def test_a_mapped_file_that_the_command_does_not_name_is_refused_with_what_to_do_instead(folder: Path) -> None:
    (folder / "small.yml").write_text("micro: 4\n")
    told = followed(["python", "launcher.py", "small.yml"], folder, lambda sentence: None, mapped=["small.yml:micro"])
    assert told.words[-1] == "small.yml"
    (folder / "reads.py").write_text(LAUNCHER.replace(", *sys.argv[1:]", ""))
    with pytest.raises(InputError, match=r"small\.yml is no argument of python reads\.py or of the command") as refused:
        followed(["python", "reads.py"], folder, lambda sentence: None, mapped=["small.yml:micro"])
    assert "Leave this mapping out" in str(refused.value)


def test_a_wrapper_whose_file_is_mapped_starts_each_trial_from_a_copy_of_it(folder: Path) -> None:
    (folder / "conf").mkdir()
    (folder / "conf" / "small.yml").write_text("micro: 4 # rows\nranks: 2\n")
    (folder / "reads.py").write_text(READS)
    words, mappings = ["python", "reads.py", "-d", "conf", "small.yml"], {MICRO_BATCH: "conf/small.yml:micro"}
    found = followed(words, folder, lambda sentence: None, mapped=mappings.values())
    experiment = read_command(found.words, mappings, folder, None, wrapper=words)
    assert experiment.entrypoint.arguments == ("--size", "4", "--all", "8")
    (place,) = batch_places(experiment.entrypoint.arguments, {}, mappings, folder, words)
    assert (place.key, place.value) == (MICRO_BATCH, 4)
    config = folder / "trial" / "ds_config.json"
    entrypoint, others = rewrapped(experiment.entrypoint, config, mappings, {MICRO_BATCH: 16}, folder)
    # What follows from the value follows.
    assert (entrypoint.arguments, others) == (("--size", "16", "--all", "32"), {})
    assert (folder / "conf" / "small.yml").read_text() == "micro: 4 # rows\nranks: 2\n"
    with pytest.raises(InputError, match="starts another command with train_micro_batch_size_per_gpu=64"):
        rewrapped(experiment.entrypoint, config, mappings, {MICRO_BATCH: 64}, folder)


def test_a_training_without_a_launcher_is_followed_to_where_it_joins_a_process_group(folder: Path) -> None:
    (folder / "run.sh").write_text('python -c \'open("prepared", "w")\'\nSIZE=3 python -u train.py --x\ntouch after\n')
    found = follow(folder, "bash run.sh")
    assert found.words == ("SIZE=3", "python", "-u", "train.py", "--x")
    assert (folder / "prepared").exists()


@pytest.mark.long
def test_ranks_that_a_wrapper_starts_itself_are_torchruns(folder: Path) -> None:
    lines = ["export MASTER_ADDR=127.0.0.1 MASTER_PORT=29518 WORLD_SIZE=2"]
    lines += [f"RANK={rank} LOCAL_RANK={rank} python train.py --x &" for rank in range(2)]
    (folder / "run.sh").write_text("\n".join([*lines, "wait", ""]))
    assert follow(folder, "bash run.sh").words == ("torchrun", "--nproc_per_node", "2", "train.py", "--x")


def test_a_training_that_does_not_tell_of_itself_is_known_by_its_code(folder: Path) -> None:
    (folder / "train.py").write_text("import time\ntime.sleep(60)\nimport deepspeed")
    (folder / "prepare.py").write_text("open('prepared', 'w')")
    (folder / "run.sh").write_text("PYTHONPATH=. python prepare.py\npython -E train.py\n")
    assert follow(folder, "bash run.sh").words == ("python", "-E", "train.py")
    assert (folder / "prepared").exists()


@pytest.mark.long
def test_ranks_that_only_python_can_start_are_named(folder: Path) -> None:
    with pytest.raises(InputError, match=r"python workers.py starts its 2 ranks within Python") as refused:
        follow(folder, "python workers.py")
    assert "torchrun --nproc_per_node 2 SCRIPT" in refused.value.remedy
    assert not left_in(folder)


def test_a_program_that_trains_by_itself_is_not_run(folder: Path) -> None:
    assert follow(folder, "python train.py") == Followed(("python", "train.py"), folder)
    assert follow(folder, "torchrun launcher.py") == Followed(("torchrun", "launcher.py"), folder)


def test_a_wrapper_that_comes_to_nothing_is_told_with_its_last_words(folder: Path) -> None:
    with pytest.raises(InputError) as refused:
        follow(folder, "bash none.sh")
    assert "bash none.sh ended (exit code 127) before it started a launcher or a training." in refused.value.what
    assert "none.sh: No such file or directory" in refused.value.what
    assert "Put `zerotune tune --` before the command that starts your ranks" in refused.value.remedy


SUBMITS = {
    "bash job.sh": "sbatch job.slurm",
    "bash -c 'X=1 sbatch job.slurm'": "",
    "nohup sbatch job.slurm": "",
    "bash deep.sh": "bash inner.sh; touch after",
    "make job": "",
    "python submit.py": "",
    "bash sudo.sh": "sudo docker run --gpus all image",
}


@pytest.mark.parametrize("command", quick_first(3, SUBMITS))
def test_a_training_elsewhere_is_not_started_even_within_a_wrapper(
    folder: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs_that_leave_a_trace(folder, monkeypatch)
    (folder / command.split()[-1]).write_text(SUBMITS[command])
    (folder / "inner.sh").write_text("docker ps; command -v oarsub && exit; docker run -d redis; sbatch job.slurm")
    (folder / "Makefile").write_text("job: FORCE\n\tsbatch job.slurm\nFORCE:\n")
    (folder / "submit.py").write_text("import subprocess\nsubprocess.run(['sbatch', 'job.slurm'])")
    shown = "docker run starts its command in a container" if "sudo" in command else "sbatch submits a job"
    with pytest.raises(InputError, match=shown) as refused:
        followed(shlex.split(command), folder, lambda sentence: None)
    assert "ZeroTune" in refused.value.remedy or "zerotune tune --" in refused.value.remedy
    ran = (folder / "ran").read_text().splitlines() if (folder / "ran").exists() else []
    assert ran == (["docker ps", "docker run -d redis"] if "deep" in command else [])
    assert not left_in(folder)


def test_a_wrapper_that_asks_a_container_for_help_is_followed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs_that_leave_a_trace(folder, monkeypatch)
    (folder / "run.sh").write_text("docker run -d redis\nPATH=/added:$PATH torchrun train.py\n")
    assert follow(folder, "bash run.sh").words == ("torchrun", "train.py")
    assert (folder / "ran").read_text() == "docker run -d redis\n"


def programs_that_leave_a_trace(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts `sbatch`, `docker` and `sudo` on PATH, which write what they are asked."""
    programs = folder / "programs"
    programs.mkdir()
    for name in ("sbatch", "docker", "sudo"):
        (programs / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {folder}/ran\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize(("does", "code"), [("exit 255", 255), ("kill -TERM $$", 143)])
def test_the_exit_code_of_a_wrapper_is_the_one_that_a_shell_would_tell(folder: Path, does: str, code: int) -> None:
    (folder / "run.sh").write_text(does)
    with pytest.raises(InputError, match=rf"ended \(exit code {code}\) before"):
        follow(folder, "bash run.sh")


@pytest.mark.long
def test_a_wrapper_that_takes_its_time_is_told_of_and_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerotune.trial_lib.launch.wrapper._FIRST_WORD_S", 0.2)
    told: list[float] = []
    (folder / "run.sh").write_text("echo downloading\nsleep 60 & sleep 60\n")
    end = follow_wrapper(["bash", "run.sh"], folder, os.environ, told.append, given_up_s=5)
    assert end == NoLaunch(None, "downloading")
    assert len(told) == 1
    assert not left_in(folder)


def test_an_interrupt_ends_a_wrapper_and_all_that_it_has_started(tmp_path: Path) -> None:
    zerotune = Zerotune(tmp_path, tmp_path / "unused-home")
    (tmp_path / "run.sh").write_text("setsid sleep 61 & sleep 61\n")
    running = zerotune.start("tune", "--", "bash", "run.sh")
    running.wait_until(lambda: sum("sleep" in process.name() for process in running.look()) == 2, "its processes")
    running.process.send_signal(signal.SIGINT)
    began = time.monotonic()
    ended = running.end()
    assert (ended.returncode, ended.stderr.splitlines()[1:]) == (
        130,
        ["zerotune: interrupted before anything was started."],
    )
    assert time.monotonic() - began < 10
    assert not running.left_over(within_s=2)
    assert not (tmp_path / "zerotune-studies").exists()
