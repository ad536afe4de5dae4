"""Studies of one experiment, one after another, whose trials end as a function says: no process is started."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from zerotune.trial_lib.launch.trial import TrialPlan
from zerotune.trial_lib.messages.measurement import Memory, ModelProfile
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.folders import StudyStatus
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.best_command import write_answer
from zerotune.trial_lib.study.confirm import answer_of, holds, next_confirming_plan, next_known_plan
from zerotune.trial_lib.study.driver import StudyDriver
from zerotune.trial_lib.study.open_study import OpenStudy, new_study, resume_study
from zerotune.trial_lib.study.runner import Work

BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "zero_optimization": {"stage": 1},
}
VERSIONS = {"python": "3.11.2", "torch": "2.6.0", "deepspeed": "0.19.8"}
PROFILE = ModelProfile(
    num_params=10_000,
    trainable_num_params=10_000,
    activation_mem_per_gpu=100_000,
    gpu_mem=2**30,
    data_parallel_size=1,
    flops_per_sample=1e6,
)

# No rank runs that could change the user's files, and the kernel takes its time to say whether it can hide them.
NO_LAYERS = patch("zerotune.trial_lib.study.open_study.uncovered", return_value="")

Speed = Callable[[Candidate], float]


class CutShortError(Exception):
    """The study was ended from outside."""


def larger_is_faster(candidate: Candidate) -> float:
    """Samples/s that grow with the micro-batch; ZeRO costs something, and 8 do not fit."""
    return 100.0 * candidate.micro_batch_size / (1 + 0.1 * (candidate.zero_stage or 0))


class Experiment:
    """An experiment, and a machine that it is tuned on.

    Attributes:
        folder: where its studies are.
        model: its model directory.
        speed: samples/s of a candidate.
        versions: as the profile trial finds them.
        profile: as it finds the model.
        largest: the largest micro-batch that fits.
        crash: why a candidate of the search crashes; empty where it does not.
        scatter: how much readings vary, in logarithms.
        moves: whether a confirming trial's data can begin elsewhere in each round.
        ran: the trials that have been run, in their order: number, purpose, candidate.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "train.py").write_text("print('trains')\n")
        self.speed: Speed = larger_is_faster
        self.versions = VERSIONS
        self.profile = PROFILE
        self.largest = 4
        self.crash: Callable[[Candidate], str] = lambda candidate: ""
        self.scatter = 0.01
        self.moves = True
        self.ran: list[tuple[int, Purpose, Candidate]] = []
        self._noise = random.Random(7)
        self._seconds = 1_000_000.0
        self._config = folder / "experiment.yaml"
        self.write(BASE)

    def write(self, ds_config: dict[str, Any], **fields: Any) -> None:
        """Writes the YAML."""
        hparams = {"deepspeed_config": ds_config}
        text = {"name": "team", "entrypoint": "deepspeed train.py", "hyperparameters": hparams, "max_restarts": 0}
        self._config.write_text(yaml.safe_dump({**text, **fields}))

    def arguments(self, **changed: Any) -> StudyArguments:
        """Returns the arguments of a study that learns."""
        told = {"max_trials": 8, "metric": "throughput", "start": "cold", "from_earlier": True, **changed}
        return StudyArguments(config_path=self._config, model_dir=self.model, **told)

    @contextmanager
    def opened(self, **changed: Any) -> Iterator[OpenStudy]:
        """A new study."""
        self.ran = []
        with NO_LAYERS:
            study = new_study(self.arguments(**changed), self.folder)
        try:
            yield study
        finally:
            study.close()

    @contextmanager
    def resumed(self, root: Path) -> Iterator[OpenStudy]:
        """A resumed study."""
        self.ran = []
        with NO_LAYERS:
            study = resume_study(root)
        try:
            yield study
        finally:
            study.close()

    def tune(self, **changed: Any) -> OpenStudy:
        """Runs a new study to its end."""
        with self.opened(**changed) as study:
            self.finish(study)
        return study

    def finish(self, study: OpenStudy, trials: float = float("inf")) -> None:
        """Runs a study to its end, or until so many trials have ended."""
        driver, left = study.driver, trials

        def run(plan: TrialPlan) -> None:
            nonlocal left
            if left == 0:
                raise CutShortError
            left -= 1
            self.ran.append((plan.number, plan.purpose, plan.candidate))
            driver.tell(self._ended(plan, driver))

        if driver.state.profile is None:
            run(driver.profile_plan())
        if not driver.state.has_searched:
            while (plan := next_known_plan(driver)) is not None:
                run(plan)
            if holds(driver):
                driver.stop("holds")
        if not driver.state.has_searched:
            submitted = None if driver.state.submitted else driver.submitted_plan()
            if submitted is not None:
                run(submitted)
            while work := driver.next_work(1):
                self._search(work[0], run)
            driver.stop("the search has ended")
        while (plan := next_confirming_plan(driver)) is not None:
            run(plan)
        answer = answer_of(driver)
        assert answer is not None
        write_answer(driver, answer)
        study.finish(StudyStatus.COMPLETED)

    def _search(self, work: Work, run: Callable[[TrialPlan], None]) -> None:
        for plan in work.plans:
            run(plan)

    def _ended(self, plan: TrialPlan, driver: StudyDriver) -> TrialResult:
        self._seconds += 2
        candidate = plan.candidate
        crash = self.crash(candidate) if plan.purpose is Purpose.SEARCH else ""
        fits = candidate.micro_batch_size <= self.largest and not crash
        throughput = self.speed(candidate) * self._noise.lognormvariate(0.0, self.scatter)
        peak = 10_000_000 + candidate.micro_batch_size * self.profile.activation_mem_per_gpu
        return TrialResult(
            trial_id=plan.trial_id,
            number=plan.number,
            purpose=plan.purpose,
            config_hash=plan.config_hash,
            outcome=Outcome.COMPLETED if fits else Outcome.CRASHED if crash else Outcome.OUT_OF_MEMORY,
            reason=crash,
            metrics={"throughput": throughput, "cpu_time_per_sample": 1 / throughput, "latency": 0.01} if fits else {},
            memory=Memory(peak=[peak], after_initialize=[10_000_000]),
            profile=self.profile if plan.purpose is Purpose.PROFILE else None,
            versions=self.versions,
            losses=[3.0, 2.9, 2.8],
            data_offset=8 if self.moves and plan.purpose is Purpose.CONFIRM else None,
            phases={"steps": 1.0},
            started_at=self._seconds,
        )

    @property
    def purposes(self) -> list[Purpose]:
        """Why the trials ran."""
        return [purpose for _, purpose, _ in self.ran]

    @property
    def searched(self) -> list[Candidate]:
        """What the search has run."""
        return [candidate for _, purpose, candidate in self.ran if purpose is Purpose.SEARCH]
