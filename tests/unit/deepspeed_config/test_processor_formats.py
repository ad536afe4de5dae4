"""fp16 on a CPU is DeepSpeed's to allow: it asks oneDNN, and oneDNN asks the processor."""

from pathlib import Path

import pytest

from zerotune.trial_lib.deepspeed_config import rules
from zerotune.trial_lib.deepspeed_config.rules import broken_rules, processor_computes_fp16

FP16 = {"train_batch_size": 1, "fp16": {"enabled": True}}


@pytest.mark.parametrize(
    ("flags", "computes"),
    [("fpu avx2 avx512f", False), ("avx512f avx512_fp16 amx_tile", True), ("avx2 avx_ne_convert avx_vnni_int8", True)],
)
def test_fp16_on_a_processor_that_has_it_breaks_no_rule(
    flags: str, computes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags : {flags}\n")
    monkeypatch.setattr(rules, "_INFO", tmp_path / "cpuinfo")
    processor_computes_fp16.cache_clear()
    try:
        broken = [rule.name for rule in broken_rules(FP16, "cpu", False, 1)]
    finally:
        processor_computes_fp16.cache_clear()
    assert ("fp16_on_cpu" not in broken) == computes


def test_this_processor_is_read_as_torch_reads_it() -> None:
    import torch

    torch_says = bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    assert processor_computes_fp16() == torch_says
