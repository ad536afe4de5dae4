"""The queue for the slots of a host: who may take which devices now. Pure.

Claims are served in the order of arrival. A later claim takes devices only if no earlier one that waits can start later
for it. How long the others keep theirs is unknown.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trial_lib.slots.claims import Claim


@dataclass(frozen=True)
class QueueWait:
    """A claim that waits for slots.

    Attributes:
        count: the slots that it waits for.
        of: the slots that it can run on.
        place: its place among the claims that wait for any of these, from 1.
        holders: who has these slots, each with the time since when, in seconds since the epoch.
    """

    count: int
    of: int
    place: int
    holders: tuple[tuple[str, float], ...]


def may_take(claim: Claim, others: Sequence[Claim]) -> tuple[str, ...] | None:
    """Returns the devices that a claim may take now; None if it has to wait.

    Args:
        claim: it has none yet.
        others: all other claims, in the order of arrival.
    """
    held = {device for other in others for device in other.holds}
    ahead = _ahead(claim, others)
    spare = [_spare(waiting, others, held) for waiting in ahead]
    taken: list[str] = []
    for device in claim.wants:
        asking = [place for place, waiting in enumerate(ahead) if device in waiting.wants]
        if device not in held and len(taken) < claim.count and all(spare[place] > 0 for place in asking):
            taken.append(device)
            for place in asking:
                spare[place] -= 1
    return tuple(taken) if len(taken) == claim.count else None


def wait_of(claim: Claim, others: Sequence[Claim]) -> QueueWait:
    """Returns how a claim waits."""
    wanted = {*claim.wants}
    holders = tuple((other.maker, other.since) for other in others if wanted & {*other.holds})
    return QueueWait(claim.count, len(claim.wants), len(_ahead(claim, others)) + 1, holders)


def _ahead(claim: Claim, others: Sequence[Claim]) -> list[Claim]:
    """Returns the earlier claims that wait for any of the same devices."""
    return [
        other
        for other in others
        if not other.holds
        and (other.arrived, other.pid) < (claim.arrived, claim.pid)
        and not {*claim.wants}.isdisjoint(other.wants)
    ]


def _spare(waiting: Claim, others: Sequence[Claim], held: set[str]) -> int:
    """Returns how many of its free devices a waiting claim can do without, whatever the order in which others end.

    A claim gives all its devices back at once. So the devices that can be free together are sums, and the least sum
    that is enough may be more than enough. A claim that waits behind another can do without none.

    Args:
        waiting: the claim.
        others: all claims.
        held: the devices that any of them holds.
    """
    if _ahead(waiting, others):
        return 0
    wanted = {*waiting.wants}
    sums = {len(wanted - held)}
    for other in others:
        sums |= {some + len(wanted & {*other.holds}) for some in sums}
    return min((some - waiting.count for some in sums if some >= waiting.count), default=0)
