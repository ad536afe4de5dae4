"""The micro-batch sizes that a rank measures, one after another. A single trial has one size.

After a size, the user's program may go on with the same engine (`NextSize`). Otherwise it is run again from its
beginning. Its engine is then gone, and its imported modules stay. Library functions are replaced once, before the first
size. A program as typed has one size. If it was profiled, it may train on to be measured as the user's configuration.
"""

import json
import os
import signal
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from zerotune.trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH
from zerotune.trial_lib.messages.files import OWNERS_FILE, write_whole
from zerotune.trial_lib.messages.measurement import HostMoment, Measurement, Memory, ModelProfile
from zerotune.trial_lib.messages.orders import (
    NextSize,
    RankOrder,
    SizeMemory,
    SizeOrder,
    now,
    seconds_since,
    will_fit,
)
from zerotune.trial_lib.messages.turned import beside_kind, settings_of
from zerotune.trial_lib.rank import (
    batch_source,
    early_finish,
    huggingface,
    interception,
    rank_placement,
    torch_functions,
)
from zerotune.trial_lib.rank.batch_source import BatchSource
from zerotune.trial_lib.rank.device import Device
from zerotune.trial_lib.rank.early_finish import EarlyFinish, Watcher
from zerotune.trial_lib.rank.loader_batches import loader_batches
from zerotune.trial_lib.rank.probe import Probe
from zerotune.trial_lib.rank.program_facts import ProgramFacts
from zerotune.trial_lib.rank.rank_consensus import FolderMailbox, RankConsensus, StoreMailbox
from zerotune.trial_lib.rank.records import RankRecords
from zerotune.trial_lib.rank.sandbox import Sandbox
from zerotune.trial_lib.rank.user_program import forget_program

# A program may keep caches and modules of its last run, beyond an engine that has not trained. An engine with its
# optimizer's states is larger, if it matters.
_MOST_KEPT_BYTES, _MOST_KEPT_SHARE = 64 * 2**20, 0.05


class EndedRun:
    """An engine whose program has ended. It is destroyed, and this object keeps no reference to it."""

    def __init__(self, engine: Any) -> None:
        self._parts = [weakref.ref(part) for part in (engine, engine.optimizer, engine.module) if part is not None]
        engine.destroy()
        _forget_models()

    def is_held(self, device: Device, used_at_first: int, available: int | None, has_compiled: bool = False) -> bool:
        """Whether the program still holds the engine, after a garbage collection.

        `used_at_first`: bytes when the first run's engine had been built. `available`: for a run's steps; None without
        a limit.
        """
        if has_compiled and not device.is_apart:
            # The compiler's own modules and caches stay in the process, and take more memory than a small engine.
            return any(part() is not None for part in self._parts)
        most = _MOST_KEPT_BYTES if available is None else max(_MOST_KEPT_BYTES, _MOST_KEPT_SHARE * available)
        if device.used_bytes() > used_at_first + most:
            return True
        # A device with memory of its own does not show states that are offloaded to the host.
        return device.is_apart and any(part() is not None for part in self._parts)


def _forget_models() -> None:
    # Empties a list and a method's cache in which DeepSpeed's ZeRO 3 keeps each engine's model, and so the engine.
    offload = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
    getattr(offload, "FWD_MODULE_STACK", []).clear()
    coordinator = sys.modules.get("deepspeed.runtime.zero.partitioned_param_coordinator")
    for method in vars(getattr(coordinator, "PartitionedParameterCoordinator", object)).values():
        # The cache is below another decorator. Only the decorator's closure has a reference to it.
        for cell in getattr(method, "__closure__", None) or ():
            getattr(cell.cell_contents, "cache_clear", lambda: None)()


_MEMORY, _NOT_REPEATABLE = "memory", "not_repeatable"
# The time to build an engine again: a multiple of the first run's time, and a minimum.
_PATIENCE, _LEAST_PATIENCE_S = 3.0, 60.0


class SweepSession:
    """Measures one size after another in this rank: the `Session` of the probe of each size."""

    def __init__(self, order: RankOrder, rank: int, records: RankRecords) -> None:
        self._order = order
        self._rank = rank
        self._records = records
        self._position = 0
        self._measured: list[SizeMemory] = []
        self._measured_at: HostMoment = ()
        # The functions that replace DeepSpeed's read this one mapping: each size's overrides are put into it.
        self._overrides = dict(self.size.overrides)
        self._scratch = Path(order.scratch)
        self._seed = torch.initial_seed()
        self._patience_s = 0.0
        self._watchdog: threading.Timer | None = None
        self._used_at_first = 0
        self._trains_on = False  # the size is measured in a training that another size has begun
        self.is_last_run = False  # the program cannot be run again in this process
        self.phases = {"start": seconds_since(order.launched_at)}  # seconds of the phases of the current size

    @property
    def size(self) -> SizeOrder:
        return self._order.sizes[self._position]

    @property
    def is_between(self) -> bool:
        return self.probe.has_finished

    def install(self) -> None:
        """Installs the probe, and the protection of the user's files and runs, before the program runs."""
        order, model_dir = self._order, Path(self._order.model_dir)
        facts = ProgramFacts()
        self.probe = self._new_probe(facts, self.size)
        self.probe.install()
        if self.size.ends_at_unbuilt_ops:
            interception.end_at_unbuilt_ops()
        torch_functions.install()
        batch_source.note_parsers()
        self.sandbox = Sandbox(order, self._rank)
        # Libraries and torch's functions
        files = self.sandbox.files
        to_save, beside = (files.to_prepare, files.to_prepare_model), beside_kind(self.size.turned)
        huggingface.install(facts, self._overrides, self._scratch, *to_save, beside, self.probe)
        interception.install_zero_init(self._overrides, facts)
        torch_functions.install_loaders(lambda: settings_of("loader", self.size.turned))
        torch_functions.install_fused_adam(lambda: settings_of("optimizer", self.size.turned))
        # The place of the rank, and the ends of the program
        rank_placement.install(facts.note_devices)
        early_finish.install_own_ranks(
            lambda reason: self.probe.starts_own_ranks(reason), lambda: self.early_finish.consensus.apart()
        )
        early_finish.install_own_ends(lambda: self.early_finish)
        Watcher(lambda: self.early_finish, model_dir, order.patience_s).start()

    def _new_probe(self, facts: ProgramFacts, size: SizeOrder) -> Probe:
        source = BatchSource(
            size.arguments, dict(os.environ), Path(self._order.model_dir), int(os.environ.get("WORLD_SIZE", "1"))
        )
        probe = Probe(replace(size, overrides=self._overrides), source, facts, self)
        mailbox: FolderMailbox | StoreMailbox = FolderMailbox(size.states)
        if not self._order.shares_folder:
            mailbox = StoreMailbox(self._rank, len(size.states), self._position)
        self.early_finish = EarlyFinish(probe, RankConsensus(mailbox, self._rank, size.failures), self)
        loader_batches.start_over(self.end_early, size.data_offset, size.stream_offset, size.data_step)
        return probe

    # What the probe and the early finish of a size tell

    def end_early(self) -> None:
        self.early_finish.by_itself()

    def leave(self) -> None:
        self.is_last_run = True

    def fail(self, error: BaseException) -> None:
        self._records.fail(error, self.size, self.phases)

    def engine_built(self) -> None:
        self.early_finish.consensus.open()
        write_whole(Path(self.size.engine_built[self._rank]), json.dumps(self.probe.facts.to_json()))
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._position == 0:
            self._patience_s = max(_LEAST_PATIENCE_S, _PATIENCE * sum(self.phases.values()))

    def training_began(self) -> None:
        # A program that trains on has prepared its data before, and may have written checkpoints since.
        if not self._trains_on:
            self.sandbox.training_began()

    def keep(self, measurement: Measurement) -> None:
        self._records.write(replace(measurement, time=now(), is_kept=True), self.size, self.sandbox.way)

    def finished(self, measurement: Measurement | None) -> None:
        """Records the measurement of the current size. Ends the process, or this run of the program."""
        if measurement is None:
            # The program has caught `NextSize` somewhere, or breaks up the process group.
            self._end_group(_NOT_REPEATABLE, status=1)
        # The program's own signal handlers must not raise within a record.
        interruptible = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self._measured_at = now()
        self._records.write(replace(measurement, time=self._measured_at), self.size, self.sandbox.way)
        is_measured = measurement.outcome in ("completed", "too_slow")
        if not is_measured or self._position + 1 == len(self._order.sizes):
            # If a rank ends alone, because its loss diverged for example, the others wait for it. The guard ends those.
            self._records.end(0 if is_measured else 1)
        following = self._order.sizes[self._position + 1]
        if self.probe.is_pipeline or self.is_last_run or (following.as_typed and self.early_finish.is_closing):
            self._end_group(_NOT_REPEATABLE, status=0)
        if not following.as_typed and not self._next_will_fit(measurement.memory):
            self._end_group(_MEMORY, status=0)
        signal.pthread_sigmask(signal.SIG_SETMASK, interruptible)
        if following.as_typed:
            assert measurement.profile is not None
            self._train_on(measurement.profile)
            return
        batch = following.overrides
        raise NextSize(following.arguments, batch[MICRO_BATCH], batch[ACCUMULATION], self._go_on)

    def _end_group(self, reason: str, status: int) -> NoReturn:
        write_whole(Path(self._order.withdrawal), json.dumps({"reason": reason}))
        self._records.end(status)

    def _next_will_fit(self, used: Memory) -> bool:
        # Whether the next size is expected to fit on every rank; all of them call it.
        (taken,) = used.above_initialize
        own = [taken, -max(used.available, default=float("inf")), max(used.counted_retries, default=0)]
        most, least, retries = self.probe.on_most_demanding_rank(own)
        if retries:
            return False
        available = None if least == -float("inf") else round(-least)
        self._measured.append(SizeMemory(self.size.overrides[MICRO_BATCH], round(most), available))
        samples = self._order.sizes[self._position + 1].overrides[MICRO_BATCH]
        return will_fit(self._measured, samples, self._order.bytes_per_sample, self._order.headroom)

    def _go_on(self) -> None:
        # Prepares the next size for code that keeps its engine.
        self._turn_to_next()
        torch_functions.forget_compiled()
        self._measure_same_engine(self.size)

    def _train_on(self, profile: ModelProfile) -> None:
        # Measures the configuration of a program that was profiled as typed. The program trains on as it is.
        self._turn_to_next()
        self._trains_on = True
        formats = None if profile.uncounted else tuple(self.probe.facts.found.formats)
        self._measure_same_engine(replace(self.size, flops_per_sample=profile.flops_per_sample, formats=formats))

    def _measure_same_engine(self, size: SizeOrder) -> None:
        before = self.probe
        assert before.device is not None
        before.device.start_over()
        self.phases = {"start": seconds_since(self._measured_at)}
        self.probe = self._new_probe(before.facts, size)
        self.probe.take_over(before)

    def start_over(self) -> None:
        """Prepares the next size for a program that is run again, after its last run has ended."""
        before = self.probe
        device = before.device
        assert device is not None
        if self._position == 0:
            self._used_at_first = before.memory.after_initialize
        self._watchdog = threading.Timer(self._patience_s, self._end_group, (_NOT_REPEATABLE, 1))
        self._watchdog.daemon = True
        self._watchdog.start()
        # No rank frees its engine before every rank has left its program, because a `finally` may use it.
        _meet()
        ended = EndedRun(before.release_engine())
        forget_program()
        # Compiled code, libraries and files are as in a fresh process.
        has_compiled = torch_functions.compilations() > 0
        torch_functions.forget_compiled()
        huggingface.start_over()
        self.sandbox.start_over()
        # If memory is held, the next size would not be measured as in a fresh process.
        self._turn_to_next()
        device.unlimit()
        device.start_over()
        if ended.is_held(device, self._used_at_first, self._measured[-1].available, has_compiled):
            print("The program still holds its engine, so it is not run again in this process.", file=sys.stderr)
            self._end_group(_NOT_REPEATABLE, status=1)
        os.chdir(self._order.model_dir)
        torch.manual_seed(self._seed)
        _meet()
        self.phases = {"start": seconds_since(self._measured_at)}
        self.probe = self._new_probe(before.facts, self.size)
        if has_compiled and not device.is_apart:
            self.probe.memory.count_from(before.memory)
        self.probe.install()

    def _turn_to_next(self) -> None:
        self._position += 1
        size = self.size
        self._overrides.clear()
        self._overrides.update(size.overrides)
        for name, value in size.environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _write_to(size.logs[self._rank])


def _meet() -> None:
    # Waits for the other ranks.
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def _write_to(log: str) -> None:
    # Redirects this process's output to another log.
    sys.stdout.flush()
    sys.stderr.flush()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, OWNERS_FILE)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
