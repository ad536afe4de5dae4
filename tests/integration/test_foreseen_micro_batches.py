"""The step of a foreseen run that stands for all others has each micro-batch once, however a program accumulates."""

import json
from dataclasses import replace

import pytest
from foreseen_fixtures import PROGRAMS, program_named

from zerotune.trial_lib.messages.foreseen_run import KINDS, OPERATIONS
from zerotune.trial_lib.plan.arm_work import micro_batches_of_a_run
from zerotune.trial_lib.plan.device_memory import live_bytes
from zerotune.trial_lib.plan.simulation import Pretended, simulate
from zerotune.trial_lib.plan.step_time import step_of

ACCUMULATION = 3
BASE = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": ACCUMULATION,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}


@pytest.fixture
def step(foreseen):
    """Foresees a program, and returns the step."""
    return lambda *args, **kwargs: step_of(foreseen(*args, **kwargs))


@pytest.fixture
def foreseen(foreseeing_starter, tmp_path):
    """Foresees a program. Source code is a program that takes a configuration."""

    def run(program, overrides=None, world=2, says=""):
        if isinstance(program, str):
            (tmp_path / "train.py").write_text(program)
            (tmp_path / "toy.py").write_text((PROGRAMS / "toy.py").read_text())
            (tmp_path / "ds_config.json").write_text(json.dumps(BASE))
            program = program_named("train.py", "--deepspeed_config", "ds_config.json", folder=tmp_path)
        pretended = Pretended(world=world, ranks_per_host=world)
        found = simulate(program, overrides or {}, pretended, tmp_path / "run", foreseeing_starter, deadline_s=120.0)
        assert found.stopped == says
        return found

    return run


def passes(step):
    """The forward passes, and the backward passes, of each micro-batch."""
    assert not step.repeated
    return [
        [sum(each.moment == name and each.micro_batch == number for each in step.last) for name in PASSES]
        for number in sorted({each.micro_batch for each in step.last})
    ]


PASSES = ("forward", "backward")
ONCE = [[1, 1]] * ACCUMULATION
DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}
ACCUMULATES = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": str(ACCUMULATION)}


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(
            program_named("trainer.py", "--deepspeed", "ds_auto.json", folder=PROGRAMS / "any"), marks=pytest.mark.long
        ),
        program_named("accelerated.py", folder=PROGRAMS / "any", **DEEPSPEED, **ACCUMULATES),
    ],
    ids=["trainer", "accelerate"],
)
def test_of_accelerate_which_steps_after_the_last_alone(step, program):
    overrides = {"gradient_accumulation_steps": ACCUMULATION, "train_micro_batch_size_per_gpu": 1}
    assert passes(step(program, overrides)) == ONCE


_PIPELINE = """
import deepspeed
import torch.nn.functional as F
from deepspeed.pipe import PipelineModule
from torch import nn
from toy import CLASSES, FEATURES, batches, parse_arguments

args = parse_arguments(width=16)
deepspeed.init_distributed()
layers = [nn.Linear(FEATURES, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)]
model = PipelineModule(layers, num_stages=2, loss_fn=F.cross_entropy)
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
data = batches(engine.train_micro_batch_size_per_gpu(), engine.device)
for _ in range(args.steps):
    engine.train_batch(data)
    if {evaluates}:
        engine.eval_batch(data)
"""


@pytest.mark.parametrize("evaluates", [False, True])
def test_of_a_pipeline(step, evaluates):
    assert passes(step(_PIPELINE.format(evaluates=evaluates), world=4)) == ONCE


def test_a_plans_run_of_a_pipeline_has_the_peak_of_a_longer_step(foreseen):
    """The first of three stages holds the activations of three micro-batches, beside the gradients of others."""
    source = _PIPELINE.format(evaluates=False).replace("num_stages=2", "num_stages=3")

    def peak(micro_batches):
        overrides = {"gradient_accumulation_steps": micro_batches, "train_micro_batch_size_per_gpu": 64}
        return live_bytes(foreseen(source, overrides, world=3)).peak

    shown = micro_batches_of_a_run(8, pipeline_stages=3)
    assert shown < 8
    assert peak(shown) == peak(8) > peak(shown - 1)


def test_of_a_pipeline_with_tensor_parallelism(foreseen):
    """Its ranks divide what stages send to each other, unless they are told not to. Gradients are the same."""
    topology = "topology=PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)"
    source = "from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology\n" + _PIPELINE.format(
        evaluates=False
    ).replace("num_stages=2", topology)

    def gradients(divides):
        run = foreseen(source, {"pipeline": {"pipe_partitioned": divides, "grad_partitioned": divides}}, world=4)
        assert passes(step_of(run)) == ONCE
        return max(moment.by_kind[KINDS.index("gradient")] for moment in live_bytes(run).moments)

    assert gradients(divides=True) == gradients(divides=False) > 0


def test_of_a_pipeline_with_two_stages_on_a_rank(foreseen):
    source = _PIPELINE.format(evaluates=False).replace("layers = [", "layers = [nn.Identity(), ")
    source = source.replace("PipelineModule", "DualPipeVModule").replace("deepspeed.pipe", "deepspeed")
    says = "DualPipeV cannot be foreseen, because each of its ranks has two stages and exchanges tensors both ways."
    foreseen(source, {"gradient_accumulation_steps": 4}, says=says)


def test_a_plans_run_of_a_pipeline_sends_as_much_as_a_longer_step(foreseen):
    source = _PIPELINE.format(evaluates=False).replace("num_stages=2", "num_stages=3")

    def sent(micro_batches):
        overrides = {"gradient_accumulation_steps": micro_batches, "train_micro_batch_size_per_gpu": 4}
        step = step_of(replace(foreseen(source, overrides, world=3), accumulation=8))
        sends = [
            [one.moved for each in stretches for one in each.operations if OPERATIONS[one.kind] == "send"]
            for stretches in (step.repeated, step.last)
        ]
        return step.times * sum(sends[0]) + sum(sends[1])

    assert sent(micro_batches_of_a_run(8, pipeline_stages=3)) == sent(8) > 0


# What the program does with each micro-batch.
_LOOP = """
import contextlib

import deepspeed
import torch
import torch.nn.functional as F
from toy import batches, parse_arguments, small_model

args = parse_arguments()
model = small_model()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
for number, (inputs, labels) in enumerate(batches(engine.train_micro_batch_size_per_gpu(), engine.device)):
    is_last = (number + 1) % 3 == 0
    {does}
"""


@pytest.mark.parametrize(
    ("does", "settings"),
    [
        ("engine.backward(F.cross_entropy(engine(inputs), labels)); engine.step()", {}),
        (
            "engine.set_gradient_accumulation_boundary(is_last); F.cross_entropy(engine(inputs), labels).backward()\n"
            "    if is_last: engine.step()",
            {},
        ),
        (
            "torch.autograd.backward(F.cross_entropy(engine(inputs), labels))\n    if is_last: engine.step()",
            {"managed_gradient_accumulation": False},
        ),
        (
            "with contextlib.nullcontext() if is_last else engine.no_sync():\n"
            "        engine.backward(F.cross_entropy(engine(inputs), labels))\n"
            "    engine.step()",
            {},
        ),
    ],
    ids=["managed", "own boundary", "unmanaged", "no_sync"],
)
def test_of_a_loop(step, does, settings):
    found = step(_LOOP.format(does=does), {"zero_optimization": {"stage": 1}, **settings})
    assert passes(found) == ONCE
    # Gradients are exchanged once, after the last micro-batch.
    exchanging = [
        each.micro_batch
        for each in found.last
        for one in each.operations
        if OPERATIONS[one.kind] in ("all_reduce", "reduce_scatter", "reduce") and one.moved > 1000
    ]
    assert set(exchanging) == {ACCUMULATION - 1}
