"""What formulas say of DeepSpeed's own layouts beside foreseen runs: `python -m benchmarks.foresee.layouts [CASE ...]`.

A run has DeepSpeed's engine, its groups and its collectives (docs/plan.md), and no device. Formulas have how a layer is
written from one run of the same model without a layout, as in a plan.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerotune.trial_lib.messages.foreseen_run import ForeseenRun
from zerotune.trial_lib.plan.decoder import DecoderShape, decoder_of
from zerotune.trial_lib.plan.devices import Cluster, known_devices
from zerotune.trial_lib.plan.fits import ArmMemory
from zerotune.trial_lib.plan.laid_out import Writing
from zerotune.trial_lib.plan.layouts import as_typed
from zerotune.trial_lib.plan.plan_record import PlanArguments, read_run
from zerotune.trial_lib.plan.step_time import planned_step
from zerotune.trial_lib.study.model_program import with_program

RESULTS = Path(__file__).parents[1] / "results" / "foreseen_layouts.json"
LLAMA = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 5632},
    **{"num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000},
    **{"max_position_embeddings": 8192, "tie_word_embeddings": False},
}
MIXTRAL = {
    **LLAMA,
    **{"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 1024},
    **{"intermediate_size": 3584, "num_hidden_layers": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
}
_TYPED = ("--length", "2048", "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "4")
_ULYSSES = {
    **{"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_SP_BACKEND": "deepspeed"},
    **{"PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": "sdpa", "PARALLELISM_CONFIG_SP_SIZE": "4"},
}
# Under Accelerate's groups the Trainer knows the batch.
_OPEN = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")


@dataclass(frozen=True)
class Case:
    model: Mapping[str, Any]
    devices: int = 8
    config: Mapping[str, Any] = field(default_factory=dict)  # what its DeepSpeed configuration has besides
    variables: Mapping[str, str] = field(default_factory=dict)
    stages: tuple[int, ...] = (0, 1, 2, 3)


CASES = {
    "plain": Case(LLAMA),
    "autotp": Case(LLAMA, config={"tensor_parallel": {"autotp_size": 4}}, stages=(1, 2, 3)),
    "ulysses": Case(LLAMA, 4, _OPEN, _ULYSSES, (1, 2, 3)),
    "mixture": Case(MIXTRAL, stages=(1, 2)),
}


def runs_of(case: Case, folder: Path) -> dict[str, ForeseenRun]:
    """Foresees a case, and returns its runs without offload by their names."""
    model = folder / "model.json"
    model.write_text(json.dumps(case.model))
    arguments = with_program(PlanArguments(model=model, command=_TYPED, model_dir=folder), folder)
    if case.variables:
        # Ulysses needs the positions of each sample.
        program = arguments.model_dir / "train.py"
        before, item = program.read_text(), '"labels": tokens}'
        assert item in before, "the program of a plan of a model alone"
        program.write_text(before.replace(item, '"labels": tokens, "position_ids": torch.arange(self.length)}'))
    file = arguments.model_dir / "ds_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **case.config}))
    typed = [*(f"{name}={value}" for name, value in case.variables.items()), *arguments.command]
    words = [
        "zerotune",
        "plan",
        "--json",
        "--on",
        f"h100-80gb:{case.devices}",
        "-z",
        *map(str, case.stages),
        "--",
        "env",
    ]
    done = subprocess.run([*words, *typed], cwd=arguments.model_dir, stdout=subprocess.PIPE, check=False)
    found = Path(json.loads(done.stdout)["folder"]) / "runs"
    return {
        file.name.partition(".")[0]: read_run(file)
        for file in sorted(found.glob("*.json.gz"))
        if "off" not in file.name
    }


def beside(run: ForeseenRun, shape: DecoderShape, writing: Writing, cluster: Cluster) -> dict[str, float]:
    """Seconds of a step and bytes that are allocated: of the run, and of formulas as a multiple of it."""
    said = as_typed(run, shape, cluster, writing)
    seconds = planned_step(run, cluster).seconds
    memory = ArmMemory(one=run, ranks_per_node=cluster.per_host, capability=cluster.device.capability)
    allocated = memory.at(run.micro_batch).allocated.mean
    return {
        "seconds": round(seconds, 4),
        "by_formulas": round(said.step.seconds / seconds, 3),
        "gib": round(allocated / 2**30, 2),
        "memory_by_formulas": round((said.states + said.activations) / allocated, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="CASE")
    arguments = parser.parse_args()
    record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"writings": {}, "cases": {}}
    for name in arguments.cases or CASES:
        case = CASES[name]
        cluster = Cluster(device=known_devices()["h100-80gb"], per_host=case.devices)
        with tempfile.TemporaryDirectory() as folder:
            runs = runs_of(case, Path(folder))
        shapes = {label: decoder_of(run) for label, run in runs.items()}
        model = str(case.model["model_type"])
        plain = next((run for label, run in runs.items() if not case.config and run.stage == 2), None)
        if plain is not None:
            shape = decoder_of(plain)
            assert isinstance(shape, DecoderShape), shape
            record["writings"][model] = vars(Writing.of(plain, as_typed(plain, shape, cluster)))
        writing = Writing(**record["writings"][model])
        found = {
            label: beside(runs[label], shape, writing, cluster)
            for label, shape in shapes.items()
            if isinstance(shape, DecoderShape)
        }
        record["cases"][name] = found
        for label, figures in found.items():
            print(name, label, figures, flush=True)
        RESULTS.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
