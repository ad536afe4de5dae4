"""The trainings that are foreseen: every program of tests/programs, and every example."""

import json
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "programs"
EXAMPLES = ROOT / "examples"
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000},
}
STAGE_3 = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
BY_FILE = "deepspeed --num_gpus 2 {} --deepspeed_config ds.json"
BY_TRAINER = (
    "torchrun --nproc_per_node=2 {} --deepspeed {}ds_auto.json --output_dir out --max_steps 60 "
    "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --report_to none --save_strategy no"
)
BY_ACCELERATE = "accelerate launch --config_file accelerate.yaml {}"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z_0-9]*=")


@dataclass(frozen=True)
class Foreseeable:
    """A training, and how it is typed.

    Attributes:
        name: of the row.
        folder: which is copied before the run.
        typed: the words of the command; empty for a trial class.
        variables: of its environment.
        config: written beside the program, as `ds.json`.
        experiment: the YAML of a trial class, in its folder.
        world: ranks.
        is_no_training: why it is none; empty if it is one.
    """

    name: str
    folder: Path
    typed: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=lambda: dict(CONFIG))
    experiment: str = ""
    world: int = 8
    is_no_training: str = ""

    def copy(self, into: Path) -> Path:
        """Copies the folder, with the configuration, and returns the copy."""
        copy = into / "program"
        left = shutil.ignore_patterns("__pycache__", "zerotune-studies", "out", "COMMAND", "EXPECT")
        shutil.copytree(self.folder, copy, ignore=left)
        (copy / "ds.json").write_text(json.dumps(self.config))
        return copy


def _of_tests(script: str, options: str = "", **more: Any) -> Foreseeable:
    """A script of tests/programs that reads the file of its configuration from the command line."""
    config = {**CONFIG, **more.pop("config", {})}
    typed = tuple(shlex.split(BY_FILE.format(script) + " " + options))
    name = " ".join(filter(None, [script, more.pop("label", options)]))
    return Foreseeable(name, more.pop("folder", PROGRAMS), typed, config=config, **more)


def _typed(name: str, typed: str, folder: Path, **more: Any) -> Foreseeable:
    return Foreseeable(name, folder, tuple(shlex.split(typed)), **more)


_PLAIN = (
    "plain",
    "two_forwards",
    "two_engines",
    "changes_batch",
    "distills",
    "fp16",
    "half_by_code",
    "known_losses",
    "memory_use",
    "nan_loss",
    "own_reduction",
    "torch_style",
    "transformer",
    "uncounted",
    "uneven",
    "varied_lengths",
    "slow_data",
    "skipped_steps",
    "compiles",
    "autotunes",
    "runs_once",
    "children",
    "ends",
    "holds_on",
    "ignores_batch",
    "inspects",
    "leaves_shared_memory",
    "prints",
    "raises_on_rank_1",
    "works_ahead",
    "loads_outside_the_context",
    "hangs_at_size",
    "batch_shapes",
    "stands_still",
)
_HALF = {"bf16": {"enabled": True}}
_OFFLOADED = {"zero_optimization": {**CONFIG["zero_optimization"], "stage": 2, "offload_optimizer": {"device": "cpu"}}}
_OFFLOADED_3 = {
    "zero_optimization": {
        **STAGE_3["zero_optimization"],
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
    }
}
_SPLIT = {"tensor_parallel": {"autotp_size": 2}}
_ANY = PROGRAMS / "any"


def _of_arms() -> list[Foreseeable]:
    """One program with each feature of a configuration."""
    rows: dict[str, Mapping[str, Any]] = {
        "stage 0, bf16": {**_HALF, "zero_optimization": {"stage": 0}},
        "stage 2, bf16": {**_HALF, "zero_optimization": {**CONFIG["zero_optimization"], "stage": 2}},
        "stage 3, bf16": {**_HALF, **STAGE_3},
        "stage 2, optimizer offloaded": {**_HALF, **_OFFLOADED},
        "stage 3, all offloaded": {**_HALF, **_OFFLOADED_3},
        "stage 1, fp16": {"fp16": {"enabled": True}},
        "Lamb": {"zero_optimization": {"stage": 0}, "optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}},
        "Lion": {**_HALF, "optimizer": {"type": "Lion", "params": {"lr": 1e-3}}},
    }
    return [_of_tests("transformer.py", label=label, config=config) for label, config in rows.items()]


def _of_layouts() -> list[Foreseeable]:
    """Programs whose ranks divide a model or a sample."""
    folder = PROGRAMS / "layouts"
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    adam = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    automatic = {**CONFIG, **dict.fromkeys(sizes, "auto"), **adam}
    trainer = BY_TRAINER.format("trainer.py", "").replace("ds_auto.json", "ds.json")
    two_ranks_a_sample = {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_SP_BACKEND": "deepspeed",
        "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": "sdpa",
        "PARALLELISM_CONFIG_SP_SIZE": "2",
    }
    return [
        _of_tests("sequences.py", "--sequence-ranks 2", folder=folder),
        _of_tests("stages.py", "--pipeline_stages 2", folder=folder),
        _typed("layouts/trainer.py", trainer, folder, config=automatic),
        _typed(
            "layouts/trainer.py with 2 ranks for a sample",
            trainer,
            folder,
            config=automatic,
            variables=two_ranks_a_sample,
            world=2,
        ),
        _of_tests("train.py", label="(divided)", folder=PROGRAMS / "divided", config=_SPLIT),
    ]


def _of_trial_classes() -> list[Foreseeable]:
    folders = [EXAMPLES / name for name in ("custom_mpu", "custom_reducer", "gan_two_engines", "pipeline_parallel")]
    rows = [Foreseeable(f"examples/{each.name}", each, experiment="deepspeed.yaml", world=2) for each in folders]
    hello = EXAMPLES / "hello_deepspeed"
    return [*rows, Foreseeable("examples/hello_deepspeed trial class", hello, experiment="trial.yaml")]


def _of_others() -> list[Foreseeable]:
    """The programs after those of other people, as the file COMMAND of each says."""
    rows = []
    for file in sorted((PROGRAMS / "others").glob("*/COMMAND")):
        words = shlex.split(file.read_text())
        count = next(place for place, word in enumerate(words) if not _VARIABLE.match(word))
        variables = dict(word.split("=", 1) for word in words[:count])
        typed = tuple(words[words.index("--") + 1 :])
        # These commands start others, as a study of such a command finds out.
        if file.parent.name == "launcher_yaml":
            variables, typed = {"IS_A_RANK": "1"}, ("torchrun", "--nproc_per_node", "2", "kit.py", "recipe.yaml")
        if file.parent.name == "named_preset":
            typed = ("torchrun", "--nproc_per_node", "2", "sft.py", *typed[3:])
        rows.append(Foreseeable(f"others/{file.parent.name}", file.parent, typed, variables, world=2))
    return rows


def all_programs() -> list[Foreseeable]:
    """Returns every row of the table, in order."""
    auto = "any/"
    return [
        *(_of_tests(f"{name}.py") for name in _PLAIN),
        *_of_arms(),
        *(_of_tests("batch_shapes.py", f"--kind {kind}") for kind in ("packed", "sequence_first", "budget")),
        _typed("from_import.py", "deepspeed --num_gpus 2 from_import.py --config ds.json", PROGRAMS),
        _of_tests("uses_library.py", variables={"PYTHONPATH": f"{ROOT}:{PROGRAMS / 'library'}"}),
        _of_tests("partitioned_init.py", config=STAGE_3),
        _of_tests("experts.py", "--ep_size 2"),
        _of_tests("pipeline.py", world=2),
        _of_tests("pipeline.py", "--checkpoint_every 1", world=2),
        _of_tests("tensor_parallel.py", label="autotp_size 2, stage 1", config=_SPLIT),
        _of_tests("tensor_parallel.py", label="stage 3", config=STAGE_3),
        *_of_layouts(),
        _of_tests(
            "train.py",
            label="(kernel_packages)",
            folder=PROGRAMS / "kernel_packages",
            config={"zero_allow_untested_optimizer": True},
        ),
        _of_tests("train.py", label="(switched)", folder=PROGRAMS / "switched"),
        _of_tests("train.py", label="(turned)", folder=PROGRAMS / "turned"),
        _of_tests("prepares.py", is_no_training="Its test makes the files that it begins with."),
        _of_tests("without_deepspeed.py", is_no_training="It trains without DeepSpeed."),
        _typed("varied_trainer.py", BY_TRAINER.format("varied_trainer.py", auto), PROGRAMS),
        _of_tests("raw_json.py", label="(any)", folder=_ANY),
        _typed("any/raw_dict.py", "deepspeed --num_gpus 2 raw_dict.py", _ANY),
        _of_tests("raw_engine.py", label="(any)", folder=_ANY),
        _of_tests("raw_environment.py", label="(any)", folder=_ANY),
        _of_tests("raw_flag.py", label="(any)", folder=_ANY),
        _typed("any/trainer.py", BY_TRAINER.format("trainer.py", ""), _ANY),
        _typed("any/trainer.py --use_cpu", BY_TRAINER.format("trainer.py", "") + " --use_cpu", _ANY),
        _typed("any/trainer.py checkpointing", BY_TRAINER.format("trainer.py", "") + " --gradient_checkpointing", _ANY),
        _typed("any/lora.py", BY_TRAINER.format("lora.py", ""), _ANY),
        _typed("any/trainer_core_api.py", BY_TRAINER.format("trainer_core_api.py", ""), _ANY),
        _typed("any/core_api.py", "deepspeed --num_gpus 2 core_api.py --deepspeed_config ds.json --steps 60", _ANY),
        _typed("any/accelerated.py", BY_ACCELERATE.format("accelerated.py --per_device_train_batch_size 4"), _ANY),
        _typed("any/accelerate_plugin.py", BY_ACCELERATE.format("accelerate_plugin.py"), _ANY),
        _typed("any/accelerate_saves.py", BY_ACCELERATE.format("accelerate_saves.py --output_dir out"), _ANY),
        _typed("any/accelerate_teacher.py", "torchrun --nproc_per_node=2 accelerate_teacher.py", _ANY),
        _typed("examples/lightning", "torchrun --nproc_per_node=2 train.py", EXAMPLES / "lightning", world=2),
        _typed("for_cuda", "deepspeed --num_gpus 2 train.py", PROGRAMS / "for_cuda"),
        *_of_others(),
        _typed(
            "examples/hello_deepspeed",
            "deepspeed --num_gpus 2 train.py --deepspeed_config ds_config.json",
            EXAMPLES / "hello_deepspeed",
        ),
        *_of_trial_classes(),
    ]
