"""Answers what an import asks a GPU, without initialising CUDA in this process. Runs in the user's environment.

Before 0.19.3, `import deepspeed` asks the first GPU for its architecture, in eight op builders and if triton is
installed. After that no fork of the process could use CUDA.
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
    """Has a child process ask a GPU for its properties, whenever code in this block asks torch for them.

    Args:
        is_fit_to_fork: returns whether this process may still fork. If not, it asks the GPU itself.
    """
    import torch

    ask = torch.cuda.get_device_properties
    answers: dict[str, SimpleNamespace] = {}
    is_over = False

    def get_device_properties(*arguments: Any, **options: Any) -> Any:
        """Stands in for `torch.cuda.get_device_properties`, also if a module has imported the function."""
        if is_over or not is_fit_to_fork():
            return ask(*arguments, **options)
        asked = repr((arguments, options))
        if asked not in answers:
            answers[asked] = _answer_of_a_child(lambda: ask(*arguments, **options))
        return answers[asked]

    torch.cuda.get_device_properties = get_device_properties
    try:
        yield
    finally:
        is_over = True
        torch.cuda.get_device_properties = ask


def _answer_of_a_child(ask: Callable[[], Any]) -> SimpleNamespace:
    """Returns the plain attributes of a question's answer.

    Raises:
        RuntimeError: the question raises, or ends the child.
    """
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
    return SimpleNamespace(**told["answer"])


def _asked(ask: Callable[[], Any]) -> dict[str, Any]:
    try:
        found = ask()
    except Exception as error:  # noqa: BLE001 - raised again in the process that wanted to know
        return {"error": f"{type(error).__name__}: {error}"}
    named = {name: getattr(found, name) for name in dir(found) if not name.startswith("_")}
    return {"answer": {name: value for name, value in named.items() if isinstance(value, bool | int | float | str)}}
