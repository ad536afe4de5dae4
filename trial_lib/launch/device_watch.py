"""Watches the devices of a trial while it runs: their clocks, and other processes on them."""

import contextlib
import os
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import psutil
from pydantic import TypeAdapter

from zerotune.trial_lib.device.base import DeviceState, Host, Tenant
from zerotune.trial_lib.device.this_host import kind_of
from zerotune.trial_lib.launch.outcome import read_record
from zerotune.trial_lib.rank.endings import ENDED, WORKS, RankEnd
from zerotune.trial_lib.records.result import Neighbour, TrialDevice, TrialResult
from zerotune.trial_lib.records.units import bytes_shown

_PERIOD_S = 2.0
_PATIENCE_S = 10.0
_RELEASE_POLL_S, _TOLD_S, _STUCK_S = 0.1, 5.0, 60.0
# These reasons are usual. The power limit slows nearly every busy card, and clocks were set on purpose.
_USUAL = ("its power limit", "clocks that were set", "a display")
_Answer = TypeVar("_Answer")


class DeviceWatch:
    """Looks at a trial's devices before it starts, from time to time while it runs, and when it has ended.

    A process is foreign if this process did not start it. In a container the driver may report process numbers of
    another namespace. A process is then foreign if it is there before the trial and after it.
    """

    def __init__(self, host: Host, slots: Sequence[str]) -> None:
        self._host = host
        self._slots = slots
        self._kind = kind_of(host.device)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._own: set[int] = set()
        self._is_silent = False
        self._start_over()
        self._before = self._within(self._tenants) or {}
        self._note_others(self._before)
        self._thread = threading.Thread(target=self._run, daemon=True, name="device-watch")
        if not self._kind.computes_on_the_processor:
            self._thread.start()

    def take(self) -> list[TrialDevice]:
        """Returns the states of the devices since the last call. The trial's ranks may have ended."""
        tenants = self._within(self._tenants) or {}
        states = [] if self._states else self._within(self._look_at_states)
        with self._lock:
            self._note_others(tenants)
            self._note_those_who_stay(tenants)
            if states and not self._states:
                self._states.append(states)
            taken = [self._taken(number) for number in range(len(self._slots))]
            self._start_over()
        return taken

    def await_release(self, is_cancelled: Callable[[], bool], note: Callable[[str], None]) -> None:
        """Waits until the driver has released the trial's ended processes. No other trial may have them before."""
        held, is_told = self._still_held(), False
        began = since = time.monotonic()
        while held and not is_cancelled():
            if not is_told and time.monotonic() - began > _TOLD_S:
                is_told = True
                note(f"the driver has not let go of ended processes yet ({_numbers(held)}): their slots are kept")
            if time.monotonic() - since > _STUCK_S:
                note(f"the driver does not let go of ended processes ({_numbers(held)}): what follows finds them there")
                return
            time.sleep(_RELEASE_POLL_S)
            if (now := self._still_held()) != held:
                held, since = now, time.monotonic()

    def _still_held(self) -> set[tuple[int, int | None]]:
        tenants = self._within(self._tenants) or {}
        with self._lock:
            own = set(self._own)
        named = {(each.pid, each.memory) for found in tenants.values() for each in found if each.pid in own}
        return {(pid, memory) for pid, memory in named if _has_ended(pid)}

    def close(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(_PATIENCE_S)

    def _start_over(self) -> None:
        self._states: list[list[DeviceState]] = []
        self._company: dict[str, dict[int, Neighbour]] = {self._host.device_of(slot): {} for slot in self._slots}

    def _run(self) -> None:
        with self._kind.asked_often():
            while not self._over.wait(_PERIOD_S):
                states, tenants = self._look_at_states(), self._tenants()
                with self._lock:
                    self._states.append(states)
                    self._note_others(tenants)

    def _tenants(self) -> dict[str, list[Tenant]]:
        return self._kind.tenants(self._host, self._slots)

    def _look_at_states(self) -> list[DeviceState]:
        return self._kind.states(self._host, self._slots)

    def _within(self, ask: Callable[[], _Answer]) -> _Answer | None:
        # A driver's answer. None if the driver hangs, which is then not asked again.
        if self._is_silent:
            return None
        answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        threading.Thread(target=lambda: answers.put(ask()), daemon=True, name="ask-driver").start()
        try:
            return answers.get(timeout=_PATIENCE_S)
        except queue.Empty:
            self._is_silent = True
            self._over.set()
            return None

    def _note_others(self, tenants: Mapping[str, Sequence[Tenant]]) -> None:
        # Notes the foreign processes of this host.
        for device, found in tenants.items():
            for tenant in found:
                if tenant.pid in self._own or not psutil.pid_exists(tenant.pid):
                    continue
                if _is_own(tenant.pid):
                    self._own.add(tenant.pid)
                else:
                    self._company[device][tenant.pid] = neighbour(tenant)

    def _note_those_who_stay(self, tenants: Mapping[str, Sequence[Tenant]]) -> None:
        # Notes the processes that were there before the trial and still are, in any container.
        for device, found in tenants.items():
            before = {tenant.pid for tenant in self._before.get(device, [])} - self._own
            for tenant in found:
                if tenant.pid in before:
                    self._company[device].setdefault(tenant.pid, neighbour(tenant))

    def _taken(self, number: int) -> TrialDevice:
        looks = [states[number] for states in self._states]
        at_work = [look for look in looks if not look.is_idle and look.clock] or looks
        clocks = [look.clock for look in at_work if look.clock is not None]
        temperatures = [look.temperature for look in looks if look.temperature is not None]
        device = self._host.device_of(self._slots[number])
        return TrialDevice(
            device=device,
            model=self._host.models.get(device, ""),
            clock=statistics.median(clocks) if clocks else None,
            power_limit=next((look.power_limit for look in reversed(looks) if look.power_limit is not None), None),
            temperature=max(temperatures, default=None),
            held_down=list(dict.fromkeys(reason for look in looks for reason in look.held_down)),
            company=list(self._company[device].values()),
        )


@contextlib.contextmanager
def watched(host: Host, slots: Sequence[str]) -> Iterator[DeviceWatch]:
    watch = DeviceWatch(host, slots)
    try:
        yield watch
    finally:
        watch.close()


def note_devices(devices: Sequence[TrialDevice], label: str, note: Callable[[str], None]) -> None:
    for device in devices:
        if reasons := _unusual([device]):
            note(f"{label}: the clock of {device.device} was held down by {', '.join(reasons)}")
        if device.company:
            note(f"{label}: others computed on {device.device} meanwhile: {company_said(device.company)}")


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
    held = [one for one in results if _unusual(one.devices)]
    if held:
        reasons = sorted({reason for one in held for reason in _unusual(one.devices)})
        notes.append(f"In {len(held)} of {len(results)} of these trials a clock was held down by {', '.join(reasons)}.")
    return notes


def _unusual(devices: Sequence[TrialDevice]) -> list[str]:
    return [reason for device in devices for reason in device.held_down if reason not in _USUAL]


def company_said(company: Sequence[Neighbour]) -> str:
    return ", ".join(
        f"{each.name or 'a process'} ({each.pid}" + (")" if each.memory is None else f", {bytes_shown(each.memory)})")
        for each in company
    )


def company_now(host: Host) -> list[str]:
    """Returns a sentence for each of a host's devices on which a process computes now."""
    found = {device: [each for each in there if not _is_own(each.pid)] for device, there in _tenants(host).items()}
    return [
        f"Others compute on {device} now: {company_said(list(map(neighbour, there)))}. "
        "A trial beside them is slower than it would be alone; one that confirms is measured again."
        for device, there in found.items()
        if there
    ]


def _tenants(host: Host) -> dict[str, list[Tenant]]:
    return kind_of(host.device).tenants(host, [slot for slot in host.slots if slot in host.devices])


def _is_own(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return os.getpid() in {process.pid for process in psutil.Process(pid).parents()}
    return False


def _has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD, psutil.STATUS_DISK_SLEEP)
    except psutil.Error:
        return True


def _numbers(held: set[tuple[int, int | None]]) -> str:
    return ", ".join(sorted(str(pid) for pid, _ in held))


def neighbour(tenant: Tenant) -> Neighbour:
    """Returns a process with its name. The name is empty for a process of another container."""
    name = ""
    with contextlib.suppress(psutil.Error):
        name = psutil.Process(tenant.pid).name()
    return Neighbour(pid=tenant.pid, name=name, memory=tenant.memory)


# Reports while ranks stand still what they wait for, and which rank works.

_POLL_S = 2.0
_STATE = TypeAdapter(RankEnd)
# The time to the next report of a trial, and the factor for the time to the one after it.
_AGAIN_S, _LONGER = 120.0, 2.0


@contextlib.contextmanager
def noting_standing_ranks(label: str, states: list[Path], note: Callable[[str], None]) -> Iterator[None]:
    """Reports the states of a trial's ranks, from files that exist only while their ranks stand still."""
    over = threading.Event()
    thread = threading.Thread(target=_tell, args=(label, states, note, over), daemon=True, name="standing-ranks")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _tell(label: str, states: list[Path], note: Callable[[str], None], over: threading.Event) -> None:
    next_at, pause_s = 0.0, _AGAIN_S
    while not over.wait(_POLL_S):
        if time.monotonic() < next_at:
            continue
        said = [end for state in states if (end := read_record(state, _STATE)) is not None]
        # If all ranks have ended, none waits. Their processes are about to end.
        kinds = {end.kind for end in said}
        if len(said) == len(states) and kinds != {ENDED}:
            words = "; ".join(f"rank {rank} {end.words}" for rank, end in enumerate(said))
            note(f"{label} {'takes long' if kinds == {WORKS} else 'stands still'}: {words}")
            next_at, pause_s = time.monotonic() + pause_s, pause_s * _LONGER
