"""A fork server that must not fork any more holds nothing: not what its imports have opened, nor their memory."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from zerotune.trial_lib.launch.rank_starter import LaunchRequest, RankRequest
from zerotune.trial_lib.launch.starters import WarmStarter, rank_environment

# As a library does that initialises a GPU: it opens the driver's file, takes memory, and leaves a thread.
SPOILS = """
import os, threading, time
opened = os.open({file!r}, os.O_RDWR | os.O_CREAT)
os.set_inheritable(opened, True)
taken = bytearray(os.urandom(1 << 20) * 256)
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
"""
MIB = 2**20


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[WarmStarter, list[str]]]:
    """A starter whose server finds a module `spoils`, and its notes."""
    (tmp_path / "spoils.py").write_text(SPOILS.format(file=str(tmp_path / "nvidia-uvm")))
    notes: list[str] = []
    environment = {**rank_environment(), "PYTHONPATH": str(tmp_path)}
    starter = WarmStarter(sys.executable, [], environment, str(tmp_path / "server.log"), notes.append)
    starter.start()
    yield starter, notes
    starter.close()


def wait_until(holds: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def opens(process: psutil.Process, name: str) -> bool:
    return any(Path(file.path).name == name for file in process.open_files())


def test_one_whose_imports_have_spoilt_it_waits_without_them_and_its_fork_serves(
    server: tuple[WarmStarter, list[str]],
) -> None:
    starter, notes = server
    starter.prime(["spoils"])
    (note,) = notes
    assert "could not fork with spoils" in note
    assert starter._server is not None
    (spoilt,) = psutil.Process(starter._server.pid).children()
    (serving,) = spoilt.children()
    # The serving one has said that it is primed; the other has begun to stand aside just before.
    assert wait_until(lambda: spoilt.num_threads() == 1)
    assert wait_until(lambda: spoilt.memory_info().rss < 32 * MIB)
    assert not opens(spoilt, "nvidia-uvm")
    assert serving.memory_info().rss > 64 * MIB
    starter.prime(["json"])
    assert notes == [note]
    serving.kill()
    # A program that only waits for that end.
    assert wait_until(lambda: not spoilt.is_running() or spoilt.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.long
def test_one_that_is_in_doubt_from_the_beginning_is_ended_and_is_no_longer_asked(tmp_path: Path) -> None:
    # The server is a fork of its watchdog.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, threading, time\n"
        "def start(): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "os.register_at_fork(after_in_child=start)\n"
    )
    environment = {**rank_environment(), "PYTHONPATH": str(tmp_path)}
    starter = WarmStarter(sys.executable, [], environment, str(tmp_path / "server.log"), lambda text: None)
    with contextlib.closing(starter):
        starter.start()
        assert starter._server is not None
        watchdog = psutil.Process(starter._server.pid)
        starter.prime(["json"])
        assert starter._server is None
        assert wait_until(lambda: not watchdog.is_running())
        judged = starter.check({"train_batch_size": 1, "sparse_attention": {}}, 1)
        assert judged is not None
        assert judged["refusals"]


# A library registers an operator with torch, and then asks for a device, which the server of foreseen runs has not.
LIBRARY = """
import torch
library = torch.library.Library("of_a_test", "FRAGMENT")
library.define("twice(Tensor a) -> Tensor")
@torch.library.impl(library, "twice", "CPU")
def twice(a):
    return 2 * a
from . import devices
"""
LIBRARY_RANK = """
import os, sys
def run(payload, rank):
    print(sys.modules["named"].KIND, flush=True)
    import trainer
    print(trainer.COUNT, trainer.registers.devices.__name__, flush=True)
    os._exit(0)
"""


def test_a_library_that_the_server_has_begun_and_left_is_imported_by_a_rank_as_for_the_first_time(
    tmp_path: Path,
) -> None:
    texts = {
        "registers/__init__": LIBRARY,
        "registers/devices": "import torch\nCOUNT = torch.cuda.device_count()",
        "trainer": "import registers\nCOUNT = registers.devices.COUNT",
        "named": "import torch\nKIND = torch.accelerator.current_accelerator().type",
        "library_rank": LIBRARY_RANK,
    }
    (tmp_path / "registers").mkdir()
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    environment = {**rank_environment(), "PYTHONPATH": str(tmp_path), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    notes: list[str] = []
    server = str(tmp_path / "server.log")
    starter = WarmStarter(sys.executable, [], environment, server, notes.append, without=["pynvml"])
    log = tmp_path / "rank0.log"
    request = LaunchRequest(
        sys.executable, "library_rank:run", {}, str(tmp_path), [RankRequest(environment, str(log), [])], deadline_s=60.0
    )
    with contextlib.closing(starter):
        starter.start()
        starter.prime(["registers.devices", "registers", "trainer", "named"])
        assert starter.launch(request).wait().statuses == [0], log.read_text()
    # All foreseen ranks have a device of the same name, so the server has imported what asks for it.
    assert log.read_text().split() == ["foreseen", "0", "registers.devices"]
    assert notes == []


BLAS_RANK = """
import os, threadpoolctl
def run(payload, rank):
    pools = [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["internal_api"] == "openblas"]
    print(*pools, flush=True)
    os._exit(0)
"""


@pytest.mark.long
def test_without_a_number_of_threads_it_forks_all_the_same_and_a_rank_starts_its_own(tmp_path: Path) -> None:
    (tmp_path / "blas_rank.py").write_text(BLAS_RANK)
    environment = {name: value for name, value in rank_environment().items() if name != "OMP_NUM_THREADS"}
    environment |= {"PYTHONPATH": str(tmp_path), "OPENBLAS_NUM_THREADS": "3"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    notes: list[str] = []
    starter = WarmStarter(sys.executable, [], environment, str(tmp_path / "server.log"), notes.append)
    log = tmp_path / "rank0.log"
    rank = RankRequest(environment, str(log), [])
    request = LaunchRequest(sys.executable, "blas_rank:run", {}, str(tmp_path), [rank], deadline_s=60.0)
    with contextlib.closing(starter):
        assert starter.launch(request).wait().statuses == [0], log.read_text()
    assert notes == []
    pools = log.read_text().split()
    assert pools
    assert set(pools) == {"3"}


MUON_RANK = """
import os, sys
def run(payload, rank):
    import torch
    from deepspeed.runtime.zero.muon import original_muon
    print(hasattr(original_muon.zeropower_via_newtonschulz5, "_torchdynamo_orig_callable"), flush=True)
    print("torch._inductor.compile_fx" in sys.modules, flush=True)
    with torch.compiler.set_stance("force_eager"):
        print(*original_muon.zeropower_via_newtonschulz5(torch.eye(2), steps=5).shape, flush=True)
    print(hasattr(original_muon.zeropower_via_newtonschulz5, "_torchdynamo_orig_callable"), flush=True)
    os._exit(0)
"""


@pytest.mark.long
def test_functions_that_deepspeed_compiles_are_compiled_by_the_rank_that_calls_one(tmp_path: Path) -> None:
    (tmp_path / "muon_rank.py").write_text(MUON_RANK)
    environment = {**rank_environment(), "PYTHONPATH": str(tmp_path), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    starter = WarmStarter(sys.executable, [], environment, str(tmp_path / "server.log"), lambda text: None)
    log = tmp_path / "rank0.log"
    rank = RankRequest(environment, str(log), [])
    request = LaunchRequest(sys.executable, "muon_rank:run", {}, str(tmp_path), [rank], deadline_s=60.0)
    with contextlib.closing(starter):
        assert starter.launch(request).wait().statuses == [0], log.read_text()
    assert log.read_text().split() == ["False", "False", "2", "2", "True"]
