"""The devices of a plan as they are typed: `h100-80gb:8`, `a100-40gb:2x8`, and their prices, `h100-80gb=2.99`.

Pure: standard library only.
"""

import difflib
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from trial_lib.wire.errors import InputError

MOST_DEVICES = 65_536
_NEAR, _LISTED = 4, 12
_COUNT = re.compile(r"(?:([1-9]\d{0,6})[x*])?([1-9]\d{0,6})")


@dataclass(frozen=True)
class AskedDevices:
    """A number of devices of one kind, that train together.

    Attributes:
        device: the name of the kind.
        nodes: hosts.
        per_node: devices of each host.
        price: of one device for one hour, in the user's currency; None if the user gives none.
    """

    device: str
    nodes: int
    per_node: int
    price: float | None = None

    @property
    def count(self) -> int:
        """All of them."""
        return self.nodes * self.per_node

    @property
    def label(self) -> str:
        """As people type it, such as `a100-40gb:2x8`."""
        return f"{self.device}:{self.per_node}" if self.nodes == 1 else f"{self.device}:{self.nodes}x{self.per_node}"


def read_devices(typed: Sequence[str], prices: Sequence[str], known: Collection[str]) -> tuple[AskedDevices, ...]:
    """Returns the devices of `--on` and `--price`, in the order of `--on`.

    Args:
        typed: such as `h100-80gb:8`, `a100-40gb:2x8`, or `h100-80gb` for one.
        prices: such as `h100-80gb=2.99`.
        known: the names of all known devices.

    Raises:
        InputError: a word is malformed, names an unknown device, or is there twice.
    """
    asked = [_read(word, known) for word in typed]
    costs: dict[str, float] = {}
    for word in prices:
        name, price = _read_price(word, known)
        where = f"--price {word}"
        if name in costs:
            raise InputError(f"{name} has two prices.", where=where, remedy="Leave one of them out.")
        if typed and name not in {each.device for each in asked}:
            raise InputError(
                f"no --on asks for {name}.", where=where, remedy=f"Add --on {name}:8, or leave the price out."
            )
        costs[name] = price
    seen: set[AskedDevices] = set()
    for each in asked:
        if each in seen:
            raise InputError(f"{each.label} is there twice.", where=f"--on {each.label}", remedy="Leave one out.")
        seen.add(each)
    return tuple(AskedDevices(each.device, each.nodes, each.per_node, costs.get(each.device)) for each in asked)


def _read(word: str, known: Collection[str]) -> AskedDevices:
    where = f"--on {word}"
    name, colon, count = word.partition(":")
    found = _COUNT.fullmatch(count) if colon else None
    if not name or (colon and found is None):
        raise InputError(
            f'"{word}" is no number of devices.',
            where=where,
            remedy="Write NAME:NUMBER, or NAME:HOSTSxNUMBER for several hosts, such as h100-80gb:8 or a100-40gb:2x8.",
        )
    device = _known(name, known, where)
    nodes, per_node = (1, 1) if found is None else (int(found[1] or 1), int(found[2]))
    if nodes * per_node > MOST_DEVICES:
        raise InputError(
            f"{nodes * per_node:,} devices are more than a plan can foresee.",
            where=where,
            remedy=f"Ask for at most {MOST_DEVICES:,}.",
        )
    return AskedDevices(device, nodes, per_node)


def _read_price(word: str, known: Collection[str]) -> tuple[str, float]:
    where = f"--price {word}"
    name, sign, amount = word.partition("=")
    try:
        price = float(amount)
    except ValueError:
        price = math.nan
    if not sign or not name or not math.isfinite(price) or price < 0:
        raise InputError(
            f'"{word}" is no price.',
            where=where,
            remedy="Write NAME=PRICE, the price of one device for one hour, such as h100-80gb=2.99.",
        )
    return _known(name, known, where), price


def _known(name: str, known: Collection[str], where: str) -> str:
    """Returns the name of a device as the table has it."""
    by_plain = {each.lower(): each for each in known}
    found = by_plain.get(name.lower())
    if found is not None:
        return found
    raise InputError(f'no device is called "{name}".', where=where, remedy=f"{_nearest(name, known)} {_OWN}")


_OWN = "A file of your own describes others (--devices)."


def _nearest(name: str, known: Collection[str]) -> str:
    """Returns a sentence with the names that are nearest to an unknown one, or with all if none is near."""
    by_plain = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), by_plain, n=_NEAR, cutoff=0.5)
    within = sorted(each for each in by_plain if name.lower() in each)
    names = [by_plain[each] for each in dict.fromkeys([*within[:_NEAR], *near])][:_NEAR]
    if names:
        return f"The nearest are {', '.join(names)}."
    listed = sorted(known)
    more = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
    return f"Known are {', '.join(listed[:_LISTED])}{more}."
