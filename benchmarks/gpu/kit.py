"""What the stages share: the device, models at whatever size it takes, and trials and plain trainings of them."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.gpu.report import Report
from zerotune.trial_lib.deepspeed_config.overrides import config_hash
from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.device.this_host import kind_of
from zerotune.trial_lib.launch.locks import host_lock_dir, reserved_port
from zerotune.trial_lib.launch.rank_starter import Program, RankStarter
from zerotune.trial_lib.launch.slots import held_slots
from zerotune.trial_lib.launch.starters import ColdStarter, WarmStarter, rank_environment
from zerotune.trial_lib.launch.trial import ThisHost, TrialPlan
from zerotune.trial_lib.messages.measurement import ModelProfile
from zerotune.trial_lib.messages.orders import StepWindow, TrainingSpec
from zerotune.trial_lib.records.candidate import Candidate, Purpose, Sweep
from zerotune.trial_lib.records.folders import TrialPaths
from zerotune.trial_lib.records.result import Outcome, TrialResult

Case = TypeVar("Case")
MODELS = Path(__file__).with_name("models")
GIB = 2**30
SHORT = StepWindow(start_step=3, end_step=5, max_steps=5)


@dataclass(frozen=True)
class Shape:
    """What a model is made of, as `models/train.py` takes it."""

    hidden: int
    layers: int
    heads: int
    inner: int
    vocabulary: int
    length: int

    @property
    def options(self) -> list[str]:
        """Returns the words of a command line."""
        return [word for name, value in vars(self).items() for word in (f"--{name}", str(value))]

    @property
    def parameters(self) -> int:
        """How many there are."""
        block = 4 * self.hidden**2 + 3 * self.hidden * self.inner + 2 * self.hidden
        return self.layers * block + 2 * self.hidden * self.vocabulary + self.hidden


TOY = Shape(hidden=64, layers=2, heads=4, inner=160, vocabulary=256, length=32)
SHAPES = {
    "125m": Shape(hidden=768, layers=12, heads=12, inner=2048, vocabulary=32_000, length=1024),
    "1b": Shape(hidden=2048, layers=16, heads=16, inner=5632, vocabulary=32_000, length=1024),
}


class Kit:
    """Runs trials and trainings on one device.

    Args:
        report: of the stage.
        host: whose slots there are.
        work: a folder for what trials leave.
        part: which of a stage's cases are this process's, and of how many parts; others run beside it.

    Attributes:
        report: of the stage.
        host: whose slots there are.
        is_toy: whether models and repeats are as small as they can be: on a processor, to run every line.
        notes: what the starters have said.
    """

    def __init__(self, report: Report, host: Host, work: Path, part: tuple[int, int] = (0, 1)) -> None:
        self.report = report
        self.host = host
        self.work = work
        self.is_toy = host.device == "cpu"
        self.notes: list[str] = []
        self._kind = kind_of(host.device)
        self._starters: dict[str, RankStarter] = {}
        self._count = 0
        self._part, self._parts = part
        # Parts share the device, so each has locks of its own.
        self._locks = host_lock_dir() if self.is_alone else work / "locks"

    @property
    def is_alone(self) -> bool:
        """Whether nothing else of the kit runs on the device."""
        return self._parts == 1

    def part_of(self, cases: Iterable[Case]) -> list[Case]:
        """Returns those of a stage's cases that this process runs."""
        return list(cases)[self._part :: self._parts]

    @property
    def is_cuda(self) -> bool:
        """Whether there is a GPU."""
        return self.host.device == "cuda"

    @property
    def on_first_slot(self) -> dict[str, str]:
        """What a process starts from that is shown the first slot alone."""
        return {**os.environ, **self._kind.environment(self.host.slots[:1])}

    @property
    def environment(self) -> dict[str, str]:
        """What ranks start from: as many OpenMP threads as the `deepspeed` launcher leaves them."""
        return rank_environment(has_one_thread=not self.is_cuda)

    def shape(self, name: str) -> Shape:
        """Returns a model's shape: on a processor a toy's, whatever it is called."""
        return TOY if self.is_toy else SHAPES[name]

    def config(self, **sections: Any) -> dict[str, Any]:
        """Returns a DeepSpeed configuration: bf16 with DeepSpeed's Adam on a GPU, float32 with torch's elsewhere."""
        params = {"lr": 1e-4} if self.is_cuda else {"lr": 1e-4, "torch_adam": True}
        precision = {"bf16": {"enabled": True}} if self.is_cuda else {}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": params},
            "zero_optimization": {"stage": 0},
            **precision,
            **sections,
        }

    def starter(self, name: str = "warm", builders: Sequence[str] | None = None) -> RankStarter:
        """Returns what starts trials; the first call starts it."""
        if name not in self._starters:
            wanted = ["FusedAdamBuilder"] if self.is_cuda else ["ShareMemCommBuilder"]
            builders = wanted if builders is None else list(builders)
            environment = {**self.environment, **self._kind.primed_with(self.host, 1)}
            if name == "cold":
                self._starters[name] = ColdStarter(sys.executable, builders, environment, self.say)
            else:
                log = str(self.work / "fork_server.log")
                warm = WarmStarter(sys.executable, builders, environment, log, self.say)
                warm.start()
                self._starters[name] = warm
        return self._starters[name]

    def say(self, text: str) -> None:
        """Notes what a starter says."""
        self.notes.append(text)
        self.report.note(text)

    def plan(
        self,
        shape: Shape,
        *options: str,
        micro_batch: int = 1,
        knobs: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        window: StepWindow = SHORT,
        memory_limit: int | None = None,
        purpose: Purpose = Purpose.SEARCH,
        environment: Mapping[str, str] | None = None,
        deadline_s: float = 150.0,
        accumulation: int = 1,
        as_class: bool = False,
        profile: ModelProfile | None = None,
        formats: tuple[str, ...] | None = None,
    ) -> TrialPlan:
        """Returns a trial of `models/train.py`, with `options` behind those of the shape, or of the trial class."""
        number, self._count = self._count, self._count + 1
        candidate = Candidate(
            knobs=dict(knobs or {}), micro_batch_size=micro_batch, gradient_accumulation_steps=accumulation, slots=1
        )
        paths = TrialPaths(self.work / "trials" / f"{number:04d}")
        complete = candidate.complete(self.config() if config is None else config)
        target, words, spec = {"script": "train.py"}, ["--deepspeed_config", str(paths.ds_config)], None
        if as_class:
            hparams = {"deepspeed_config": str(paths.ds_config), **vars(shape)}
            spec = TrainingSpec(trial="model_def:LlamaTrial", hparams=hparams, tensorboard=str(paths.tensorboard))
            target, words, options = {"module": "zerotune.trial_lib.training"}, [str(paths.training_spec)], ()
        else:
            words += shape.options
        return TrialPlan(
            trial_id=f"{self.work.name}-{number}",
            number=number,
            purpose=purpose,
            candidate=candidate,
            ds_config=complete,
            config_hash=config_hash(complete),
            program=Program(
                interpreter=sys.executable,
                target=target,
                arguments=[*words, *options],
                local_rank_option="",
                model_dir=MODELS,
                environment={**self.environment, **(environment or {})},
            ),
            window=window,
            memory_limit=memory_limit,
            deadline_s=deadline_s,
            paths=paths,
            training_spec=spec,
            flops_per_sample=None if profile is None else profile.flops_per_sample,
            formats=formats,
        )

    def run(self, shape: Shape, *options: str, starter: str = "warm", **planned: Any) -> TrialResult:
        """Runs a trial to its end; see `plan`."""
        plan = self.plan(shape, *options, **planned)
        return ThisHost(self.starter(starter), self.host, self._locks).run_trial(plan, threading.Event(), self.say)

    def completed(self, what: str, shape: Shape, *options: str, **planned: Any) -> TrialResult | None:
        """Runs a trial that should complete; returns its result where it did, and says so in the report."""
        result = self.run(shape, *options, **planned)
        is_complete = self.report.check(f"{what} completes", result.outcome is Outcome.COMPLETED, result.reason)
        return result if is_complete else None

    def sweep(self, plans: Sequence[TrialPlan], bytes_per_sample: float = 0.0) -> list[Any]:
        """Runs the sizes of a sweep in one process group; returns each one's result, or why there is none."""
        sweep = Sweep(tuple(plan.candidate for plan in plans), bytes_per_sample, headroom=0.05)
        starter, cancelled = self.starter(), threading.Event()
        place = ThisHost(starter, self.host, self._locks)
        return place.run_sweep(plans, sweep, cancelled, self.say, lambda position, result: None)

    def said(self, result: TrialResult, what: str) -> list[dict[str, Any]]:
        """Returns what `models/train.py` has said of something, `what: {...}` in its log."""
        lines = Path(result.logs[0]).read_text(errors="replace").splitlines()
        return [json.loads(line.partition(": ")[2]) for line in lines if line.startswith(f"{what}: {{")]

    @contextlib.contextmanager
    def alone(self) -> Iterator[tuple[dict[str, str], list[str]]]:
        """Holds a slot; yields the environment of a plain rank on it, and what to begin its command with."""
        locks = self._locks
        with held_slots(locks, self.host, 1, lambda: False) as slots, reserved_port() as port:
            assert slots is not None
            cores = ",".join(map(str, self._kind.cores(slots.names[0])))
            environment = {
                **self.environment,
                **self._kind.environment(slots.names),
                **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            }
            yield environment, ["taskset", "-c", cores] if cores else []

    def train(
        self, shape: Shape, *options: str, config: Mapping[str, Any], steps: int, timeout_s: float = 300.0
    ) -> dict[str, Any]:
        """Trains without ZeroTune; returns what `models/train.py` reports of its steps."""
        folder = self.work / f"plain-{self._count}"
        self._count += 1
        folder.mkdir()
        (folder / "ds_config.json").write_text(json.dumps(config))
        words = ["--deepspeed_config", str(folder / "ds_config.json"), "--report", str(folder / "report.json")]
        command = [sys.executable, str(MODELS / "train.py"), *words, "--steps", str(steps), *shape.options, *options]
        with self.alone() as (environment, pinned), (folder / "log").open("w") as log:
            command = [*pinned, *command]
            subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log, timeout=timeout_s, check=True)
        found: dict[str, Any] = json.loads((folder / "report.json").read_text())
        return found

    def ask(self, code: str, timeout_s: float = 120.0, **variables: str) -> dict[str, Any]:
        """Runs Python code in a process of its own; returns the JSON of its last line."""
        run = subprocess.run(
            [sys.executable, "-c", code],
            env={**self.on_first_slot, **variables},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if run.returncode:
            raise RuntimeError(f"exit {run.returncode}: {run.stderr[-2000:]}")
        answer: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
        return answer

    def close(self) -> None:
        """Ends the starters."""
        for starter in self._starters.values():
            starter.close()
