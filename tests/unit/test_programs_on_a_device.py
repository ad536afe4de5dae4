"""The programs of the tests put their batches where their engine is, wherever that is.

Each runs with an engine on a device that any host has and that is not its processor, torch's "meta": an operation on
tensors of both fails there, as it does on a GPU.
"""

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

TESTS = Path(__file__).parents[1]
PROGRAMS = TESTS / "programs"
DEVICE = torch.device("meta")
STEPS = 3
# The Trainer, Accelerate and Lightning, and pipelines, move batches themselves.
MOVED_BY_OTHERS = {"varied_trainer.py", "pipeline.py"}
# What they do needs ranks, values of tensors, or an experiment.
WITH_MORE_THAN_AN_ENGINE = {
    "ends.py", "experts.py", "fp16.py", "partitioned_init.py", "prepares.py", "raises_on_rank_1.py", "runs_once.py",
    "stands_still.py", "uneven.py", "loads_outside_the_context.py", "leaves_shared_memory.py", "children.py",
}  # fmt: skip
NO_TRAININGS_BY_DEEPSPEED = {"toy.py", "without_deepspeed.py"}
NOT_RUN = MOVED_BY_OTHERS | WITH_MORE_THAN_AN_ENGINE | NO_TRAININGS_BY_DEEPSPEED
SCRIPTS = [
    *sorted(path.name for path in PROGRAMS.glob("*.py") if path.name not in NOT_RUN),
    *(f"any/raw_{name}.py" for name in ("dict", "engine", "environment", "flag")),
    "tiny_study/train.py",
    *(f"others/{name}" for name in ("fire_function/job.py", "subcommands/tool.py", "teacher_and_student/distil.py")),
    "others/token_budget/translate.py",
    "../../examples/hello_deepspeed/train.py",
]
WORDS: dict[str, list[str]] = {
    "any/raw_flag.py": ["--workers", "0"],
    "batch_shapes.py": ["--kind", "sequence_first"],
    "from_import.py": ["--config", "any/ds_config.json"],
    "others/fire_function/job.py": ["train"],
    "others/subcommands/tool.py": ["fit"],
    "own_reduction.py": ["--reduction", "divided"],
    "tiny_study/train.py": ["--layers", "2"],
    "torch_style.py": ["--through", "outputs"],
    "transformer.py": ["--attention", "own"],
    "varied_lengths.py": ["--kib_per_token", "1"],
}
"""What is typed behind each."""


def expect_on_the_device(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Tables of embeddings are the ones that take indices from anywhere here, and not on a GPU."""
    assert all(tensor.device == DEVICE for tensor in inputs if isinstance(tensor, torch.Tensor)), module


class TrainedError(Exception):
    """An engine has made the steps that it was to make."""


class Engine:
    """An engine on a device that every host has, and that is not the processor: its tensors have no values."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.device = module.to(DEVICE), DEVICE
        self.global_steps = 0
        for each in module.modules():
            each.register_forward_pre_hook(expect_on_the_device)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.module(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "train_batch_size": 2}
        return lambda *_, **__: sizes.get(name, 0)

    def backward(self, loss: torch.Tensor, **_: Any) -> None:
        assert loss.device == DEVICE

    def step(self) -> None:
        self.global_steps += 1
        if self.global_steps == STEPS:
            raise TrainedError


def initialize(
    args: Any = None, model: Any = None, optimizer: Any = None, model_parameters: Any = None, training_data: Any = None,
    **_: Any,
) -> tuple[Any, ...]:  # fmt: skip
    loader = None if training_data is None else torch.utils.data.DataLoader(training_data, batch_size=2)
    return Engine(model), None, loader, None


@pytest.fixture
def made_up_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(deepspeed, "initialize", initialize)
    monkeypatch.setattr(deepspeed, "init_distributed", lambda *_, **__: None)
    for module in (torch.distributed, deepspeed.comm):
        monkeypatch.setattr(module, "get_rank", lambda *_: 0)
        monkeypatch.setattr(module, "get_world_size", lambda *_: 1)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda *_: None)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "BATCH": "2"}.items():
        monkeypatch.setenv(name, value)
    before = set(sys.modules)
    yield
    # `model`, `data`, `toy`: other programs have modules of these names.
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith((str(PROGRAMS), str(TESTS.parent / "examples"))):
            del sys.modules[name]


@pytest.mark.usefixtures("made_up_device")
@pytest.mark.parametrize("script", SCRIPTS)
def test_batches_are_on_the_engine_s_device(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = PROGRAMS / script
    monkeypatch.syspath_prepend(str(PROGRAMS / "library"))
    monkeypatch.syspath_prepend(str(path.parent))
    monkeypatch.chdir(PROGRAMS)
    monkeypatch.setattr(sys, "argv", [str(path), *WORDS.get(script, [])])
    with pytest.raises(TrainedError):
        runpy.run_path(str(path), run_name="__main__")


@pytest.mark.usefixtures("made_up_device")
def test_a_batch_that_was_left_on_the_processor_is_found() -> None:
    engine, *_ = initialize(model=nn.Linear(3, 2))
    with pytest.raises(AssertionError, match="Linear"):
        engine(torch.randn(4, 3))
    with pytest.raises(RuntimeError, match="is not on the expected device"):
        nn.functional.cross_entropy(engine(torch.randn(4, 3, device=DEVICE)), torch.ones(4, dtype=torch.long))
