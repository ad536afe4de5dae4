"""The description of a training. The driver writes it, and every rank reads it.

The loop of a trial class follows it. A script may find it by `SPEC_VARIABLE`, as the Core API does.
A rank imports this module, so it needs only the standard library.
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
"""The environment variable with the path of the spec, for the ranks of a script."""


@dataclass(frozen=True)
class TrainingSpec:
    """One training: a trial that is measured, or a full experiment.

    Attributes:
        trial: the class, as `module:Class`; None for a script.
        hparams: the experiment's hyperparameters, with the training's configuration merged in.
        experiment_config: the whole experiment, without secrets.
        seed: of everything random.
        length: how long to train. None trains until the process is ended from outside, and neither validates nor saves.
        validation_period: the longest time between validations; None validates at the end.
        checkpoint_period: the longest time between checkpoints; None saves at the end.
        report_period: optimizer steps between two reports of the training metrics.
        records_per_epoch: samples of an epoch; None takes the number in the training loader.
        metric: the validation metric that decides which checkpoint is best.
        smaller_is_better: whether a smaller value of it is better.
        checkpoints: the folder of the checkpoints. The training resumes from the newest intact one. None in a trial,
            which keeps nothing.
        latest_checkpoint: the name of that newest intact one, for a script. A trial class finds it by itself.
        metrics: the file to which rank 0 appends JSON lines.
        finished: the file that rank 0 writes at the end of the training.
        tensorboard: the folder for TensorBoard's files.
        scratch: a folder for files that are only needed while the ranks run.
        stop: the folder of the full experiment's `StopRequest`, which a script may follow.
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
        """Whether this is a trial. A trial is measured and ended from outside; a full experiment is not."""
        return self.checkpoints is None

    def write(self, path: Path) -> None:
        """Writes the spec. Only its owner may read it, because hyperparameters may contain secrets."""
        write_whole(path, self.to_json())

    def to_json(self) -> str:
        """Returns the text of the spec's file."""
        return json.dumps(asdict(self), indent=2)


def read_training_spec(path: Path) -> TrainingSpec:
    """Returns the spec that a driver wrote."""
    return TrainingSpec(**json.loads(path.read_text()))


def training_spec_of_this_rank() -> TrainingSpec | None:
    """Returns the spec of this process, as a rank of a script; None outside of ZeroTune."""
    path = os.environ.get(SPEC_VARIABLE)
    return None if path is None else read_training_spec(Path(path))
