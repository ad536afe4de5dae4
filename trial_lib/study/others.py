"""The configurations of a study other than the user's: how many could be measured, and why the rest could not."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerotune.trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH
from zerotune.trial_lib.rank.batch_source import TypedNumber, numbers_in_words
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult, as_sentence, cause_of, without_log
from zerotune.trial_lib.search.knobs import STAGE, get_knob
from zerotune.trial_lib.study.confirmation import is_good
from zerotune.trial_lib.study.history import StudyState

# A program repeats these keys in its own options, and some compare the two.
_REPEATED = {
    STAGE: re.compile(r"stage|zero", re.IGNORECASE),
    MICRO_BATCH: re.compile(r"^(?!.*(eval|valid|test)).*(batch|(^|[-_.])(bs|bsz|mbs)($|[-_]))", re.IGNORECASE),
    ACCUMULATION: re.compile(r"accum|(^|[-_.])gas($|[-_])", re.IGNORECASE),
    TRAIN_BATCH: re.compile(r"^(?!.*(eval|valid|test)).*(batch|(^|[-_.])(bs|bsz|gbs)($|[-_]))", re.IGNORECASE),
}
ONE_UNMEASURED = "The only other configuration that was tried could not be measured."
_SMALLER = "Let the search try smaller sizes only (--max-micro-batch)"
_REMEDIES = {
    Outcome.OUT_OF_MEMORY: f"{_SMALLER}, or free memory on the devices.",
    Outcome.OUT_OF_HOST_MEMORY: f"Free memory on the host, or leave out offload. {_SMALLER} if they need less of it.",
}
_KILLED = (
    "Nothing shows which process did it. The kernel kills ranks when the host's memory runs out. If that is the cause, "
    f"free some, or: {_SMALLER[:1].lower()}{_SMALLER[1:]}."
)
_REFUSED = (
    "Your configuration ran, so a setting in which they differ from it may be the cause. If the program has an option "
    "for that setting, let each trial set it too (--map KEY=OPTION)."
)


@dataclass(frozen=True)
class Others:
    """The other configurations of a study, each counted once however often it ran."""

    tried: int  # those that ran
    failed: tuple[TrialResult, ...]  # the last failure of each one that was not measured
    has_own: bool  # whether the user's configuration was measured
    repeated: str = ""  # the mappings that may be missing, as they are typed: `--map KEY=OPTION`

    @property
    def measured(self) -> int:
        """A trial that was stopped because it cannot win is one."""
        return self.tried - len(self.failed)

    @property
    def headline(self) -> str:
        """The answer of a study that has measured none of them."""
        if not self.tried:
            return "No configuration but yours was tried."
        others = "the only other one" if self.tried == 1 else f"any of the {self.tried} others"
        if not self.has_own:
            return f"Neither your configuration nor {others} could be measured."
        return f"None of the {self.tried} others could be measured." if self.tried > 1 else ONE_UNMEASURED

    @property
    def reason(self) -> str:
        """The most frequent reason with its remedy. Empty if all were measured."""
        if not self.failed:
            return ""
        groups: dict[tuple[Outcome, str], list[TrialResult]] = {}
        for result in self.failed:
            groups.setdefault((result.outcome, cause_of(without_log(result.reason))), []).append(result)
        alike = max(groups.values(), key=len)
        reason = as_sentence(without_log(alike[0].reason)) or f"Its outcome is {alike[0].outcome.value}."
        count = "" if len(self.failed) == 1 else f"{len(alike)} of {len(self.failed)} ended like this one: "
        count = "All ended like this one: " if 1 < len(self.failed) == len(alike) else count
        return f"{count}{reason} {self._remedy(alike[0])}".rstrip()

    @property
    def note(self) -> str:
        """The sentence beside an answer. Empty if all were measured."""
        if not self.failed:
            return ""
        return f"{len(self.failed)} of the {self.tried} other configurations could not be measured. {self.reason}"

    def _remedy(self, result: TrialResult) -> str:
        if result.from_outside:
            return _KILLED if "SIGKILL" in result.reason else ""
        if result.outcome in _REMEDIES:
            return _REMEDIES[result.outcome]
        is_refused = result.outcome in (Outcome.CRASHED, Outcome.INVALID)
        if not is_refused or not self.has_own or "--map" in result.reason:
            return ""
        return self.repeated or _REFUSED


def others_of(
    state: StudyState, metric: str, base_config: Mapping[str, Any], arguments: Sequence[str], mapped: Mapping[str, str]
) -> Others:
    """The other configurations that the search has tried. `mapped` has the place in the command of each key."""
    own = state.submitted
    ends: dict[str, list[TrialResult]] = {}
    for result in state.of_purpose(Purpose.SEARCH):
        if result.outcome is not Outcome.CANCELLED and (own is None or result.config_hash != own.config_hash):
            ends.setdefault(result.config_hash, []).append(result)
    failed = tuple(each[-1] for each in ends.values() if not any(_is_measured(result, metric) for result in each))
    candidates = [state.candidates[result.number] for result in failed]
    return Others(
        tried=len(ends),
        failed=failed,
        has_own=own is not None and _is_measured(own, metric),
        repeated=_repeated(candidates, base_config, arguments, mapped),
    )


def _is_measured(result: TrialResult, metric: str) -> bool:
    return is_good(result, metric) or result.outcome is Outcome.TOO_SLOW


def _repeated(
    failed: Sequence[Candidate], base_config: Mapping[str, Any], arguments: Sequence[str], mapped: Mapping[str, str]
) -> str:
    configs = [candidate.complete(base_config) for candidate in failed]
    found: dict[str, TypedNumber] = {}
    for key, name in _REPEATED.items():
        own = get_knob(base_config, key, 0 if key == STAGE else None)
        if key in mapped or all(get_knob(config, key, own) == own for config in configs):
            continue
        for typed in numbers_in_words(arguments):
            if typed.value == str(own) and name.search(typed.name):
                found.setdefault(key, typed)
    if not found:
        return ""
    shown = " and ".join(each.shown for each in found.values())
    flags = " ".join(f"--map {key}={each.target}" for key, each in found.items())
    return f"The command has {shown} beside the configuration. Let each trial set that too: {flags}."
