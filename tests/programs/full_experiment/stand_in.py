"""Does what a driver sees of a trial class, without torch: tells, saves, and dies where it is told to."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from zerotune.trial_lib.messages.orders import read_training_spec
from zerotune.trial_lib.training.distributed import InvalidTrialError

spec = read_training_spec(Path(sys.argv[1]))
print(f"pid {os.getpid()}", flush=True)
if spec.hparams.get("invalid"):
    raise InvalidTrialError("model_def:Tiny has registered no engine.\nCall context.wrap_model_engine(engine).")
assert spec.checkpoints is not None
assert spec.metrics is not None
assert spec.finished is not None
assert spec.length is not None
assert spec.checkpoint_period is not None
checkpoints = Path(spec.checkpoints)
checkpoints.mkdir(exist_ok=True)


def tell(kind: str, **rest: object) -> None:
    with Path(str(spec.metrics)).open("a") as file:
        file.write(json.dumps({"kind": kind, "time": time.time(), **rest}) + "\n")


def crash(batch: int) -> None:
    """Dies at a batch the first time that it gets there, in the middle of a line."""
    marker = checkpoints.parent / f"crashed-at-{batch}"
    if batch in spec.hparams.get("crash_at", []) and not marker.exists():
        marker.touch()
        with Path(str(spec.metrics)).open("a") as file:
            file.write('{"kind": "training", "ba')
        os.kill(os.getpid(), signal.SIGKILL)


saved = sorted(int(path.name.removeprefix("batch-")) for path in checkpoints.iterdir())
start = saved[-1] if saved else 0
tell("note", text=f"resuming from batch {start}")
best = min((1.0 / batch for batch in saved), default=None)
for batch in range(start + 1, spec.length["batches"] + 1):
    time.sleep(spec.hparams.get("step_seconds", 0.0))
    tell("training", batch=batch, epoch=0, metrics={"loss": 1.0 / batch, "throughput": float("inf")})
    crash(batch)
    if batch % spec.checkpoint_period["batches"] == 0:
        best = 1.0 / batch
        tell("validation", batch=batch, epoch=0, metrics={"validation_loss": best})
        (checkpoints / f"batch-{batch:08d}").touch()
        tell("checkpoint", batch=batch, name=f"batch-{batch:08d}", metric=best)
    if batch - start == spec.hparams.get("fails_after") and batch < spec.length["batches"]:
        raise RuntimeError("the disk is away")
latest = sorted(path.name for path in checkpoints.iterdir())[-1]
Path(spec.finished).write_text(
    json.dumps(
        {
            "batches": spec.length["batches"],
            "best_checkpoint": latest,
            "latest_checkpoint": latest,
            "best_metric": best,
            "metrics": {"validation_loss": best},
        }
    )
)
