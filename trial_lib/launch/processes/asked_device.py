"""Answers what an import asks a GPU, without initialising a driver in this process. Runs in the user's environment.

Before 0.19.3, `import deepspeed` asks the first GPU for its architecture, in eight op builders and if triton is
installed. After that no fork of the process could use CUDA.

With NVIDIA's driver 580, NVML is no better: `nvmlInit` starts a thread and opens CUDA's file (seen on an H200, see
`benchmarks/results/gpu_h200_endings.json`). DeepSpeed calls it for its accelerator. torch calls it to count GPUs.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from trial_lib.launch.processes import rank_process


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
            answers[asked] = _answer_of_a_child(lambda: _plain_attributes(ask(*arguments, **options)))
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
            counted[visible] = _answer_of_a_child(count)
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
                _answer_of_a_child(begin)
                _put_off.append(begin)
                return
        # If NVML fails, it fails here as well, and its caller has to know.
        begin()

    pynvml.nvmlInit = begin_later
    try:
        yield
    finally:
        pynvml.nvmlInit = begin


def _answer_of_a_child(ask: Callable[[], Any]) -> Any:
    # The answer, which JSON can hold. A question that raises, or ends the child, is a `RuntimeError`.
    read, write = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            rank_process.die_with_parent(parent)
            os.close(read)
            with open(write, "w", encoding="utf-8") as pipe:  # noqa: PTH123 - a pipe
                json.dump(_asked(ask), pipe)
        finally:
            os._exit(0)
    os.close(write)
    with open(read, encoding="utf-8") as pipe:  # noqa: PTH123 - a pipe
        told = json.loads(pipe.read() or "{}")
    os.waitpid(child, 0)
    if "answer" not in told:
        raise RuntimeError(told.get("error", "the process that asked the GPU has died"))
    return told["answer"]


def _asked(ask: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"answer": ask()}
    except Exception as error:  # noqa: BLE001 - raised again in the process that wanted to know
        return {"error": f"{type(error).__name__}: {error}"}


def _plain_attributes(found: Any) -> dict[str, Any]:
    named = {name: getattr(found, name) for name in dir(found) if not name.startswith("_")}
    return {name: value for name, value in named.items() if isinstance(value, bool | int | float | str)}
