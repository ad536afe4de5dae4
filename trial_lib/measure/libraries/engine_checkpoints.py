"""The checkpoints of a trial's engines.

An engine writes none, because a trial leaves the user's checkpoints alone. It reads of one only what the program itself
has put there. DeepSpeed loads ZeRO's states at the stage that wrote them alone, so no other stage could be tried.
"""

import functools
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trial_lib.measure.program_facts import ProgramFacts

_SAVES = ("save_checkpoint", "save_16bit_model", "save_fp16_model")
# The files of layers and of experts have weights alone (deepspeed/runtime/engine.py, `_get_ckpt_name`).
_HAS_STATE = re.compile(r"(zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt")
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
# What `DeepSpeedEngine._load_checkpoint` leaves out of the program's state unless it loads the module alone.
_OF_DEEPSPEED = (
    *("module", "skipped_steps", "global_steps", "dp_world_size", "mp_world_size"),
    *("data_sampler", "random_ltd"),
)


def install(facts: ProgramFacts) -> None:
    """Replaces the methods of DeepSpeed's engines that save and load checkpoints.

    Args:
        facts: gets the ZeRO stage of a checkpoint that the program resumes from.
    """
    import deepspeed

    engine = deepspeed.DeepSpeedEngine
    for name in _SAVES:
        if hasattr(engine, name):
            setattr(engine, name, _saves_nothing)
    engine.load_checkpoint = _reading_no_weights(engine.load_checkpoint, facts)


def _saves_nothing(engine: Any, *args: Any, **kwargs: Any) -> bool:
    return True


def _reading_no_weights(original: Callable[..., Any], facts: ProgramFacts) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_checkpoint(
        engine: Any,
        load_dir: Any,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> Any:
        is_universal = bool(engine.load_universal_checkpoint())
        file = _file_with_state(Path(load_dir), tag, is_universal)
        if file is None:
            # DeepSpeed says what is missing.
            flags = load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only
            return original(engine, load_dir, tag, *flags, custom_load_fn)
        # As DeepSpeed reads it. The file's tensors are not read if it can be mapped.
        saved = torch.load(file, map_location="cpu", mmap=zipfile.is_zipfile(file), weights_only=False)
        if not load_module_only:
            for name in _COUNTERS:
                if name in saved:
                    setattr(engine, name, saved[name])
        resumes = load_optimizer_states and not load_module_only and engine.optimizer is not None
        if resumes and not is_universal:
            facts.note_resumed(saved.get("ds_config"))
        left_out = {"module"} if load_module_only else {*_OF_DEEPSPEED}
        left_out |= {"lr_scheduler"} if load_lr_scheduler_states else set()
        left_out |= {"optimizer"} if load_optimizer_states else set()
        return str(file), {name: value for name, value in saved.items() if name not in left_out}

    return load_checkpoint


def _file_with_state(folder: Path, tag: Any, is_universal: bool) -> Path | None:
    """Returns the file of a checkpoint that has the program's own state; None if there is none."""
    if tag is None:
        latest = folder / ("latest_universal" if is_universal else "latest")
        if not latest.is_file():
            return None
        tag = latest.read_text().strip()
    files = folder.joinpath(str(tag)).glob("*.pt")
    return min((file for file in files if _HAS_STATE.fullmatch(file.name)), default=None)
