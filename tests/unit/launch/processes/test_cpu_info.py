import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from zerotune.trial_lib.launch.processes.fork_server import remember_cpu_info


@pytest.fixture
def looks(monkeypatch):
    """Stands in for py-cpuinfo, which takes a second; returns the list of its looks."""
    looks = []
    module = ModuleType("cpuinfo")
    module.get_cpu_info = lambda: looks.append(1) or {"arch": "X86_64", "flags": ["avx2"]}
    monkeypatch.setitem(sys.modules, "cpuinfo", module)
    return looks


def ask():
    return sys.modules["cpuinfo"].get_cpu_info()


def new_process(monkeypatch, looks, file):
    monkeypatch.setattr(
        sys.modules["cpuinfo"], "get_cpu_info", lambda: looks.append(1) or {"arch": "X86_64", "flags": []}
    )
    remember_cpu_info(file)


def test_one_look_serves_all_ops_and_the_processes_to_come(tmp_path, monkeypatch, looks):
    file = tmp_path / "cache" / "cpu.json"
    remember_cpu_info(file)
    assert ask() == ask() == {"arch": "X86_64", "flags": ["avx2"]}
    new_process(monkeypatch, looks, file)
    assert ask()["flags"] == ["avx2"]
    assert len(looks) == 1


def test_what_a_program_does_to_the_answer_does_not_change_the_next(tmp_path, looks):
    remember_cpu_info(tmp_path / "cpu.json")
    ask()["flags"].append("avx512")
    assert ask()["flags"] == ["avx2"]


def test_a_look_that_failed_is_not_remembered(tmp_path, monkeypatch, looks):
    monkeypatch.setattr(sys.modules["cpuinfo"], "get_cpu_info", lambda: {} if not looks else {"arch": "", "flags": []})
    remember_cpu_info(tmp_path / "cpu.json")
    assert ask() == {}
    assert not (tmp_path / "cpu.json").exists()
    looks.append(1)
    assert ask() == {"arch": "", "flags": []}


def test_a_failed_look_that_was_kept_is_not_believed(tmp_path, looks):
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    (tmp_path / "cpu.json").write_text(json.dumps({"boot": boot, "seen": {}}))
    remember_cpu_info(tmp_path / "cpu.json")
    assert ask()["flags"] == ["avx2"]


@pytest.mark.parametrize("kept", ['{"boot": "another", "seen": {}}', "{", "[]", "{}", '{"boot": 1}'])
def test_what_was_seen_before_the_machine_was_booted_anew_or_cannot_be_read_is_not_believed(tmp_path, looks, kept):
    (tmp_path / "cpu.json").write_text(kept)
    remember_cpu_info(tmp_path / "cpu.json")
    assert ask()["arch"] == "X86_64"
    assert json.loads((tmp_path / "cpu.json").read_text())["seen"]["flags"] == ["avx2"]


def test_where_nothing_can_be_kept_each_process_looks_once(tmp_path, looks):
    (tmp_path / "cache").write_text("no folder")
    remember_cpu_info(tmp_path / "cache" / "cpu.json")
    assert ask() == ask()
    assert len(looks) == 1


def test_without_py_cpuinfo_nothing_changes(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cpuinfo", None)
    remember_cpu_info(tmp_path / "cpu.json")
    assert not (tmp_path / "cpu.json").exists()
