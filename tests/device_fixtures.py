"""Which devices a test needs, and what a run left out for want of them.

`@pytest.mark.devices(2)` needs two devices of whatever kind this host trains on, `@pytest.mark.devices(1, "cuda")` a
GPU, `@pytest.mark.devices(1, "cpu")` a host whose cores are the devices. Fixtures that start ranks ask by themselves:
a test that wants two slots needs no mark.
"""

import functools
from collections import Counter
from typing import Any

import pytest

from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.device.this_host import this_host

WANTING = "needs "
ON_CORES = "`CUDA_VISIBLE_DEVICES= make test` runs those of several devices, and the cores' own, on this host's cores."


@functools.cache
def host_of_tests() -> Host:
    """Returns what trials of this run may use; asked once, before any test makes up another host."""
    return this_host()


# Accelerate counts the ranks of a host without a GPU only when it is told that there is none.
TRAINER_FLAGS = ["--use_cpu", "true"] if host_of_tests().device == "cpu" else []


def lacking(count: int, kind: str | None, host: Host) -> str | None:
    """Returns what a host lacks for a test, in words; None where it has it all.

    Args:
        count: of the devices that the test needs.
        kind: `cuda` or `cpu` where the test is about one of them; None for whatever the host trains on.
        host: the one that is asked.
    """
    names = {"cuda": "CUDA device", "cpu": "core"}
    if kind not in (None, *names):
        raise ValueError(f"a test needs devices of kind cuda or cpu, not {kind!r}")
    have = f"{len(host.slots)} {names[host.device]}{'s' * (len(host.slots) != 1)}"
    wanted = f"{WANTING}{count} {names[kind] if kind else 'device'}{'s' * (count != 1)}"
    if kind not in (None, host.device):
        return f"{wanted} for its trials, and this host trains on {have}"
    return f"{wanted}, and this host has {have}" if count > len(host.slots) else None


def need(count: int, kind: str | None = None) -> None:
    """Skips the test that runs where this host has fewer devices than it needs."""
    if lack := lacking(count, kind, host_of_tests()):
        pytest.skip(lack)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Holds a test's marks against this host, before its fixtures start anything."""
    for mark in item.iter_markers("devices"):
        need(*mark.args, **mark.kwargs)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says what was left out, and why."""
    reasons = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", []))
    if not reasons:
        return
    terminalreporter.section("left out")
    for reason, tests in reasons.most_common():
        terminalreporter.line(f"{tests} test{'s' * (tests != 1)}: {reason}")
    if host_of_tests().device == "cuda" and any(reason.startswith(WANTING) for reason in reasons):
        terminalreporter.line(ON_CORES)


def _reason(report: Any) -> str:
    """Returns why a test was skipped, without pytest's own word for it."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return str(text).removeprefix("Skipped: ")
