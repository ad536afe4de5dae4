"""What a method is worth to who does not know which world is his: its regret, the mean over all worlds. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TypeAlias

from benchmarks.replay.regret import Course

Courses: TypeAlias = Mapping[str, Mapping[str, Sequence[Course]]]


@dataclass(frozen=True)
class Overall:
    """A method's regret over all worlds: the mean, and that of its worst world, of the medians over the seeds.

    Attributes:
        after_trials: mean by budget in trials.
        after_time: mean by budget in time: what the clock's method needs for so many trials, world by world.
        worst_after_trials: the worst world's by budget in trials.
        worst_after_time: the worst world's by budget in time.
        trials_within: the least budget in time, in trials of the clock's method, from which on the mean is never above
            the share that was asked for; None if there is none.
    """

    after_trials: dict[int, float]
    after_time: dict[int, float]
    worst_after_trials: dict[int, float]
    worst_after_time: dict[int, float]
    trials_within: int | None


def clock_seconds(courses: Courses, clock: str, trials: int) -> dict[str, float]:
    """Returns what a method needs for so many trials, the profile trial the first: virtual seconds, by world."""
    return {
        world: median(course.seconds_of_trial(trials - 1) for course in of_world[clock])
        for world, of_world in courses.items()
    }


def overall(courses: Courses, clock: str, budgets: Sequence[int], most_trials: int, share: float) -> dict[str, Overall]:
    """Returns each method's regret over all worlds.

    Args:
        courses: of every method's seeds, by world and by method.
        clock: the method whose time for so many trials is a budget in time.
        budgets: in trials, the profile trial among them.
        most_trials: how far the time is followed, in trials of the clock's method.
        share: the regret to come within.
    """
    # A search's first trial is the second of its study.
    followed = range(2, most_trials + 1)
    seconds = {trials: clock_seconds(courses, clock, trials) for trials in (*followed, *budgets)}

    def of_method(method: str) -> Overall:
        def after_trials(trials: int) -> list[float]:
            return [median(course.after_trials(trials) for course in each[method]) for each in courses.values()]

        def after_time(trials: int) -> list[float]:
            return [
                median(course.after_seconds(seconds[trials][world]) for course in each[method])
                for world, each in courses.items()
            ]

        above = [trials for trials in followed if fmean(after_time(trials)) > share]
        within = max(above, default=1) + 1
        return Overall(
            {trials: round(fmean(after_trials(trials)), 4) for trials in budgets},
            {trials: round(fmean(after_time(trials)), 4) for trials in budgets},
            {trials: round(max(after_trials(trials)), 4) for trials in budgets},
            {trials: round(max(after_time(trials)), 4) for trials in budgets},
            within if within <= most_trials else None,
        )

    return {method: of_method(method) for method in next(iter(courses.values()))}
