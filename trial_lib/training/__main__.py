"""One rank of a trial class: `python -m zerotune.trial_lib.training SPEC.json`, in the model directory."""

import importlib
import os
import sys
from pathlib import Path

from zerotune.trial_lib.messages.orders import NextSize, TrainingSpec, read_training_spec
from zerotune.trial_lib.training.context import DeepSpeedTrialContext
from zerotune.trial_lib.training.data import seed_everything
from zerotune.trial_lib.training.deepspeed_trial import DeepSpeedTrial
from zerotune.trial_lib.training.distributed import (
    DistributedContext,
    InvalidTrialError,
    join_process_group,
    rank_device,
)
from zerotune.trial_lib.training.loop import train_built


def main(arguments: list[str]) -> None:
    train(read_training_spec(Path(arguments[0])))


def train(spec: TrainingSpec) -> None:
    """If the ranks measure several micro-batch sizes, the trial and its engines stay, and loaders and loop are built
    anew.
    """
    assert spec.trial is not None
    trial_class = load_class(spec.trial)
    seed_everything(spec.seed)
    context, trial = build_trial(trial_class, spec)
    while following := run_loop(trial, context, spec):
        spec = read_training_spec(Path(following.arguments[0]))
        context.spec = spec
        for engine in context.models:
            following.set_batch(engine)
        following.go_on()


def run_loop(trial: DeepSpeedTrial, context: DeepSpeedTrialContext, spec: TrainingSpec) -> NextSize | None:
    """Trains to the end, or until the ranks measure the next size, which it returns."""
    try:
        train_built(trial, context, spec)
    except NextSize as following:
        # The objects of its frames have to be freed: the loop and the data.
        return following.with_traceback(None)
    return None


def load_class(name: str) -> type[DeepSpeedTrial]:
    module_name, _, class_name = name.partition(":")
    found = getattr(importlib.import_module(module_name), class_name, None)
    if not (isinstance(found, type) and issubclass(found, DeepSpeedTrial)):
        raise InvalidTrialError(
            f"{name} is {found!r}, no DeepSpeedTrial. Derive the class from zerotune.DeepSpeedTrial."
        )
    return found


def build_trial(trial_class: type[DeepSpeedTrial], spec: TrainingSpec) -> tuple[DeepSpeedTrialContext, DeepSpeedTrial]:
    """The process group is initialised first, unless the trial does that itself."""
    device = rank_device(int(os.environ.get("LOCAL_RANK", "0")))
    join_process_group(device)
    context = DeepSpeedTrialContext(spec, DistributedContext.from_torch(), device)
    return context, trial_class(context)


if __name__ == "__main__":
    main(sys.argv[1:])
