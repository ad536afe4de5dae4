"""Compares a model of 64 layers, foreseen in whole, with the line through 8 and 16.

    python -m benchmarks.foresee.many_layers

The comparison with public GPUs foresees models of many layers with few, twice (`public_gpus/foreseen_rows.py`). This is
the check of that line, for the live bytes of each moment. The model is that of `plan_8b`.

At stage 3 DeepSpeed updates a rank's share in pieces. That of 64 layers has two, and that of 8 or 16 has one. So the
runs with few layers have smaller pieces (`few_layers.py`).
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.foresee.few_layers import zero_of_few
from zerotune.trial_lib.launch.rank_starter import Program
from zerotune.trial_lib.messages.foreseen_run import ForeseenRun
from zerotune.trial_lib.plan.fits import by_size
from zerotune.trial_lib.plan.simulation import Pretended, simulate, starter_for

LAYERS = 64
RESULT = Path(__file__).parents[1] / "results" / "foreseen_many_layers.json"
_PROGRAM = Path(__file__).parent / "plan_8b"
FEW_LAYERS = (8, 16)
_WORLD = 8
_DEADLINE_S = 1800.0
_STAGES = (0, 3)
_GIB = 2**30
_HIDDEN, _INTERMEDIATE, _VOCABULARY, _OF_HEADS = 4096, 14_336, 128_256, 1024
_OF_LAYER = 2 * _HIDDEN * (_HIDDEN + _OF_HEADS + 1) + 3 * _HIDDEN * _INTERMEDIATE
_OUTSIDE = 2 * _VOCABULARY * _HIDDEN + _HIDDEN


def runs_of(stage: int, layers: tuple[int, ...]) -> dict[int, ForeseenRun]:
    """Foresees the model with each number of layers.

    Raises:
        RuntimeError: it cannot be foreseen.
    """
    folder = Path(tempfile.mkdtemp(prefix="many-layers-"))
    found = {}
    try:
        for name in ("train.py", "ds_config.json"):
            shutil.copy(_PROGRAM / name, folder)
        environment = dict(os.environ)
        first = _program(folder, layers[0], environment)
        starter = starter_for(first, folder / "server", lambda text: print(text, file=sys.stderr))
        hardware = Pretended(world=_WORLD, ranks_per_host=_WORLD)
        try:
            for each in layers:
                program = _program(folder, each, environment)
                zero = zero_of_few({"stage": stage}, parameters_of(each), parameters_of(max(layers)))
                overrides = {"gradient_accumulation_steps": 2, "zero_optimization": zero}
                run = simulate(program, overrides, hardware, folder / "run", starter, _DEADLINE_S)
                if run.stopped:
                    raise RuntimeError(run.stopped)
                assert run.parameters == parameters_of(each)
                print(f"stage {stage}, {each} layers: {run.seconds:.0f} s", file=sys.stderr)
                found[each] = run
        finally:
            starter.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def parameters_of(layers: int) -> int:
    """Returns the parameters of the model (`plan_8b/train.py`) with so many layers."""
    return _OUTSIDE + layers * _OF_LAYER


def _program(folder: Path, layers: int, environment: Mapping[str, str]) -> Program:
    return Program(
        interpreter=sys.executable,
        target={"script": "train.py"},
        arguments=["--deepspeed_config", str(folder / "ds_config.json"), "--layers", str(layers)],
        local_rank_option="",
        model_dir=folder,
        environment=dict(environment),
    )


def compared(runs: Mapping[int, ForeseenRun], layers: int) -> dict[str, Any]:
    """Returns the line's figures beside those of the whole model.

    Args:
        runs: by layers.
        layers: of the whole model.
    """
    # Live bytes are a line in the layers as they are one in the micro-batch.
    few, more = (replace(runs[each], micro_batch=each) for each in FEW_LAYERS)
    whole = runs[layers]
    line, real = by_size(few, more).at(layers), by_size(whole).at(whole.micro_batch)
    peaks = line.by_name()
    return {
        "line_gib": round(line.peak / _GIB, 4),
        "whole_gib": round(real.peak / _GIB, 4),
        "error": round(line.peak / real.peak - 1, 5),
        "moments": {name: round(peaks[name] / peak - 1, 5) for name, peak in real.by_name().items() if peak},
    }


def main() -> None:
    """Compares, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    began = time.monotonic()
    result: dict[str, Any] = {"layers": arguments.layers, "from": list(FEW_LAYERS), "world": _WORLD}
    for stage in _STAGES:
        result[f"stage {stage}"] = compared(runs_of(stage, (*FEW_LAYERS, arguments.layers)), arguments.layers)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2), f"\n{time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
