"""dsat's helpers, under the names that training code imports."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zerotune.trial_lib.deepspeed_config.overrides import OVERWRITES, TRAINING_ARGUMENTS, DeepSpeedConfig
from zerotune.trial_lib.deepspeed_config.overrides import get_ds_config_from_hparams as get_ds_config_from_hparams
from zerotune.trial_lib.deepspeed_config.overrides import overwrite_deepspeed_config as overwrite_deepspeed_config
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.files import write_whole
from zerotune.trial_lib.messages.orders import training_spec_of_this_rank


@contextmanager
def dsat_reporting_context(core_context: Any, op: Any, steps_completed: int | None = None) -> Iterator[None]:
    """Does nothing. dsat reported the steps through it, and ZeroTune's trials measure the engine itself.

    A step is measured as in any other program, from the end of one to the end of the next. Loading counts, wherever the
    program loads.

    Args:
        core_context: what `core.init` returned.
        op: the current operation.
        steps_completed: the optimizer steps done.
    """
    yield


# The command line of a Hugging Face Trainer script, adapted to the overrides of a DeepSpeed configuration.

_CONFIG_FLAG = "--deepspeed"
_FLAGS = {key: f"--{name}" for key, name in TRAINING_ARGUMENTS.items()}


def get_hf_args_with_overwrites(args: Sequence[str], hparams: Mapping[str, Any]) -> list[str]:
    """Adapts the arguments of a Trainer script to the overrides of its DeepSpeed configuration.

    The overrides, `overwrite_deepspeed_args` in the hyperparameters, are merged into the JSON file that `--deepspeed`
    names. `--per_device_train_batch_size` and `--gradient_accumulation_steps` get its values, and are added if they are
    missing. "auto" is never copied. Without overrides, nothing is changed. Every rank may call it at once. The file is
    read and written under a lock, so a reader finds it whole.

    In a full experiment the user's own file stays unchanged. If the overrides are not in it already, `--deepspeed`
    names a merged copy. In a trial there is nothing to do, because the Trainer's own arguments follow it.

    Raises:
        InputError: there are overrides, but no `--deepspeed` names a file, or it is missing, or is no JSON.
    """
    overrides = hparams.get(OVERWRITES)
    spec = training_spec_of_this_rank()
    if not overrides or (spec is not None and spec.is_trial):
        return list(args)
    named = _value(args, _CONFIG_FLAG)
    if named is None:
        raise InputError(
            f"the arguments name no DeepSpeed configuration, and the hyperparameters have {OVERWRITES}.",
            where=" ".join(args) or "an empty command line",
            remedy=f"Add `{_CONFIG_FLAG} ds_config.json`.",
        )
    copies_to = None if spec is None or spec.scratch is None else Path(spec.scratch)
    path, config = _merged(Path(named), overrides, copies_to)
    changed = list(args) if path == named else _with_value(args, _CONFIG_FLAG, path)
    for key, flag in _FLAGS.items():
        if config.get(key, "auto") != "auto":
            changed = _with_value(changed, flag, str(config[key]))
    return changed


def _merged(path: Path, overrides: Mapping[str, Any], copies_to: Path | None) -> tuple[str, DeepSpeedConfig]:
    # Merges overrides into a configuration's file, or into a copy in a folder. Returns the file and its content.
    with _locked(path):
        config = overwrite_deepspeed_config(path, {})
        merged = overwrite_deepspeed_config(config, overrides)
        if merged == config:
            return str(path), merged
        target = path.resolve()
        if copies_to is not None:
            copies_to.mkdir(parents=True, exist_ok=True)
            target = copies_to / f"merged_{path.name}"
        write_whole(target, json.dumps(merged, indent=2) + "\n", mode=path.stat().st_mode & 0o777)
        return str(path if copies_to is None else target), merged


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # Holds the lock of a file's folder, because the file itself is replaced by a new one when it is written.
    folder = path.resolve().parent
    if not folder.is_dir():
        yield  # and reading the file says what is wrong
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is(word: str, flag: str) -> bool:
    # Whether a word is a flag, with or without `=` and its value. transformers also accepts dashes.
    return word.split("=", 1)[0].replace("-", "_") == flag.replace("-", "_")


def _value(args: Sequence[str], flag: str) -> str | None:
    value = None
    for index, word in enumerate(args):
        if _is(word, flag):
            if "=" in word:
                value = word.split("=", 1)[1]
            elif index + 1 < len(args):
                value = args[index + 1]
    return value


def _with_value(args: Sequence[str], flag: str, value: str) -> list[str]:
    # The arguments with another value of a flag, everywhere; added at the end if it is missing.
    changed: list[str] = []
    words = iter(args)
    found = False
    for word in words:
        if not _is(word, flag):
            changed.append(word)
            continue
        found = True
        name, has_value, _ = word.partition("=")
        changed += [f"{name}={value}"] if has_value else [name, value]
        if not has_value:
            next(words, None)
    return changed if found else [*changed, flag, value]
