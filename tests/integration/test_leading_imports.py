"""The imports by which a program begins, in the fork server: once for all ranks, and without harm to them."""

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from zerotune.trial_lib.launch import starters
from zerotune.trial_lib.launch.rank_starter import LaunchRequest, RankRequest
from zerotune.trial_lib.launch.starters import WarmStarter, rank_environment

MODULES = {
    "leads": "import os\nclass Lazy: pass\nos.environ['LEADS'] = 'set'",
    "follows": "",
    "fails": "raise RuntimeError('no')",
    "spoils": "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
    # It catches what interrupts it, and goes on.
    "waits": "import time\nwhile True:\n    try:\n        time.sleep(600)\n    except BaseException:\n        pass",
    "takes_a_second": "import time\ntime.sleep(1.2)",
    "takes_a_second_too": "import time\ntime.sleep(1.2)",
    "kills": "import os\nos.abort()",
    "shows": "import os, sys\n"
    "def run(payload, rank):\n"
    "    print(*[name for name in ('leads', 'follows') if name in sys.modules], os.environ.get('LEADS'), flush=True)\n"
    "    os._exit(0)\n",
}
Shown = Callable[..., tuple[str, list[str]]]


@pytest.fixture
def shown(tmp_path: Path) -> Shown:
    """Returns what a rank of a server with such imports shows of its modules, and the server's notes."""
    installed = tmp_path / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    installed.mkdir(parents=True)
    for name, code in MODULES.items():
        (installed / f"{name}.py").write_text(code)
    (tmp_path / "own.py").write_text("")
    environment = {**rank_environment(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    environment |= {"PYTHONPATH": f"{installed}{os.pathsep}{tmp_path}", "PYTHONUSERBASE": str(tmp_path)}
    log = tmp_path / "rank0.log"
    request = LaunchRequest(
        sys.executable, "shows:run", {}, str(tmp_path), [RankRequest(environment, str(log), [])], deadline_s=60.0
    )

    def show(*leading: str, without: tuple[str, ...] = ()) -> tuple[str, list[str]]:
        notes: list[str] = []
        server = str(tmp_path / "server.log")
        starter = WarmStarter(sys.executable, [], environment, server, notes.append, leading=leading, without=without)
        with contextlib.closing(starter):
            starter.start()
            assert starter.launch(request).wait().statuses == [0], log.read_text()
        return log.read_text().strip(), notes

    return show


def test_ranks_have_them_already_with_the_variables_that_they_set(shown: Shown) -> None:
    leading = ("from leads import Lazy as Other", "import fails", "import os, follows")
    assert shown(*leading) == ("leads follows set", [])


@pytest.mark.long
def test_they_end_at_the_first_of_the_users_own_code(shown: Shown) -> None:
    assert shown("import leads", "import own", "import follows") == ("leads set", [])


@pytest.mark.long
def test_one_that_makes_forks_unsafe_is_left_to_the_ranks(shown: Shown) -> None:
    modules, (note,) = shown("import leads", "import spoils, follows")
    assert modules == "leads set"
    assert "could not fork with spoils" in note


@pytest.mark.long
def test_one_that_needs_a_device_is_left_to_the_ranks(shown: Shown) -> None:
    assert shown("import leads", "import follows", without=("follows",)) == ("leads set", [])


@pytest.mark.long
def test_the_time_is_that_of_all_attempts(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starters, "_PATIENCE_S", 2.0)
    modules, notes = shown("import takes_a_second", "import spoils", "import takes_a_second_too", "import follows")
    assert modules == "None"
    assert notes == ["the code's imports took more than 2 s: they are left to the ranks"]


@pytest.mark.long
def test_all_are_left_to_the_ranks_if_one_never_ends(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starters, "_PATIENCE_S", 1.0)
    modules, notes = shown("import leads", "import waits", "import follows")
    assert modules == "None"
    assert notes == ["the code's imports took more than 1 s: they are left to the ranks"]


@pytest.mark.long
def test_a_server_that_dies_of_them_comes_back_without(shown: Shown) -> None:
    modules, (note,) = shown("import leads", "import kills")
    assert modules == "None"
    assert note == "the fork server died while it ran the program's first imports: another one leaves them out"
