"""Confirmation: the best few and the user's configuration are measured again until their intervals separate. Pure.

The best of many readings is the luckiest one, so the promised gain is measured again. Each contender is measured once a
round, alone and in fresh processes, in another order each round. After some rounds (`_LOOKS`) the intervals are looked
at. The confirmation ends when the best candidate has separated from the user's configuration, or when the rounds are
over. They may cost half of the search's time (or a minute), with at least `_LEAST_ROUNDS` and at most `_MOST_ROUNDS`
rounds.

Two equal contenders may be called different in at most 5 of 100 confirmations. So the error of the intervals is divided
by the number of looks and of candidates (Bonferroni).

On a CPU `throughput` and `FLOPS_per_gpu` are compared by the processor time of a sample. It varies by 2 to 3 % from
process to process, and the wall clock by 13 % and more. Both are the same while the training computes. If it waits, for
a disk say, the two intervals do not meet. Then the wall clock decides. It also decides if a candidate's data loader has
other workers, because their processor time is not the rank's. A candidate that is no faster by the wall clock is not
chosen either.

A configuration that ran in the search may run out of memory in another process. A CPU's resident memory varies by some
10 % from process to process. If a heat has lost all its candidates that way, the next heat prefers those that filled
clearly less of their memory.
"""

import math
import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from zerotune.trial_lib.device.this_host import kind_of
from zerotune.trial_lib.launch.device_watch import unusual_reasons
from zerotune.trial_lib.messages.measurement import TRACE
from zerotune.trial_lib.messages.statistics import Ratio, geometric_mean, ratios_to
from zerotune.trial_lib.records.candidate import Candidate, FrozenRecord
from zerotune.trial_lib.records.result import SEARCH_METRICS, Outcome, TrialResult, as_sentence, without_log
from zerotune.trial_lib.records.switches import other_switches
from zerotune.trial_lib.records.units import (
    NONE_CONFIRMED,
    NONE_FASTER,
    NONE_FASTER_ALIKE,
    NONE_FASTER_BEYOND_NOISE,
    NOTHING_CONFIRMED,
    PROCESSOR_TIME,
    confidence_level,
    gain_line,
    interval,
    name_of,
    percent,
)
from zerotune.trial_lib.study.loss_agreement import LossAgreement, LossCourse, compare, cuts_alike, global_batch

# A free batch changes the training: less than this is not worth the thought.
_WORTH_SAYING = 1.05

ConfirmationVerdict = Literal["own", "faster", "equal", "slower", "uncompared", "failed", "disagrees"]


class Estimate(FrozenRecord):
    """A geometric mean over fresh processes, with the ends of its confidence interval."""

    value: float
    low: float
    high: float

    @property
    def times(self) -> str:
        """A gain in short, such as `1.83x (1.79 to 1.87)`."""
        return f"{self.value:.2f}x ({self.low:.2f} to {self.high:.2f})"


class Confirmed(FrozenRecord):
    """One configuration that was measured again."""

    name: str  # its name in a sentence, such as `ZeRO 2, micro-batch 24`
    trials: tuple[int, ...]  # the numbers of its confirming trials, in their order
    number: int | None  # the trial with the median. None if no trial completed.
    metrics: dict[str, float]  # the median of each metric over the completed trials, which a training can expect
    value: Estimate | None = None  # the study's metric. None if fewer than two trials completed.
    # How many times better it is than the user's configuration. None if there is nothing to compare.
    gain: Estimate | None = None
    clock_gain: Estimate | None = None  # the same by the metric itself, if another quantity decides
    verdict: ConfirmationVerdict  # `own` for the user's configuration, `uncompared` if that has no measurement
    reason: str = ""  # why it failed. Empty otherwise.
    losses: str = ""  # how its losses compare with those of the user's configuration


class Finding(FrozenRecord):
    """The result of a study's last step."""

    metric: str  # the metric that the study optimises
    quantity: str  # the quantity that was compared, in words
    rounds: int  # how many rounds were run. In each one every contender was measured once, in a fresh process.
    error: float  # the probability that any of the intervals misses the true value
    own: Confirmed | None  # the user's configuration. None if it was not measured.
    candidates: tuple[Confirmed, ...]  # the others, best first
    winner: Confirmed | None  # the configuration to train with. None if no configuration could be measured again.
    advice: str = ""  # on the learning rate and on the code, if the winner has another batch. Empty otherwise.
    # The expected gain of a free batch, if the batch was kept and the gain is worth it. Empty otherwise.
    freeing: str = ""
    in_code: str = ""  # a change that the winner needs in the code. Empty if none.
    # Configurations that were not tried because two trials had failed alike, a sentence each
    left_out: tuple[str, ...] = ()
    instead: str = ""  # why the metric is not the requested one. Empty if it is.
    left_unmeasured: str = ""  # what the measurement of the user's configuration leaves out. Empty if nothing.
    others: str = ""  # how many of the other configurations could not be measured, and why. Empty if all were.
    on_devices: tuple[str, ...] = ()  # differences between devices that may have influenced the trials, a sentence each

    @property
    def sentence(self) -> str:
        """The answer in one line."""
        if self.winner is None:
            is_own = self.own is not None and self.own.verdict == "own"
            return NONE_CONFIRMED.format(len(self.candidates)) if is_own else NOTHING_CONFIRMED
        if self.winner.verdict == "own":
            verdicts = {candidate.verdict for candidate in self.candidates}
            none = NONE_FASTER_BEYOND_NOISE if "equal" in verdicts else NONE_FASTER
            none = NONE_FASTER_ALIKE if "disagrees" in verdicts else none
            return f"{none.removesuffix('.')}{self._by}."
        if self.winner.gain is None:
            value, unit, level = self.winner.value, SEARCH_METRICS[self.metric].unit, confidence_level(self.error)
            value_shown = "" if value is None else f": {interval(value.value, value.low, value.high, unit, level)}"
            return f"{self.winner.name}{value_shown}. There is no measurement of your configuration to compare it with."
        gain = self.winner.gain
        return gain_line(gain.value, self.winner.name, (gain.low, gain.high), self.error, self._by)

    @property
    def _by(self) -> str:
        return "" if self.quantity == self.metric else PROCESSOR_TIME

    @property
    def failure(self) -> str:
        """Why nothing was confirmed, in the words of the first trial that failed. Empty if that is not known."""
        reasons = [tried.reason for tried in (self.own, *self.candidates) if tried is not None]
        return as_sentence(without_log(next(filter(None, reasons), "")))

    @property
    def lines(self) -> list[str]:
        """Notes on the answer: how it was measured, and what else a person needs to know, a sentence each."""
        lines = [self.instead] if self.instead else []
        if self.rounds:
            lines.append(
                f"Measured in {self.rounds} rounds of fresh processes, in turn, and compared by {self.quantity}. In "
                f"{percent(1 - self.error)} of such comparisons all intervals contain the true values."
            )
        if self.winner is not None and self.winner.clock_gain is not None:
            lines.append(f"By the wall clock, which varies more, the gain is {self.winner.clock_gain.times}.")
        lines += [_about(candidate) for candidate in self.candidates if candidate != self.winner]
        if self.winner is not None and self.winner.losses:
            lines.append(f"{self.winner.losses[:1].upper()}{self.winner.losses[1:]}.")
        lines += self.on_devices
        more = (self.left_unmeasured, self.in_code, self.advice, self.freeing, self.others)
        return [*lines, *filter(None, more), *self.left_out]

    def document(self) -> dict[str, Any]:
        return {"sentence": self.sentence, "notes": self.lines, **self.model_dump(mode="json")}

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> "Finding":
        return cls.model_validate({name: value for name, value in document.items() if name in cls.model_fields})


def _about(candidate: Confirmed) -> str:
    if candidate.verdict == "failed":
        return f"{candidate.name} did not complete again. {candidate.reason}"
    if candidate.verdict == "disagrees":
        return f"{candidate.name} is not chosen: {candidate.losses}."
    return f"{candidate.name}: {candidate.gain.times if candidate.gain else 'measured as well'}."


def partition_advice(zero_stage: int, partitions_its_model: bool) -> str:
    """What a winner needs of code that makes its model within `deepspeed.zero.Init`; empty where nothing."""
    if zero_stage == 3 or not partitions_its_model:
        return ""
    return (
        "The code makes its model within deepspeed.zero.Init, which was off in these trials and is in "
        f"`zerotune train`; elsewhere give it enabled=False at stage {zero_stage}."
    )


def freeing_advice(micro_batch_size: int, factor: float) -> str:
    """What a free batch is expected to bring; empty where that is too little to speak of.

    `factor` is how many times as many samples per second it is expected to take.
    """
    if factor < _WORTH_SAYING:
        return ""
    return (
        f"With a free batch (--free-batch) about {factor:.2g} times as many samples per second are expected, at "
        f"micro-batch {micro_batch_size}: predicted, not measured, and the training changes with the batch."
    )


def micro_batch_advice(own: int, winner: int) -> str:
    """What another micro-batch may change in a training of the same global batch; empty if it is the same."""
    if own == winner:
        return ""
    return (
        f"The micro-batch is {winner} and yours {own}. Whatever depends on it trains differently, such as BatchNorm "
        "and losses across the samples of a micro-batch (docs/tuning.md, What depends on the micro-batch)."
    )


def learning_rate_advice(own_batch: int, batch: int) -> str:
    """What to try with the learning rate when the samples of an optimizer step change; empty if they do not.

    DeepSpeed's dynamic batching has both rules (`data_efficiency.data_sampling.dynamic_batching.lr_scaling_method`):
    linear after Goyal et al., Accurate, Large Minibatch SGD (2017), the square root after Krizhevsky, One weird trick
    (2014). You et al. train with LAMB by the square root (2020). Its tutorial for larger batches finds the rate by a
    learning rate range test.
    """
    if own_batch == batch:
        return ""
    factor = batch / own_batch
    return (
        f"The global batch is {batch} and yours {own_batch}: scale the learning rate, by {math.sqrt(factor):.3g} "
        f"(square root, usual with Adam and LAMB) or {factor:.3g} (linear, usual with SGD), the two rules of "
        "DeepSpeed's lr_scaling_method, and try it: https://www.deepspeed.ai/tutorials/lrrt."
    )


_NO_FAILURE = (Outcome.COMPLETED, Outcome.TOO_SLOW, Outcome.CANCELLED)


@dataclass(frozen=True)
class Contender:
    """A configuration to measure again."""

    candidate: Candidate  # the configuration, with its slots
    config: Mapping[str, Any]  # the complete DeepSpeed configuration, with the program's switches
    reading: TrialResult  # its trial in the search, or the trial of the user's configuration
    expected: float | None = None  # the metric that the search expects, in its unit; None if it expects the reading

    @property
    def key(self) -> str:
        return self.reading.config_hash

    def worth(self, metric: str) -> float:
        """The expected metric, in its unit."""
        return self.reading.metrics[metric] if self.expected is None else self.expected


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


def device_notes(results: Sequence[TrialResult]) -> list[str]:
    """A sentence for each difference between devices that matters for the compared trials."""
    notes = []
    beside = [result for result in results if result.had_company]
    if beside:
        names = sorted(
            {each.name or "a process" for one in beside for device in one.devices for each in device.company}
        )
        notes.append(
            f"In {len(beside)} of {len(results)} of these trials other processes computed on the same devices "
            f"({', '.join(names)}). These trials are slower than they would be alone."
        )
    # Cores are alike, and are chosen again for each trial.
    sets = {tuple(sorted(device.device for device in one.devices if device.model)) for one in results if one.devices}
    if len(sets) > 1:
        notes.append(
            f"These trials ran on {len(sets)} different sets of devices, because other processes held some meanwhile. "
            "Cards of one model differ by a few percent."
        )
    held = [one for one in results if _reasons_of(one)]
    if held:
        reasons = sorted({reason for one in held for reason in _reasons_of(one)})
        notes.append(f"In {len(held)} of {len(results)} of these trials a clock was held down by {', '.join(reasons)}.")
    return notes


def _reasons_of(result: TrialResult) -> list[str]:
    return [reason for device in result.devices for reason in unusual_reasons(device)]


# The confirmation

ERROR = 0.05
_NEAR = 0.05  # a candidate that is this share below the best may be as good
_MOST_CANDIDATES = 3
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 8
_FEWEST_ROUNDS = 2  # that give an interval, if a study has no time for more
_LOOKS = (4, 6, 8)  # a fourth round halves the intervals of three: Student's t has few degrees of freedom
_SHARE_OF_SEARCH = 0.5
_FLOOR_S = 60.0  # half of a search of seconds would be too short to separate anything
_PRECISE = 0.05  # a half interval of this size is enough; more rounds must fit the share
_MOST_HEATS = 3
_CLEARLY_LESS = 0.85  # of the memory share of a candidate that ran out of memory the next time
_PROCESSOR_TIME = "cpu_time_per_sample"
# A data loader's switches, ZeroTune's and a program's own: `loader:num_workers`, `--dataloader_num_workers`. No rank
# counts the processor time of its loader's workers.
_OF_LOADER = re.compile(r"loader|workers", re.IGNORECASE)
_WINS = ("faster", "uncompared")
# Outcomes that follow from the size, and not from chance.
_NO_CHANCE = (Outcome.OUT_OF_MEMORY, Outcome.OUT_OF_DATA)


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
        device: str,
        search_seconds: float,
        submitted: Candidate | None = None,
        formats: Collection[str] = (),
        free: Collection[str] = (),
    ) -> None:
        self._own = own
        self._submitted = submitted if own is None else own.candidate
        self._left = list(ranked)
        self._metric = metric
        self._formats = formats
        self._free = tuple(free)
        on_the_processor = kind_of(device).computes_on_the_processor
        self._by_processor_time = on_the_processor and SEARCH_METRICS[metric].is_throughput
        self._share_s = _SHARE_OF_SEARCH * search_seconds
        self._tried: list[Contender] = []
        self._results: dict[str, list[TrialResult]] = {}
        self._out: dict[str, tuple[ConfirmationVerdict, str]] = {}
        self._lost: set[str] = set()  # killed from outside, or failed by chance, once
        self._disturbed: set[str] = set()  # measured again because other processes used the devices
        self._too_full = math.inf  # the least memory share of a candidate that then ran out
        self._heats = 0
        self._next_heat()

    @property
    def next(self) -> Candidate | None:
        """None when the confirmation is over."""
        return self._queue[0].candidate if self._queue else None

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
        contender = next((one for one in self._queue if one.key == result.config_hash), None)
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
        self._results.setdefault(contender.key, []).append(result)
        if not self._is_measured(result):
            self._out[contender.key] = ("failed", result.reason or f"Its trial {result.number:04d} measured nothing.")
        if result.outcome is Outcome.OUT_OF_MEMORY:
            self._too_full = min(self._too_full, _filled(contender.reading))
        if not self._queue:
            self._end_round()

    def _is_bad_luck(self, result: TrialResult) -> bool:
        # Whether a trial may have failed by chance. Its configuration has run in the search.
        return result.outcome not in _NO_CHANCE and not self._is_measured(result)

    def end_now(self) -> None:
        """Without time for more, ends it with its complete rounds if they are enough for (wide) intervals."""
        if self.next is None or self._round < _FEWEST_ROUNDS:
            return
        for contender in self._with_own(self._live):
            if contender not in self._queue:
                self._results[contender.key].pop()
        self._queue.clear()
        self._leave_out_other_training()

    # -- rounds --------------------------------------------------------------------------------------------------

    def _next_heat(self) -> None:
        # Chooses the contenders of the next heat: the next best, if none of the last heat is left.
        self._queue: list[Contender] = []
        self._round = 0
        self._candidates: list[Contender] = []
        if not self._left or self._heats == _MOST_HEATS:
            return
        self._heats += 1
        # A candidate that was short of memory all the time is a contender only if there is no other.
        left = [one for one in self._left if not one.reading.memory.was_short] or self._left
        emptier = [one for one in left if _filled(one.reading) <= _CLEARLY_LESS * self._too_full]
        ranked = self._cut_as_own(emptier or left)
        best = ranked[0].worth(self._metric)
        near = [one for one in ranked[:_MOST_CANDIDATES] if abs(one.worth(self._metric) - best) <= _NEAR * best]
        while len(near) > 1 and _LOOKS[0] * self._cost(near) > self._share_s:
            near.pop()
        self._candidates = near
        self._tried += near
        chosen = {one.key for one in near}
        self._left = [one for one in self._left if one.key not in chosen]
        affordable = int(max(self._share_s, _FLOOR_S) / max(self._cost(near), 1e-9))
        rounds = min(max(affordable, _LEAST_ROUNDS), _MOST_ROUNDS)
        self._looks = (*(look for look in _LOOKS if look < rounds), rounds)
        self._error = ERROR / len(self._looks) / len(near)
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
        seconds = [_seconds(one.reading) for one in self._with_own(candidates)]
        own = _seconds(self._own.reading) if self._own is not None else 0.0
        return sum(max(own, each) for each in seconds)

    def _begin_round(self) -> None:
        members = self._with_own(self._live)
        first = self._round % len(members)
        self._queue = members[first:] + members[:first]

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
                self._out[contender.key] = ("disagrees", agreement.sentence)

    def _is_settled(self) -> bool:
        if self._round == self._looks[-1]:
            return True
        if self._living_own is None:
            return len(self._live) == 1
        gains, _ = self._gains()
        best = max(gains.values(), key=lambda gain: gain.value)
        if best.low <= 1.0 and any(gain.high >= 1.0 for gain in gains.values()):
            return False
        next_look = next(look for look in self._looks if look > self._round)
        return best.low <= 1.0 or best.spread <= _PRECISE or next_look * self._cost(self._live) > self._share_s

    # -- contenders --------------------------------------------------------------------------------------------

    @property
    def _living_own(self) -> Contender | None:
        return self._own if self._own is not None and self._own.key not in self._out else None

    @property
    def _live(self) -> list[Contender]:
        return [contender for contender in self._candidates if contender.key not in self._out]

    def _with_own(self, candidates: Sequence[Contender]) -> list[Contender]:
        return [*candidates] if self._living_own is None else [self._living_own, *candidates]

    # -- measurements ---------------------------------------------------------------------------------------

    def _is_measured(self, result: TrialResult) -> bool:
        return is_good(result, self._metric) and (
            not self._by_processor_time or result.metrics.get(_PROCESSOR_TIME, 0.0) > 0.0
        )

    def _rounds(self, contenders: Sequence[Contender], metric: str, smaller_is_better: bool) -> list[dict[str, float]]:
        # The measurements of the complete rounds of this heat, by contender. Larger is better.
        power = -1 if smaller_is_better else 1
        kept = {one.key: self._results[one.key][-self._round :] for one in contenders}
        return [
            {key: results[position].metrics[metric] ** power for key, results in kept.items()}
            for position in range(self._round)
        ]

    def _gains(self) -> tuple[dict[str, Ratio], dict[str, Ratio]]:
        assert self._living_own is not None
        own, members = self._living_own.key, self._with_own(self._live)
        metric = SEARCH_METRICS[self._metric]
        by_metric = ratios_to(own, self._rounds(members, metric.name, metric.smaller_is_better), self._error)
        if not self._by_processor_time or any(_loads_otherwise(one, self._living_own) for one in members):
            return by_metric, {}
        by_time = ratios_to(own, self._rounds(members, _PROCESSOR_TIME, smaller_is_better=True), self._error)
        if any(not gain.overlaps(by_metric[key]) for key, gain in by_time.items()):
            return by_metric, {}
        return by_time, by_metric

    def _agreement(self, contender: Contender) -> LossAgreement:
        own = self._living_own
        if own is None:
            return LossAgreement(is_compared=False, agrees=True, sentence="")
        return compare(self._course(own), self._course(contender))

    def _course(self, contender: Contender) -> LossCourse:
        results = self._results[contender.key][-self._round :]
        losses, weights = [each.losses for each in results], [each.initial_weights for each in results]
        skipped = [each.skipped_steps for each in results]
        return LossCourse(contender.candidate, contender.config, losses, weights, self._formats, skipped, self._free)

    # -- the end -------------------------------------------------------------------------------------------------

    def finding(self) -> Finding:
        """The finding of the results so far. When `next` is None, it is that of the study."""
        own = self._living_own
        gains, clock_gains = self._gains() if own is not None and self._live and self._round else ({}, {})
        confirmed = [
            (self._confirmed(one, gains.get(one.key), clock_gains.get(one.key)), one)
            for one in self._tried
            if self._trials_of(one)
        ]
        confirmed.sort(key=lambda pair: self._rank(pair[0]))
        own_confirmed = None if self._own is None or not self._trials_of(self._own) else self._confirmed(self._own)
        winner, chosen = next((pair for pair in confirmed if pair[0].verdict in _WINS), (None, None))
        if winner is None and own is not None and any(one.verdict != "failed" for one, _ in confirmed):
            winner = own_confirmed
        return Finding(
            metric=self._metric,
            quantity="processor time per sample" if clock_gains else self._metric,
            rounds=self._round,
            error=ERROR,
            own=own_confirmed,
            candidates=tuple(one for one, _ in confirmed),
            winner=winner,
            on_devices=tuple(device_notes([result for results in self._results.values() for result in results])),
            advice="" if self._submitted is None or chosen is None else _advice(self._submitted, chosen.candidate),
        )

    def _trials_of(self, contender: Contender) -> list[TrialResult]:
        return self._results.get(contender.key, [])

    def _confirmed(self, contender: Contender, gain: Ratio | None = None, clock: Ratio | None = None) -> Confirmed:
        results = self._trials_of(contender)
        measured = [result for result in results if self._is_measured(result)]
        names = measured[0].metrics.keys() if measured else ()
        values = [result.metrics[self._metric] for result in measured]
        decisive = _PROCESSOR_TIME if self._by_processor_time else self._metric
        in_order = sorted(measured, key=lambda result: result.metrics[decisive])
        is_own = contender is self._own
        verdict, reason = self._out.get(contender.key, ("own" if is_own else _verdict(gain, clock), ""))
        return Confirmed(
            name=name_of(contender.candidate),
            trials=tuple(result.number for result in results),
            number=in_order[(len(in_order) - 1) // 2].number if in_order else None,
            metrics={
                name: statistics.median(result.metrics[name] for result in measured if name in result.metrics)
                for name in names
            },
            value=_estimate(geometric_mean(values, ERROR)) if len(values) > 1 else None,
            gain=_estimate(gain),
            clock_gain=_estimate(clock),
            verdict=verdict,
            reason=reason if verdict == "failed" else "",
            losses=reason
            if verdict == "disagrees"
            else ""
            if is_own or verdict == "failed"
            else self._agreement(contender).sentence,
        )

    def _rank(self, confirmed: Confirmed) -> tuple[bool, float]:
        if confirmed.verdict in ("failed", "disagrees"):
            return True, 0.0
        if confirmed.gain is not None:
            return False, -confirmed.gain.value
        sign = 1.0 if SEARCH_METRICS[self._metric].smaller_is_better else -1.0
        return False, sign * confirmed.metrics[self._metric]


def _advice(own: Candidate, chosen: Candidate) -> str:
    of_rate = learning_rate_advice(global_batch(own), global_batch(chosen))
    return " ".join(filter(None, (of_rate, micro_batch_advice(own.micro_batch_size, chosen.micro_batch_size))))


def _estimate(ratio: Ratio | None) -> Estimate | None:
    return None if ratio is None else Estimate(value=ratio.value, low=ratio.low, high=ratio.high)


def _verdict(gain: Ratio | None, clock: Ratio | None) -> ConfirmationVerdict:
    if gain is None:
        return "uncompared"
    if gain.low > 1.0:
        return "faster" if clock is None or clock.value >= 1.0 else "equal"
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


def _loads_otherwise(one: Contender, own: Contender) -> bool:
    return any(_OF_LOADER.search(place) for place, _ in other_switches(one.config, own.config))
