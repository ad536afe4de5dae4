"""Confirmation: the best few and the user's configuration are measured again until their intervals separate. Pure.

The best of many readings is the luckiest one, so the promised gain is measured again. Each contender is measured once a
round, alone and in fresh processes, in another order each round. After some rounds (`_LOOKS`) the intervals are looked
at. The confirmation ends when the best candidate has separated from the user's configuration, when it surely brings
less than 2 %, when the rounds that are left would hardly tell, or when they are over. They may cost half of the
search's time, or a minute for up to 8 rounds, with at least `_LEAST_ROUNDS` and at most `MOST_ROUNDS` rounds.

Two equal contenders may be called different in at most 5 of 100 confirmations. So the looks and the candidates share
the error of the intervals (Bonferroni). The look after `_LEAST_ROUNDS` has little of it: three rounds are enough only
for a gain that is far beyond the noise.

Everything is compared by the clock, because that is what a training costs. On a shared machine the clock varies much,
and the interval is as wide. If the rounds do not tell, the finding has how many more probably would.

A configuration that ran in the search may run out of memory in another process. A CPU's resident memory varies by some
10 % from process to process. If a heat has lost all its candidates that way, the next heat prefers those that filled
clearly less of their memory.
"""

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from zerotune.trial_lib.deepspeed_config.overrides import adds_up_in_32_bits
from zerotune.trial_lib.launch.device_watch import device_notes
from zerotune.trial_lib.messages.measurement import TRACE, AcrossRows
from zerotune.trial_lib.messages.statistics import Ratio, chance_to_tell, mean_rate, ratios_to, rounds_to_tell
from zerotune.trial_lib.messages.turned import beside_kind
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.result import SEARCH_METRICS, Outcome, TrialResult
from zerotune.trial_lib.records.switches import other_switches
from zerotune.trial_lib.records.units import name_of
from zerotune.trial_lib.study.data_window import DataWindow
from zerotune.trial_lib.study.finding import (
    BEST_WITH_DEEPSPEED,
    MOST_ROUNDS,
    ConfirmationVerdict,
    Confirmed,
    Estimate,
    Finding,
    PlainTraining,
    learning_rate_advice,
    micro_batch_advice,
)
from zerotune.trial_lib.study.loss_agreement import LossAgreement, LossCourse, compare, cuts_alike, global_batch
from zerotune.trial_lib.study.weight_changes import FirstUpdates, roundoff

_NO_FAILURE = (Outcome.COMPLETED, Outcome.TOO_SLOW, Outcome.CANCELLED)


@dataclass(frozen=True)
class Contender:
    """A configuration to measure again."""

    candidate: Candidate  # the configuration, with its slots
    config: Mapping[str, Any]  # the complete DeepSpeed configuration, with the program's switches
    reading: TrialResult  # its trial in the search, or the trial of the user's configuration
    expected: float | None = None  # the metric that the search expects, in its unit; None if it expects the reading
    # As `ProbeSettings` has it, for the one trial of the user's configuration that rounds otherwise
    rounding: float | None = None

    @property
    def key(self) -> str:
        return _key(self.reading.config_hash, self.rounding)

    def worth(self, metric: str) -> float:
        """The expected metric, in its unit."""
        return self.reading.metrics[metric] if self.expected is None else self.expected


def _key(config_hash: str, rounding: float | None) -> str:
    # There is one trial in other rounding.
    return config_hash if rounding is None else "in other rounding"


def ranking(readings: Sequence[Contender], own: Contender | None, metric: str) -> list[Contender]:
    """The configurations that completed in the search, each once, best first, without the user's.

    Configurations that failed in another trial come last.
    """
    sign = 1.0 if SEARCH_METRICS[metric].smaller_is_better else -1.0
    doubtful = {one.key for one in readings if not one.reading.from_outside and one.reading.outcome not in _NO_FAILURE}

    def order(one: Contender) -> tuple[bool, float, int]:
        return one.key in doubtful, sign * one.worth(metric), one.reading.number

    by_key: dict[str, Contender] = {}
    for contender in sorted((one for one in readings if is_good(one.reading, metric)), key=order):
        by_key.setdefault(contender.key, contender)
    if own is not None:
        by_key.pop(own.key, None)
    return list(by_key.values())


def is_good(result: TrialResult, metric: str) -> bool:
    """Whether a trial has measured the metric."""
    return result.outcome is Outcome.COMPLETED and result.metrics.get(metric, 0.0) > 0.0


def speeds_of_rounds(results: Mapping[str, Sequence[TrialResult]], metric: str) -> list[dict[str, float]]:
    power = -1 if SEARCH_METRICS[metric].smaller_is_better else 1
    rounds = zip(*results.values(), strict=True)
    return [{key: each.metrics[metric] ** power for key, each in zip(results, of, strict=True)} for of in rounds]


# The confirmation

ERROR = 0.05
_NEAR = 0.05  # a candidate that is this share below the best may be as good
_MOST_CANDIDATES = 3
_LEAST_ROUNDS, _ROUNDS_OF_THE_FLOOR = 3, 8
_FEWEST_ROUNDS = 2  # that give an interval, if a study has no time for more
_LOOKS = (4, 8, 16, 24)  # a fourth round halves the intervals of three: Student's t has few degrees of freedom
SHARE_OF_SEARCH = 0.5
FLOOR_S = 60.0  # half of a search of seconds would be too short to separate anything
# A half interval of this size, or of this share of the gain, is enough. More rounds must fit the share.
_PRECISE, _PRECISE_FOR_THE_GAIN = 0.05, 0.25
_WORTH = 1.02  # a smaller gain is not looked for any longer
_OF_FIRST_LOOK = 0.1  # of the error, if others follow
_HOPELESS = 0.1  # a smaller chance that the rounds that are left tell is not worth them
_MOST_HEATS = 3
_CLEARLY_LESS = 0.85  # of the memory share of a candidate that ran out of memory the next time
_RATES = ("throughput", "FLOPS_per_gpu", "mfu", "tokens_per_second")
_WINS = ("faster", "uncompared")
# Outcomes that follow from the configuration, and not from chance.
_NO_CHANCE = (Outcome.OUT_OF_MEMORY, Outcome.OUT_OF_DATA, Outcome.INVALID)


class Confirmation:
    """Which configuration is measured next, and the finding.

    It depends only on its arguments and on the results that `tell` gets. A resumed study gives it the same ones.
    `own` is the user's configuration, None if it did not complete; `submitted` is that one, completed or not.
    """

    def __init__(
        self,
        own: Contender | None,
        ranked: Sequence[Contender],
        metric: str,
        search_seconds: float,
        submitted: Candidate | None = None,
        formats: Collection[str] = (),
        free: Collection[str] = (),
        data_vary: bool = False,
        across: AcrossRows | None = None,
        beside: Callable[[Contender, Contender | None], list[Contender]] = lambda leader, own: [],
    ) -> None:
        self._own = own
        self._submitted = submitted if own is None else own.candidate
        self._left = list(ranked)
        self._metric = metric
        self._formats = formats
        self._free = tuple(free)
        self.across = across  # what the profile has found
        self.share_s = SHARE_OF_SEARCH * search_seconds  # the seconds that its rounds may take, but for a floor
        self._tried: list[Contender] = []
        self._results: dict[str, list[TrialResult]] = {}
        self._out: dict[str, tuple[ConfirmationVerdict, str]] = {}
        self._lost: set[str] = set()  # killed from outside, or failed by chance, once
        self._disturbed: set[str] = set()  # measured again because other processes used the devices
        # The user's configuration in one round, and the same there in other rounding
        self._again: tuple[TrialResult, TrialResult] | None = None
        self._again_cut: Candidate | None = None
        self._too_full = math.inf  # the least memory share of a candidate that then ran out
        self._heats = 0
        self.begun = -1  # the round that is being measured, from 0 on, over all heats
        self.data, self._data_vary = DataWindow(), data_vary
        self.later: list[TrialResult] = []  # the results that it was told after its end
        # The same training without DeepSpeed, given the best candidate and the user's configuration. It is no candidate
        # of this heat, and is measured in its rounds.
        self._beside_of, self._beside = beside, list[Contender]()
        self._round, self._candidates = 0, list[Contender]()
        self._next_heat()

    @property
    def next(self) -> Candidate | None:
        """None when the confirmation is over."""
        return self._queue[0].candidate if self._queue else None

    @property
    def rounding(self) -> float | None:
        """As `ProbeSettings` has it, for the next trial."""
        return self._queue[0].rounding if self._queue else None

    @property
    def traces(self) -> bool:
        """Whether the next trial may be traced: that of a contender, in which DeepSpeed trains."""
        return bool(self._queue) and self._queue[0].rounding is None and self._queue[0] not in self._beside

    @property
    def rounds(self) -> int:
        """The complete rounds of this heat."""
        return self._round

    @property
    def leader(self) -> Contender | None:
        """The candidate of this heat that the search expects most of."""
        return self._candidates[0] if self._candidates else None

    @property
    def has_own(self) -> bool:
        """Whether the user's configuration is measured again as well."""
        return self._own is not None

    def tell(self, result: TrialResult) -> None:
        """A trial that it does not expect, from a record of another version, is ignored."""
        if not self._queue:
            self.later.append(result)
        key = _key(result.config_hash, result.rounding)
        contender = next((one for one in self._queue if one.key == key), None)
        if contender is None:
            return
        self._queue.remove(contender)
        if contender.key not in self._lost and (result.from_outside or self._is_bad_luck(result)):
            # A killed trial says nothing about its configuration. A second kill rules it out.
            self._lost.add(contender.key)
            self._queue.insert(0, contender)
            return
        if result.had_company and contender.key not in self._disturbed:
            # Processes that stay will be there the next time as well, for all contenders alike.
            self._disturbed.add(contender.key)
            self._queue.insert(0, contender)
            return
        own = self._living_own
        if contender.rounding is not None and own is not None:
            if not self._is_measured(result) and contender.candidate != own.candidate:
                # The user's other settings may leave no room for that micro-batch. A mean over tokens changes more from
                # half of yours than to any larger one.
                half = _cut_in_half(own.candidate)
                next_one = own.candidate if contender.candidate == half else half
                self._queue.append(replace(contender, candidate=next_one))
                return
            self._again, self._again_cut = (self._results[own.key][-1], result), contender.candidate
        self._results.setdefault(contender.key, []).append(result)
        if not self._is_measured(result):
            self._out[contender.key] = ("failed", result.reason or f"Its trial {result.number:04d} measured nothing.")
        if result.outcome is Outcome.OUT_OF_MEMORY and contender not in self._beside:
            self._too_full = min(self._too_full, _filled(contender.reading))
        if not self._queue:
            self._end_round()

    def _is_bad_luck(self, result: TrialResult) -> bool:
        # Whether a trial may have failed by chance. Its configuration has run in the search.
        return result.outcome not in _NO_CHANCE and not self._is_measured(result)

    def end_now(self) -> None:
        """Without time for more, ends it with its complete rounds if they are enough for (wide) intervals."""
        # A round is complete without the trial in other rounding.
        is_complete = all(one.rounding is not None for one in self._queue)
        if self.next is None or self._round + is_complete < _FEWEST_ROUNDS:
            return
        for contender in () if is_complete else self._measured_now:
            if contender not in self._queue:
                self._results[contender.key].pop()
        self._round += is_complete
        self._queue.clear()
        self._leave_out_other_training()

    # -- rounds --------------------------------------------------------------------------------------------------

    def _next_heat(self) -> None:
        # Chooses the contenders of the next heat: the next best, if none of the last heat is left. After the last one
        # its rounds still compare the training without DeepSpeed with the user's configuration.
        self._queue: list[Contender] = []
        if not self._left or self._heats == _MOST_HEATS:
            return
        self._heats += 1
        self._round = 0
        # A candidate that was short of memory all the time is a contender only if there is no other.
        left = [one for one in self._left if not one.reading.memory.was_short] or self._left
        emptier = [one for one in left if _filled(one.reading) <= _CLEARLY_LESS * self._too_full]
        ranked = self._cut_as_own(emptier or left)
        best = ranked[0].worth(self._metric)
        near = [one for one in ranked[:_MOST_CANDIDATES] if abs(one.worth(self._metric) - best) <= _NEAR * best]
        while len(near) > 1 and _LOOKS[0] * self._cost(near) > self.share_s:
            near.pop()
        self._candidates, self._beside = near, self._beside_of(near[0], self._own)
        self._tried += near
        chosen = {one.key for one in near}
        self._left = [one for one in self._left if one.key not in chosen]
        members = [(one.candidate, one.reading) for one in self._with_own(near)]
        self.data = DataWindow.of(members, self._data_vary, max(self.share_s, FLOOR_S) / _LOOKS[0])
        cost = max(self._cost(near), 1e-9)
        of_floor = min(int(FLOOR_S / cost), _ROUNDS_OF_THE_FLOOR)
        rounds = min(max(int(self.share_s / cost), of_floor, _LEAST_ROUNDS), MOST_ROUNDS)
        self._looks = tuple(sorted({_LEAST_ROUNDS, *(look for look in _LOOKS if look < rounds), rounds}))
        self._begin_round()

    def _cut_as_own(self, left: list[Contender]) -> list[Contender]:
        # The contenders that cut the batch as the user does, if another cut trained differently. If a contender with
        # other switches of the program trained differently, those with the same are left out. The loss may depend on
        # the micro-batch, for example if it compares the samples of a micro-batch with each other.
        own = self._own
        apart = [one for one in self._tried if self._out.get(one.key, ("",))[0] == "disagrees"]
        if own is None:
            return left
        switched = [changed for one in apart if (changed := _switched(one, own))]
        left = [one for one in left if not any(changed <= _switched(one, own) for changed in switched)] or left
        if all(cuts_alike(one.candidate, own.candidate) or _switched(one, own) for one in apart):
            return left
        return [one for one in left if cuts_alike(one.candidate, own.candidate)] or left

    def _cost(self, candidates: Sequence[Contender]) -> float:
        # The seconds of a round. A swept reading did not pay for its start, and the user's reading did.
        measured = [*self._with_own(candidates), *self._beside]
        seconds = [_seconds(one.reading) + self.data.more_seconds(one.reading) for one in measured]
        own = _seconds(self._own.reading) if self._own is not None else 0.0
        return sum(max(own, each) for each in seconds)

    def _begin_round(self) -> None:
        self.begun += 1
        members = self._measured_now
        first = self._round % len(members)
        self._queue = members[first:] + members[:first]
        own = self._living_own
        if self._round == 1 and own is not None and self._again is None and self._compares_weights(own):
            others = [] if self._is_row_wise else [one.candidate for one in self._live]
            candidate = cut_otherwise(own.candidate, others)
            self._queue.append(replace(own, candidate=candidate, rounding=roundoff(own.config, self._formats)))

    @property
    def _is_row_wise(self) -> bool:
        # Where lengths differ, one micro-batch may have texts of one length, and show no mean over tokens.
        across = None if self._data_vary else self.across
        return across is not None and not (across.kind or across.undecided or across.is_outside)

    def _end_round(self) -> None:
        self._round += 1
        if self._round in self._looks:
            self._leave_out_other_training()
        if not self._live:
            self._next_heat()
        elif self._round not in self._looks or not self._is_settled():
            self._begin_round()

    def _leave_out_other_training(self) -> None:
        for contender in self._live:
            agreement = self._agreement(contender)
            if not agreement.agrees:
                rounding = "" if self._own is None else rounding_advice(self._own, contender)
                self._out[contender.key] = ("disagrees", f"{agreement.sentence}{rounding}")

    def _compares_weights(self, own: Contender) -> bool:
        # Whether a candidate that keeps the batch and the user's configuration have shown how their weights change.
        alike = [one for one in self._live if global_batch(one.candidate) == global_batch(own.candidate)]
        return all(any(self._results[one.key][-1].weight_change for one in contenders) for contenders in (alike, [own]))

    def _is_settled(self) -> bool:
        if self._round == self._looks[-1]:
            return True
        is_first = self._round == _LEAST_ROUNDS
        if self._living_own is None:
            return len(self._live) == 1 and not is_first
        best = max(self._gains().values(), key=lambda gain: gain.value)
        next_look = next(look for look in self._looks if look > self._round)
        if best.low > 1.0:
            enough = max(_PRECISE, _PRECISE_FOR_THE_GAIN * (best.value - 1.0))
            is_dear = next_look * self._cost(self._live) > self.share_s and not is_first
            return best.spread <= enough or is_dear
        if best.high < _WORTH or is_first:
            return best.high < _WORTH
        return chance_to_tell(best, self._round, self._looks[-1], self._error, _WORTH) < _HOPELESS

    @property
    def _error(self) -> float:
        # Of the interval of each candidate of this heat, after these rounds.
        others = len(self._looks) - 1
        of_first = _OF_FIRST_LOOK if others else 1.0
        share = of_first if self._round == _LEAST_ROUNDS else (1.0 - of_first) / max(1, others)
        return share * ERROR / (len(self._candidates) + len(self._beside))

    # -- contenders --------------------------------------------------------------------------------------------

    @property
    def _living_own(self) -> Contender | None:
        return self._own if self._own is not None and self._own.key not in self._out else None

    @property
    def _live(self) -> list[Contender]:
        return [contender for contender in self._candidates if contender.key not in self._out]

    @property
    def _measured_now(self) -> list[Contender]:
        # What a round measures
        return [*self._with_own(self._live), *(one for one in self._beside if one.key not in self._out)]

    def _with_own(self, candidates: Sequence[Contender]) -> list[Contender]:
        return [*candidates] if self._living_own is None else [self._living_own, *candidates]

    # -- measurements ---------------------------------------------------------------------------------------

    def _is_measured(self, result: TrialResult) -> bool:
        return is_good(result, self._metric)

    def gain_of(self, key: str) -> Ratio:
        """The gain of a living candidate over the user's configuration."""
        return self._gains()[key]

    def _gains(self) -> dict[str, Ratio]:
        # By the complete rounds of this heat.
        assert self._living_own is not None
        return self._ratios(self._living_own, self._live)

    def _ratios(self, base: Contender, others: Sequence[Contender]) -> dict[str, Ratio]:
        kept = {one.key: self._results[one.key][-self._round :] for one in (base, *others)}
        return ratios_to(base.key, speeds_of_rounds(kept, self._metric), self._error)

    def _agreement(self, contender: Contender) -> LossAgreement:
        own = self._living_own
        if own is None:
            return LossAgreement(is_compared=False, agrees=True, sentence="")
        return compare(self._course(own), self._course(contender), self._again_for(own, contender))

    def agreement(self, *pair: tuple[Contender, Sequence[TrialResult]]) -> LossAgreement:
        """Whether two configurations train alike, by their results in the same rounds."""
        one, other = (self._course(contender, results) for contender, results in pair)
        return compare(one, other, self._again_for(*(contender for contender, _ in pair)))

    def _again_for(self, one: Contender, other: Contender) -> tuple[TrialResult, TrialResult] | None:
        # None if these two may train otherwise by more than what it shows, because their cuts are further apart.
        if self._again_cut is None or self._own is None or self._is_row_wise:
            return self._again
        reach = cuts_apart(self._again_cut, self._own.candidate)
        return self._again if cuts_apart(one.candidate, other.candidate) <= reach else None

    def _course(self, contender: Contender, measured: Sequence[TrialResult] = ()) -> LossCourse:
        results = measured or self._results[contender.key][-self._round :]
        losses, weights = [each.losses for each in results], [each.initial_weights for each in results]
        skipped = [each.skipped_steps for each in results]
        updates = [FirstUpdates.of(each) for each in results]
        traced = None if self._own is None else self._own.reading.traced
        generates = traced is not None and traced.parts.get("generation", 0.0) > 0.0
        return LossCourse(
            contender.candidate,
            contender.config,
            losses,
            weights,
            self._formats,
            skipped,
            self._free,
            updates,
            generates,
        )

    # -- the end -------------------------------------------------------------------------------------------------

    def finding(self) -> Finding:
        """The finding of the results so far. When `next` is None, it is that of the study."""
        own = self._living_own
        is_compared = own is not None and bool(self._live) and self._round > 0
        gains = self._gains() if is_compared else {}
        confirmed = [(self._confirmed(one, gains.get(one.key)), one) for one in self._tried if self._trials_of(one)]
        confirmed.sort(key=lambda pair: self._rank(pair[0]))
        own_confirmed = None if self._own is None or not self._trials_of(self._own) else self._confirmed(self._own)
        winner, chosen = next((pair for pair in confirmed if pair[0].verdict in _WINS), (None, None))
        if winner is None and own is not None and any(one.verdict != "failed" for one, _ in confirmed):
            winner = own_confirmed
        is_open = bool(gains) and winner is own_confirmed and own_confirmed is not None
        return Finding(
            metric=self._metric,
            quantity=self._metric,
            rounds=self._round,
            **(self._rounds_to_tell(gains) if is_open else {}),
            round_seconds=self._seconds_of_a_round(),
            error=ERROR,
            own=own_confirmed,
            candidates=tuple(one for one, _ in confirmed),
            winner=winner,
            beside=tuple(map(partial(self._beside_the, self._fastest(gains) or chosen or own, winner), self._beside)),
            of_data=self.data.note(self._trials_of(own)[-self._round :]) if own is not None and self._round else "",
            on_devices=tuple(device_notes([result for results in self._results.values() for result in results])),
            advice=""
            if self._submitted is None or chosen is None
            else batch_advice(self._submitted, chosen.candidate, self.across),
        )

    def _rounds_to_tell(self, gains: Mapping[str, Ratio]) -> dict[str, Any]:
        # As `Finding` has them
        best = max(gains.values(), key=lambda gain: gain.value)
        if best.high < _WORTH or self._round < _FEWEST_ROUNDS:
            return {}
        more, noise = rounds_to_tell(best, self._round, self._error, _WORTH, MOST_ROUNDS)
        return {"more_rounds": more} if more else {"varies": best.noise, "varies_at_most": noise}

    def _seconds_of_a_round(self) -> float:
        contenders = self._with_own(self._live)
        return sum(statistics.fmean(map(_seconds, self._trials_of(one) or [one.reading])) for one in contenders)

    def _trials_of(self, contender: Contender) -> list[TrialResult]:
        return self._results.get(contender.key, [])

    def _confirmed(self, contender: Contender, gain: Ratio | None = None) -> Confirmed:
        is_own = contender is self._own
        verdict, reason = self._out.get(contender.key, ("own" if is_own else _verdict(gain), ""))
        agreement = None if is_own or verdict in ("failed", "disagrees") else self._agreement(contender)
        return confirmed_by(self._trials_of(contender), contender.candidate, self._metric, verdict).model_copy(
            update={
                "gain": _estimate(gain),
                "reason": reason if verdict == "failed" else "",
                "losses": agreement.sentence if agreement is not None else reason if verdict == "disagrees" else "",
                "is_compared": agreement is None or agreement.is_compared or not agreement.sentence,
            }
        )

    def _fastest(self, gains: Mapping[str, Ratio]) -> Contender | None:
        # Whether it surely is faster than the user's configuration or only seems to be; None if nothing seems to be
        fastest = max(gains, key=lambda key: gains[key].value, default="")
        return next((one for one in self._live if one.key == fastest and gains[fastest].value > 1.0), None)

    def _beside_the(self, best: Contender | None, winner: Confirmed | None, one: Contender) -> PlainTraining:
        # The training without DeepSpeed, compared with the best configuration with it
        found, gain = self._confirmed(one), None
        name = "" if best is None else name_of(best.candidate)
        is_winner = winner is None or winner.name == name
        than = BEST_WITH_DEEPSPEED if is_winner else f"{name}, which seems the best with DeepSpeed"
        if found.verdict != "failed" and self._round >= _FEWEST_ROUNDS:
            if not self._agreement(one).agrees:
                found = found.model_copy(update={"verdict": "disagrees"})
            if best is not None and best.key not in self._out:
                gain = _estimate(self._ratios(best, [one])[one.key])
        return PlainTraining(kind=beside_kind(one.candidate.switches), measured=found, gain=gain, than=than)

    def _rank(self, confirmed: Confirmed) -> tuple[bool, float]:
        if confirmed.verdict in ("failed", "disagrees"):
            return True, 0.0
        if confirmed.gain is not None:
            return False, -confirmed.gain.value
        sign = 1.0 if SEARCH_METRICS[self._metric].smaller_is_better else -1.0
        return False, sign * confirmed.metrics[self._metric]


def cut_otherwise(own: Candidate, others: Sequence[Candidate]) -> Candidate:
    """The user's configuration with the micro-batch of the candidate that is furthest from it, for the trial in other
    rounding. A mean over tokens weighs them by the micro-batch, and a candidate may differ as much.
    """
    others = [one for one in others if global_batch(one) == global_batch(own)]
    other = max(others, key=lambda one: cuts_apart(one, own), default=own)
    if cuts_alike(other, own):
        return own
    return _cut(own, other.micro_batch_size, other.gradient_accumulation_steps)


def cuts_apart(one: Candidate, other: Candidate) -> float:
    """How far two cuts of a batch are apart, as the variances of a mean over unequal parts of each micro-batch are."""
    return abs(1.0 / one.micro_batch_size - 1.0 / other.micro_batch_size)


def _cut(own: Candidate, size: int, steps: int) -> Candidate:
    # The user's configuration with another cut of the batch. A copy would keep the settings derived from the old one.
    return Candidate.model_validate(
        {**own.model_dump(), "micro_batch_size": size, "gradient_accumulation_steps": steps}
    )


def _cut_in_half(own: Candidate) -> Candidate:
    # With half of its micro-batch or less. The next larger one if there is no such.
    size, samples = own.micro_batch_size, own.micro_batch_size * own.gradient_accumulation_steps
    sizes = [each for each in range(1, samples + 1) if samples % each == 0]
    larger = min((each for each in sizes if each > size), default=size)
    cut = max((each for each in sizes if 2 * each <= size), default=larger)
    return _cut(own, cut, samples // cut)


def rounding_advice(own: Contender, other: Contender) -> str:
    """What sums in bf16 may add to a difference, as a clause; empty if the sums are alike or in 32 bits.

    By default DeepSpeed adds bf16 gradients up in bf16. Without ZeRO it refuses 32 bits (deepspeed/runtime/engine.py
    `_do_optimizer_sanity_check`).
    """
    steps = [one.candidate.gradient_accumulation_steps for one in (own, other)]
    section = other.config.get("bf16", other.config.get("bfloat16"))
    is_bf16 = isinstance(section, Mapping) and section.get("enabled") is True
    if not is_bf16 or adds_up_in_32_bits(other.config) or steps[0] == steps[1]:
        return ""
    return (
        f". Its gradients add up in bf16 over {steps[1]} micro-batches and yours over {steps[0]}, which rounds "
        "otherwise. With ZeRO 1 to 3 data_types.grad_accum_dtype: fp32 avoids that"
    )


def confirmed_by(
    results: Sequence[TrialResult], candidate: Candidate, metric: str, verdict: ConfirmationVerdict
) -> Confirmed:
    """A configuration with what its confirming trials have measured, and without a comparison."""
    measured = [result for result in results if is_good(result, metric)]
    names = measured[0].metrics.keys() if measured else ()
    values = [result.metrics[metric] for result in measured]
    in_order = sorted(measured, key=lambda result: result.metrics[metric])
    are_times = SEARCH_METRICS[metric].smaller_is_better
    return Confirmed(
        name=name_of(candidate),
        trials=tuple(result.number for result in results),
        number=in_order[(len(in_order) - 1) // 2].number if in_order else None,
        metrics={name: _over_rounds(name, [each.metrics for each in measured]) for name in names},
        value=_mean(values, are_times) if len(values) > 1 else None,
        verdict=verdict,
    )


def batch_advice(own: Candidate, chosen: Candidate, across: AcrossRows | None) -> str:
    """What a configuration's other batch may change in the training. Empty if it is the user's."""
    of_rate = learning_rate_advice(global_batch(own), global_batch(chosen))
    of_size = micro_batch_advice(own.micro_batch_size, chosen.micro_batch_size, across)
    return " ".join(filter(None, (of_rate, of_size)))


def _over_rounds(name: str, trials: Sequence[Mapping[str, float]]) -> float:
    # All work over all time, as a training has it.
    values = [metrics[name] for metrics in trials if name in metrics]
    return (statistics.harmonic_mean if name in _RATES and min(values) > 0.0 else statistics.fmean)(values)


def _mean(values: Sequence[float], are_times: bool) -> Estimate:
    mean = mean_rate([1 / value for value in values] if are_times else values, ERROR)
    low, high = (1 / mean.high, 1 / mean.low) if are_times else (mean.low, mean.high)
    return Estimate(value=1 / mean.value if are_times else mean.value, low=low, high=high)


def _estimate(ratio: Ratio | None) -> Estimate | None:
    return None if ratio is None else Estimate(value=ratio.value, low=ratio.low, high=ratio.high)


def _verdict(gain: Ratio | None) -> ConfirmationVerdict:
    if gain is None:
        return "uncompared"
    if gain.low > 1.0:
        return "faster"
    return "slower" if gain.high < 1.0 else "equal"


def _seconds(reading: TrialResult) -> float:
    # The seconds of a trial without its trace, which only the first trial of a configuration has.
    return sum(seconds for phase, seconds in reading.phases.items() if phase != TRACE)


def _filled(reading: TrialResult) -> float:
    # The share that the steps took of the memory left by initialisation; infinite if it is not known.
    memory = reading.memory
    ranks = zip(memory.above_initialize, memory.available, strict=False)
    return max((above / left if left > 0 else math.inf for above, left in ranks), default=math.inf)


def _switched(one: Contender, own: Contender) -> frozenset[tuple[str, str]]:
    return frozenset(other_switches(one.config, own.config))
