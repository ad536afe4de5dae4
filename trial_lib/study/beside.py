"""The training without DeepSpeed (`--beside`): whether the program can have it, what is measured, and the way to it."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerotune.trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH
from zerotune.trial_lib.device.this_host import kind_of
from zerotune.trial_lib.inputs.accelerate import ACCUMULATION_VARIABLE
from zerotune.trial_lib.inputs.documents import SUFFIXES, leaves, read_document
from zerotune.trial_lib.inputs.launchers import launcher_named
from zerotune.trial_lib.inputs.places import typed_as
from zerotune.trial_lib.inputs.program_code import own_code
from zerotune.trial_lib.inputs.read_experiment import Experiment
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.measurement import ProgramProfile
from zerotune.trial_lib.messages.turned import BESIDE
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.switches import PROGRAM
from zerotune.trial_lib.study.confirmation import Contender
from zerotune.trial_lib.study.finding import Finding
from zerotune.trial_lib.study.loss_agreement import cuts_alike
from zerotune.trial_lib.study.setup import StudySetup

_INITIALIZE = "deepspeed.initialize"
_STRATEGY = ("trainer", "strategy")  # the key of Lightning's command line
_REMEDY = (
    "Leave it out: it is for trainings in which Accelerate, the Hugging Face Trainer or Lightning turns DeepSpeed on."
)


def require_a_switch(experiment: Experiment) -> None:
    """Raises InputError if the user's own code makes the engine, which then is no flag that can be left out."""
    entrypoint, folder = experiment.entrypoint, experiment.model_dir
    reason = "" if entrypoint.trial_class is None else f"{entrypoint.trial_class} trains with DeepSpeed alone"
    for file, tree, imported in own_code(folder / entrypoint.script, (folder,)) if entrypoint.script else ():
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        names = (_INITIALIZE, *(("initialize",) if _INITIALIZE in imported else ()))
        line = next((each.lineno for each in calls if ast.unparse(each.func) in names), None)
        if line is not None:
            reason = f"{file.name}:{line} calls {_INITIALIZE} itself, so nothing turns DeepSpeed off"
    if reason:
        raise InputError(f"{reason}.", where="--beside", remedy=_REMEDY)


def require_found_switch(found: ProgramProfile | None) -> None:
    """The same, by what the profile trial has found. Libraries of others' make engines too."""
    if found is not None and not framework_of(found):
        reason = "none of Accelerate, the Hugging Face Trainer and Lightning makes the engine of this program."
        raise InputError(reason, where="--beside", remedy=_REMEDY)


def framework_of(found: ProgramProfile) -> str:
    """Which one makes the engine, and can do without; empty if the code does."""
    if found.by_lightning:
        return "Lightning"
    return "Trainer" if MICRO_BATCH in found.batch else "Accelerate" if ACCUMULATION in found.batch else ""


def besides_of(
    kinds: Sequence[str], leader: Contender, own: Contender | None, base_config: Mapping[str, Any]
) -> list[Contender]:
    """What is measured without DeepSpeed: with the best candidate's batch, and with the user's own if that differs."""
    apart = own is not None and not cuts_alike(leader.candidate, own.candidate)
    return [
        _without_deepspeed(one, kind, base_config)
        for kind in kinds
        for one in (leader, *((own,) if own is not None and apart else ()))
    ]


def _without_deepspeed(one: Contender, kind: str, base_config: Mapping[str, Any]) -> Contender:
    # What ZeroTune turns in a model needs DeepSpeed's engine.
    switches = {place: value for place, value in one.candidate.switches.items() if not place.startswith("model:")}
    knobs = {PROGRAM: {**switches, BESIDE[kind]: True}}
    # A copy would keep the settings that are derived from the old knobs.
    candidate = Candidate.model_validate({**one.candidate.model_dump(), "knobs": knobs})
    reading = replace(one.reading, config_hash=candidate.config_hash(base_config))
    return replace(one, candidate=candidate, reading=reading)


# The place that turns DeepSpeed off, as a person reads it


def with_ways(finding: Finding, setup: StudySetup, found: ProgramProfile | None) -> Finding:
    """A finding with how the user trains without DeepSpeed, or learns whether that is faster."""
    if found is None or not (framework := framework_of(found)):
        return finding
    if not setup.arguments.beside:
        asks = f"Whether it trains faster without DeepSpeed was not measured: --beside ddp does that with {framework}."
        return finding.model_copy(update={"without": asks})
    on_processor = kind_of(setup.device).computes_on_the_processor
    ways = {each: way_to(each, setup.experiment, found, on_processor) for each in setup.arguments.beside}
    config = found.ds_config or setup.experiment.ds_config
    names: list[str] = [name for name in ("optimizer", "scheduler") if name in config]
    if framework == "Accelerate":
        # The others have these among their own arguments. Accelerate's launcher gives the ranks those of DeepSpeed.
        ways = {each: f"{way}, with {ACCUMULATION_VARIABLE} set to that accumulation" for each, way in ways.items()}
        names += [name for name in ("bf16", "fp16") if (config.get(name) or {}).get("enabled") is True]
        names += ["gradient_clipping"] if config.get("gradient_clipping") else []
    if parts := " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:]))):
        theirs = f"the code or the framework then sets the {parts} that the DeepSpeed configuration has now"
        ways = {each: f"{way}; {theirs}" for each, way in ways.items()}
    beside = tuple(one.model_copy(update={"way": ways[one.kind]}) for one in finding.beside)
    return finding.model_copy(update={"beside": beside})


def way_to(kind: str, experiment: Experiment, found: ProgramProfile, on_processor: bool) -> str:
    """What to change in the command, its files or the code, as a clause."""
    entrypoint, folder, framework = experiment.entrypoint, experiment.model_dir, framework_of(found)
    more = ' and give --fsdp "full_shard auto_wrap" with {"version": 2} as fsdp_config' if kind == "fsdp2" else ""
    words = (*entrypoint.wrapper, *entrypoint.launcher, *entrypoint.arguments)
    files = {word: content for word in words if Path(word).suffix in SUFFIXES and (content := _read(folder / word))}
    if framework == "Lightning":
        named = (word for word, content in files.items() if any(key[:2] == _STRATEGY for key, _ in leaves(content)))
        in_code = f'strategy="ddp" of Lightning\'s Trainer{_at(experiment, "strategy")}'
        return next((f"strategy: ddp of `trainer` in {word}" for word in named), in_code)
    for typed in typed_as("--deepspeed", entrypoint.arguments) if framework == "Trainer" else ():
        return f"leave out --deepspeed {typed.value}{more}"
    launching = [word for word, content in files.items() if content.get("distributed_type") == "DEEPSPEED"]
    if on_processor and (launching or launcher_named(entrypoint.launched_by).hands_over_config):
        ranks = f"torchrun --nproc_per_node {entrypoint.slots} {entrypoint.script or f'-m {entrypoint.module}'}"
        return f"ACCELERATE_USE_CPU=true {ranks} in place of `accelerate launch`, which starts one rank on processors"
    launched = {"ddp": "MULTI_GPU", "fsdp2": "FSDP, with fsdp_version: 2"}[kind]
    for word in launching:
        return f"distributed_type: {launched} in place of DEEPSPEED in {word}"
    for word, content in files.items():
        if any(key[-1] == "deepspeed" and isinstance(value, str) for key, value in leaves(content)):
            return f"leave out `deepspeed` in {word}{more}"
    if "--use_deepspeed" in words:
        return f"{'--multi_gpu' if kind == 'ddp' else '--use_fsdp --fsdp_version 2'} in place of --use_deepspeed"
    if "ACCELERATE_USE_DEEPSPEED" in entrypoint.launcher_environment:
        return f"distributed_type: {launched} in place of DEEPSPEED in the configuration of `accelerate launch`"
    name, owner = ("deepspeed", "TrainingArguments") if framework == "Trainer" else ("deepspeed_plugin", "Accelerator")
    return f"{name}=None of {owner}{_at(experiment, name)}{more}"


def _at(experiment: Experiment, name: str) -> str:
    script, folder = experiment.entrypoint.script, experiment.model_dir
    for file, tree, _ in own_code(folder / script, (folder,)) if script else ():
        for each in ast.walk(tree):
            if isinstance(each, ast.keyword) and each.arg == name:
                return f" at {file.name}:{each.value.lineno}"
    return ""


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = read_document(path.read_text(encoding="utf-8"), path.name)
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
