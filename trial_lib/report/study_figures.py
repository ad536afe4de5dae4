"""The figures of a study's report."""

from collections.abc import Callable, Sequence

from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.result import SEARCH_METRICS
from zerotune.trial_lib.records.units import bytes_shown, scaled_unit
from zerotune.trial_lib.report.chart import (
    COLOURS,
    GREEN,
    GREY,
    RED,
    SYMBOLS,
    Axis,
    Bars,
    Chart,
    Curve,
    Drawn,
    Level,
    Points,
    Remark,
)
from zerotune.trial_lib.report.knob_effects import FEWEST_TRIALS, knob_effects, measured_trials
from zerotune.trial_lib.report.study_view import Interval, StudyView, TrialView

_LARGE = 10 * 2**30  # bytes from which GiB are shown
_KNOBS_SHOWN = 12
_FAR = 4  # times the memory of trials: a larger budget is written, not drawn


def draw_figures(view: StudyView) -> list[Drawn]:
    return [throughput_figure(view), memory_figure(view), progress_figure(view), knobs_figure(view)]


def throughput_figure(view: StudyView) -> Drawn:
    measured = [trial for trial in view.trials if trial.throughput is not None and not trial.is_profile]
    searched = [trial for trial in measured if not _is_confirming(trial)]
    key, title = "throughput", "Throughput against micro-batch size"
    if not searched:
        return Drawn(key, title, "No trial has measured a throughput.", None)
    sizes = sorted({trial.row.micro_batch_size for trial in searched})
    ticks = [(size, str(size)) for size in sizes]
    figure = Chart(Axis("micro-batch size (samples)", is_log=True, ticks=ticks), Axis("samples/s", from_zero=True))
    for place, arm in enumerate(sorted({trial.arm for trial in searched})):
        of_arm = sorted((trial for trial in searched if trial.arm == arm), key=lambda t: t.row.micro_batch_size)
        _add_arm(figure, arm, of_arm, place)
    for again in view.confirmed:
        if again.throughput is not None:
            figure.marks.append(
                Points(
                    f"confirmed: {again.name}",
                    GREEN if again.is_winner else GREY,
                    [again.micro_batch_size],
                    [again.throughput.value],
                    [f"{again.name}: {again.throughput.value:.1f} samples/s"],
                    [_ends(again.throughput)],
                    symbol="star",
                    size=7,
                    bar=3,
                )
            )
    says = (
        "Every completed trial of the search, and a line through the best trials of each arm (ZeRO stage and "
        "offload). Thin bars span the middle half of the trial's own steps."
    )
    confirmed = [again.throughput for again in view.confirmed if again.throughput is not None]
    if confirmed:
        says += " Stars were measured again, in fresh processes"
        known = any(throughput.has_ends for throughput in confirmed)
        says += "; their bars are intervals over those processes." if known else "."
    rows = tuple(
        (f"{trial.number:04d}", trial.arm, str(trial.row.micro_batch_size), *_three(trial.throughput, 1.0, ".1f"))
        for trial in measured
    )
    return Drawn(key, title, says, figure, ("trial", "arm", "micro-batch", "samples/s", "low", "high"), rows)


def _add_arm(figure: Chart, arm: str, of_arm: Sequence[TrialView], place: int) -> None:
    # Draws an arm's trials, and a line through its best one at each micro-batch size.
    measured = [(trial, trial.throughput) for trial in of_arm if trial.throughput is not None]
    best: dict[int, float] = {}
    for trial, throughput in measured:
        size = trial.row.micro_batch_size
        best[size] = max(throughput.value, best.get(size, 0.0))
    # Points of several arms do not overlap.
    aside, colour = 1.015 ** (place - 1.5), COLOURS[place % len(COLOURS)]
    figure.marks.append(Curve("", colour, [size * aside for size in best], list(best.values()), width=1.2))
    figure.marks.append(
        Points(
            arm,
            colour,
            [trial.row.micro_batch_size * aside for trial, _ in measured],
            [throughput.value for _, throughput in measured],
            [f"{_named(trial)}: {throughput.value:.1f} samples/s" for trial, throughput in measured],
            [_ends(throughput) for _, throughput in measured],
            symbol=SYMBOLS[place % len(SYMBOLS)],
        )
    )


def memory_figure(view: StudyView) -> Drawn:
    trials = [(trial, trial.memory) for trial in view.trials if trial.memory is not None]
    key, title = "memory", "Memory of the steps: predicted, measured, budget"
    if not trials:
        return Drawn(key, title, "Nothing was predicted: the profile trial did not complete.", None)
    most = max(max(memory.predicted.value, memory.measured or 0.0) for _, memory in trials)
    unit, size = ("GiB", 2**30) if most >= _LARGE else ("MiB", 2**20)
    predicted = [memory.predicted for _, memory in trials]
    done = [(place, trial, memory.measured / size) for place, (trial, memory) in enumerate(trials) if memory.measured]
    limits = [None if memory.budget is None else memory.budget / size for _, memory in trials]
    budgets = [limit for limit in limits if limit is not None]
    seen = [measured for _, _, measured in done]
    # The first predictions follow no trial, so their intervals may be as wide as the rest is high.
    most = max([0.0, *seen, *(each.value / size for each in predicted), *(each.high / size for each in predicted[1:])])
    # A budget far above the rest would flatten it.
    is_drawn = bool(budgets) and min(budgets) <= _FAR * most
    top = 1.08 * max([most, *budgets] if is_drawn else [most])
    x = Axis("trial", ends=(-1, len(trials)), ticks=[(n, f"{trial.number:04d}") for n, (trial, _) in enumerate(trials)])
    figure = Chart(x, Axis(f"{unit} above initialisation", ends=(0, top)))
    figure.marks = [
        Points(
            "predicted (90 %)",
            COLOURS[0],
            range(len(trials)),
            [each.value / size for each in predicted],
            [f"{_named(trial)}: predicted {bytes_shown(memory.predicted.value)}" for trial, memory in trials],
            [(each.low / size, each.high / size) for each in predicted],
            symbol="dash",
        ),
        Points(
            "measured",
            COLOURS[1],
            [place for place, _, _ in done],
            seen,
            [f"{_named(trial)}: measured {bytes_shown(measured * size)}" for _, trial, measured in done],
            size=4,
        ),
    ]
    failed = [(n, t, memory.predicted.value / size) for n, (t, memory) in enumerate(trials) if not t.completed]
    _add_failed(figure, failed)
    if is_drawn:
        steps = [place - 0.5 for place in range(len(trials))]
        last = [*limits, limits[-1]]
        figure.marks.append(Curve("budget", RED, [*steps, len(trials) - 0.5], last, "2 4", is_stepped=True))
    elif budgets:
        figure.notes.append(Remark(f"budget: {bytes_shown(min(budgets) * size)} ↑", is_warning=True))
    inside = sum(
        memory.measured is not None and memory.predicted.low <= memory.measured <= memory.predicted.high
        for _, memory in trials
    )
    says = (
        "Memory that the steps take above initialisation, on the rank that took most. Each prediction was made just "
        "before its trial's result was known, from all earlier trials. "
        f"{inside} of {len(seen)} measured peaks are within their 90 % interval."
    )
    if budgets:
        says += f" The budget is what initialisation leaves of a slot: at least {bytes_shown(min(budgets) * size)}."
    rows = tuple(
        (
            f"{trial.number:04d}",
            trial.row.label,
            *(bytes_shown(each) for each in (memory.predicted.value, memory.predicted.low, memory.predicted.high)),
            "" if memory.measured is None else bytes_shown(memory.measured),
            "" if memory.budget is None else bytes_shown(memory.budget),
        )
        for trial, memory in trials
    )
    columns = ("trial", "candidate", "predicted", "low", "high", "measured", "budget")
    return Drawn(key, title, says, figure, columns, rows)


def progress_figure(view: StudyView) -> Drawn:
    key, title = "progress", "Best so far"
    ended = sorted((trial for trial in view.trials if not trial.is_profile), key=lambda trial: trial.ended)
    measured = [(trial, trial.row.value) for trial in ended if trial.row.value is not None]
    if not measured:
        return Drawn(key, title, "No trial has completed.", None)
    # The best so far, as a line of steps.
    metric = SEARCH_METRICS[view.metric]
    choose: Callable[[float, float], float] = min if metric.smaller_is_better else max
    best, steps = measured[0][1], []
    for _, value in measured:
        best = choose(best, value)
        steps.append(best)
    scale, unit = scaled_unit(max(value for _, value in measured), metric.unit)
    figure = Chart(Axis("minutes since the study began", from_zero=True), Axis(f"{view.metric} ({unit})"))
    minutes = [trial.ended / 60 for trial, _ in measured]
    figure.marks.append(
        Curve(
            "best reading so far", COLOURS[0], minutes, [value / scale for value in steps], width=2.5, is_stepped=True
        )
    )
    # The trials themselves.
    for name, colour, wanted in (("search", GREY, False), ("confirming", COLOURS[1], True)):
        chosen = [
            (at, trial, value)
            for at, (trial, value) in zip(minutes, measured, strict=True)
            if _is_confirming(trial) is wanted
        ]
        if chosen:
            figure.marks.append(
                Points(
                    f"{name} trials",
                    colour,
                    [at for at, _, _ in chosen],
                    [value / scale for _, _, value in chosen],
                    [f"{_named(trial)}: {metric.shown(value)} at {at:.1f} min" for at, trial, value in chosen],
                    symbol="diamond" if wanted else "circle",
                    size=4,
                )
            )
    own = view.before.get(view.metric)
    if own is not None:
        figure.levels.append(Level(own / scale, "yours", RED))
    low = min(value for _, value in measured) / scale
    _add_failed(figure, [(trial.ended / 60, trial, low) for trial in ended if not trial.completed])
    says = (
        "Each dot is a trial when it ended. The line is the best single reading so far, which may be luck. The answer "
        "comes from the confirming trials."
    )
    rows = tuple(
        (f"{trial.number:04d}", trial.row.label, f"{at:.2f}", *map(metric.shown, (value, best)))
        for at, (trial, value), best in zip(minutes, measured, steps, strict=True)
    )
    return Drawn(key, title, says, figure, ("trial", "candidate", "minutes", view.metric, "best so far"), rows)


def knobs_figure(view: StudyView) -> Drawn:
    key, title = "knobs", "Which knobs mattered"
    effects = knob_effects(view)
    if not effects:
        return Drawn(
            key, title, f"That takes at least {FEWEST_TRIALS} completed trials that differ in something.", None
        )
    shown = effects[:_KNOBS_SHOWN]
    figure = Chart(Axis("the better value over the other (times)"), Axis(""), names=[each.knob for each in shown])
    figure.marks.append(
        Bars(
            "",
            [COLOURS[0] if effect.is_clear else GREY for effect in shown],
            [1.0] * len(shown),
            [effect.gain for effect in shown],
            [f"{each.knob} {each.times}: {each.best} over {each.worst}, by {each.source}" for each in shown],
            hollow=[effect.trials is None for effect in shown],
            intervals=[(effect.low, effect.high) for effect in shown],
        )
    )
    clear = [f"{effect.knob} {effect.times}" for effect in effects if effect.is_clear]
    found = (
        f"Beyond the noise: {', '.join(clear)}." if clear else "With these trials, no effect is larger than the noise."
    )
    says = (
        "How many times better one of two values of a knob is than the other, with 90 % intervals. Trials that differ "
        "in this knob alone are compared directly. Pale: no two trials do, so it is the expectation of the search's "
        f"model beside the best trial, from {len(measured_trials(view))} trials. {found} Grey: cannot be told from "
        "noise."
    )
    rows = tuple(
        (effect.knob, effect.best, effect.worst, effect.times, effect.interval, effect.source) for effect in effects
    )
    return Drawn(key, title, says, figure, ("knob", "better", "than", "times", "90 % interval", "seen by"), rows)


def _add_failed(figure: Chart, failed: Sequence[tuple[float, TrialView, float]]) -> None:
    # Draws trials that did not complete, each at a place and a height.
    if failed:
        x, trials, y = zip(*failed, strict=True)
        texts = [f"{_named(trial)}: {trial.row.outcome.value.replace('_', ' ')}" for trial in trials]
        figure.marks.append(Points("did not complete", RED, x, y, texts, symbol="x"))


def _named(trial: TrialView) -> str:
    return f"{trial.number:04d} {trial.row.label}"


def _is_confirming(trial: TrialView) -> bool:
    return trial.row.purpose is Purpose.CONFIRM


def _ends(interval: Interval) -> tuple[float, float]:
    return interval.low, interval.high


def _three(interval: Interval | None, unit: float, style: str) -> tuple[str, str, str]:
    if interval is None:
        return "", "", ""
    low, value, high = (format(each / unit, style) for each in (interval.low, interval.value, interval.high))
    return value, low, high
