"""Figures as SVG. They need no script and no network, so a printer and a mail program show them as a browser does."""

import html
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

# Colour-blind readers can distinguish these, on white and on black.
COLOURS = ("#2f81d6", "#d9730d", "#159a74", "#c2529a", "#8567d6", "#a67c00", "#5b8c1d", "#d0454c")
GREY, RED, GREEN = "#838b98", "#d0454c", "#159a74"
SYMBOLS = ("circle", "square", "diamond", "triangle", "drop", "plus", "pentagon", "hexagon")
# Corners of a symbol, and the angle of the first one.
_CORNERS = {"square": (4, 45), "diamond": (4, 90), "triangle": (3, 90), "drop": (3, -90), "pentagon": (5, 90)}
_CORNERS |= {"hexagon": (6, 90), "star": (10, 90)}
_STROKES = {"x": "M-1-1L1 1M-1 1L1-1", "plus": "M-1.2 0H1.2M0-1.2V1.2", "dash": "M-1 0H1", "bar": "M0-1V1"}

# Widths of a drawing in its own pixels. The style sheet shows one of the two.
DESK, PHONE = 880, 350
_FONT, _LETTER = 13, 7.5  # pixels: the height of a letter, and its width in the mean in a wide font
_LINE = 18  # from one line of words to the next

Dash = Literal["", "2 4", "7 5"]
DOTTED: Dash = "2 4"
DASHED: Dash = "7 5"


@dataclass(frozen=True)
class Axis:
    name: str
    is_log: bool = False
    ends: tuple[float, float] | None = None  # None: from what is drawn
    from_zero: bool = False
    ticks: Sequence[tuple[float, str]] | None = None  # None: round numbers


class Scale:
    """An axis as numbers of pixels."""

    def __init__(self, axis: Axis, values: Sequence[float], start: float, end: float) -> None:
        # A damaged record may have any number.
        drawn = [value for value in values if math.isfinite(value) and (value > 0 or not axis.is_log)]
        low, high = axis.ends or (min(drawn, default=1.0), max(drawn, default=1.0))
        if axis.ends is None:
            low = 0.0 if axis.from_zero else low
            if axis.is_log:
                spare = max(high / low, 1.2) ** 0.05
                low, high = low / spare, high * spare
            else:
                spare = 0.05 * (high - low or abs(high) or 1.0)
                low, high = low - (0.0 if axis.from_zero else spare), high + spare
        self.low, self.high, self._axis, self._start, self._end = low, high, axis, start, end

    def __call__(self, value: float) -> float:
        if self._axis.is_log:
            share = math.log(max(value, 1e-300) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low or 1.0)
        return self._start + share * (self._end - self._start)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        if self._axis.ticks is not None:
            found = list(self._axis.ticks)
        elif self._axis.is_log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            parts = (1, 2, 5) if len(decades) <= 3 else (1,)
            found = [(value, f"{value:,g}") for decade in decades for part in parts if (value := part * 10.0**decade)]
        else:
            step = _round_step((self.high - self.low) / most)
            first = math.ceil(self.low / step)
            found = [(n * step, _number(n * step, step)) for n in range(first, math.floor(self.high / step + 1e-9) + 1)]
        return [(value, text) for value, text in found if self.low <= value <= self.high * (1 + 1e-9)]


def _round_step(least: float) -> float:
    decade = 10.0 ** math.floor(math.log10(least or 1.0))
    return next(part * decade for part in (1, 2, 5, 10) if part * decade >= least * (1 - 1e-9))


def _number(value: float, step: float) -> str:
    return f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


@dataclass(frozen=True)
class Plane:
    """The place of a drawing's points."""

    x: Scale
    y: Scale
    bar: float  # height of a bar


@dataclass(frozen=True)
class Curve:
    name: str  # in the legend. Empty if it is not there.
    colour: str
    x: Sequence[float]
    y: Sequence[float | None]  # None is a gap
    dash: Dash = ""
    width: float = 2
    is_stepped: bool = False  # whether a value holds until the next

    def reach(self) -> tuple[Iterable[float], Iterable[float]]:
        return self.x, [value for value in self.y if value is not None]

    def drawn(self, plane: Plane) -> Iterator[str]:
        path = _path(plane, self.x, self.y, self.is_stepped)
        dash = f' stroke-dasharray="{self.dash}"' if self.dash else ""
        yield f'<path d="{path}" fill="none" stroke="{self.colour}" stroke-width="{self.width}"{dash}/>'

    def sign(self, x: float, y: float) -> str:
        dash = f' stroke-dasharray="{self.dash}"' if self.dash else ""
        return f'<path d="M{x} {y}h18" stroke="{self.colour}" stroke-width="{self.width}"{dash}/>'


@dataclass(frozen=True)
class Area:
    """Between two lines."""

    name: str
    colour: str
    x: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    opacity: float = 0.18
    is_stepped: bool = False

    def reach(self) -> tuple[Iterable[float], Iterable[float]]:
        return self.x, [*self.low, *self.high]

    def drawn(self, plane: Plane) -> Iterator[str]:
        there = _path(plane, self.x, self.high, self.is_stepped)
        # On the way back a value begins where it ended on the way there.
        low = [*self.low[-2::-1], self.low[0]] if self.is_stepped else self.low[::-1]
        back = _path(plane, self.x[::-1], low, self.is_stepped)
        style = f'fill="{self.colour}" fill-opacity="{self.opacity}"'
        yield f'<path d="{there}L{back[1:]}Z" {style}>{_title(self.name)}</path>'

    def sign(self, x: float, y: float) -> str:
        return f'<rect x="{x}" y="{y - 5}" width="18" height="10" fill="{self.colour}" fill-opacity="{self.opacity}"/>'


@dataclass(frozen=True)
class Points:
    name: str
    colour: str
    x: Sequence[float]
    y: Sequence[float]
    texts: Sequence[str] = ()  # what a pointer on each reads
    ends: Sequence[tuple[float, float]] = ()  # of the interval of each
    is_sideways: bool = False  # whether the intervals are of x
    symbol: str = "circle"
    size: float = 4.5
    hollow: Sequence[bool] = ()
    bar: float = 1  # width of an interval's line

    def reach(self) -> tuple[Iterable[float], Iterable[float]]:
        reached = [end for pair in self.ends for end in pair]
        return ([*self.x, *reached], self.y) if self.is_sideways else (self.x, [*self.y, *reached])

    def drawn(self, plane: Plane) -> Iterator[str]:
        for place, (low, high) in enumerate(self.ends):
            if low < high:
                at = plane.y(self.y[place]) if self.is_sideways else plane.x(self.x[place])
                along = plane.x if self.is_sideways else plane.y
                colour = self.colour if self.bar > 1 or not self.is_sideways else ""
                yield _interval(at, along(low), along(high), self.is_sideways, colour, self.bar)
        for place, (x, y) in enumerate(zip(self.x, self.y, strict=True)):
            is_hollow = bool(self.hollow) and self.hollow[place]
            text = self.texts[place] if self.texts else self.name
            yield _symbol(self.symbol, plane.x(x), plane.y(y), self.size, self.colour, is_hollow, text)

    def sign(self, x: float, y: float) -> str:
        return _symbol(self.symbol, x + 9, y, min(self.size, 6), self.colour, False, "")


@dataclass(frozen=True)
class Bars:
    """One bar for each name of the chart, sideways."""

    name: str
    colour: str | Sequence[str]
    starts: Sequence[float]
    ends: Sequence[float]
    texts: Sequence[str]
    faint: Sequence[bool] = ()
    hollow: Sequence[bool] = ()
    intervals: Sequence[tuple[float, float]] = ()

    def reach(self) -> tuple[Iterable[float], Iterable[float]]:
        return [*self.starts, *self.ends, *(end for pair in self.intervals for end in pair)], ()

    def drawn(self, plane: Plane) -> Iterator[str]:
        height = plane.bar
        for place, (start, end) in enumerate(zip(self.starts, self.ends, strict=True)):
            left, right = sorted((plane.x(start), plane.x(end)))
            colour = self.colour if isinstance(self.colour, str) else self.colour[place]
            style = f'fill="{colour}"'
            if self.hollow and self.hollow[place]:
                style += f' fill-opacity="0.15" stroke="{colour}" stroke-dasharray="4 3"'
            elif self.faint and self.faint[place]:
                style += ' fill-opacity="0.45"'
            if right > left:
                yield (
                    f'<rect class="bar" x="{left:.1f}" y="{plane.y(place) - height / 2:.1f}" '
                    f'width="{right - left:.1f}" height="{height:.1f}" {style}>{_title(self.texts[place])}</rect>'
                )
        for place, (low, high) in enumerate(self.intervals):
            yield _interval(plane.y(place), plane.x(low), plane.x(high), True, "", 1.5)

    def sign(self, x: float, y: float) -> str:
        assert isinstance(self.colour, str)
        return f'<rect x="{x + 3}" y="{y - 6}" width="12" height="12" fill="{self.colour}"/>'


Mark = Curve | Area | Points | Bars


@dataclass(frozen=True)
class Level:
    """A line across the drawing, with its name at the end."""

    at: float
    text: str
    colour: str
    dash: Dash = DOTTED
    is_upright: bool = False


@dataclass(frozen=True)
class Band:
    """A stretch of the x axis, with its name above."""

    start: float
    end: float
    text: str
    colour: str


@dataclass(frozen=True)
class Remark:
    """Words in a corner of the drawing, at the top, in a line of their own."""

    text: str
    is_warning: bool = False
    is_left: bool = False
    line: int = 0


@dataclass
class Chart:
    x: Axis
    y: Axis
    height: int = 400
    names: Sequence[str] = ()  # of rows of bars, from the top. Empty: y has numbers.
    marks: list[Mark] = field(default_factory=list)
    levels: list[Level] = field(default_factory=list)
    bands: list[Band] = field(default_factory=list)
    notes: list[Remark] = field(default_factory=list)

    @property
    def words(self) -> list[str]:
        """All that is written into the drawing."""
        texts = [level.text for level in self.levels] + [band.text for band in self.bands]
        return [text for text in texts + [note.text for note in self.notes] if text]

    def svg(self, width: int = DESK) -> str:
        is_narrow = width < DESK
        row = (46 if is_narrow else 34) if self.names else 0
        top = 30 if self.bands or any(level.is_upright for level in self.levels) else 12
        height = top + row * len(self.names) + 50 if self.names else self.height - 46
        # Letters on the left, beside the rows or the numbers.
        reach = [mark.reach() for mark in self.marks]
        on_x = [value for values, _ in reach for value in values]
        on_x += [level.at for level in self.levels if level.is_upright]
        on_y = [value for _, values in reach for value in values]
        on_y += [level.at for level in self.levels if not level.is_upright]
        bottom = height - 40
        rows = Axis("", ends=(-0.5, max(len(self.names), 1) - 0.5))
        y = Scale(rows, (), top, bottom) if self.names else Scale(self.y, on_y, bottom, top)
        y_ticks = [] if self.names else y.ticks(6)
        longest = max((len(text) for _, text in y_ticks), default=0)
        if self.names and not is_narrow:
            longest = max(map(len, self.names))
        left = 10 if self.names and is_narrow else 12 + _LETTER * longest + (0 if self.names else 20)
        right = width - 14.0
        plane = Plane(Scale(self.x, on_x, left, right), y, 16 if is_narrow else 21)
        x_ticks = _apart(plane.x, plane.x.ticks(5 if is_narrow else 10))
        parts = [*self._grid(plane, x_ticks, y_ticks, (left, right, top, bottom), is_narrow)]
        # What is beyond the ends of an axis is cut.
        inner = f'x="{left:.1f}" y="{top}" width="{right - left:.1f}" height="{bottom - top}"'
        box = f"{left:.1f} {top} {right - left:.1f} {bottom - top}"
        parts.append(f'<svg {inner} viewBox="{box}">')
        parts += [part for mark in self.marks for part in mark.drawn(plane)]
        parts.append("</svg>")
        parts += self._words(plane, (left, right, top, bottom))
        legend, under = self._legend(width, height)
        view = f'viewBox="0 0 {width} {under:.0f}"'
        kind = "phone" if is_narrow else "desk"
        return f'<svg class="{kind}" {view} font-size="{_FONT}">{"".join([*parts, *legend])}</svg>'

    def _grid(
        self,
        plane: Plane,
        x_ticks: Sequence[tuple[float, str]],
        y_ticks: Sequence[tuple[float, str]],
        box: tuple[float, float, float, float],
        is_narrow: bool,
    ) -> Iterator[str]:
        left, right, top, bottom = box
        for band in self.bands:
            start, end = plane.x(band.start), plane.x(band.end)
            yield (
                f'<rect x="{start:.1f}" y="{top}" width="{end - start:.1f}" height="{bottom - top}" '
                f'fill="{band.colour}" fill-opacity="0.14"/>'
            )
            yield _text((start + end) / 2, top - 6, band.text, "middle", "band")
        for value, text in x_ticks:
            yield f'<path class="grid" d="M{plane.x(value):.1f} {top}V{bottom}"/>'
            yield _text(plane.x(value), bottom + 17, text, "middle", "tick")
        for value, text in y_ticks:
            yield f'<path class="grid" d="M{left:.1f} {plane.y(value):.1f}H{right:.1f}"/>'
            yield _text(left - 6, plane.y(value) + 4.5, text, "end", "tick")
        for place, name in enumerate(self.names):
            if is_narrow:
                yield _text(left, plane.y(place) - 13, name, "start", "tick")
            else:
                yield _text(left - 8, plane.y(place) + 4.5, name, "end", "tick")
        yield _text((left + right) / 2, bottom + 35, self.x.name, "middle", "name")
        if self.y.name:
            turned = f' transform="rotate(-90 12 {(top + bottom) / 2})"'
            yield _text(12, (top + bottom) / 2, self.y.name, "middle", "name", turned)

    def _words(self, plane: Plane, box: tuple[float, float, float, float]) -> Iterator[str]:
        left, right, top, bottom = box
        for level in self.levels:
            at = plane.x(level.at) if level.is_upright else plane.y(level.at)
            line = f"M{at:.1f} {top}V{bottom}" if level.is_upright else f"M{left:.1f} {at:.1f}H{right:.1f}"
            yield (
                f'<path class="level" d="{line}" fill="none" stroke="{level.colour}" stroke-width="2" '
                f'stroke-dasharray="{level.dash}"/>'
            )
            kind = "note bad" if level.colour == RED else "note"
            if level.is_upright:
                is_right = at > (left + right) / 2
                yield _text(at, top - 6, level.text, "end" if is_right else "start", kind)
            else:
                yield _text(right, at - 6 if at > top + 20 else at + 16, level.text, "end", kind)
        for note in self.notes:
            kind = "note bad" if note.is_warning else "note"
            x, anchor = (left + 4, "start") if note.is_left else (right, "end")
            yield _text(x, top + 13 + 16 * note.line, note.text, anchor, kind)

    def _legend(self, width: int, top: float) -> tuple[list[str], float]:
        parts: list[str] = []
        x, y = 12.0, top + 16
        for mark in self.marks:
            if mark.name:
                most = int((width - 38) / _LETTER)
                name = mark.name if len(mark.name) <= most else f"{mark.name[: most - 1]}…"
                room = 26 + _LETTER * len(name) + 14
                if x > 12 and x + room > width:
                    x, y = 12.0, y + _LINE
                parts += [mark.sign(x, y), _text(x + 26, y + 4.5, name, "start", "legend")]
                x += room
        return parts, y + 12 if parts else top


@dataclass(frozen=True)
class Drawn:
    """A figure with its words and its numbers, for readers who cannot see or hover."""

    key: str  # its name in addresses and files
    title: str
    says: str  # how to read it
    figure: Chart | None  # None if there is nothing to draw; `says` has the reason.
    columns: tuple[str, ...] = ()  # of the table of its numbers
    rows: tuple[tuple[str, ...], ...] = ()  # of that table


def _path(plane: Plane, x: Sequence[float], y: Sequence[float | None], is_stepped: bool = False) -> str:
    """`is_stepped` draws each value up to the next one's place."""
    parts: list[str] = []
    last: str | None = None
    for at, value in zip(x, y, strict=True):
        right = f"{plane.x(at):.1f}"
        if value is None:
            last = None
            continue
        down = f"{plane.y(value):.1f}"
        if last is None:
            parts.append(f"M{right} {down}")
        elif not is_stepped:
            parts.append(f"L{right} {down}")
        elif down == last and parts[-1][0] == "H":
            # It goes on at the same height.
            parts[-1] = f"H{right}"
        else:
            parts += [f"H{right}", *([f"V{down}"] if down != last else [])]
        last = down
    return "".join(parts)


def _interval(at: float, low: float, high: float, is_sideways: bool, colour: str, width: float) -> str:
    cap = 3 * width**0.5
    lines = [((low, at), (high, at)), *(((end, at - cap), (end, at + cap)) for end in (low, high))]
    places = [point if is_sideways else point[::-1] for line in lines for point in line]
    path = "".join(f"{'ML'[n % 2]}{x:.1f} {y:.1f}" for n, (x, y) in enumerate(places))
    stroke = f'stroke="{colour or "currentColor"}" '
    return f'<path class="interval" d="{path}" {stroke}stroke-width="{width}"/>'


def _symbol(symbol: str, x: float, y: float, size: float, colour: str, is_hollow: bool, text: str) -> str:
    style = f'fill="none" stroke="{colour}" stroke-width="2"' if is_hollow else f'fill="{colour}" fill-opacity="0.88"'
    said = _title(text)
    if symbol == "circle":
        return f'<circle class="point" cx="{x:.1f}" cy="{y:.1f}" r="{size}" {style}>{said}</circle>'
    if symbol in _STROKES:
        moved = f'transform="translate({x:.1f} {y:.1f}) scale({size})" vector-effect="non-scaling-stroke"'
        style = f'fill="none" stroke="{colour}" stroke-width="2"'
        return f'<path class="point" d="{_STROKES[symbol]}" {moved} {style}>{said}</path>'
    corners, turned = _CORNERS[symbol]
    radii = [1.25 * size * (0.45 if symbol == "star" and corner % 2 else 1.15) for corner in range(corners)]
    angles = [math.radians(turned + 360 * corner / corners) for corner in range(corners)]
    places = (f"{x + r * math.cos(a):.1f},{y - r * math.sin(a):.1f}" for r, a in zip(radii, angles, strict=True))
    return f'<polygon class="point" points="{" ".join(places)}" {style}>{said}</polygon>'


def _apart(scale: Scale, ticks: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    # Numbers that would lie on the one before stay away.
    shown: list[tuple[float, str]] = []
    for value, text in ticks:
        half = _LETTER * len(text) / 2 + 4
        if not shown or scale(value) - half > scale(shown[-1][0]) + _LETTER * len(shown[-1][1]) / 2 + 4:
            shown.append((value, text))
    return shown


def _text(x: float, y: float, text: str, anchor: str, kind: str, more: str = "") -> str:
    if not text:
        return ""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{html.escape(text)}</text>'


def _title(text: str) -> str:
    return f"<title>{html.escape(text)}</title>" if text else ""
