"""What is noted of a trial's devices while it runs; NVML's answers are made up, the processes are real."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pynvml
import pytest
from nvml_fixtures import PretendGpu, Process, pretend_gpus

from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.launch import device_watch
from zerotune.trial_lib.launch.device_watch import company_now, note_devices, watched
from zerotune.trial_lib.records.result import TrialDevice

GIB = 2**30
INIT, NOBODY = 1, 2**22 - 3
CLOCK, REASONS = "nvmlDeviceGetClockInfo", "nvmlDeviceGetCurrentClocksEventReasons"
HOST = Host("cuda", ["0", "1"], 80 * GIB, {"0": "GPU-a", "1": "GPU-b"}, {"GPU-a": "H100", "GPU-b": "H100"})


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[PretendGpu]:
    monkeypatch.setattr(device_watch, "_PERIOD_S", 0.01)
    return pretend_gpus(monkeypatch, [PretendGpu("GPU-a"), PretendGpu("GPU-b")])


@pytest.fixture
def rank() -> Iterator[int]:
    """Yields the number of a process of this one's own."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process.pid
    process.kill()
    process.communicate()


def during(change: Callable[[], None], slots: tuple[str, ...] = ("0",)) -> list[TrialDevice]:
    """Returns what is noted of a trial in the course of which something changes."""
    with watched(HOST, slots) as watch:
        change()
        time.sleep(0.2)
        return watch.take()


def test_the_cards_are_named_in_the_order_of_the_ranks(gpus: list[PretendGpu]) -> None:
    devices = during(lambda: None, ("1", "0"))
    assert [(device.device, device.model) for device in devices] == [("GPU-b", "H100"), ("GPU-a", "H100")]
    assert not any(device.company for device in devices)


def test_a_clock_is_that_of_the_work_and_not_of_the_waiting(gpus: list[PretendGpu]) -> None:
    gpus[0].said = {CLOCK: 210, REASONS: pynvml.nvmlClocksEventReasonGpuIdle, "nvmlDeviceGetTemperature": 31}

    def work() -> None:
        time.sleep(0.1)
        gpus[0].said = {
            CLOCK: 1755,
            REASONS: pynvml.nvmlClocksEventReasonSwThermalSlowdown,
            "nvmlDeviceGetTemperature": 86,
        }
        time.sleep(0.1)
        gpus[0].said[REASONS] = 0
        gpus[0].said["nvmlDeviceGetTemperature"] = 80

    (device,) = during(work)
    assert (device.clock, device.temperature, device.power_limit) == (1755, 86, 700)
    assert device.held_down == ["its temperature"]


def test_a_short_trial_has_a_reading_as_well(gpus: list[PretendGpu], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_watch, "_PERIOD_S", 60.0)
    gpus[0].said = {CLOCK: 1980}
    (device,) = during(lambda: None)
    assert device.clock == 1980


def test_a_card_that_tells_nothing_is_named_all_the_same(gpus: list[PretendGpu]) -> None:
    gpus[0].handle_error = pynvml.NVML_ERROR_GPU_IS_LOST
    (device,) = during(lambda: None)
    assert device == TrialDevice(device="GPU-a", model="H100")


def test_the_trials_own_processes_are_no_company(gpus: list[PretendGpu], rank: int) -> None:
    (device,) = during(lambda: gpus[0].processes.append(Process(rank, GIB)))
    assert device.company == []


def test_a_process_that_comes_and_goes_meanwhile_is_company(gpus: list[PretendGpu]) -> None:
    def visit() -> None:
        gpus[0].processes.append(Process(INIT, 30 * GIB))
        time.sleep(0.2)
        gpus[0].processes.clear()

    (device,) = during(visit)
    assert [(each.pid, each.memory) for each in device.company] == [(INIT, 30 * GIB)]
    assert device.company[0].name


@pytest.mark.parametrize(("stays", "is_company"), [(True, True), (False, False)])
def test_a_process_of_another_container_is_company_if_it_was_there_before_and_stays(
    gpus: list[PretendGpu], stays: bool, is_company: bool
) -> None:
    gpus[0].processes.append(Process(NOBODY, None))
    (device,) = during(lambda: None if stays else gpus[0].processes.clear())
    assert bool(device.company) is is_company


def test_a_rank_that_has_just_died_is_no_company(gpus: list[PretendGpu]) -> None:
    (device,) = during(lambda: gpus[0].processes.append(Process(NOBODY, GIB)))
    assert device.company == []


def test_each_size_of_a_sweep_has_its_own_company(gpus: list[PretendGpu]) -> None:
    with watched(HOST, ["0"]) as watch:
        gpus[0].processes.append(Process(INIT, None))
        time.sleep(0.1)
        gpus[0].processes.clear()
        assert watch.take()[0].company
        assert not watch.take()[0].company


def test_a_clock_that_is_held_down_is_told_unless_it_is_by_the_power_limit(gpus: list[PretendGpu]) -> None:
    told: list[str] = []
    gpus[0].said = {REASONS: pynvml.nvmlClocksEventReasonSwPowerCap}
    gpus[1].said = {REASONS: pynvml.nvmlClocksEventReasonHwThermalSlowdown}
    note_devices(during(lambda: None, ("0", "1")), "trial 0007", told.append)
    assert told == ["trial 0007: the clock of GPU-b was held down by its temperature (hardware)"]


def test_company_is_told_in_a_sentence(gpus: list[PretendGpu]) -> None:
    gpus[1].processes.append(Process(NOBODY, 30 * GIB))
    told: list[str] = []
    note_devices(during(lambda: None, ("0", "1")), "trial 0007", told.append)
    assert told == [f"trial 0007: others computed on GPU-b meanwhile: a process ({NOBODY}, 30.0 GiB)"]
    (sentence,) = company_now(HOST)
    assert f"Others compute on GPU-b now: a process ({NOBODY}, 30.0 GiB)." in sentence


def test_on_a_processor_the_cores_are_noted_and_nobody_is_company() -> None:
    host = Host("cpu", ["3", "5"], GIB)
    with watched(host, ["5"]) as watch:
        assert watch.take() == [TrialDevice(device="5")]
    assert company_now(host) == []


def test_the_slots_of_another_host_are_named(gpus: list[PretendGpu]) -> None:
    with watched(HOST, ["node-2/0"]) as watch:
        assert watch.take() == [TrialDevice(device="node-2/0")]


def test_a_driver_that_hangs_holds_no_trial_up(gpus: list[PretendGpu], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_watch, "_PATIENCE_S", 0.2)
    hangs = threading.Event()
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: hangs.wait(60.0))
    began = time.monotonic()
    assert during(lambda: None) == [TrialDevice(device="GPU-a", model="H100")]
    assert time.monotonic() - began < 5.0
    hangs.set()


class Ended:
    """A trial whose only rank has ended, and of which the driver still has something.

    Args:
        gpus: of the host.
    """

    def __init__(self, gpus: list[PretendGpu]) -> None:
        self._gpu = gpus[0]
        self.notes: list[str] = []
        process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
        self._gpu.processes.append(Process(process.pid, 40 * GIB))
        self._watching = watched(HOST, ("0",))
        self._watch = self._watching.__enter__()
        time.sleep(0.2)
        process.kill()
        process.communicate()
        self.pid = process.pid

    def seconds_until_released(self, is_cancelled: Callable[[], bool] = lambda: False) -> float:
        """Returns for how long the trial's slots are kept."""
        began = time.monotonic()
        self._watch.await_release(is_cancelled, self.notes.append)
        self._watching.__exit__(None, None, None)
        return time.monotonic() - began

    def let_go(self) -> None:
        """Has the driver give back what it has of the rank: first some of it, then all."""
        for memory in (30, 20, 10):
            time.sleep(0.3)
            self._gpu.processes[:] = [Process(self.pid, memory * GIB)]
        time.sleep(0.3)
        self._gpu.processes.clear()


@pytest.fixture
def ended(gpus: list[PretendGpu], monkeypatch: pytest.MonkeyPatch) -> Ended:
    monkeypatch.setattr(device_watch, "_TOLD_S", 0.2)
    monkeypatch.setattr(device_watch, "_STUCK_S", 0.8)
    return Ended(gpus)


def test_slots_are_kept_as_long_as_the_driver_names_an_ended_rank_and_gets_on(ended: Ended) -> None:
    driver = threading.Thread(target=ended.let_go)
    driver.start()
    assert ended.seconds_until_released() >= 1.1
    driver.join()
    (said,) = ended.notes
    assert said == f"the driver has not let go of ended processes yet ({ended.pid}): their slots are kept"


def test_a_driver_that_does_not_get_on_keeps_no_study_from_going_on(ended: Ended) -> None:
    assert 0.8 <= ended.seconds_until_released() < 5
    assert ended.notes[-1].startswith(f"the driver does not let go of ended processes ({ended.pid})")


def test_whoever_cancels_does_not_wait_for_the_driver(ended: Ended) -> None:
    assert ended.seconds_until_released(lambda: True) < 0.5


def test_processes_of_others_and_those_that_still_run_keep_no_slots(gpus: list[PretendGpu], rank: int) -> None:
    gpus[0].processes += [Process(INIT, GIB), Process(NOBODY, None), Process(rank, GIB)]
    with watched(HOST, ("0",)) as watch:
        time.sleep(0.2)
        began = time.monotonic()
        watch.await_release(lambda: False, lambda text: None)
    assert time.monotonic() - began < 0.5
