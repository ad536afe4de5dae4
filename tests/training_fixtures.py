"""What the tests of trial classes share: a full-length training on real ranks, started warm, and what it leaves."""

import json
import math
import re
import shutil
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from beside_fixtures import own_first
from device_fixtures import need

from zerotune.trial_lib.device.this_host import this_host
from zerotune.trial_lib.launch.locks import reserved_port
from zerotune.trial_lib.launch.rank_starter import LaunchRequest, ProcessesEnd, Program, RankStarter, rank_requests
from zerotune.trial_lib.launch.starters import rank_environment
from zerotune.trial_lib.messages.orders import SPEC_VARIABLE, TrainingOrder, TrainingSpec

EXAMPLES = Path(__file__).parents[1] / "examples"
TRIAL_CLASSES = Path(__file__).parent / "programs" / "trial_classes"
DS_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000},
}
SCRIPT_PATHS = {
    "checkpoints": "checkpoints",
    "metrics": "metrics.jsonl",
    "finished": "finished.json",
    "tensorboard": "tensorboard",
    "scratch": "scratch",
    "stop": "stop",
}
PIPELINE = {**DS_CONFIG, "train_micro_batch_size_per_gpu": 4}


@dataclass(frozen=True)
class Training:
    """What a training has left.

    Attributes:
        root: its folder.
        ending: how its processes ended.
        logs: what each rank printed, all runs of this folder together.
    """

    root: Path
    ending: ProcessesEnd
    logs: list[str]

    @property
    def succeeded(self) -> bool:
        return self.ending.statuses != [] and all(status == 0 for status in self.ending.statuses)

    @property
    def finished(self) -> dict[str, Any] | None:
        path = self.root / "finished.json"
        return json.loads(path.read_text()) if path.exists() else None

    @property
    def records(self) -> list[dict[str, Any]]:
        path = self.root / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == kind]

    def metric(self, name: str, kind: str = "training") -> dict[int, float]:
        """Returns a metric by batch; of a batch that was repeated, the last."""
        return {record["batch"]: record["metrics"][name] for record in self.of_kind(kind)}

    @property
    def notes(self) -> list[str]:
        return [record["text"] for record in self.of_kind("note")]

    def said(self, rank: int = 0) -> list[str]:
        """Returns what the trial said on a rank (its lines that begin with `> `)."""
        return re.findall(r"^> (.*)$", self.logs[rank], re.MULTILINE)

    @property
    def checkpoints(self) -> list[str]:
        folder = self.root / "checkpoints"
        return (
            sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")) if folder.exists() else []
        )


class Trainings:
    """Runs trial classes, each training in a folder of its own; the same name resumes in the same folder."""

    def __init__(self, root: Path, starter: RankStarter) -> None:
        self.root = root
        self._starter = starter

    def run(
        self,
        trial: str,
        name: str = "training",
        *,
        slots: int = 1,
        ds_config: dict[str, Any] | None = None,
        model_dir: Path = TRIAL_CLASSES,
        environment: dict[str, str] | None = None,
        hparams: dict[str, Any] | None = None,
        deadline_s: float = 120.0,
        model_text: tuple[str, str] = ("", ""),
        **spec: Any,
    ) -> Training:
        """Trains `model_def:<trial>` and returns what it left; `spec` are fields of `TrainingSpec`.

        `model_text` is what to replace in the model directory's code, and by what.
        """
        folder = self.root / name
        if not folder.exists():
            shutil.copytree(model_dir, folder / "model", ignore=shutil.ignore_patterns("__pycache__"))
        code = folder / "model" / "model_def.py"
        code.write_text(code.read_text().replace(*model_text, 1))
        config_path = folder / "ds_config.json"
        config_path.write_text(json.dumps(ds_config or DS_CONFIG))
        TrainingSpec(
            trial=trial if ":" in trial else f"model_def:{trial}",
            hparams={"deepspeed_config": str(config_path)} if hparams is None else hparams,
            **{
                "length": {"batches": 4},
                "report_period": 1,
                "checkpoints": str(folder / "checkpoints"),
                "metrics": str(folder / "metrics.jsonl"),
                "finished": str(folder / "finished.json"),
                "tensorboard": str(folder / "tensorboard"),
                **spec,
            },
        ).write(folder / "training.json")
        target, arguments = {"module": "zerotune.trial_lib.training"}, [str(folder / "training.json")]
        return self._train(folder, target, arguments, slots, environment or {}, deadline_s)

    def run_script(
        self, model_dir: Path, script: str, *arguments: str, name: str = "training", slots: int = 1, **spec: Any
    ) -> Training:
        """Trains by a script at full length, in a copy of its folder, and returns what it left.

        `spec` are fields of `TrainingSpec`; the script finds the spec as the ranks of a full experiment do.
        """
        folder = self.root / name
        if not (folder / "model").exists():
            shutil.copytree(model_dir, folder / "model", ignore=shutil.ignore_patterns("__pycache__"))
        paths = {field: str(folder / file) for field, file in SCRIPT_PATHS.items()}
        TrainingSpec(trial=None, **{**paths, **spec}).write(folder / "training.json")
        environment = {SPEC_VARIABLE: str(folder / "training.json")}
        return self._train(folder, {"script": script}, list(arguments), slots, environment, 120.0)

    def _train(
        self,
        folder: Path,
        target: dict[str, str],
        arguments: list[str],
        slots: int,
        environment: dict[str, str],
        deadline_s: float,
    ) -> Training:
        program = Program(
            interpreter=sys.executable,
            target=target,
            arguments=arguments,
            local_rank_option="",
            model_dir=folder / "model",
            environment={**rank_environment(), **environment},
        )
        order = TrainingOrder(
            program=program.target,
            local_rank_option="",
            arguments=program.arguments,
            ds_config={},
            is_in_code=False,
            device=None,
            finished=[str(folder / f"rank{rank}.finished.json") for rank in range(slots)],
            failures=[str(folder / f"rank{rank}.failure.json") for rank in range(slots)],
        )
        logs = [folder / f"rank{rank}.log" for rank in range(slots)]
        host = this_host()
        if host.device == "cuda":
            need(slots)
        with reserved_port() as port:
            # On a host with fewer cores, ranks share them; NCCL refuses two ranks on one GPU.
            ranks = rank_requests(program, host, (own_first(host.slots) * slots)[:slots], port, logs)
            request = LaunchRequest(
                sys.executable,
                "zerotune.trial_lib.rank.rank:train",
                asdict(order),
                str(program.model_dir),
                ranks,
                deadline_s if deadline_s else math.inf,
            )
            ending = self._starter.launch(request).wait_or_cancel(threading.Event())
        return Training(folder, ending, [log.read_text() for log in logs])


def hparams(trainings: Trainings, name: str = "training", **values: Any) -> dict[str, Any]:
    """Returns the hyperparameters of a training of that name: its DeepSpeed configuration, and values of the test's."""
    return {"deepspeed_config": str(trainings.root / name / "ds_config.json"), **values}
