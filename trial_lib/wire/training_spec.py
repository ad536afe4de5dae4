"""What the ranks of a training are told: written by the driver, read by every rank.

A trial class is trained as it says. A script finds it by `SPEC_VARIABLE`, if it asks: the Core API does.
A rank imports this module from the user's environment: standard library only.
"""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trial_lib.wire.whole_files import write_whole

UnitLength = dict[str, int]
"""One of `{"batches": n}`, `{"records": n}` and `{"epochs": n}`; a batch is an optimizer step."""

SPEC_VARIABLE = "ZEROTUNE_TRAINING_SPEC"
"""The environment variable by which the ranks of a script find their spec's file."""


@dataclass(frozen=True)
class TrainingSpec:
    """One training: a trial that is measured, or a full experiment.

    Attributes:
        trial: the class, as `module:Class`; None for a script.
        hparams: the experiment's hyperparameters, the configuration to train with merged in.
        experiment_config: the whole experiment, secrets left out.
        seed: of everything random.
        length: how long to train; None trains until it is ended from outside, and neither validates nor saves.
        validation_period: how often to validate at least; None: at the end.
        checkpoint_period: how often to save at least; None: at the end.
        report_period: optimizer steps from one report of the training metrics to the next.
        records_per_epoch: samples of an epoch; None: what the training loader holds.
        metric: the validation metric that says which checkpoint is best.
        smaller_is_better: whether a smaller value of it is better.
        checkpoints: the folder of the checkpoints; the training resumes from the newest intact one. None in a trial,
            which keeps nothing.
        latest_checkpoint: the name of that newest intact one, for a script: a trial class looks for it itself.
        metrics: the file that rank 0 appends records to, one JSON object a line.
        finished: the file that rank 0 writes when the training has come to its end.
        tensorboard: the folder for TensorBoard's files.
        scratch: a folder for what is needed while the ranks run, and not afterwards.
        stop: the folder of the full experiment's `StopRequest`, which a script may heed.
    """

    trial: str | None
    hparams: dict[str, Any]
    experiment_config: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    length: UnitLength | None = None
    validation_period: UnitLength | None = None
    checkpoint_period: UnitLength | None = None
    report_period: int = 100
    records_per_epoch: int | None = None
    metric: str = "validation_loss"
    smaller_is_better: bool = True
    checkpoints: str | None = None
    metrics: str | None = None
    finished: str | None = None
    tensorboard: str | None = None
    latest_checkpoint: str | None = None
    scratch: str | None = None
    stop: str | None = None

    @property
    def is_trial(self) -> bool:
        """Whether this is a trial, which is measured and ended from outside, and not a full experiment."""
        return self.checkpoints is None

    def write(self, path: Path) -> None:
        """Writes the spec for the ranks to read, and nobody else: hyperparameters may hold secrets."""
        write_whole(path, json.dumps(asdict(self), indent=2), mode=0o600)


def read_training_spec(path: Path) -> TrainingSpec:
    """Returns the spec that a driver wrote."""
    return TrainingSpec(**json.loads(path.read_text()))


def training_spec_of_this_rank() -> TrainingSpec | None:
    """Returns what this process is told as a rank of a script; None outside of ZeroTune."""
    path = os.environ.get(SPEC_VARIABLE)
    return None if path is None else read_training_spec(Path(path))
