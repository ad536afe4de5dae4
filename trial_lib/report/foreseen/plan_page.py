"""The page of a plan: one self-contained HTML file, with plotly's drawing code."""

import json

from trial_lib.records.units import bytes_shown, quantity
from trial_lib.report.figures import Drawn
from trial_lib.report.foreseen.arm_figures import arms_memory_figure, arms_time_figure
from trial_lib.report.foreseen.count_figures import count_memory_figure, speed_figure
from trial_lib.report.foreseen.plan_parts import fits_text, interval_bytes
from trial_lib.report.foreseen.plan_view import PlanView, TargetView
from trial_lib.report.foreseen.step_figure import host_figure, line_figure
from trial_lib.report.page_parts import drawings, packed_plotly, page_template
from trial_lib.report.study_view import Interval


def render_plan(view: PlanView) -> str:
    """Returns the page of a plan as HTML."""
    of_targets = [(target, target_figures(target)) for target in view.targets]
    counted = [target for target in view.targets if target.counts]
    counts = [speed_figure(counted, view.counts_say), count_memory_figure(counted, view.counts_say)] if counted else []
    figures = [drawn for _, of_target in of_targets for drawn in of_target] + counts
    return page_template("plan.html.j2").render(
        view=view,
        of_targets=of_targets,
        counts=counts,
        cards=_cards(view),
        drawings=drawings(figures),
        plotly=packed_plotly(),
        config=None if view.best_config is None else json.dumps(view.best_config, indent=2),
        fits=fits_text,
        needs=interval_bytes,
        speed=_speed,
        cost=_cost,
    )


def target_figures(target: TargetView) -> list[Drawn]:
    """Returns the figures of one kind of device, in the order of the page."""
    if not target.arms:
        return []
    lines = [line_figure(target)] if target.line is not None else []
    if target.host_line is not None:
        lines.append(host_figure(target))
    return [*lines, arms_memory_figure(target), arms_time_figure(target)]


def _cards(view: PlanView) -> list[tuple[str, str, str]]:
    """Returns the figures of the answer: name, value, explanation."""
    target = view.targets[0] if view.targets else None
    arm = target.chosen if target is not None else None
    if target is None or arm is None:
        return []
    cards = []
    if arm.samples_per_s is not None:
        ends = f"90 % interval {_ends(arm.samples_per_s)}" if arm.samples_per_s.has_ends else "interval unknown"
        cards.append(("Samples/s, foreseen", quantity(arm.samples_per_s.value, "").rstrip(), ends))
    cards.append(("Memory of a device", bytes_shown(arm.peak.value), f"of {bytes_shown(target.memory)}"))
    cards.append(("It fits", fits_text(arm.fits), f"micro-batch {arm.micro_batch}"))
    if arm.cost is not None:
        cards.append(("Cost of a billion tokens", _cost(arm.cost, target.currency), "at the price that you gave"))
    if target.fewest is not None:
        cards.append(("Fewest devices", f"{target.fewest:,}", "on which it trains at all"))
    return cards


def _ends(interval: Interval) -> str:
    return f"{quantity(interval.low, '').rstrip()} to {quantity(interval.high, '').rstrip()}"


def _speed(interval: Interval | None) -> str:
    """Returns a speed with its interval."""
    if interval is None:
        return "-"
    value = quantity(interval.value, "").rstrip()
    return f"{value} ({_ends(interval)})" if interval.has_ends else value


def _cost(cost: float | None, currency: str) -> str:
    if cost is None:
        return "-"
    return f"{currency}{cost:,.0f}" if cost >= 100 else f"{currency}{cost:,.2f}"
