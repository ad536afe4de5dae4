"""What a rank of a `DeepSpeedTrial` is told: written by the driver, read by every rank.

A rank imports this module from the user's environment: standard library only.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trial_lib.experiment.files import write_whole

Length = dict[str, int]
"""One of `{"batches": n}`, `{"records": n}` and `{"epochs": n}`; a batch is an optimizer step."""


@dataclass(frozen=True)
class TrainingSpec:
    """One training of a trial class.

    Attributes:
        trial: the class, as `module:Class`.
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
        checkpoints: the folder of the checkpoints; the training goes on from the newest intact one.
        metrics: the file that rank 0 appends records to, one JSON object a line.
        finished: the file that rank 0 writes when the training has come to its end.
        tensorboard: the folder for TensorBoard's files.
    """

    trial: str
    hparams: dict[str, Any]
    experiment_config: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    length: Length | None = None
    validation_period: Length | None = None
    checkpoint_period: Length | None = None
    report_period: int = 100
    records_per_epoch: int | None = None
    metric: str = "validation_loss"
    smaller_is_better: bool = True
    checkpoints: str | None = None
    metrics: str | None = None
    finished: str | None = None
    tensorboard: str | None = None

    def write(self, path: Path) -> None:
        """Writes the spec for the ranks to read, and nobody else: hyperparameters may hold secrets."""
        write_whole(path, json.dumps(asdict(self), indent=2), mode=0o600)


def read_training_spec(path: Path) -> TrainingSpec:
    """Returns the spec that a driver wrote."""
    return TrainingSpec(**json.loads(path.read_text()))
