"""What the user's environment is asked: does DeepSpeed refuse a configuration, what is there, do the devices work.

A process of its own answers, or a fork of the fork server, because an import or a broken driver may block or end it,
and because a process that has initialised a driver must not fork.
"""

import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from zerotune.trial_lib.launch.processes import bootstrap, jit_builds
from zerotune.trial_lib.launch.processes.channel import NoAnswerError, ask_fork
from zerotune.trial_lib.launch.processes.watchdog import die_with_parent

CONFIGURATION, ENVIRONMENT, DEVICES = "configuration", "environment", "devices"
"""The questions. The first argument of the process is one of them."""

# Whether DeepSpeed refuses a configuration.

JUDGED_S = 120.0  # A judgement takes milliseconds. The import of DeepSpeed, if it comes first, takes seconds.

Judgement = dict[str, Any]
"""The version as `deepspeed`, and `refusals` with the fields of `deepspeed_refusals.Refusal`."""


def judge(request: dict[str, Any]) -> Judgement:
    import deepspeed

    from zerotune.trial_lib.deepspeed_config.refusals import refusals_of

    refusals = refusals_of(request["ds_config"], request["slots"])
    return {"deepspeed": deepspeed.__version__, "refusals": [asdict(refusal) for refusal in refusals]}


# What torch and DeepSpeed find.

_NO_TOOLKIT = "there is no nvcc, the compiler of the CUDA toolkit, where CUDA_HOME is"


def environment_report() -> dict[str, Any]:
    """Returns the versions, the devices that torch sees, and the state of each of DeepSpeed's ops.

    `torch_cuda` is the CUDA that torch was built for, or None, `torch_libraries` what a linker is told without quotes,
    and `accelerator` DeepSpeed's name of the device.
    """
    # DeepSpeed imports mlflow if it is installed, which takes seconds.
    sys.modules["mlflow"] = None  # type: ignore[assignment]
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder.all_ops import ALL_OPS
    from deepspeed.ops.op_builder.builder import CUDAOpBuilder
    from torch.utils.cpp_extension import CUDA_HOME, TORCH_LIB_PATH

    # If torch has CUDA, DeepSpeed builds these with the toolkit (op_builder/builder.py, jit_load), and does not look
    # for its compiler before.
    needs_toolkit = CUDAOpBuilder if torch.version.cuda and get_accelerator()._name == "cuda" else ()
    has_toolkit = CUDA_HOME is not None and shutil.which("nvcc", path=str(Path(CUDA_HOME) / "bin")) is not None
    folders = jit_builds.build_folders(os.environ)
    ops = {}
    for name, builder in ALL_OPS.items():
        if name == "deepspeed_not_implemented":
            continue
        can_build, why = False, ""
        with contextlib.suppress(Exception):
            can_build, why = jit_builds.compatibility(builder)
        with_cuda = isinstance(builder, needs_toolkit)
        if can_build and with_cuda and not has_toolkit:
            can_build, why = False, _NO_TOOLKIT
        ops[name] = {
            "built": bool(installed_ops.get(name)) or is_built(name, folders, with_cuda),
            "can_build": can_build,
            "why": why,
        }
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "torch_libraries": TORCH_LIB_PATH,
        "deepspeed": deepspeed.__version__,
        "accelerator": get_accelerator()._name,
        "ops": ops,
    }


def is_built(name: str, folders: Iterable[Path], with_cuda: bool) -> bool:
    """Whether an extension is built for this Python, and with CUDA or without. Builds of both kinds share a folder."""
    other = re.compile(rf"py(?!{sys.version_info[0]}{sys.version_info[1]}_)\d+_")
    return any(
        folder.name == name
        and (folder / f"{name}.so").exists()
        and not other.match(folder.parent.name)
        and _links_cuda(folder, with_cuda) is with_cuda
        for folder in folders
    )


def _links_cuda(folder: Path, unknown: bool) -> bool:
    # Whether a build is linked with CUDA, by ninja's file. Without that file, the value that is passed.
    try:
        return "-lcudart" in (folder / "build.ninja").read_text()
    except OSError:
        return unknown


# Whether torch can compute on each GPU, and on two together. torch's own answer does not suffice. It may come from
# NVML, which lists GPUs that the driver is too old for.

_SIDE = 64
_TOGETHER = 2
_TOGETHER_S = 30.0
_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"


def tried_devices() -> dict[str, Any]:
    """Tries all devices. Of the result, `sees` is the number of GPUs that torch sees, and `why_none` CUDA's reason if
    there is none. `devices` has the error of each device, empty if it computed. `together` is the error of a sum over
    the first two devices, None without two working devices.
    """
    # torch reads this variable at each call. With it torch would ask NVML instead of CUDA.
    os.environ.pop(_BY_NVML, None)
    import torch

    sees = torch.cuda.device_count()
    devices = [_words(functools.partial(compute, f"cuda:{number}")) for number in range(sees)]
    both_work = sees >= _TOGETHER and not any(devices[:_TOGETHER])
    return {
        "sees": sees,
        "why_none": "" if sees else _words(torch.cuda.init),
        "devices": devices,
        "together": reduced_together("cuda") if both_work else None,
    }


def compute(device: str) -> None:
    """Allocates memory on a device, and multiplies two matrices there.
    Raises RuntimeError: that fails, or the product is wrong.
    """
    import torch

    ones = torch.ones(_SIDE, _SIDE, device=device)
    total = float((ones @ ones).sum())
    if total != _SIDE**3:
        raise RuntimeError(f"the elements of a product of matrices have the sum {total}, and it is {_SIDE**3}")


def reduced_together(kind: str) -> str:
    """The error of two processes that sum over two devices, by NCCL (`cuda`) or gloo (`cpu`); empty for none."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ended:
        processes = []
        for rank in range(_TOGETHER):
            command = bootstrap.command(sys.executable, __name__, kind, folder, str(rank))
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            processes.append(ended.enter_context(process))
            ended.callback(process.kill)
        said, deadline = [], time.monotonic() + _TOGETHER_S
        for process in processes:
            try:
                _, words = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                said.append(f"it has not ended within {_TOGETHER_S:.0f} s")
                continue
            if process.returncode:
                # The first error comes first. The other process may only report that its peer is gone.
                said.insert(0, (words.strip().splitlines() or [f"a process ended with {process.returncode}"])[-1])
    return next(iter(said), "")


def _reduce(kind: str, folder: str, rank: int) -> None:
    import torch
    from torch import distributed

    is_cuda = kind == "cuda"
    device = torch.device(kind, rank) if is_cuda else torch.device(kind)
    if is_cuda:
        torch.cuda.set_device(device)
    store = f"file://{Path(folder) / 'store'}"
    distributed.init_process_group("nccl" if is_cuda else "gloo", init_method=store, rank=rank, world_size=_TOGETHER)
    share = torch.full((1,), rank + 1.0, device=device)
    distributed.all_reduce(share)
    if float(share) != sum(range(1, _TOGETHER + 1)):
        raise RuntimeError(f"the sum over two devices is {float(share)}")
    distributed.destroy_process_group()


def _words(attempt: Callable[[], None]) -> str:
    try:
        attempt()
    except Exception as error:  # noqa: BLE001 - told
        return " ".join(str(error).split("\n")[0].split()) or type(error).__name__
    return ""


# What an import asks a GPU. A child answers, so that this process initialises no driver.
#
# Before 0.19.3, `import deepspeed` asks the first GPU for its architecture, in eight op builders and if triton is
# installed. After that no fork of the process could use CUDA.
#
# With NVIDIA's driver 580, NVML is no better: `nvmlInit` starts a thread and opens CUDA's file (seen on an H200, see
# `benchmarks/results/gpu_h200_endings.json`). DeepSpeed calls it for its accelerator. torch calls it to count GPUs.

# A driver that hangs must not keep a study from its beginning. Usually it answers within seconds.
_ANSWER_S = 120.0


@contextlib.contextmanager
def asked_by_a_child(is_fit_to_fork: Callable[[], bool]) -> Iterator[None]:
    """Has a child process ask a GPU for its properties, whenever code in this block asks torch for them."""
    import torch

    ask = torch.cuda.get_device_properties
    answers: dict[str, dict[str, Any]] = {}
    is_over = False

    def get_device_properties(*arguments: Any, **options: Any) -> Any:
        """Stands in for `torch.cuda.get_device_properties`, also if a module has imported the function."""
        if is_over or not is_fit_to_fork():
            return ask(*arguments, **options)
        asked = repr((arguments, options))
        if asked not in answers:
            answers[asked] = _asked(lambda: _plain_attributes(ask(*arguments, **options)))
        return SimpleNamespace(**answers[asked])

    torch.cuda.get_device_properties = get_device_properties
    try:
        with _nvml_put_off(is_fit_to_fork):
            yield
    finally:
        is_over = True
        torch.cuda.get_device_properties = ask


def count_by_a_child(is_fit_to_fork: Callable[[], bool]) -> None:
    """Has a child process count the GPUs whenever torch is asked, until this process becomes a rank."""
    import torch

    count = torch.cuda.device_count
    counted: dict[str | None, int] = {}
    is_rank = False

    def device_count() -> int:
        """Stands in for `torch.cuda.device_count`, also if a module has imported the function."""
        if is_rank or not is_fit_to_fork():
            return count()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible not in counted:
            counted[visible] = _asked(count)
        return counted[visible]

    def count_here() -> None:
        nonlocal is_rank
        is_rank = True
        torch.cuda.device_count = count

    torch.cuda.device_count = device_count
    _put_off.append(count_here)


_put_off: list[Callable[[], object]] = []


def make_up() -> None:
    """Does in a rank what its parent has put off. If NVML fails now, the rank's program finds out when it asks."""
    while _put_off:
        with contextlib.suppress(Exception):
            _put_off.pop()()


@contextlib.contextmanager
def _nvml_put_off(is_fit_to_fork: Callable[[], bool]) -> Iterator[None]:
    # Puts off `pynvml.nvmlInit` in this block, if a child process shows that NVML works.
    try:
        import pynvml
    except ImportError:
        yield
        return
    begin = pynvml.nvmlInit

    def begin_later() -> None:
        if is_fit_to_fork():
            with contextlib.suppress(RuntimeError):
                _asked(begin)
                _put_off.append(begin)
                return
        # If NVML fails, it fails here as well, and its caller has to know.
        begin()

    pynvml.nvmlInit = begin_later
    try:
        yield
    finally:
        pynvml.nvmlInit = begin


def _plain_attributes(found: Any) -> dict[str, Any]:
    named = {name: getattr(found, name) for name in dir(found) if not name.startswith("_")}
    return {name: value for name, value in named.items() if isinstance(value, bool | int | float | str)}


def _asked(question: Callable[[], Any]) -> Any:
    # A question that raises, or ends the child, is a `RuntimeError`, as torch's own are.
    try:
        return ask_fork(question, _ANSWER_S)
    except NoAnswerError as error:
        raise RuntimeError(*error.args) from None


def main(arguments: list[str]) -> None:
    """Entry: writes the answer to a question to a descriptor, or is one of the two processes of a sum."""
    match arguments:
        case [kind, folder, rank]:
            _reduce(kind, folder, int(rank))
        case [question, descriptor]:
            die_with_parent(os.getppid())
            ask = {ENVIRONMENT: environment_report, DEVICES: tried_devices}
            answer = judge(json.load(sys.stdin)) if question == CONFIGURATION else ask[question]()
            with os.fdopen(int(descriptor), "w") as file:
                json.dump(answer, file, default=str)
