"""Reduction: the winner's changes that its gain does not need are dropped, and the others are weighed. Pure.

The winner and the same configuration without some of its changes are measured in further rounds of fresh processes. A
change is dropped if the interval of the speed without it, beside the whole winner's, lies above 1 - m: m is half of the
95 % interval that the confirmation's rounds alone give the gain, between `MARGINS`. So what is left still has a gain
within the interval that was confirmed, and the losses of several changes do not add up.

Rounds cost as much as those of the confirmation, so few are run:

* A change that the search has seen to be worth more than the margin, far beyond its noise, stays without a round.
* Changes that the search's model thinks worth less than the margin each are dropped together, in a heat of their own.
  If the gain does not hold, each half of them is dropped, or each alone if they are few. So are the others.
* The confirmation's rounds have shown the noise. So a heat has as many rounds as probably tell that a change is worth
  nothing, and none if even those that there is time for hardly would. What the noise was counts in its intervals.
* A heat ends before its last round for a variant that would hardly hold. Such an end can keep a change and not drop
  one.

The intervals share the error of all heats (Bonferroni), so at most one study in twenty drops anything worth more than
the margin (`benchmarks/confirm_aa/reduction.py` counts how often).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, log, sqrt
from statistics import NormalDist, fmean
from typing import Any, Literal

from zerotune.trial_lib.messages.statistics import SURE, Ratio, ratios_to, t_quantile
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.records.units import duration, percent
from zerotune.trial_lib.search.arms import surroundings_of
from zerotune.trial_lib.search.changes import Changes
from zerotune.trial_lib.study.confirmation import (
    ERROR,
    FLOOR_S,
    SHARE_OF_SEARCH,
    Confirmation,
    Contender,
    batch_advice,
    confirmed_by,
    is_good,
    speeds_of_rounds,
)
from zerotune.trial_lib.study.finding import Estimate, Finding, Worth
from zerotune.trial_lib.study.history import StudyState
from zerotune.trial_lib.study.setup import StudySetup

# A change worth less is not worth having, as in the confirmation. One worth more is kept, however wide the interval is.
MARGINS = (0.02, 0.05)
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 24  # of a heat, as of a confirmation
_HOPELESS = 0.2  # a smaller chance that a heat shows that a change is worth nothing is not worth its rounds
_NO_CHANCE = 0.1  # a change whose drop has a smaller one stays
_FEW = 3  # changes that are dropped one by one, and not by halves
FAR = 3.0  # standard deviations of what the search expects
# Of two-sided intervals in each heat. Together they miss in a tenth (`OF_WORTHS`), and in half of that at the end that
# drops a change.
_ERRORS = (ERROR, ERROR / 2, ERROR / 2)
_SHARE, _FLOOR = 0.5, 18  # of the seconds that the confirmation may take; so many trials in any case


@dataclass(frozen=True)
class Variant:
    """The winner without some of its changes."""

    contender: Contender
    dropped: frozenset[str]  # the paths of these changes


@dataclass(frozen=True)
class _Measured:
    """A variant's speed as a share of the whole winner's, and whether the gain holds."""

    variant: Variant
    ratio: Ratio | None  # None if it failed
    holds: bool
    reason: str = ""  # why it does not hold, if the speed is not the reason


def longest_confirmation_s(search_seconds: float) -> float:
    """The seconds that a confirmation may take with the weighing of its winner's changes, but for the least rounds."""
    return (1.0 + _SHARE) * max(SHARE_OF_SEARCH * search_seconds, FLOOR_S)


class Reduction:
    """Which configuration is measured next, and what is left of the winner.

    It depends only on its arguments and on the results that `tell` gets. A resumed study gives it the same ones.

    Args:
        confirmation: the confirmation, which has found the winner.
        whole: the winner.
        gain: its confirmed gain.
        changes: what it changes in the user's configuration.
        base_config: the user's configuration.
        apart: the logarithm of the expected cost of one candidate above another, and its standard deviation, by the
            search's model. None if it has none.
        trial_s: what a trial of these takes.
    """

    def __init__(
        self,
        confirmation: Confirmation,
        whole: Contender,
        gain: Ratio,
        changes: Changes,
        base_config: Mapping[str, Any],
        apart: Callable[[Candidate, Candidate], tuple[float, float] | None],
        metric: str,
        trial_s: float,
    ) -> None:
        self._confirmation, self._whole, self._gain, self._metric = confirmation, whole, gain, metric
        self._variants_of, self._base_config = changes, base_config
        self._changes = {change.path: change for change in changes.all}
        self._trial_s = max(trial_s, 1e-9)
        self._left_s = max(_SHARE * confirmation.share_s, _FLOOR * self._trial_s)
        half = _reach(ERROR, gain.freedom) * gain.noise / sqrt(confirmation.rounds)
        self.margin = min(max(1.0 - exp(-half), MARGINS[0]), MARGINS[1])
        self._bound = -log(1.0 - self.margin)
        self._expected = {path: self._expects(path, apart) for path in self._changes}
        self._measured: dict[frozenset[str], _Measured] = {}
        self._results: dict[str, list[TrialResult]] = {}  # of all heats, by contender
        self._repeated: set[str] = set()  # killed from outside, failed by chance, or disturbed, once
        self.begun = confirmation.begun  # the round that is being measured, from 0 on, with those of the confirmation
        self.data = confirmation.data
        self._heat = 0
        self._begin_heat()

    @property
    def next(self) -> Candidate | None:
        """None when the reduction is over."""
        return self._queue[0].candidate if self._queue else None

    # As `Confirmation` has them. No trial of these rounds in other ways, and the whole winner was traced.
    rounding, traces = None, False

    @property
    def _left(self) -> _Measured | None:
        # What is left of the winner, if less than all of it.
        return max((each for each in self._measured.values() if each.holds), key=_fewest, default=None)

    # -- what is tried -------------------------------------------------------------------------------------------

    def _expects(
        self, path: str, apart: Callable[[Candidate, Candidate], tuple[float, float] | None]
    ) -> tuple[float, float]:
        # What the search expects a change to be worth, as a logarithm, and the standard deviation of that. A method
        # without a model expects nothing of fine knobs.
        single = self._without([path])
        expected = None if single is None else apart(single.contender.candidate, self._whole.candidate)
        return expected or (0.0 if self._changes[path].is_fine else inf, inf)

    def _is_seen(self, path: str) -> bool:
        # Whether the search has seen that a change is worth more than the margin.
        mean, deviation = self._expected[path]
        return deviation < inf and mean - FAR * deviation > self._bound

    def _without(self, paths: Collection[str]) -> Variant | None:
        candidate = self._variants_of.without([self._changes[path] for path in paths])
        if candidate is None:
            return None
        config = candidate.complete(self._base_config)
        reading = replace(self._whole.reading, config_hash=candidate.config_hash(self._base_config))
        dropped = frozenset(self._changes) - self._variants_of.left_in(candidate)
        return Variant(Contender(candidate, config, reading), dropped)

    def _proposals(self) -> list[Variant]:
        # The variants that are worth a trial now, the cheapest first. Without all its changes the winner is the user's
        # configuration, which was measured.
        worths = {path: self._expected[path][0] for path in self._changes if not self._is_seen(path)}
        in_order = sorted(worths, key=worths.__getitem__)
        little = [path for path in in_order if worths[path] < self._bound]
        little = little if len(little) < len(self._changes) else []
        held = [each.variant.dropped for each in self._measured.values() if each.holds]
        parts = [] if any(set(little) <= each for each in held) else _parts(little)
        alone = [[path] for path in in_order if path not in little]
        for sets in ([little], [*parts, *alone], [frozenset[str]().union(*held)]):
            found: dict[frozenset[str], Variant] = {}
            for paths in filter(None, sets):
                variant = self._without(paths)
                if variant is not None and len(variant.dropped) < len(self._changes):
                    found.setdefault(variant.dropped, variant)
            if new := [variant for dropped, variant in found.items() if dropped not in self._measured]:
                return new
        return []

    def _begin_heat(self) -> None:
        self._queue: list[Contender] = []
        self._round = self._rounds = 0
        self._variants: list[Variant] = []
        self._unfinished = ""  # why not everything was tried. Empty if it was.
        proposals = self._proposals() if len(self._changes) > 1 else []
        most = len(proposals) if self._heat < len(_ERRORS) else 0
        number = next((number for number in range(most, 0, -1) if self._rounds_of(number)), 0)
        if number < len(proposals):
            each, left = (duration(max(1.0, seconds)) for seconds in (self._trial_s, self._left_s))
            varies = percent(self._gain.noise / sqrt(2.0))
            self._unfinished = f"{left} were left for it, a trial takes {each}, and its reading varies by {varies}"
        if proposals and not most:
            self._unfinished = f"the {len(_ERRORS)} times that something may be left out are over"
        self._variants = proposals[:number]
        if self._variants:
            self._rounds, self._error = self._rounds_of(number), _ERRORS[self._heat] / number
            self._heat += 1
            self._begin_round()

    def _rounds_of(self, variants: int) -> int:
        # The rounds of a heat that probably show of a change that is worth nothing that the gain holds without it. If
        # there is no time for those, as many as there is time for; 0 if they would hardly show it.
        most = min(int(self._left_s / (self._trial_s * (1 + variants))), _MOST_ROUNDS)
        noise = max(self._gain.noise, 1e-9)
        error = _ERRORS[self._heat] / variants

        def distance(rounds: int) -> float:
            return self._bound * sqrt(rounds) / noise - _reach(error, self._gain.freedom + rounds - 1)

        enough = next((rounds for rounds in range(_LEAST_ROUNDS, most + 1) if distance(rounds) > SURE), most)
        return enough if enough >= _LEAST_ROUNDS and NormalDist().cdf(distance(enough)) > _HOPELESS else 0

    # -- rounds --------------------------------------------------------------------------------------------------

    def _begin_round(self) -> None:
        self.begun += 1
        members = [self._whole, *(each.contender for each in self._variants)]
        first = self._round % len(members)
        self._queue = members[first:] + members[:first]

    def tell(self, result: TrialResult) -> None:
        """A trial that it does not expect, from a record of another version, is ignored."""
        contender = next((one for one in self._queue if one.key == result.config_hash), None)
        if contender is None or result.rounding is not None:
            return
        self._left_s -= sum(result.phases.values())
        no_chance = result.outcome in (Outcome.OUT_OF_MEMORY, Outcome.OUT_OF_DATA)
        is_odd = result.from_outside or result.had_company or not (is_good(result, self._metric) or no_chance)
        if is_odd and contender.key not in self._repeated:
            self._repeated.add(contender.key)
            return
        self._queue.remove(contender)
        self._results.setdefault(contender.key, []).append(result)
        if not is_good(result, self._metric):
            self._lose(contender, result)
        if not self._queue and self._variants:
            self._end_round()

    def _lose(self, contender: Contender, result: TrialResult) -> None:
        reason = result.reason or f"Its trial {result.number:04d} measured nothing."
        if contender is self._whole:
            self._queue, self._variants = [], []
            self._unfinished = f"the winner failed again: {reason}"
            return
        lost = next(each for each in self._variants if each.contender is contender)
        self._variants.remove(lost)
        self._measured[lost.dropped] = _Measured(lost, None, holds=False, reason=reason)
        if not self._variants:
            self._queue = []
            self._begin_heat()

    def _end_round(self) -> None:
        self._round += 1
        if self._round > 1:
            is_late = self._round >= _LEAST_ROUNDS and self._trial_s * (1 + len(self._variants)) > self._left_s
            self._look(is_last=is_late or self._round == self._rounds)
        if self._variants:
            self._begin_round()
        else:
            self._begin_heat()

    def end_now(self, why: str) -> None:
        """Ends it with the complete rounds of this heat."""
        if self.next is None:
            return
        self._unfinished = why
        members = [self._whole, *(each.contender for each in self._variants)]
        for contender in members:
            if contender not in self._queue:
                self._results[contender.key].pop()
        self._queue = []
        if self._round >= _LEAST_ROUNDS:
            self._look(is_last=True)
        self._variants = []

    def _look(self, is_last: bool) -> None:
        members = [self._whole, *(each.contender for each in self._variants)]
        kept = {one.key: self._results[one.key][-self._round :] for one in members}
        rounds = speeds_of_rounds(kept, self._metric)
        ratios = ratios_to(self._whole.key, rounds, self._error, before=self._gain)
        for variant in list(self._variants):
            ratio = ratios[variant.contender.key]
            if not is_last and not self._is_hopeless(ratio):
                continue
            self._variants.remove(variant)
            fast = ratio.low > 1.0 - self.margin and chained(self._gain, ratio).low > 1.0
            reason = self._apart(variant.contender, kept) if fast else ""
            self._measured[variant.dropped] = _Measured(variant, ratio, fast and not reason, reason)

    def _is_hopeless(self, ratio: Ratio) -> bool:
        # Whether the gain would hardly hold at the end of this heat, if things are as its rounds have shown so far.
        half = _reach(self._error, ratio.freedom + self._rounds - self._round) * ratio.noise / sqrt(self._rounds)
        between = ratio.noise * sqrt(1 / self._round - 1 / self._rounds)
        return log(ratio.value) + self._bound - half < NormalDist().inv_cdf(_NO_CHANCE) * between

    def _apart(self, reduced: Contender, results: Mapping[str, Sequence[TrialResult]]) -> str:
        # Why it does not train as the winner does, which trains as the user's configuration. Empty if it does.
        pair = ((one, results[one.key]) for one in (self._whole, reduced))
        agreement = self._confirmation.agreement(*pair)
        return "" if agreement.agrees else agreement.sentence

    # -- the end -------------------------------------------------------------------------------------------------

    def applied(self, finding: Finding, own: Candidate) -> Finding:
        """A confirmation's finding with what is left of its winner as the winner. `own` is the user's configuration."""
        winner, left = finding.winner, self._left
        assert winner is not None
        results = [result for each in self._results.values() for result in each]
        found: dict[str, Any] = {"worths": self._worths(), "unweighed": self._unfinished, "weighed_in": len(results)}
        if left is not None and left.ratio is not None:
            contender = left.variant.contender
            reduced = confirmed_by(self._results[contender.key], contender.candidate, self._metric, "faster")
            told = {"gain": chained(self._gain, left.ratio), "losses": winner.losses, "is_compared": winner.is_compared}
            reduced = reduced.model_copy(update=told)
            whole = winner.model_copy(update={"name": f"{winner.name}, with {self._names(left.variant.dropped)}"})
            others = tuple(one for one in finding.candidates if one != winner)
            found |= {"winner": reduced, "candidates": (reduced, whole, *others)}
            found["advice"] = batch_advice(own, contender.candidate, self._confirmation.across)
        return finding.model_copy(update=found)

    def _worths(self) -> tuple[Worth, ...]:
        left = self._left
        dropped = frozenset[str]() if left is None else left.variant.dropped
        kept = [path for path in self._changes if path not in dropped]
        found = dict.fromkeys(self._kept(path, dropped, alone=len(kept) == 1) for path in kept)
        if left is not None:
            found[self._worth(left, "dropped")] = None
        return tuple(sorted(found, key=lambda worth: ("kept", "untried", "dropped").index(worth.verdict)))

    def _kept(self, path: str, dropped: frozenset[str], alone: bool) -> Worth:
        left = self._left
        if alone:
            # Without it nothing is left but the user's configuration.
            gain = self._gain if left is None or left.ratio is None else chained(self._gain, left.ratio)
            without = Estimate(value=1.0 / gain.value, low=1.0 / gain.high, high=1.0 / gain.low)
            one = Estimate(value=1.0, low=1.0, high=1.0)
            return Worth(knobs=(self._changes[path].knob,), verdict="kept", without=without, gain=one)
        if self._is_seen(path):
            mean, deviation = self._expected[path]
            low, value, high = (exp(-mean + width * deviation) for width in (-FAR, 0.0, FAR))
            seen = Estimate(value=value, low=low, high=high)
            return Worth(knobs=(self._changes[path].knob,), verdict="kept", without=seen, of_search=True)
        measured = [each for each in self._measured.values() if path in each.variant.dropped]
        found = min(measured, key=lambda each: len(each.variant.dropped), default=None)
        if found is None or found.variant.dropped & dropped:
            return Worth(knobs=(self._changes[path].knob,), verdict="untried")
        return self._worth(found, "kept")

    def _worth(self, measured: _Measured, verdict: Literal["kept", "dropped"]) -> Worth:
        ratio = measured.ratio
        without = None if ratio is None else Estimate(value=ratio.value, low=ratio.low, high=ratio.high)
        knobs = tuple(change.knob for path, change in self._changes.items() if path in measured.variant.dropped)
        gain = None if ratio is None else chained(self._gain, ratio)
        return Worth(knobs=knobs, verdict=verdict, without=without, gain=gain, reason=measured.reason)

    def _names(self, paths: Collection[str]) -> str:
        return " and ".join(change.knob for path, change in self._changes.items() if path in paths)


def _parts(paths: Sequence[str]) -> list[Sequence[str]]:
    # Halves, or one by one if they are few.
    size = 1 if len(paths) <= _FEW else (len(paths) + 1) // 2
    return [paths[start : start + size] for start in range(0, len(paths), size)]


def _reach(error: float, freedom: int) -> float:
    return t_quantile(1.0 - error / 2.0, freedom)


def chained(gain: Ratio, ratio: Ratio) -> Estimate:
    """The gain of a variant over the user's configuration, by its ratio to the winner in other rounds.

    The half widths add up as squares, because the two readings have nothing in common. With Student's quantiles such an
    interval contains the true value at least as often as each of the two (Banerjee, Sankhya 22 (1960) 359).
    """
    value = gain.value * ratio.value
    down = sqrt(log(gain.value / gain.low) ** 2 + log(ratio.value / ratio.low) ** 2)
    up = sqrt(log(gain.high / gain.value) ** 2 + log(ratio.high / ratio.value) ** 2)
    return Estimate(value=value, low=value * exp(-down), high=value * exp(up))


def _fewest(measured: _Measured) -> tuple[int, float]:
    return len(measured.variant.dropped), 0.0 if measured.ratio is None else measured.ratio.value


def reduction_of(
    setup: StudySetup,
    state: StudyState,
    base_config: Mapping[str, Any],
    apart: Callable[[Candidate, Candidate], tuple[float, float] | None],
    confirmation: Confirmation,
    metric: str,
) -> Reduction | None:
    """The reduction of a confirmation's winner, as far as it has come. None if the winner is not surely faster."""
    finding = confirmation.finding()
    own, winner, submitted = finding.own, finding.winner, state.submitted
    if own is None or winner is None or winner.gain is None or winner.number is None or submitted is None:
        return None
    profiled = state.profile
    if winner.verdict != "faster" or profiled is None or profiled.profile is None:
        return None
    candidate = state.candidates[winner.number]
    here = surroundings_of(profiled, base_config, setup.slots, setup.device)
    changes = Changes(candidate, state.candidates[submitted.number], here, setup.experiment.requests)
    whole = Contender(candidate, candidate.complete(base_config), state.results[winner.number])
    trial_s = fmean(sum(state.results[number].phases.values()) for number in (*winner.trials, *own.trials))
    gain = confirmation.gain_of(whole.key)
    reduction = Reduction(confirmation, whole, gain, changes, base_config, apart, metric, trial_s)
    for result in confirmation.later:
        reduction.tell(result)
    return reduction
