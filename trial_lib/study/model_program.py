"""The program of a plan that has a model's configuration alone: `zerotune plan --model config.json`."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.files import make_own_folder
from zerotune.trial_lib.plan.plan_record import PlanArguments
from zerotune.trial_lib.records.folders import PLANS
from zerotune.trial_lib.study.folder import new_id

_PROGRAM = Path(__file__).with_name("model_training.txt")
# The program's batch of a device. The sum leaves room for micro-batches of several sizes.
_BATCH = {"--per_device_train_batch_size": 1, "--gradient_accumulation_steps": 32}
_FIXED = ("--bf16", "--output_dir", "out", "--report_to", "none", "--save_strategy", "no", "--logging_steps", "10")


def with_program(arguments: PlanArguments, work_dir: Path) -> PlanArguments:
    """The arguments of a plan for a Trainer program of the model, which is written into the folder of the plan.

    Words of the command are the program's. Raises InputError if the file is no configuration of transformers, or the
    folder cannot be written.
    """
    assert arguments.model is not None
    file = arguments.model / "config.json" if arguments.model.is_dir() else arguments.model
    fields = _read(file)
    name = file.parent.absolute().name if file.stem == "config" else file.stem
    folder = (work_dir / PLANS / new_id(name) / "program").absolute()
    micro, accumulation = (_number(arguments.command, option) for option in _BATCH)
    config = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "zero_optimization": {"stage": 2},
    }
    try:
        make_own_folder(folder)
        (folder / "train.py").write_text(_PROGRAM.read_text(encoding="utf-8"), encoding="utf-8")
        (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        (folder / "ds_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"the plan's folder cannot be written ({error.strerror}).",
            where=str(folder),
            remedy="Run zerotune in a folder that you may write to.",
        ) from None
    typed = {word.partition("=")[0] for word in arguments.command}
    batch = [word for option, size in _BATCH.items() if option not in typed for word in (option, str(size))]
    words = ["deepspeed", "train.py", "--deepspeed", "ds_config.json", *_FIXED, *batch, *arguments.command]
    return arguments.model_copy(update={"command": tuple(words), "model_dir": folder})


def _read(file: Path) -> dict[str, Any]:
    remedy = "Give the config.json of a model of transformers, or its folder."
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "no JSON"
        raise InputError(f"it cannot be read ({why}).", where=f"--model {file}", remedy=remedy) from None
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise InputError("it has no `model_type`.", where=f"--model {file}", remedy=remedy)
    return fields


def _number(words: Sequence[str], option: str) -> int:
    # The last value of an option of the program, which the DeepSpeed configuration has to have too.
    given = [after for word, after in pairwise([*words, ""]) if word == option]
    given += [word.partition("=")[2] for word in words if word.startswith(f"{option}=")]
    if not given:
        return _BATCH[option]
    if not given[-1].isdecimal() or not int(given[-1]):
        raise InputError(f'"{given[-1]}" is no number.', where=option, remedy="Give 1 or more.")
    return int(given[-1])
