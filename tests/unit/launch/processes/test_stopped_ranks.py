"""A rank that stays stopped ends its trial; one that goes on does not."""

import os
import signal
import socket
import subprocess
import sys

from zerotune.trial_lib.launch.outcome import RankRecord, classify
from zerotune.trial_lib.launch.processes.supervisor import STOPPED, Guard
from zerotune.trial_lib.launch.processes.watchdog import STOPPED_LOOKS
from zerotune.trial_lib.launch.rank_starter import ProcessesEnd


def test_a_rank_that_stays_stopped_ends_its_trial_which_names_the_signal() -> None:
    driver = socket.socket()
    guard = Guard(driver, {"interpreter": sys.executable, "deadline_s": 60.0}, lambda rank: 0)
    rank = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)

    def looks(count: int) -> list[str]:
        return [guard._look({rank.pid: 1}) for _ in range(count)]

    def send(number: int, seen: int) -> None:
        rank.send_signal(number)
        os.waitid(os.P_PID, rank.pid, seen | os.WNOWAIT)

    try:
        send(signal.SIGSTOP, os.WSTOPPED)
        assert looks(STOPPED_LOOKS) == [""] * STOPPED_LOOKS
        send(signal.SIGCONT, os.WCONTINUED)
        assert looks(1) == [""]
        send(signal.SIGSTOP, os.WSTOPPED)
        assert looks(STOPPED_LOOKS + 1) == [*[""] * STOPPED_LOOKS, STOPPED]
    finally:
        driver.close()
        rank.kill()
        rank.communicate()
    ranks = [RankRecord(None, None, "", f"rank{number}.log") for number in range(2)]
    end = classify(ProcessesEnd(STOPPED, [None, None], **guard._lost), ranks, 60.0, False, "cpu")
    assert end.reason.startswith("Rank 1 was stopped by SIGSTOP and did not go on:")
