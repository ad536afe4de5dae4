"""The number formats that this host's processor computes in, as DeepSpeed's accelerator for CPUs asks oneDNN."""

import contextlib
import functools
from pathlib import Path

_INFO = Path("/proc/cpuinfo")
# oneDNN's avx512_core_fp16, the two parts of its avx2_vnni_2, and half precision on Arm.
_FP16 = ({"avx512_fp16"}, {"avx_ne_convert", "avx_vnni_int8"}, {"asimdhp"})


@functools.cache
def processor_computes_fp16() -> bool:
    """Returns whether DeepSpeed takes fp16 on this host's processor (deepspeed/accelerator/cpu_accelerator.py)."""
    words: set[str] = set()
    with contextlib.suppress(OSError):
        words = set(_INFO.read_text(errors="replace").split())
    return any(flags <= words for flags in _FP16)
