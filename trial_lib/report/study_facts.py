"""The circumstances of a study: versions, hosts, devices, the model, the arguments."""

import importlib.metadata
import shlex
import time
from collections.abc import Iterable, Mapping
from typing import Any

from trial_lib.records.result import TrialResult
from trial_lib.records.study_folder import StudyPaths, StudyRecord
from trial_lib.records.units import bytes_shown
from trial_lib.report.memory_views import device_of
from trial_lib.secrets.by_name import redact


def study_facts(paths: StudyPaths, record: StudyRecord, results: Iterable[TrialResult]) -> dict[str, str]:
    """Returns the circumstances of a study, by name. If its trials differ, a fact has several values."""
    by_number = {result.number: result for result in results}
    profile = next((result.profile for result in by_number.values() if result.profile is not None), None)
    facts = {
        "started": time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(record.started_at)),
        "host": _values(result.host for result in by_number.values()),
        "device": device_of(by_number.values()),
        "slots of a trial": _values(
            str(len(result.memory.peak)) for result in by_number.values() if result.memory.peak
        ),
    }
    if profile is not None:
        facts |= {
            "parameters": f"{profile.num_params:,}, of which {profile.trainable_num_params:,} are trained",
            "memory for the model on a slot": bytes_shown(profile.gpu_mem) if profile.gpu_mem else "no limit",
            **({"memory of the host for each rank": bytes_shown(profile.host_mem)} if profile.host_mem else {}),
            "activations of one sample": bytes_shown(profile.activation_mem_per_gpu),
            "model replicas": str(profile.data_parallel_size),
        }
    names = dict.fromkeys(name for result in by_number.values() for name in result.versions)
    facts |= {
        name: _values(result.versions.get(name, "") for result in by_number.values() if result.versions)
        for name in names
    }
    facts["zerotune"] = importlib.metadata.version("zerotune")
    facts["model directory"] = record.model_dir
    command = record.arguments.get("command") or ()
    if command:
        facts["command"] = shlex.join(command)
    facts["search"] = _arguments(record.arguments)
    facts["folder"] = str(paths.root)
    return {name: value for name, value in facts.items() if value}


def _values(found: Iterable[str]) -> str:
    return ", ".join(value for value in dict.fromkeys(found) if value)


def _arguments(arguments: Mapping[str, Any]) -> str:
    """Returns the arguments of a search that have a value."""
    shown = redact({name: value for name, value in arguments.items() if name not in ("command", "settings")})
    words = {**shown, **redact(arguments.get("settings") or {})}
    return " ".join(f"{name}={_word(value)}" for name, value in words.items() if value not in (None, [], {}, (), ""))


def _word(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
