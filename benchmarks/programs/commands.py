"""The programs that are measured, and what is typed to train them."""

import json
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).resolve().parents[2] / "tests" / "programs"
IS_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z_0-9]*=")
FLAGS = ("--max-trials", "6")
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000},
}
HALF = {"bf16": {"enabled": True}}
BY_FILE = "deepspeed --num_gpus 2 {} --deepspeed_config ds.json"
BY_TRAINER = (
    "torchrun --nproc_per_node=2 {} --deepspeed ds_auto.json --use_cpu --output_dir out --max_steps 60 "
    "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --report_to none --save_strategy no"
)
BY_ACCELERATE = (
    "accelerate launch --config_file accelerate.yaml accelerated.py --per_device_train_batch_size 4 --steps 200"
)
BATCH_OF_ACCELERATE = ("--map", "train_micro_batch_size_per_gpu=--per_device_train_batch_size")


@dataclass(frozen=True)
class Program:
    """A program, and how it is trained and tuned.

    Attributes:
        name: for people.
        folder: which is copied before anything runs.
        typed: the command.
        variables: that are typed before it.
        flags: of `zerotune tune`.
        config: that is written beside the program, as `ds.json`; None for a folder that has all it needs.
    """

    name: str
    folder: Path
    typed: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = FLAGS
    config: Mapping[str, Any] | None = None

    @property
    def mappings(self) -> list[str]:
        """The values of `--map`."""
        return [self.flags[place + 1] for place, flag in enumerate(self.flags) if flag == "--map"]

    def copy(self, into: Path) -> Path:
        """Copies the folder, with the configuration, and returns the copy."""
        copy = into / "program"
        left = shutil.ignore_patterns("__pycache__", "zerotune-studies", "out", "COMMAND", "EXPECT")
        shutil.copytree(self.folder, copy, ignore=left)
        if self.config is not None:
            (copy / "ds.json").write_text(json.dumps(self.config))
        return copy


def _own(name: str, typed: str, folder: Path = PROGRAMS, flags: tuple[str, ...] = (), **more: Any) -> Program:
    return Program(name, folder, tuple(shlex.split(typed)), flags=(*FLAGS, *flags), config={**CONFIG, **more})


ANY = PROGRAMS / "any"
OWN = [
    _own("language model", BY_FILE.format("raw_json.py --steps 200"), ANY),
    _own("language model, bf16", BY_FILE.format("raw_json.py --steps 200"), ANY, **HALF),
    _own("dictionary in the code", "deepspeed --num_gpus 2 raw_dict.py --steps 200", ANY),
    _own("Trainer with dropout", BY_TRAINER.format("trainer.py --hidden_size 64"), ANY),
    _own("Trainer, bf16", BY_TRAINER.format("trainer.py --hidden_size 64 --bf16"), ANY),
    _own("Trainer with LoRA", BY_TRAINER.format("lora.py"), ANY),
    _own("Accelerate", BY_ACCELERATE, ANY, BATCH_OF_ACCELERATE),
    _own("two views", BY_FILE.format("two_forwards.py")),
    _own("zero.Init", BY_FILE.format("partitioned_init.py"), zero_optimization={"stage": 3}),
    _own("two engines", BY_FILE.format("two_engines.py")),
]
# One program, whose losses are reduced in several ways.
REDUCTIONS = [
    *(
        _own(f"reduction {how}", BY_FILE.format(f"own_reduction.py --reduction {how}"))
        for how in ("mean", "sum", "undivided", "divided", "divided_twice")
    ),
    _own("reduction sum, bf16", BY_FILE.format("own_reduction.py --reduction sum"), **HALF),
]


def others() -> list[Program]:
    """Returns the programs that are written after those of other people."""
    return [read(path.parent) for path in sorted((PROGRAMS / "others").glob("*/COMMAND"))]


def read(folder: Path) -> Program:
    """Reads a program's folder, whose file COMMAND says what is typed: `[NAME=VALUE ...] zerotune tune ... -- ...`."""
    words = shlex.split((folder / "COMMAND").read_text())
    variables, words = split_variables(words)
    end = words.index("--")
    return Program(folder.name, folder, tuple(words[end + 1 :]), variables, tuple(words[2:end]))


def split_variables(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Returns the variables that stand before a command, and the command."""
    count = next(place for place, word in enumerate(words) if not IS_VARIABLE.match(word))
    return dict(word.split("=", 1) for word in words[:count]), words[count:]
