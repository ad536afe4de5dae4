"""The checks of `zerotune doctor`, each with its remedy."""

import contextlib
import errno
import json
import os
import shlex
import shutil
import sqlite3
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import Any

import certifi
import httpx
from pydantic import TypeAdapter

from zerotune.trial_lib.device.base import DeviceCondition, Host
from zerotune.trial_lib.device.cuda_variables import unread_architectures
from zerotune.trial_lib.device.nvml import driver_version
from zerotune.trial_lib.device.this_host import kind_of, this_host
from zerotune.trial_lib.inputs.entrypoint import default_interpreter
from zerotune.trial_lib.launch.device_watch import company_said, neighbour
from zerotune.trial_lib.launch.locks import host_lock_dir, own_folder
from zerotune.trial_lib.launch.processes import environment_check
from zerotune.trial_lib.launch.processes.channel import NoAnswerError, Question
from zerotune.trial_lib.launch.processes.jit_builds import build_folders, is_stale
from zerotune.trial_lib.launch.starters import rank_environment
from zerotune.trial_lib.launch.trial_files import UNCOVERED, layer_refusal
from zerotune.trial_lib.messages import shared_segments
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.records.folders import STUDIES as STUDIES_FOLDER
from zerotune.trial_lib.records.units import bytes_shown
from zerotune.trial_lib.study.folder import data_folder
from zerotune.trial_lib.study.program import build_root, with_build_folder
from zerotune.trial_lib.tracking.tracking_uri import (
    default_tracking_uri,
    is_database,
    is_server,
    sqlite_file,
    without_password,
)


class Verdict(str, Enum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    name: str  # of the checked thing
    verdict: Verdict  # `fail` if a study would fail or hang; `warn` if it may, or would be slower than necessary
    said: str  # the finding, in one sentence
    remedy: str = ""  # how to mend it. Empty if there is nothing to mend.


def ok(name: str, said: str) -> Check:
    return Check(name, Verdict.OK, said)


def warn(name: str, said: str, remedy: str) -> Check:
    return Check(name, Verdict.WARN, said, remedy)


def fail(name: str, said: str, remedy: str) -> Check:
    return Check(name, Verdict.FAIL, said, remedy)


def trusting(bundle: str | None, *, anybody: bool) -> ssl.SSLContext:
    """`bundle` is a file or a folder of certificates, None for those that Python's clients bring along.
    Raises OSError: the file is missing, or has no certificate.
    """
    if anybody:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    trusted = bundle or certifi.where()
    if Path(trusted).is_dir():
        return ssl.create_default_context(capath=trusted)
    return ssl.create_default_context(cafile=trusted)


# This host's devices, their driver, and whether torch can compute on them.

ACCELERATORS, DEVICES = "accelerators", "devices"


@dataclass(frozen=True)
class DevicesFound:
    host: Host  # the devices that this process may use
    driver: str | None = None  # the version of the NVIDIA driver; None without one
    conditions: tuple[DeviceCondition, ...] = ()  # of each slot's device, if there is anything to report

    @classmethod
    def here(cls) -> "DevicesFound":
        """Asks the drivers, which may block this process. Raises InputError as `devices` does."""
        host = this_host()
        return cls(host, driver_version(), tuple(kind_of(host.device).conditions(host)))


def check_accelerators(
    found: DevicesFound | InputError, report: Mapping[str, Any] | str, tried: Mapping[str, Any] | str | None = None
) -> Check:
    """`report` and `tried` are sentences if there is none; `tried` is None if there was nothing to try."""
    if isinstance(found, InputError):
        return fail(ACCELERATORS, f"{found.where}: {found.what}", found.remedy)
    slots, on_the_processor = _slots(found), kind_of(found.host.device).computes_on_the_processor
    if isinstance(report, str):
        return ok(ACCELERATORS, slots)
    if on_the_processor and report["torch_cuda"] is not None:
        why = "CUDA_VISIBLE_DEVICES hides the GPUs" if found.driver else "no NVIDIA driver answers"
        remedy = "With GPUs: install the driver, start a container with --gpus all, or unset CUDA_VISIBLE_DEVICES."
        return warn(ACCELERATORS, f"{slots}: {why}, though torch is built for CUDA {report['torch_cuda']}", remedy)
    if not on_the_processor and report["torch_cuda"] is None:
        said = f"{slots}, but torch {report['torch']} is built without CUDA, so no rank can use them"
        remedy = "Install the build of torch that fits the driver (pytorch.org/get-started), then ZeroTune again."
        return fail(ACCELERATORS, said, remedy)
    return ok(ACCELERATORS, slots) if tried is None else _check_tried(found, f"{slots}, but ", report, tried)


def _check_tried(found: DevicesFound, but: str, report: Mapping[str, Any], tried: Mapping[str, Any] | str) -> Check:
    if isinstance(tried, str):
        return fail(ACCELERATORS, f"{but}trying them has failed: {tried}", "See whether `nvidia-smi` hangs.")
    if tried["sees"] == 0:
        said = f"{but}torch, built for CUDA {report['torch_cuda']}, sees none: {tried['why_none'] or 'CUDA shows none'}"
        remedy = "Update the driver to one that supports this CUDA, or install a build of torch for an older one."
        return fail(ACCELERATORS, said, remedy)
    broken = {number: words for number, words in enumerate(tried["devices"]) if words}
    if broken:
        said = "; ".join(f"cuda:{number}: {words}" for number, words in broken.items())
        return fail(
            ACCELERATORS,
            f"{but}torch cannot compute on {len(broken)} of {tried['sees']} ({said})",
            "If torch has no kernel for the device, install a build that has one. If the device is busy, see which "
            "process has it (nvidia-smi). Otherwise restart the host.",
        )
    # CUDA shows a process only one instance.
    count = len(found.host.slots)
    if tried["sees"] < count and kind_of(found.host.device).refusal(found.host, count) is None:
        return fail(ACCELERATORS, f"{but}CUDA shows torch {tried['sees']} of them", "See what `nvidia-smi` says.")
    if tried["together"]:
        return fail(
            ACCELERATORS,
            f"{but}two of them cannot reduce together by NCCL: {tried['together']}",
            "NCCL_DEBUG=INFO shows more. Mostly /dev/shm is too small (Docker: --shm-size=8g), or the GPUs cannot "
            "reach each other (NCCL_P2P_DISABLE=1 avoids that).",
        )
    return ok(ACCELERATORS, _slots(found))


def _slots(found: DevicesFound) -> str:
    host = found.host
    size = bytes_shown(host.memory_per_slot) if host.memory_per_slot else "unknown size"
    memory = f"{len(host.slots)} slots of {size}"
    on_the_processor = kind_of(host.device).computes_on_the_processor
    return f"no GPU; {memory}, a core each" if on_the_processor else f"{memory} (GPUs, driver {found.driver})"


# What may hold for a device: its field in `DeviceCondition`, the words, the remedy, and whether a study would fail.
_CONDITIONS = (
    ("is_cut", "cut into instances (MIG)", "", False),
    ("is_closed", "closed to all (compute mode prohibited)", "Open it: nvidia-smi -c 0.", True),
    ("is_exclusive", "for one process at a time (compute mode exclusive)", "", False),
    (
        "forgets",
        "persistence mode off",
        "Keep the driver up between trials: nvidia-smi -pm 1, or nvidia-persistenced.",
        False,
    ),
)
_COMPANY = "Wait for the other processes, or name other GPUs in CUDA_VISIBLE_DEVICES. Beside them a trial is slower."
_FAULTS = "Reset the device (nvidia-smi -r) or restart the host. If that does not help, replace it."


def check_devices(found: DevicesFound | InputError) -> list[Check]:
    """Returns no line if there is nothing to report."""
    if isinstance(found, InputError) or not (found.conditions or found.host.notes):
        return []
    said = list(found.host.notes)
    remedies: dict[str, bool] = {}
    for each in found.conditions:
        holds = [row for row in _CONDITIONS if getattr(each, row[0])]
        words = [f"{each.device}: {each.model or 'of no known model'}"]
        if each.memory is not None and each.memory_used is not None:
            words.append(f"{bytes_shown(each.memory_used)} of {bytes_shown(each.memory)} in use")
        if each.tenants:
            words.append(f"others compute there: {company_said(list(map(neighbour, each.tenants)))}")
            remedies[_COMPANY] = False
        said.append(", ".join([*words, *(text for _, text, _, _ in holds), *each.faults]))
        remedies |= {remedy: fails for _, _, remedy, fails in holds if remedy}
        if each.faults:
            remedies[_FAULTS] = False
    if not remedies:
        return [ok(DEVICES, "; ".join(said))]
    return [(fail if any(remedies.values()) else warn)(DEVICES, "; ".join(said), " ".join(remedies))]


# What a rank needs to train: torch and DeepSpeed, and the tools that build its ops.

_ANSWER_S = 60.0
_CHECK = "zerotune.trial_lib.launch.processes.environment_check"
ENVIRONMENT, OPS, LOCKS, COMPILER = "environment", "ops", "build locks", "compiler"


def environment_report(interpreter: str, environment: Mapping[str, str]) -> dict[str, Any] | str:
    try:
        report: dict[str, Any] = Question(interpreter, environment, _CHECK, environment_check.ENVIRONMENT).answer(
            _ANSWER_S
        )
    except TimeoutError:
        return f"importing torch and DeepSpeed has not ended within {_ANSWER_S:.0f} s"
    except NoAnswerError as error:
        return f"torch and DeepSpeed cannot be imported: {error}"
    return report


def devices() -> DevicesFound:
    """Raises InputError: a driver does not answer, or the host has devices that ZeroTune does not tune on."""
    where = "the NVIDIA driver"
    try:
        found = Question(sys.executable, os.environ, "zerotune.trial_lib.doctor").answer(_ANSWER_S)
    except TimeoutError:
        what = f"it has not listed the GPUs within {_ANSWER_S:.0f} s."
        raise InputError(what, where=where, remedy="See whether `nvidia-smi` hangs; if so, restart the host.") from None
    except NoAnswerError as error:
        what = f"asking it has failed ({error})."
        raise InputError(what, where=where, remedy="See what `nvidia-smi` says.") from None
    if "error" in found:
        raise InputError(**found["error"])
    return TypeAdapter(DevicesFound).validate_python(found)


def tried_devices(interpreter: str, environment: Mapping[str, str]) -> dict[str, Any] | str:
    try:
        tried: dict[str, Any] = Question(interpreter, environment, _CHECK, environment_check.DEVICES).answer(_ANSWER_S)
    except TimeoutError:
        return f"it has not ended within {_ANSWER_S:.0f} s"
    except NoAnswerError as error:
        return str(error)
    return tried


def check_environment(interpreter: str, report: Mapping[str, Any] | str) -> Check:
    if isinstance(report, str):
        return fail(
            ENVIRONMENT, f"{interpreter}: {report}", "Run that import by hand, and mend the error that it shows."
        )
    device = f"DeepSpeed {report['deepspeed']} on {report['accelerator']}"
    return ok(ENVIRONMENT, f"{interpreter}: Python {report['python']}, torch {report['torch']}, {device}")


def check_ops(report: Mapping[str, Any] | str, wanted: Sequence[str]) -> Check:
    """Checks which of DeepSpeed's ops are built, and which can be."""
    if isinstance(report, str):
        return warn(OPS, "not known: DeepSpeed could not be asked", f"Mend `{ENVIRONMENT}` first.")
    ops = report["ops"]
    built = [name for name, op in ops.items() if op["built"]]
    can = [name for name, op in ops.items() if op["can_build"] and not op["built"]]
    cannot = {name: op["why"] or _SILENT for name, op in ops.items() if not op["can_build"] and not op["built"]}
    reasons = [f"{name} ({_first(why)})" for name, why in cannot.items()]
    said = f"built: {_names(built)}; can be built: {_names(can)}; cannot: {_names(reasons)}"
    missing = [name for name in wanted if name in cannot]
    if missing:
        return fail(OPS, said, "; ".join(f"{name}: {cannot[name]}" for name in missing))
    later = [name for name in wanted if name in can]
    if later:
        return warn(
            OPS, said, f"The first study that needs one waits minutes for it. Build {_names(later)} ahead: {_AHEAD}."
        )
    return ok(OPS, said)


_AHEAD = "python -m zerotune.flows.prepare"
_SILENT = "DeepSpeed does not say why"


def _names(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _first(why: str) -> str:
    # DeepSpeed's first sentence. Hints follow it.
    return next(filter(None, (part.strip(" .") for part in why.split("[WARNING]"))), why)


def check_locks(environment: Mapping[str, str]) -> Check:
    """Looks for locks of killed builds. Every later process would wait for them silently."""
    stale = [folder / "lock" for folder in build_folders(environment) if is_stale(folder / "lock")]
    if not stale:
        return ok(LOCKS, "none that a killed build has left")
    said = f"{len(stale)} from a killed build: every process that needs the op waits forever"
    return fail(LOCKS, said, _removal(stale))


def check_compiler(environment: Mapping[str, str], device: str, report: Mapping[str, Any] | str) -> Check:
    """Looks for the tools that build DeepSpeed's ops: a C++ compiler, ninja, and the devices' compiler."""
    path = environment.get("PATH", "")
    compiler = shutil.which(environment.get("CXX", "c++"), path=path)
    ninja = shutil.which("ninja", path=path)
    found = [tool for tool in (compiler, ninja) if tool]
    if ninja is None:
        said = "no ninja in PATH: even a built op cannot be loaded"
        return fail(COMPILER, said, "Activate ZeroTune's environment (it has ninja), or install ninja.")
    if compiler is None:
        remedy = "Install a C++ compiler (Debian: apt install build-essential), or set CXX to yours."
        everything = not isinstance(report, str) and all(op["built"] for op in report["ops"].values())
        said = "no C++ compiler in PATH"
        return warn(COMPILER, f"{said}, but all ops are built", remedy) if everything else fail(COMPILER, said, remedy)
    own = kind_of(device).compiler
    if own is not None:
        if unread := unread_architectures(environment):
            said, remedy = unread.split(". ", 1)
            return fail(COMPILER, said, remedy)
        own_path = shutil.which(own, path=path) or shutil.which(
            own, path=f"{environment.get('CUDA_HOME', '/usr/local/cuda')}/bin"
        )
        if own_path is None:
            said = f"{compiler}, {ninja}, but no {own}: the ops of a GPU cannot be built"
            return warn(COMPILER, said, "Install the CUDA toolkit that torch was built for, and set CUDA_HOME to it.")
        found.append(own_path)
    if not isinstance(report, str) and " " in (linked := report["torch_libraries"]):
        return fail(COMPILER, f"torch links no op with {linked}", "Make the environment in a folder without a space.")
    return ok(COMPILER, ", ".join(found))


# This host: shared memory, the folders that studies write to and their room, the clock.

GIB = 2**30
# DeepSpeed's CPU collectives take about 70 MB a rank, NCCL and data loaders' workers more.
_LITTLE_SHARED_MEMORY = GIB // 2
_NO_ROOM, _LITTLE_ROOM = GIB // 4, 5 * GIB
_SKEW_S = 5.0
_CLOCK_S = 0.2


def check_shared_memory() -> Check:
    name, folder = "shared memory", shared_segments.FOLDER
    remedy = (
        "Docker: --shm-size=8g; Kubernetes: an emptyDir with `medium: Memory` on /dev/shm; "
        "else: mount -o remount,size=8G /dev/shm"
    )
    try:
        usage = shutil.disk_usage(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return fail(name, f"{folder} cannot be written ({error.strerror})", remedy)
    said = f"{folder}: {bytes_shown(usage.free)} free of {bytes_shown(usage.total)}"
    left = abandoned_buffers()
    if left:
        size = sum(left.values())
        said += f", {bytes_shown(size)} of it in {len(left)} buffers of ended runs"
    if usage.free < _LITTLE_SHARED_MEMORY:
        return fail(name, said, _removal(left) if left else remedy)
    if left:
        return warn(name, said, _removal(left))
    return ok(name, said)


def _removal(paths: Iterable[Path]) -> str:
    return shlex.join(["rm", *map(str, paths)])


def abandoned_buffers() -> dict[Path, int]:
    """Returns this user's buffers of DeepSpeed's CPU collectives and of NCCL that no process uses, with their bytes."""
    names = shared_segments.abandoned(shared_segments.BUFFERS)
    if shared_segments.are_all_holders_seen():
        names |= shared_segments.abandoned(shared_segments.OF_NCCL)
    sizes = {}
    for name in names:
        path = shared_segments.FOLDER / name
        # A run that ends meanwhile removes its own.
        with contextlib.suppress(FileNotFoundError):
            sizes[path] = path.stat().st_blocks * 512
    return sizes


_LAYERS = "Run as root, or let users make namespaces. Else tune a copy of your folder: see docs/any_program.md."


def check_layers(work_dir: Path) -> Check:
    """Mounts a layer over a folder, as trials do over the program's."""
    name = "trial files"
    try:
        refusal = layer_refusal(work_dir)
    except OSError as error:
        refusal = f"{work_dir} cannot be written: {error.strerror}"
    if refusal is None:
        return ok(name, "layered: a trial sees the program's folder through a layer of its own")
    return warn(name, f"intercepted in Python, because this host has no layers ({refusal}). {UNCOVERED}", _LAYERS)


STUDIES, DATA, BUILDS, HOST_LOCKS = "studies", "data folder", "op builds", "locks"
_HOME = "Set HOME to a folder that you may write to."
_ELSEWHERE = {
    STUDIES: "Run zerotune in a folder that you can write to.",
    DATA: "Mend its permissions, or set XDG_DATA_HOME to another folder.",
    BUILDS: "Mend its permissions, or set TORCH_EXTENSIONS_DIR to another folder.",
    HOST_LOCKS: "Let every user of this host write to it (chmod 1777).",
}


def check_write_access(folders: Mapping[str, Path]) -> list[Check]:
    """Writes a byte to each folder that ZeroTune writes to, by its purpose, and checks the room there."""
    return [_write_access(what, folder) for what, folder in folders.items()]


def _write_access(what: str, folder: Path) -> Check:
    if not folder.is_absolute():
        return fail(what, "there is no home folder: HOME is not set, nor is one in the password database", _HOME)
    try:
        if what == HOST_LOCKS:
            folder = own_folder(folder)
        there = next(place for place in (folder, *folder.parents) if place.exists())
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"1")
            file.flush()
        free = shutil.disk_usage(there).free
    except OSError as error:
        return fail(what, f"{folder} cannot be written ({error.strerror})", _ELSEWHERE[what])
    except InputError as error:
        return fail(what, f"{folder}: {error.what}", _ELSEWHERE[what])
    said = f"{folder}: {bytes_shown(free)} free"
    if free < _NO_ROOM:
        return fail(what, said, "Make room: a study stops when the disk is full.")
    if free < _LITTLE_ROOM:
        return warn(what, said, "Make room before a long study, or one with a full experiment's checkpoints.")
    return ok(what, said)


def check_clock(server_time: float | None, asked_at: float) -> Check:
    """`server_time` is in seconds since the epoch, None if unasked. `asked_at` is this host's clock then."""
    name, remedy = "clock", "Synchronise it: timedatectl set-ntp true, or chronyc makestep."
    wall, steady = time.time(), time.monotonic()
    time.sleep(_CLOCK_S)
    drift = (time.time() - wall) - (time.monotonic() - steady)
    if abs(drift) > _CLOCK_S / 4:
        return warn(name, f"it was set while it ran ({drift:+.2f} s within {_CLOCK_S} s)", remedy)
    if server_time is None:
        return ok(name, "it runs evenly; there is no Prefect server to compare it with")
    skew = asked_at - server_time
    if abs(skew) > _SKEW_S:
        said = f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the Prefect server's"
        return warn(name, f"{said}: states and schedules have the wrong time", remedy)
    return ok(name, f"it runs evenly, and agrees with the Prefect server's to {_SKEW_S:.0f} s")


# MLflow: whether its store or server answers, and its version.

NAME = "MLflow"
_TIMEOUT_S = 5
# MLflow's own variables, and those of its HTTP library.
_BUNDLES = ("MLFLOW_TRACKING_SERVER_CERT_PATH", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_LATER = "or unset MLFLOW_TRACKING_URI to keep the runs in ./mlflow.db; `zerotune sync STUDY` sends them later."


def check_mlflow(work_dir: Path) -> Check:
    try:
        uri = default_tracking_uri(work_dir)
    except InputError as error:
        return fail(NAME, error.what, error.remedy)
    shown, ours = without_password(uri), version("mlflow")
    if is_server(uri):
        return _check_server(uri, shown, ours)
    if not is_database(uri):
        return warn(NAME, f"{shown} was not checked, MLflow {ours} here", f"See that it answers, {_LATER}")
    database = sqlite_file(uri)
    if database is not None:
        return _check_file(database, shown, ours)
    try:
        _connect(uri)
    except Exception as error:  # noqa: BLE001 - drivers have errors of their own
        first = (str(error).strip().splitlines() or [type(error).__name__])[0].replace(uri, shown)
        return fail(NAME, f"{shown} does not answer ({first})", f"Start it, install its driver, {_LATER}")
    return ok(NAME, f"{shown} answers, MLflow {ours}")


def _check_file(database: Path, shown: str, ours: str) -> Check:
    try:
        if database.exists():
            with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True, timeout=_TIMEOUT_S)) as connection:
                connection.execute("select count(*) from sqlite_master").fetchone()
        # A study creates the store, and the folders above it.
        folder = next(place for place in database.parents if place.exists())
        with tempfile.TemporaryFile(dir=folder):
            pass
        if database.exists() and not os.access(database, os.W_OK):
            raise PermissionError(errno.EACCES, "it may not be written")
    except (OSError, sqlite3.Error) as error:
        why = error.strerror if isinstance(error, OSError) else error
        return fail(NAME, f"{shown} cannot be used ({why})", f"Move that file, name another store, {_LATER}")
    return ok(NAME, f"{shown}, MLflow {ours}")


def _check_server(uri: str, shown: str, ours: str) -> Check:
    try:
        server = httpx.URL(uri)
        login = {} if server.userinfo else _login()
        place = server.copy_with(path=f"{server.path.rstrip('/')}/version")
        answer = httpx.get(place, **login, timeout=_TIMEOUT_S, verify=_tls(), follow_redirects=True)
    except Exception as error:  # noqa: BLE001 - a proxy that the shell names has errors of its own
        return fail(NAME, f"{shown} does not answer ({error})", f"Start it, {_LATER}")
    if answer.status_code in (401, 403):
        return fail(
            NAME,
            f"{shown} refuses this user ({answer.status_code})",
            "Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN. If you reach the "
            "server by a name, MLFLOW_SERVER_ALLOWED_HOSTS must have that name.",
        )
    if answer.is_error:
        said = f"{shown} answers, but does not show its version ({answer.status_code})"
        return warn(NAME, said, "See that it is an MLflow.")
    theirs = answer.text[:100].strip()
    if theirs.split(".")[0] != ours.split(".")[0]:
        return warn(NAME, f"{shown} is MLflow {theirs}, this is {ours}", "Bring both to the same major version.")
    return ok(NAME, f"{shown} answers, MLflow {theirs} there, {ours} here")


def _tls() -> ssl.SSLContext:
    anybody = os.environ.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() in ("true", "1")
    context = trusting(next(filter(None, map(os.environ.get, _BUNDLES)), None), anybody=anybody)
    own = os.environ.get("MLFLOW_TRACKING_CLIENT_CERT_PATH")
    if own:
        context.load_cert_chain(own)
    return context


def _login() -> dict[str, Any]:
    token, user = os.environ.get("MLFLOW_TRACKING_TOKEN"), os.environ.get("MLFLOW_TRACKING_USERNAME")
    if token:
        return {"headers": {"Authorization": f"Bearer {token}"}}
    return {"auth": (user, os.environ.get("MLFLOW_TRACKING_PASSWORD", ""))} if user else {}


def _connect(uri: str) -> None:
    import sqlalchemy

    engine = sqlalchemy.create_engine(uri, connect_args={"connect_timeout": _TIMEOUT_S})
    try:
        engine.connect().close()
    finally:
        engine.dispose()


# All checks.

# The operators that `zerotune.flows.prepare` builds, by DeepSpeed's names.
_COMMON_OPS = {"cpu": ("deepspeed_shm_comm", "fused_adam", "cpu_adam"), "cuda": ("fused_adam", "cpu_adam")}


def examine(work_dir: Path, check_prefect: Callable[[], tuple[Check, float | None, float]]) -> list[Check]:
    """Returns the checks of this host, of the servers, and of the folders that a study in `work_dir` would write to.

    `check_prefect` also returns the server's clock and this host's, as `check_clock` takes them.
    """
    interpreter = default_interpreter()
    environment = with_build_folder(rank_environment(interpreter), interpreter)
    found: DevicesFound | InputError
    with ThreadPoolExecutor() as pool:
        # These take seconds each, so they run at the same time.
        asked = pool.submit(environment_report, interpreter, environment)
        there = pool.submit(devices)
        prefect = pool.submit(check_prefect)
        mlflow = pool.submit(check_mlflow, work_dir)
        try:
            found = there.result()
            device, tries = found.host.device, not kind_of(found.host.device).computes_on_the_processor
        except InputError as error:
            # Only a GPU's driver can fail to answer. The first check reports it.
            found, device, tries = error, "cuda", False
        # After the check for other processes on the devices, which would find this one.
        tried = pool.submit(tried_devices, interpreter, environment).result() if tries else None
        report = asked.result()
        prefect_check, server_time, asked_at = prefect.result()
        mlflow_check = mlflow.result()
    folders = {
        STUDIES: work_dir / STUDIES_FOLDER,
        DATA: data_folder(),
        BUILDS: build_root(environment),
        HOST_LOCKS: host_lock_dir(),
    }
    return [
        check_accelerators(found, report, tried),
        *check_devices(found),
        check_environment(interpreter, report),
        check_ops(report, _COMMON_OPS[device]),
        check_locks(environment),
        check_compiler(environment, device, report),
        check_shared_memory(),
        check_layers(work_dir),
        *check_write_access(folders),
        prefect_check,
        mlflow_check,
        check_clock(server_time, asked_at),
    ]


def main(arguments: list[str]) -> None:
    """Writes `DevicesFound`, or the parts of an InputError, to a file descriptor."""
    try:
        answer = asdict(DevicesFound.here())
    except InputError as error:
        answer = {"error": {"what": error.what, "where": error.where, "remedy": error.remedy}}
    with os.fdopen(int(arguments[0]), "w") as file:
        file.write(json.dumps(answer))
