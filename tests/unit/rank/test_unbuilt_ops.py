"""Ranks of a program's first run, where DeepSpeed would compile an op."""

from pathlib import Path

import pytest
from deepspeed.ops.op_builder import builder
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
from torch.utils import cpp_extension

from zerotune.trial_lib.rank import interception


def test_a_rank_that_has_waited_for_another_s_build_goes_on_without_the_op_as_that_one_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def load(op: builder.OpBuilder) -> object:
        return cpp_extension._import_module_from_library("deepspeed_shm_comm", str(tmp_path), True)

    for name in ("_run_ninja_build", "_import_module_from_library"):
        monkeypatch.setattr(cpp_extension, name, getattr(cpp_extension, name))
    monkeypatch.setattr(builder.OpBuilder, "jit_load", load)
    interception.end_at_unbuilt_ops()
    assert ShareMemCommBuilder().jit_load() is None
