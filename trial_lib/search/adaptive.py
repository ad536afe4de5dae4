"""`adaptive` measures the candidates that fit and may win. Two models learn from every trial.

Each ask weighs every candidate that fits by the memory model. The weight is the expected improvement of the answer if
the candidate is measured: the cost model's knowledge gradient, and what a value that its arm has not had may bring
unexpectedly (`probes`). First the arms race. Each runs at its best guess of the fine knobs, at sizes near the largest
that surely fits; a sweep counts for the sizes that it may reach. Once the race has little more to gain, the fine knobs
of every arm that has run join it. If readings vary, candidates for the answer are measured again. The search ends when
no trial is expected to gain enough: every arm then is surely lost, or has had its values tried.
"""

import random
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from statistics import median

import numpy as np

from zerotune.trial_lib.deepspeed_config.overrides import MICRO_BATCH
from zerotune.trial_lib.records.candidate import Candidate, Purpose, Sweep, Withdrawal
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.search.base import (
    FreeBatchGain,
    Search,
    SearchProblem,
    expected_costs,
    key_of,
    planned_costs,
    size_limit,
    switches_in,
)
from zerotune.trial_lib.search.cost_model import Array, CostModel, Point, SpaceCoordinates
from zerotune.trial_lib.search.methods import AdaptiveSettings
from zerotune.trial_lib.search.probes import ArmProbes, Surprises
from zerotune.trial_lib.search.sizes import (
    EVEN_ODDS,
    USUAL_RISK,
    ArmLimits,
    BatchPolicy,
    Failures,
    FittingSizes,
    memory_risk,
    worth_of_sweep,
)

# The models get the best and the latest trials of a long history.
_BEST_KEPT, LATEST_KEPT = 120, 80
# The assumed extra cost of a trial that was stopped as too slow before any of its steps was timed.
_TOO_SLOW = log(1.1)


@dataclass(frozen=True)
class PointCost:
    point: Point  # the candidate's place in the space
    cost: float  # logarithm of the quantity that the search minimises
    candidate: Candidate  # the candidate that ran
    step: float | None  # seconds of an optimizer step (median). None if none was timed.


@dataclass(frozen=True)
class PossibleAnswer(PointCost):
    """A completed trial that the search asked for. Its candidate may be the answer."""

    result: TrialResult


def stopped_cost(measured: Sequence[PointCost], candidate: Candidate, result: TrialResult, by_sample: bool) -> float:
    """Returns the cost of a trial that was stopped because it could not win, by its steps beside a measured one's. The
    cost then holds for any metric, however lucky the reading to beat was. At least one cost has to be known.
    """
    step = _step_seconds(result)
    # The steps of an earlier study's trials are unknown.
    timed = [(each.cost, each.step, _samples(each.candidate)) for each in measured if each.step is not None]
    if step is None or not timed:
        return min(each.cost for each in measured) + _TOO_SLOW
    best_cost, best_step, best_samples = min(timed)
    return best_cost + log(step / best_step) - (log(_samples(candidate) / best_samples) if by_sample else 0.0)


def best_and_latest(measured: Sequence[PointCost]) -> Sequence[PointCost]:
    """Returns the part of the history for the models, in its order."""
    if len(measured) <= _BEST_KEPT + LATEST_KEPT:
        return measured
    ranked = sorted(range(len(measured)), key=lambda place: measured[place].cost)
    latest = range(len(measured) - LATEST_KEPT, len(measured))
    return [measured[place] for place in sorted({*ranked[:_BEST_KEPT], *latest})]


def possible_answers(measured: Sequence[PointCost], failed: Container[Point]) -> list[PossibleAnswer]:
    """Returns the trials that may be the answer. A point that failed another time may not."""
    return [each for each in best_and_latest(measured) if isinstance(each, PossibleAnswer) and each.point not in failed]


def _step_seconds(result: TrialResult) -> float | None:
    return median(result.step_times) if result.step_times else None


def _samples(candidate: Candidate) -> int:
    return candidate.micro_batch_size * candidate.gradient_accumulation_steps


def best_free_batch(
    best: tuple[Candidate, TrialResult], others: Sequence[Candidate], point: Point, model: CostModel
) -> FreeBatchGain | None:
    """Returns the best of some candidates that differ from the best one only in the batch; None if none is better. A
    larger micro-batch shares the overhead of a pass among more samples, by the cost model. A larger batch shares the
    optimizer's step among more samples, by the time that the best trial took for it.
    """
    candidate, result = best
    step = min(1.0, result.metrics.get("step", 0.0) / result.metrics["latency"]) if "latency" in result.metrics else 0.0
    gains = []
    sizes = [point.size, *(other.micro_batch_size for other in others)]
    here, *there = model.expected([Point(point.arm, 0, size) for size in sizes])
    for other, expected in zip(others, there, strict=True):
        share = step * _samples(candidate) / _samples(other)
        gains.append(FreeBatchGain(other, 1 / ((1 - step) * exp(float(expected - here)) + share)))
    gain = max(gains, key=lambda each: each.factor, default=None)
    return gain if gain is not None and gain.factor > 1 else None


# If gains differ by less than this share, the smaller size is taken, because it fits more surely.
_NEARLY_EQUAL = 0.02
# The race is settled if none of its trials is expected to gain this share. By replay, fine knobs come too early before
# that, because the largest sizes of other arms are not measured yet.
_SETTLED = 0.01
# The share of trials that may fail because nothing safer had much to gain.
_RISKED = 0.05
# A value that its arm has not had is worth a trial from this share of the least gain on. Nothing else would show it.
_LEAST_SURPRISE = 0.5
# Larger sizes that a sweep may reach, besides the one that surely fits. The group itself finds out whether they fit.
_SWEPT_SIZES = 2
# Arms whose settings of fine knobs are weighed at several sizes, and at how many.
_FINALISTS, _FINE_SIZES = 3, 4
# The weight of another reading of a possible answer, relative to the gain of that one step; chosen by replay. The best
# of many readings is the luckiest (intensification, as in SMAC: Hutter et al., LION 5 (2011) 507).
_WORTH_AGAIN = 3.0


class AdaptiveSearch(Search):
    """Weighs the candidates that fit by their expected gain. Out of memory bounds the sizes of its arm. Any other
    failure rules out its family, and a second one the arm. Two that fail alike rule out the settings that they share.
    """

    def __init__(self, settings: AdaptiveSettings, problem: SearchProblem) -> None:
        super().__init__(settings, problem)
        policy = BatchPolicy.of(problem, settings.divisible_by, settings.max_micro_batch)
        policy.check()
        self._min_gain = settings.min_gain
        self._headroom = settings.memory_headroom
        self._coordinates = SpaceCoordinates(problem.space, problem.device)
        self._arms = problem.space.arms
        planned = self._arms, problem.base_config, problem.expected
        self._prior_costs, self._planned_costs = expected_costs(*planned), planned_costs(*planned)
        self._limits = [ArmLimits() for _ in self._arms]
        self._failures = Failures()
        self._fitting = FittingSizes(policy, problem, settings.memory_headroom)
        self._measured: list[PointCost] = []
        self._did_not_fit: list[Point] = []
        self._failed: set[Point] = set()
        self._running: dict[tuple[str, int], Point | None] = {}  # the places in the space of the candidates in flight
        self._may_sweep = problem.can_sweep
        self._model_then: tuple[int, CostModel] | None = None
        self._probes_then: tuple[int, dict[int, ArmProbes]] | None = None

    # -- ask and tell --------------------------------------------------------------------------------------------

    def _begin(self, candidate: Candidate) -> None:
        self._running[candidate.key] = self._point(candidate)

    def _learn(self, candidate: Candidate, result: TrialResult) -> None:
        value = self._value(result)
        if value is not None:
            self._is_new_best(candidate, result, value)
        self._shared.tell(candidate, result)
        self._learn_at(self._running.pop(candidate.key), candidate, result)

    def _take_back(self, candidate: Candidate, reason: Withdrawal) -> None:
        point = self._running.pop(candidate.key)
        if reason is Withdrawal.NOT_REPEATABLE:
            self._may_sweep = False
        if point is not None:
            self._limits[point.arm].withdraw(point.size, reason)

    def keep_size(self, size: int) -> None:
        self._fitting.keep_size(size)
        self._changes += 1

    def observe(self, candidate: Candidate, result: TrialResult) -> None:
        """Such a trial is never the search's best. Without the metric, only its memory counts."""
        super().observe(candidate, result)
        if result.purpose is Purpose.PROFILE:
            self._fitting.memory.observe_profile(candidate, result)
            self._fitting.forget()
            return
        family = self.space.locate_config(candidate.complete(self.problem.base_config))
        size = candidate.micro_batch_size
        same_batch = candidate.gradient_accumulation_steps == self._fitting.policy(candidate.knobs).accumulation(size)
        self._learn_at(Point(*family, size) if family and same_batch else None, candidate, result, asked=False)

    @property
    def best(self) -> tuple[Candidate, TrialResult] | None:
        """The completed trial with the best expectation, so that a lucky reading among many does not win."""
        known = possible_answers(self._measured, self._failed)
        if not known:
            return None if self._best is None or self._point(self._best[0]) in self._failed else self._best
        place = int(np.argmin(self._model().expected([answer.point for answer in known])))
        return known[place].candidate, known[place].result

    def expected(self) -> Mapping[int, float]:
        known, sign = possible_answers(self._measured, self._failed), 1 if self.metric.smaller_is_better else -1
        expected = self._model().expected([answer.point for answer in known])
        return {answer.result.number: exp(sign * cost) for answer, cost in zip(known, expected.tolist(), strict=True)}

    def apart(self, one: Candidate, other: Candidate) -> tuple[float, float] | None:
        both = [(each, self.space.locate_config(each.complete(self.problem.base_config))) for each in (one, other)]
        points = [Point(*family, each.micro_batch_size) for each, family in both if family is not None]
        return self._model().difference(*points) if len(points) == 2 else None

    def freeing_gain(self) -> FreeBatchGain | None:
        best = self.best
        point = None if best is None else self._point(best[0])
        policy = self._fitting.own_policy
        if best is None or point is None or not policy.is_kept or policy.only_micro_batch is not None:
            return None
        free = replace(policy, train_batch_size=None)
        fitting = FittingSizes(free, self.problem, self._headroom, self._fitting.memory, self._fitting.host)
        sizes = fitting.sizes(best[0].knobs, (point.arm, point.index), self._bound(point.arm), USUAL_RISK)
        return best_free_batch(best, [fitting.candidate(best[0].knobs, size) for size in sizes], point, self._model())

    # -- what is known -------------------------------------------------------------------------------------------

    def _learn_at(self, point: Point | None, candidate: Candidate, result: TrialResult, asked: bool = True) -> None:
        self._fitting.memory.observe(candidate, result)
        self._fitting.host.observe(candidate, result)
        self._fitting.forget()
        if point is None or self._failures.is_inconclusive(point, result):
            return
        # A trial that ran teaches its cost, and that its size fits.
        limits, value = self._limits[point.arm], self._value(result)
        if value is not None and value > 0:
            limits.ran(point.index, point.size)
            self._failures.ran(point.size)
            cost = log(value) if self.metric.smaller_is_better else -log(value)
            known = point, cost, candidate, _step_seconds(result)
            self._measured.append(PossibleAnswer(*known, result) if asked else PointCost(*known))
        elif value is None and not asked and result.outcome is Outcome.COMPLETED:  # its speed is not known any more
            limits.ran(point.index, point.size)
            self._failures.ran(point.size)
        elif result.outcome is Outcome.TOO_SLOW:
            limits.ran(point.index, point.size)
            if self._measured:
                cost = stopped_cost(self._measured, candidate, result, by_sample=not self.metric.smaller_is_better)
                self._measured.append(PointCost(point, cost, candidate, _step_seconds(result)))
        elif result.outcome is Outcome.INVALID and self._fitting.own_policy.only_micro_batch not in (None, point.size):
            self._failed.add(point)  # the program fed its only size, which says nothing about the arm
        else:
            self._failed.add(point)
            # A rank that was killed twice may have been killed for its memory. Smaller sizes may run.
            if result.outcome is Outcome.OUT_OF_MEMORY or (result.from_outside and result.outcome is Outcome.CRASHED):
                limits.ran_out_of_memory(point.size)
                self._did_not_fit.append(point)
                if result.from_outside:
                    self._failures.kill(point.arm, point.size)
            elif result.outcome is Outcome.OUT_OF_HOST_MEMORY and not self._fitting.host.fits(candidate):
                return  # the host's memory bounds its arm
            elif result.outcome is Outcome.OUT_OF_DATA:
                self._failures.ran_out_of_data(point.size)
            elif limits.largest.get(point.index, point.size) < point.size:
                limits.fail(point.size)
            elif all(each.point != point for each in self._measured):
                self._failures.fail(point.arm, point.index, point.size)

    def _point(self, candidate: Candidate) -> Point | None:
        family = self.space.locate(candidate.knobs)
        return None if family is None else Point(*family, candidate.micro_batch_size)

    def _model(self) -> CostModel:
        if self._model_then is None or self._model_then[0] != self._changes:
            known = best_and_latest(self._measured)
            model = CostModel(
                self._coordinates,
                self._prior_costs,
                self.metric.smaller_is_better and not self._fitting.own_policy.is_kept,
                [measured.point for measured in known],
                [measured.cost for measured in known],
                [point for point in self._running.values() if point is not None],
                self._failed,
                self._planned_costs,
            )
            self._model_then = self._changes, model
        return self._model_then[1]

    # -- what to ask ---------------------------------------------------------------------------------------------

    def _propose(self) -> Candidate | Sweep | None:
        # The plan's answer comes first, then whatever is likeliest to be cheap.
        planned = None if self._asks else self._planned()
        if planned is not None:
            return self._asked_for(planned)
        options = self._racing(risk=self._earned_risk())
        if not self._measured:
            return self._first(options)
        # Race the arms, and tune fine knobs once the race is settled.
        gains = self._gains(options)
        if gains.max(initial=0.0) < _SETTLED:
            fine = self._untried(self._fine_options())
            options, gains = [*options, *fine], np.concatenate([gains, self._gains(fine)])
        if not self._in_flight and not options:
            # Failures for memory have lowered all probabilities.
            options = self._racing(risk=EVEN_ODDS)
            gains = self._gains(options)
        # Or measure a possible answer again.
        again = self._again()
        gains_again = self._model().predict(again).gain
        most, most_again = float(gains.max(initial=0.0)), float(gains_again.max(initial=0.0))
        has_ended = most < _LEAST_SURPRISE * self._min_gain and most_again < self._min_gain
        if has_ended or not (options or most_again):
            return None
        if most_again >= self._min_gain and _WORTH_AGAIN * most_again > most:
            return self._candidate(again[int(np.argmax(gains_again))])
        # Gains of foreseen arms already have the probability to fit in them.
        nearly_equal = 0.0 if self.problem.foreseen else _NEARLY_EQUAL
        near = [place for place, gain in enumerate(gains) if gain >= most * (1 - nearly_equal)]
        return self._asked_for(options[min(near, key=lambda place: (options[place].size, place))])

    def _earned_risk(self) -> float | None:
        """Returns the risk that the next trial may have by the limit on failures; None for the usual one. A plan's
        probabilities hold. They weigh each gain, so a likely failure has to be worth it.
        """
        if not self.problem.foreseen or not self._measured or self._in_flight:
            return None
        earned = _RISKED * (self._asked + 1) - len(self._did_not_fit)
        return earned if earned > USUAL_RISK else None

    def _again(self) -> list[Point]:
        in_flight = set(self._running.values())
        may_be = {answer.point for answer in possible_answers(self._measured, self._failed)} - in_flight
        leading = [point for point in self._model().rivals if point in may_be and point.size <= self._bound(point.arm)]
        return [point for point in leading if not self._failures.is_out(point.arm, point.index)]

    def _gains(self, options: Sequence[Point]) -> Array:
        """Returns the expected gains. The start of a sweep counts for its larger sizes too. The probabilities of
        foreseen arms hold, so they weigh each size. By formulas only the larger ones are weighed.
        """
        larger = self._larger(options)
        expected = self._model().predict(options)
        # The largest of many small gains is mostly an error of the model, so they do not count.
        weighed = np.where(expected.gain < self._min_gain, 0.0, expected.gain)
        weighed += self._surprises(options, expected.mean)
        for place, start in enumerate(options):
            if self.problem.foreseen:
                beyond = [(gain, self._probability(point)) for point, gain in larger.get(start, ())]
                weighed[place] = worth_of_sweep(weighed[place], self._probability(start), beyond)
                continue
            for point, gain in larger.get(start, ()):
                weighed[place] = max(weighed[place], self._probability(point) * gain)
        return weighed

    def _racing(self, risk: float | None) -> list[Point]:
        return self._untried(
            Point(arm, index, size)
            for arm in range(len(self._arms))
            for index in self._leading(arm)
            for size in self._sizes(arm, index, risk)
        )

    def _first(self, racing: list[Point]) -> Candidate | Sweep | None:
        # The candidate with the lowest expected cost; if none surely fits, the likeliest to fit.
        if racing:
            return self._asked_for(racing[int(np.argmin(self._model().predict(racing).mean))])
        if self._in_flight:
            return None
        smallest = [
            Point(arm, index, size)
            for arm in range(len(self._arms))
            for size in self._policy_of(arm).sizes()[:1]
            for index in self._leading(arm)
        ]
        allowed = [self._candidate(point) for point in self._untried(smallest) if point.size <= self._bound(point.arm)]
        return max(filter(self._fitting.host.fits, allowed), key=self._fitting.probability, default=None)

    def _planned(self) -> Point | None:
        # The plan's answer, at a smaller size if less fits here; None without a plan, or if it has run.
        answer = next((each for each in self.problem.expected if each.is_first), None)
        if answer is None:
            return None
        base, foreseen = self.problem.base_config, switches_in(self.problem.expected)
        planned = [arm for arm, each in enumerate(self._arms) if key_of(each, base, foreseen) == answer.key]
        guesses = [(arm, index) for arm in planned[:1] for index in self._leading(arm)[:1]]
        for arm, index in guesses:
            largest = min(answer.micro_batch, max(self._sizes(arm, index), default=0))
            sizes = self._policy_of(arm).sizes(largest)
            return next(iter(self._untried([Point(arm, index, max(sizes))])), None) if sizes else None
        return None

    def _asked_for(self, point: Point) -> Candidate | Sweep:
        # A candidate, or a sweep to larger ones if it is the largest that surely fits.
        candidate = self._candidate(point)
        larger = [self._candidate(each) for each, _ in self._larger([point]).get(point, ())]
        return self._fitting.sweep([candidate, *larger]) if larger else candidate

    @property
    def _room(self) -> int:
        # The number of larger sizes that the next sweep may have.
        return min(_SWEPT_SIZES, self._budget - self._asked - 1) if self._may_sweep else 0

    def _larger(self, starts: Sequence[Point]) -> dict[Point, list[tuple[Point, float]]]:
        # A sweep may start at the largest size that surely fits.
        may_start = [each for each in starts if self._room > 0 and self._sizes(each.arm, each.index)[:1] == [each.size]]
        beyond = {start: self._foreseeable(start) for start in may_start}
        points = [point for each in beyond.values() for point in each]
        gains = dict(zip(points, self._model().predict(points).gain.tolist(), strict=True)) if points else {}
        larger: dict[Point, list[tuple[Point, float]]] = {}
        for start, each in beyond.items():
            worthy = {point.size: point for point in each if gains[point] >= self._min_gain}
            sizes = self._fitting.steps(self._arms[start.arm].family(start.index), list(worthy))[: self._room]
            larger[start] = [(worthy[size], gains[worthy[size]]) for size in sizes]
        return larger

    def _foreseeable(self, start: Point) -> list[Point]:
        # The larger sizes of a family that may fit, ascending. A sweep finds out.
        withdrawn = self._limits[start.arm].withdrawn
        bound = self._bound(start.arm) if withdrawn is None else min(self._bound(start.arm), withdrawn - 1)
        larger = self._fitting.foreseeable(self._arms[start.arm].family(start.index), start.size, bound)
        return self._untried(replace(start, size=size) for size in larger)

    def _leading(self, arm: int) -> list[int]:
        few = range(min(self._arms[arm].size, 2))  # if a best guess failed, a second one may run
        guess = next((index for index in few if not self._failures.is_out(arm, index)), None)
        ours = [measured for measured in best_and_latest(self._measured) if measured.point.arm == arm]
        best = [min(ours, key=lambda measured: measured.cost).point.index] if ours else []
        return list(dict.fromkeys([index for index in (guess, *best) if index is not None]))

    def _fine_options(self) -> Iterable[Point]:
        # Families that an arm with a cost may have next. The leading arms' are weighed at several sizes.
        arms = self._probes()
        for rank, (arm, probes) in enumerate(sorted(arms.items(), key=lambda each: each[1].cost)):
            for index in probes.candidates(random.Random(f"{self._seed}:{self._asks + 1}:{arm}")):
                for size in self._sizes(arm, index)[: _FINE_SIZES if rank < _FINALISTS else 1]:
                    yield Point(arm, index, size)

    def _surprises(self, points: Sequence[Point], means: Array) -> Array:
        arms, model = self._probes(), self._model()
        if not arms or not model.rivals:
            return np.zeros(len(points))
        families = {(point.arm, point.index) for point in points if point.arm in arms}
        novelties = {family: arms[family[0]].novelty(family[1], arms.values()) for family in families}
        novelty = np.array([novelties.get((point.arm, point.index), 0.0) for point in points])
        return Surprises(arms.values()).worth(novelty, means - model.expected(model.rivals[:1]))

    def _probes(self) -> dict[int, ArmProbes]:
        # What each arm with a cost has had of its fine knobs, at the size of its best trial.
        if self._probes_then is None or self._probes_then[0] != self._changes:
            known, model = best_and_latest(self._measured), self._model()
            expected = model.expected([measured.point for measured in known])
            ours: dict[int, list[tuple[float, Point]]] = {}
            for measured, cost in zip(known, expected.tolist(), strict=True):
                ours.setdefault(measured.point.arm, []).append((cost, measured.point))
            alike = self._coordinates.of_deepspeed(ours).tolist()
            in_flight = [point for point in self._running.values() if point is not None]
            probes = {
                arm: ArmProbes.of(self._arms[arm], arm, same, each, in_flight, model.expected)
                for same, (arm, each) in zip(alike, ours.items(), strict=True)
            }
            self._probes_then = self._changes, probes
        return self._probes_then[1]

    def _sizes(self, arm: int, index: int, risk: float | None = None) -> list[int]:
        if self._failures.is_out(arm, index):
            return []
        if risk is None:
            told = self._asked - self._failures.inconclusive
            risk = memory_risk(told, len(self._did_not_fit), len(self._in_flight), bool(self.problem.foreseen))
        return self._fitting.sizes(self._arms[arm].family(index), (arm, index), self._bound(arm), risk)

    def _policy_of(self, arm: int) -> BatchPolicy:
        return self._fitting.policy(self._arms[arm].knobs)

    def _bound(self, arm: int) -> int:
        limit = size_limit(self._failures.largest_run, self.problem.base_config.get(MICRO_BATCH))
        limit = max(limit, *self._policy_of(arm).sizes()[:1], 1)
        bounds = [self._limits[arm].bound, self._failures.bound]
        return min([limit, *(bound - 1 for bound in bounds if bound is not None)])

    def _untried(self, points: Iterable[Point]) -> list[Point]:
        tried = {each.point for each in self._measured} | set(self._running.values())
        left = [(point, self._shared.largest(self._arms[point.arm].knobs)) for point in dict.fromkeys(points)]
        return [each for each, most in left if each not in tried and (most is None or each.size <= most)]

    def _probability(self, point: Point) -> float:
        return self._fitting.probability(self._candidate(point))

    def _candidate(self, point: Point) -> Candidate:
        return self._fitting.candidate(self._arms[point.arm].family(point.index), point.size)
