"""The fork server of the warm starter: an interpreter that has imported torch and DeepSpeed, and only forks.

It must have one thread, and must not initialise a device's driver. Otherwise its forks hang or fail. It checks that
before each fork. Some modules start a thread, or initialise a driver, when they are imported. The ranks import these
modules, and the modules that import them. The server imports all others once for all trials.
"""

import ast
import contextlib
import copy
import ctypes
import functools
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ExtensionFileLoader, SourceFileLoader
from pathlib import Path
from typing import Any

import psutil

from zerotune.trial_lib.launch.processes import channel, environment_check, jit_builds, rank_process
from zerotune.trial_lib.launch.processes.supervisor import Guard, become_guard
from zerotune.trial_lib.launch.processes.watchdog import (
    become_subreaper,
    die_with_parent,
    go_on_without_parent,
    kill_all,
    kill_descendants,
)
from zerotune.trial_lib.messages.errors import chain_of
from zerotune.trial_lib.messages.files import write_whole
from zerotune.trial_lib.messages.measurement import Import
from zerotune.trial_lib.messages.orders import installed_folders, this_boot
from zerotune.trial_lib.rank.patching import Patch, Table, around, installed, note_names, stand_in

# Whether a process can still be forked, as far as the drivers of devices are concerned.

# The initialisation of each driver opens its file, from whichever library.
_FILES = {"/dev/nvidia-uvm": "CUDA", "/dev/kfd": "ROCm"}
_CUDA, _SUCCESS = "libcuda.so.1", 0


def initialised_driver() -> str | None:
    """Returns the name of the driver that this process has initialised; None for none."""
    links = _open_files()
    opened = next((name for file, name in _FILES.items() if any(link.startswith(file) for link in links)), None)
    return "CUDA" if opened is None and _is_cuda_initialised() else opened


def _is_cuda_initialised() -> bool:
    # Returns libcuda's own answer if this process has loaded it. The question does not load it. In Windows' subsystem
    # for Linux no file shows it, because NVML opens /dev/dxg as well, and NVML is harmless.
    try:
        cuda = ctypes.CDLL(_CUDA, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        # Every function fails before cuInit.
        return bool(cuda.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == _SUCCESS)
    except (OSError, AttributeError):
        return False


def _open_files() -> list[str]:
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(str(descriptor.readlink()))
    return links


def doubt() -> str | None:
    """Returns the reason why a fork is not safe now, or None."""
    threads = os.listdir("/proc/self/task")  # noqa: PTH208 - asked after every import
    if len(threads) != 1:
        return f"the fork server has {len(threads)} threads{_named(threads)}"
    driver = initialised_driver()
    return None if driver is None else f"the fork server has initialised {driver}"


def _named(threads: Iterable[str]) -> str:
    # The names of all threads but the first, in brackets. They tell which library started them.
    names = []
    for thread in threads:
        # A thread may end meanwhile.
        with contextlib.suppress(OSError):
            if int(thread) != os.getpid():
                names.append(Path("/proc/self/task", thread, "comm").read_text().strip())
    return f" ({', '.join(names)})" if names else ""


# Remembers what DeepSpeed asks of the processor whenever it loads an op. The answer takes 1.2 s, twice for each op.

_ASKED_FOR = {"arch", "flags"}


def remember_cpu_info(file: Path | None = None) -> None:
    """Has py-cpuinfo look once until the next boot, for this process, its forks and later processes."""
    try:
        import cpuinfo
    except ImportError:
        return
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - Path's own raises where there is no home
    keep = file or Path(cache) / "zerotune" / "cpu.json"
    look: Callable[[], dict[str, Any]] = cpuinfo.get_cpu_info
    seen: dict[str, Any] = {}

    def remembered() -> dict[str, Any]:
        if not seen:
            seen.update(_kept(keep))
        if not seen:
            info = look()
            # If the process that looks is killed, it returns nothing.
            if not info.keys() >= _ASKED_FOR:
                return info
            seen.update(info)
            # The disk is full, or the home cannot be written. The next process looks for itself.
            with contextlib.suppress(OSError):
                keep.parent.mkdir(parents=True, exist_ok=True)
                write_whole(keep, json.dumps({"boot": this_boot(), "seen": info}))
        return copy.deepcopy(seen)

    cpuinfo.get_cpu_info = remembered


def _kept(file: Path) -> dict[str, Any]:
    # The kept answer of this boot. Machines may share a home, and a processor may be replaced. Empty if the file cannot
    # be read or is damaged.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(file.read_text())
        seen = dict(kept["seen"])
        if kept["boot"] == this_boot() and seen.keys() >= _ASKED_FOR:
            return seen
    return {}


# Puts `torch.compile` off to a function's first call, while a module is imported.


@contextlib.contextmanager
def compiled_when_called() -> Iterator[None]:
    """Has `torch.compile` in this block return functions that are compiled when the first of them is called.

    That call replaces all of them, under all their names. Compiled code that calls another one then finds it compiled.
    """
    import torch

    compile_now = torch.compile
    waiting: list[tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = []
    compiled: dict[Callable[..., Any], Callable[..., Any]] = {}

    def compile_all() -> None:
        while waiting:
            function, later, options = waiting.pop()
            compiled[later] = compile_now(function, **options)
            stand_in(function.__name__, later, compiled[later])

    def compile_later(model: Callable[..., Any] | None = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(compile_later, **options)
        if isinstance(model, torch.nn.Module):
            return compile_now(model, **options)

        @functools.wraps(model)
        def later(*arguments: Any, **named: Any) -> Any:
            compile_all()
            return compiled[later](*arguments, **named)

        waiting.append((model, later, options))
        return later

    torch.compile = compile_later
    try:
        yield
    finally:
        torch.compile = compile_now


# What the server imports before it serves.

# What ZeroTune itself imports in every rank. By name, because this room is below that one.
_OF_RANKS = ("zerotune.trial_lib.rank.rank", "zerotune.trial_lib.rank.session")
_FORESEES = "zerotune.trial_lib.plan.simulate"


def prime(driver: socket.socket, builders: list[str]) -> list[str]:
    """Imports the modules of every DeepSpeed training, and those that a first step would load.

    Returns those of the builders whose ops are loaded. An op that is not built is built when a program needs it.
    """
    # DeepSpeed imports mlflow if it is installed. That takes seconds, which most programs need not pay.
    sys.modules["mlflow"] = None  # type: ignore[assignment]
    import torch

    environment_check.count_by_a_child(lambda: doubt() is None)
    with environment_check.asked_by_a_child(lambda: doubt() is None):
        importlib.import_module("deepspeed")

    del sys.modules["mlflow"]
    # The driver may wait for this answer, so it comes before the slow steps.
    if select.select([driver], [], [], 0)[0]:
        received = channel.receive(driver)
        if received is None:
            raise ConnectionError("the driver is gone")
        answer_check(driver, received[0])
    importlib.import_module("deepspeed.ops").__compatible_ops__  # noqa: B018 - computed on first use
    with contextlib.suppress(ImportError), compiled_when_called():
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    for module in _OF_RANKS:
        # A rank of a broken environment meets the same error, and writes it into its record.
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    torch.optim.AdamW([torch.nn.Parameter(torch.empty(0))])
    from deepspeed.accelerator import get_accelerator

    remember_cpu_info()
    note_names()

    def note(text: str) -> None:
        channel.send(driver, {"note": text})

    if get_accelerator().device_name() == "cpu":
        cannot = jit_builds.build(builders, note, only_built=True)
        return [name for name in builders if name not in cannot]
    # The ranks load the ops themselves.
    jit_builds.wait_for_the_living()
    # Loading a CUDA op asks the device for its architecture, which initialises CUDA. So a child loads it.
    child = os.fork()
    if child == 0:
        try:
            jit_builds.build(builders, note, only_built=True)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return []


# The program's imports. Each is left out that would make forks unsafe.


class _LeftOutError(BaseException):
    """An import of a module that is left out. It is no ImportError, so that no program takes it for missing."""


class _SpoiltError(BaseException):
    """A module's import has made forks unsafe."""


def _left_to_ranks(original: Any, *args: Any, **kwargs: Any) -> Any:
    now = getattr(sys.modules[original.__module__], original.__name__)
    asker = str(sys._getframe(2).f_globals["__name__"])
    if hasattr(now, "__wrapped__") and not asker.startswith(("torch.", "deepspeed.")):
        raise _LeftOutError(f"{asker} asks for a device")
    # A module may have this function by a name of its own, also when the ranks have another.
    return (original if hasattr(now, "__wrapped__") else now)(*args, **kwargs)


_ASKS = ["device_count", "is_bf16_supported", "get_device_capability", "get_device_name", "get_device_properties"]
_LEFT = " ".join(("cuda.is_available", *(f"{module}.{name}" for module in ("cuda", "accelerator") for name in _ASKS)))
_WHY = "A module or a cache may keep the answer, and a foreseen rank has other devices than this process."
_DEVICES: Table = (Patch("torch", _LEFT, _WHY, around(_left_to_ranks), may_lack=True),)


def import_all(imported: Sequence[Import], left_out: set[str], is_foreseeing: bool = False) -> str | set[str]:
    """Imports modules in their order. A module that fails, or needs one that is left out, is left to the ranks.

    Returns the one that has made forks unsafe, or those that have run in part. What these have left, such as operators
    of torch, a second run of them may meet.
    """
    # Before any code of the program's own, only what is imported has set variables.
    leads = all(isinstance(each, str) and " " in each for each in imported)
    refused, begun = set(left_out), set[str]()
    with (
        _watched(refused) as failed,
        installed(_DEVICES if is_foreseeing else ()),
        _own_environment(rank_process.set_by_imports if leads else {}),
    ):
        for each in imported:
            failed.clear()
            if isinstance(each, dict):
                _set_variables(each)
                continue
            if each in sys.modules:
                continue
            try:
                if " " not in each:
                    importlib.import_module(each)
                elif _is_of_installed(each):
                    exec(each, {})
                else:
                    # The user's own code may set what a later import reads.
                    break
            except _SpoiltError as spoilt:
                return str(spoilt)
            except (Exception, SystemExit, _LeftOutError) as error:  # noqa: BLE001 - the rank that needs it will say so
                # If an importer has handled an error, it does so in a rank too.
                chain = set(map(id, chain_of(error)))
                begun |= {name for name, why in failed.items() if id(why) in chain}
                # What needs them would only fail as late, and as often.
                refused |= begun
    note_names()
    return begun


def _is_of_installed(statement: str) -> bool:
    parsed = ast.parse(statement).body[0]
    names = [each.name for each in parsed.names] if isinstance(parsed, ast.Import) else []
    names += [parsed.module or ""] if isinstance(parsed, ast.ImportFrom) else []
    packages = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
    return all(map(_is_installed, packages))


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    # A package without an `__init__.py` has folders alone.
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    return any(f"{place}{os.sep}".startswith(installed_folders()) for place in places if place)


def _set_variables(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def _own_environment(changes: dict[str, str]) -> Iterator[None]:
    # Takes back what changes in the environment. Each rank's program changes its own.
    own = dict(os.environ)
    try:
        yield
    finally:
        changes.update({name: value for name, value in os.environ.items() if own.get(name) != value})
        os.environ.clear()
        os.environ.update(own)


@contextlib.contextmanager
def _watched(left_out: set[str]) -> Iterator[dict[str, BaseException]]:
    """Checks after each module, the innermost first, whether a fork is still safe. Yields a dictionary that gets the
    errors of modules whose import fails, by their names.
    """
    failed: dict[str, BaseException] = {}

    def refusing(create: Callable[..., Any]) -> Callable[..., Any]:
        def create_module(loader: Any, spec: Any) -> Any:
            if spec.name in left_out:
                raise _LeftOutError(spec.name)
            return create(loader, spec)

        return create_module

    def asking(execute: Callable[..., None]) -> Callable[..., None]:
        def exec_module(loader: Any, module: Any) -> None:
            try:
                execute(loader, module)
            except BaseException as error:
                failed[module.__name__] = error
                raise
            if doubt():
                raise _SpoiltError(module.__name__)

        return exec_module

    with contextlib.ExitStack() as restored:
        for loader in (SourceFileLoader, ExtensionFileLoader):
            for name, wrap in (("create_module", refusing), ("exec_module", asking)):
                original = getattr(loader, name)
                restored.callback(setattr, loader, name, original)
                setattr(loader, name, wrap(original))
        yield failed


# Serving.

_HOUSEKEEPING_S = 0.5
_GUARDS_S = 2.0
# This program waits for the end of one child, and reaps the others.
_WAIT = "import os, sys\nwhile os.wait()[0] != int(sys.argv[1]): pass"
_STANDARD_STREAMS = 2
# If the server has to begin again more often, all of the code's imports are left to the ranks.
_MOST_TIMES = 5
# What a server tells the fork that takes over, in the place of modules' names.
_TOO_LONG = "*"
_LEAST_S = 0.001


def answer_check(driver: socket.socket, message: dict[str, Any]) -> None:
    """Sends the driver what DeepSpeed refuses in a configuration; None if no fork can say it."""
    judgement = None
    if doubt() is None:
        with contextlib.suppress(channel.NoAnswerError):
            judgement = channel.ask_fork(lambda: environment_check.judge(message["check"]), environment_check.JUDGED_S)
    channel.send(driver, {"checked": judgement})


class ForkServer:
    """Answers the driver: `{"launch": request}` with a socket for the trial's guard, `{"prime": imports}`, or
    `{"check": request}`.
    """

    def __init__(self, driver: socket.socket) -> None:
        self._driver = driver
        self._guards: set[int] = set()
        self._spoilers: list[str] = []
        self._left_out: set[str] = set()

    def serve(self) -> None:
        while True:
            readable, _, _ = select.select([self._driver], [], [], _HOUSEKEEPING_S)
            self._reap()
            if not readable:
                continue
            received = channel.receive(self._driver)
            if received is None:
                return
            message, descriptors = received
            if "prime" in message:
                self.import_safely(message["prime"], set(message.get("without", ())))
                channel.send(self._driver, {"primed": True})
            elif "check" in message:
                answer_check(self._driver, message)
            else:
                self._launch(message["launch"], descriptors)

    def import_safely(self, imported: Sequence[Import], without: set[str], patience_s: float = 0.0) -> None:
        """Imports modules while a fork stands by. If a module makes forks unsafe, or runs in part, the fork takes over,
        and leaves it out. One fork too many leaves out all of them, and so does one whose imports take too long.
        """
        ends_at = time.monotonic() + patience_s
        times, before = 0, len(self._spoilers)
        takes_too_long = False
        while True:
            # The fork that stands by waits for a word on the pipe. Without one it ends with this process's imports.
            listen, tell = os.pipe()
            parent = os.getpid()
            reserve = os.fork()
            if reserve == 0:
                os.close(tell)
                die_with_parent(parent)
                become_subreaper()
                with open(listen, encoding="utf-8") as pipe:  # noqa: PTH123 - a pipe
                    word = pipe.read()
                if not word:
                    os._exit(0)
                self._guards.clear()
                times += 1
                takes_too_long = word == _TOO_LONG
                found: str | list[str] = [] if takes_too_long else json.loads(word)
                self._spoilers += [found] if isinstance(found, str) else []
                self._left_out.update([found] if isinstance(found, str) else found)
                continue
            os.close(listen)

            def hand_over(word: str, to: int = reserve, pipe: int = tell) -> None:
                os.write(pipe, word.encode())
                self._stand_aside(to)

            # The imports. The fork takes over if they make this process unfit to fork, or take too long.
            leaves_all = takes_too_long or times > _MOST_TIMES
            with _importing(), _in_time(ends_at if patience_s and not leaves_all else None, hand_over):
                unfit = "" if leaves_all else import_all(imported, self._left_out | without, bool(without))
            if unfit:
                hand_over(json.dumps(unfit if isinstance(unfit, str) else sorted(unfit)))
            os.close(tell)
            os.waitpid(reserve, 0)
            break
        if takes_too_long:
            self._note(f"the code's imports took more than {patience_s:g} s: they are left to the ranks")
        elif len(self._spoilers) > before:
            names = ", ".join(sorted(self._spoilers))
            what = "all of the code's imports" if times > _MOST_TIMES else "what imports them"
            self._note(f"the fork server could not fork with {names}: these and {what} are paid in each trial")

    def _stand_aside(self, successor: int) -> None:
        # Waits for the end of the fork that serves from now on, as a program without this one's imports. The process
        # stays the same, because the successor is its child. Memory of a GPU that the imports took is freed.
        self._driver.close()
        for descriptor in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - numbers alone
            # The log stays open. The files of a GPU's driver may be inheritable, so they are closed here.
            if descriptor > _STANDARD_STREAMS:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        with contextlib.suppress(OSError):
            os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", _WAIT, str(successor)])
        while os.wait()[0] != successor:
            pass
        os._exit(1)

    def _note(self, text: str) -> None:
        channel.send(self._driver, {"note": text})

    def _launch(self, request: dict[str, Any], descriptors: list[int]) -> None:
        reason = doubt()
        if reason is None:
            pid = os.fork()
            if pid == 0:
                self._driver.close()
                _become_guard(request, socket.socket(fileno=descriptors[0]), descriptors[1:])
            self._guards.add(pid)
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(self._driver, {"doubt": reason})

    def _reap(self) -> None:
        # Reaps ended trials, and kills what a killed watchdog has left. The server is the next subreaper above.
        has_ended = False
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                has_ended = True
                self._guards.discard(pid)
        if not has_ended:
            # Nothing was left. A look through all processes of the host would take time from the ranks' cores.
            return
        kill_all(child for child in psutil.Process().children() if child.pid not in self._guards)


def _become_guard(request: dict[str, Any], driver: socket.socket, held: list[int]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    become_guard(request, driver)
    guard = os.getpid()

    def start_rank(rank: int) -> int:
        pid = os.fork()
        if pid == 0:
            driver.close()
            for descriptor in held:
                os.close(descriptor)
            try:
                environment_check.make_up()
                rank_process.become(request, rank, guard)
            finally:
                # The exit must not unwind the frames of the guard that it was forked from.
                os._exit(1)
        return pid

    try:
        Guard(driver, request, start_rank).supervise()
    finally:
        os._exit(1)


def _keep(driver: socket.socket, server: int) -> None:
    # Stays behind as the server's parent. If the driver dies, also during a build, it ends everything below.
    poll = select.poll()
    poll.register(driver, 0)
    while os.waitpid(server, os.WNOHANG)[0] == 0:
        if poll.poll(_HOUSEKEEPING_S * 1000):
            # The guards have noticed it too, and clean up after their trials.
            with contextlib.suppress(ProcessLookupError):
                os.kill(server, signal.SIGKILL)
            _wait_for_children(_GUARDS_S)
            kill_descendants()
            return
    # The server was killed. Running trials have guards of their own, and sockets to the driver.
    driver.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _wait_for_children(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)


@contextlib.contextmanager
def _in_time(ends_at: float | None, hand_over: Callable[[str], None]) -> Iterator[None]:
    # Hands over to the fork that stands by if the imports last beyond `ends_at`, of the monotonic clock.
    if ends_at is None:
        yield
        return

    def is_late(number: int, frame: object) -> None:
        hand_over(_TOO_LONG)

    before = signal.signal(signal.SIGALRM, is_late)
    signal.setitimer(signal.ITIMER_REAL, max(_LEAST_S, ends_at - time.monotonic()))
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGALRM) is is_late:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _importing() -> Iterator[None]:
    # Spares imports the garbage collector's passes, which are a fifth of their time, and freezes their objects. The few
    # objects among them that are garbage are frozen too. A last pass to find them would delay the first trial.
    thresholds = gc.get_threshold()
    # `gc.disable` is not used here, because an imported library may call it for its program.
    gc.set_threshold(0)
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(*thresholds)


def main(arguments: list[str]) -> None:
    """Entry: primes the server, reports that, and serves."""
    driver = socket.socket(fileno=int(arguments[0]))
    # The driver handles the terminal's Ctrl-C.
    os.setsid()
    become_subreaper()
    go_on_without_parent(os.getppid())
    server = os.fork()
    if server:
        _keep(driver, server)
        return
    die_with_parent(os.getppid())
    become_subreaper()
    try:
        ahead = json.loads(arguments[1])
        with _importing():
            loaded = prime(driver, arguments[2:])
            # The device that all foreseen ranks find. A library that asks for its name may be imported here.
            with contextlib.suppress(Exception):
                if ahead["without"]:
                    importlib.import_module(f"{_FORESEES}.engine")
                    importlib.import_module(f"{_FORESEES}.pretended_device").register()
        serving = ForkServer(driver)
        if ahead["imports"] and doubt() is None:
            serving.import_safely(ahead["imports"], set(ahead["without"]), ahead["patience_s"])
        channel.send(driver, {"ready": True, "doubt": doubt(), "loaded": loaded})
        serving.serve()
    except OSError:
        # The driver is gone.
        return
