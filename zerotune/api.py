"""`zerotune.tune` and `zerotune.plan`: the commands, called from Python, with typed answers.

Each runs the command in a process of its own. There it handles signals, and sets Prefect's variables before it imports
Prefect. The caller's process, which may be a notebook with a running event loop, stays as it was.
"""

import json
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict

from zerotune.trial_lib.plan.plan_record import PlannedTrials, PlanRecord
from zerotune.trial_lib.records.candidate import FrozenRecord
from zerotune.trial_lib.records.folders import DOCUMENT_VERSION, FullExperimentRecord, StudyStatus
from zerotune.trial_lib.records.step_account import StepAccount
from zerotune.trial_lib.report.study_view import LeaderboardRow
from zerotune.trial_lib.study.earlier import SinceLast
from zerotune.trial_lib.study.finding import Finding

# The child ends in order when the caller's process is killed (PR_SET_PDEATHSIG).
_START = (
    "import ctypes, signal; ctypes.CDLL(None).prctl(1, signal.SIGTERM); from zerotune.flows.cli import main; main()"
)
_TRIAL = re.compile(r"trial \d+ (?P<label>.*): (?P<outcome>\w+) (?P<value>.*)")
_LAST_LINES = 15


class CommandError(RuntimeError):
    """A command has failed. The message is its sentence."""

    def __init__(self, message: str, exit_code: int, study: "Study | None" = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # as in `docs/command_line.md`
        self.study = study  # that failed; None if none began, or for a plan


def _fields_of(record: type[FrozenRecord]) -> BeforeValidator:
    # A document has sentences beside the fields, which the record makes again.
    def fields(document: Any) -> Any:
        if not isinstance(document, Mapping):
            return document
        return {name: value for name, value in document.items() if name in record.model_fields}

    return BeforeValidator(fields)


class Study(FrozenRecord):
    """A study that has ended, and its answer: what `zerotune tune --json` prints."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Literal[1] = DOCUMENT_VERSION
    study: str  # its id
    folder: Path  # that has all of it
    status: StudyStatus
    reason: str  # why it was cut short. Empty otherwise.
    headline: str  # the answer in a sentence
    metric: str  # the optimised metric
    gain: float | None  # how many times better than your configuration the answer is
    gain_interval: tuple[float, float] | None  # its 95 % confidence interval
    confirmation: Annotated[Finding, _fields_of(Finding)] | None
    why: tuple[Annotated[StepAccount, _fields_of(StepAccount)], ...]  # where the time of a step goes
    since_last: Annotated[SinceLast, _fields_of(SinceLast)] | None  # beside the last study's answer
    planned: Annotated[PlannedTrials, _fields_of(PlannedTrials)] | None  # what its plan foresaw
    best: LeaderboardRow | None  # the answer, with medians of its confirming trials
    largest: LeaderboardRow | None  # the largest micro-batch, of `zerotune micro-batch`
    best_ds_config: dict[str, Any] | None  # the answer's DeepSpeed configuration
    best_ds_config_path: Path | None
    command: str | None  # to train with the answer
    diff: str | None = None  # what the answer changes in your own files, as a unified diff
    full_experiment: FullExperimentRecord | None
    report: Path | None
    tracking_uri: str  # MLflow's
    trials: tuple[LeaderboardRow, ...]  # best first

    def __repr__(self) -> str:
        return f"<Study {self.study}: {self.headline or self.reason}>"


class Plan(PlanRecord):
    """A plan: what `zerotune plan --json` prints. All its figures are foreseen."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Literal[1] = DOCUMENT_VERSION
    folder: Path  # that has all of it
    best_ds_config: dict[str, Any] | None  # the answer's DeepSpeed configuration. None if nothing fits.
    best_ds_config_path: Path | None
    report: Path | None
    tracking_uri: str  # MLflow's

    def __repr__(self) -> str:
        return f"<Plan {self.plan_id}: {self.answer}>"


def tune(command: str | Sequence[str], *, folder: Path | str = ".", progress: bool = True, **options: Any) -> Study:
    """Finds the fastest configuration for a training command, as `zerotune tune` does.

    Args:
        command: what you type to train, in one string or as its words.
        folder: the folder that it runs in. The study is written there.
        progress: whether to show a bar of the trials.
        **options: the flags of `zerotune tune`: `max_trials=20`, `free_batch=True`, `zero_stages=[2, 3]`,
            `vary={"--gradient_checkpointing": ["true", "false"]}`.

    Raises:
        CommandError: the input is wrong, or no configuration was found. The message says why.
    """
    document = _run("tune", command, folder, progress, options)
    study = Study.model_validate(document.answer)
    if study.status is not StudyStatus.COMPLETED:
        raise CommandError(f"{study.headline} {study.reason}".strip(), document.exit_code, study)
    return study


def plan(command: str | Sequence[str], *, folder: Path | str = ".", progress: bool = True, **options: Any) -> Plan:
    """Foresees what fits on devices that are not here, and how fast it trains, as `zerotune plan` does.

    Args:
        command: what you type to train, in one string or as its words.
        folder: the folder that it runs in. The plan is written there.
        progress: whether to show what is done.
        **options: the flags of `zerotune plan`: `on=["h100-80gb:8"]`.

    Raises:
        CommandError: the input is wrong, or the program cannot be foreseen. If nothing fits, that is a plan as well.
    """
    return Plan.model_validate(_run("plan", command, folder, progress, options).answer)


# What the schemas beside this file describe: the documents of `--json`. `make schema` writes them.
SCHEMAS = {Path(__file__).with_name(f"{record.__name__.lower()}.schema.json"): record for record in (Study, Plan)}


_SENTENCE = {"description": "All of it in words.", "type": "string"}
_NOTES = {"description": "What limits it.", "items": {"type": "string"}, "type": "array"}
# What the documents of these records have beside the fields
_IN_WORDS = {
    **{name: {"sentence": _SENTENCE} for name in ("SinceLast", "StepAccount", "PlannedTrials")},
    "Finding": {"sentence": _SENTENCE, "notes": _NOTES},
}


def schema_text(record: type[FrozenRecord]) -> str:
    """The JSON Schema of a document. A later ZeroTune may add fields without another version."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **record.model_json_schema()}
    for name in _IN_WORDS.keys() & schema["$defs"].keys():
        schema["$defs"][name]["properties"] |= _IN_WORDS[name]
    return json.dumps(_open(schema), indent=2) + "\n"


def _open(schema: Any) -> Any:
    if isinstance(schema, dict):
        closed = ("additionalProperties", False)
        return {name: _open(value) for name, value in schema.items() if (name, value) != closed}
    return [_open(each) for each in schema] if isinstance(schema, list) else schema


class _Ended(FrozenRecord):
    answer: dict[str, Any]  # the JSON document
    exit_code: int


def _run(
    name: str, command: str | Sequence[str], folder: Path | str, progress: bool, options: Mapping[str, Any]
) -> _Ended:
    typed = shlex.split(command) if isinstance(command, str) else list(command)
    words = [sys.executable, "-P", "-c", _START, name, "--json", *_flags(options), "--", *typed]
    told: list[str] = []

    def tell(line: str) -> None:
        told.append(line)
        bar.tell(line)

    with tempfile.TemporaryFile("w+") as output, closing(_Bar(name, options.get("max_trials"), progress)) as bar:
        child = subprocess.Popen(
            words,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # Ctrl-C reaches this process alone, which hands it on: a second signal would end the command at once.
            start_new_session=True,
        )
        _follow(child, tell)
        output.seek(0)
        answer = output.read()
    if not answer.strip():
        raise CommandError(_sentence(told), child.returncode)
    return _Ended(answer=json.loads(answer), exit_code=child.returncode)


def _flags(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        values = value if isinstance(value, (list, tuple)) else [value]
        if isinstance(value, Mapping):
            values = [f"{place}={_listed(each)}" for place, each in value.items()]
        for each in values:
            if each is True:
                yield flag
            elif each is not None and each is not False:
                yield from (flag, str(each))


def _listed(values: Any) -> str:
    return ",".join(map(str, values)) if isinstance(values, (list, tuple)) else str(values)


def _follow(child: "subprocess.Popen[str]", tell: Callable[[str], None]) -> None:
    # Hands on what the command says until it has ended.
    assert child.stderr is not None
    interrupted = False
    with child.stderr:
        while True:
            try:
                line = child.stderr.readline()
                if not line:
                    child.wait()
                    break
                tell(line.rstrip())
            except KeyboardInterrupt:
                interrupted = True
                child.send_signal(signal.SIGINT)
    if interrupted:
        raise KeyboardInterrupt


def _sentence(told: Sequence[str]) -> str:
    # Why a command has printed no answer.
    for line in reversed(told):
        if line.startswith(("zerotune: ", "Error: ")):
            return line.partition(": ")[2]
    return "\n".join(told[-_LAST_LINES:])


class _Bar:
    """Shows the trials of a study, or the last line of a plan, in a notebook or a terminal."""

    def __init__(self, name: str, max_trials: int | None, is_shown: bool) -> None:
        from tqdm.auto import tqdm

        shape = {} if name == "tune" else {"bar_format": "{desc}{postfix} [{elapsed}]"}
        self._bar: Any = tqdm(total=max_trials, desc=f"zerotune {name}", unit="trial", disable=not is_shown, **shape)

    def tell(self, line: str) -> None:
        trial = _TRIAL.match(line)
        if trial is not None:
            self._bar.update()
            line = f"{trial['label']}: {trial['value'] if trial['outcome'] == 'completed' else trial['outcome']}"
        self._bar.set_postfix_str(line)

    def close(self) -> None:
        self._bar.close()


if __name__ == "__main__":
    for path, record in SCHEMAS.items():
        path.write_text(schema_text(record))
