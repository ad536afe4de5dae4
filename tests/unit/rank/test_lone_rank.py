"""The buffer of DeepSpeed's collectives on a CPU, which a rank that is alone does not need."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from zerotune.trial_lib.rank import session

_NAME = "deepspeed.comm.torch"


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Returns the buffers that the op has created, by the number of ranks and the rank."""
    found: list[tuple[int, int]] = []
    op = SimpleNamespace(initialize=lambda size, rank: found.append((size, rank)), vector_kernel_level=lambda: 2)
    module: Any = ModuleType(_NAME)
    module.build_shm_op = lambda: op
    monkeypatch.setitem(sys.modules, _NAME, module)
    session.skip_lone_buffer()
    return found


def test_a_rank_that_is_alone_creates_none(created: list[tuple[int, int]]) -> None:
    op = sys.modules[_NAME].build_shm_op()
    op.initialize(1, 0)
    assert created == []
    assert op.vector_kernel_level() == 2


def test_a_rank_that_has_others_beside_it_creates_its_own(created: list[tuple[int, int]]) -> None:
    sys.modules[_NAME].build_shm_op().initialize(2, 1)
    assert created == [(2, 1)]


def test_where_deepspeed_has_no_op_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType(_NAME)
    module.build_shm_op = lambda: None
    monkeypatch.setitem(sys.modules, _NAME, module)
    session.skip_lone_buffer()
    assert module.build_shm_op() is None
