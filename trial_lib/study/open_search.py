"""The search of a study: its space, the batch that it keeps, and the trials that are known before it."""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits

from zerotune.trial_lib.deepspeed_config.layout import LAYOUTS
from zerotune.trial_lib.inputs.search_space import refuse_mapped
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.files import write_whole
from zerotune.trial_lib.messages.measurement import ProgramProfile
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.records.switches import switches_of
from zerotune.trial_lib.search.allocations import ForeseenArm
from zerotune.trial_lib.search.arms import left_out_of_space, surroundings_of
from zerotune.trial_lib.search.base import (
    ExpectedArm,
    Search,
    SearchProblem,
    key_in_plan,
    key_of,
    switches_in,
    without_hopeless,
)
from zerotune.trial_lib.search.budgets import HostMemory, MemoryBasis
from zerotune.trial_lib.search.methods import METHODS
from zerotune.trial_lib.study.arguments import StudyArguments, metric_with
from zerotune.trial_lib.study.folder import read_own_text
from zerotune.trial_lib.study.limits import (
    kept_batch,
    largest_of_data,
    study_space,
    without_disk_room,
    without_unbuildable,
)
from zerotune.trial_lib.study.setup import StudySetup


def open_search(
    setup: StudySetup,
    base_config: Mapping[str, Any],
    can_sweep: bool,
    known: Sequence[tuple[Candidate, TrialResult]],
    log: logging.Logger,
    foreseen: tuple[ForeseenArm, ...] = (),
    expected: tuple[ExpectedArm, ...] = (),
) -> Search:
    """Returns the search of a study, which has asked for nothing yet.

    `known` is the profile trial, which has completed, then the submitted trial, if it has ended, then older trials. The
    log gets the knobs without an effect, the arms that are not tried, and the batch. Raises InputError if no candidate
    satisfies the batch policy, or a switch of the program sets the batch.
    """
    # This holds for the whole process from here on. The search's matrices are small, so its threads would wait for
    # each other, and they would use the ranks' cores.
    threadpool_limits(1, "blas")
    arguments, method = setup.arguments, setup.method
    _, profile_trial = known[0]
    profile, program = profile_trial.profile, profile_trial.program
    assert profile is not None
    here = surroundings_of(profile_trial, base_config, setup.slots, setup.device)
    requests = setup.experiment.requests
    refuse_mapped(list(switches_of(base_config)), {} if program is None else program.arg_mappings)
    left_out = left_out_of_space(arguments.zero_stages, here, requests, catalogue=method.has_catalogue)
    # Arms that have no room, cannot be built, or are hopeless by the plan are not tried.
    whole = study_space(setup, base_config, profile_trial)
    basis = MemoryBasis(profile, base_config, setup.slots, setup.device, foreseen)
    no_room = HostMemory(basis).without_room(whole.arms)
    space, unbuildable = without_unbuildable(whole, base_config, profile_trial)
    switches = switches_in(expected)
    ran = {
        key_in_plan(candidate.complete(base_config), base_config, switches)
        for candidate, result in known
        if result.outcome is Outcome.COMPLETED
    }
    space, no_disk = without_disk_room(
        space, base_config, profile_trial, setup.slots, lambda arm: key_of(arm, base_config, switches) in ran
    )
    space, hopeless = without_hopeless(space, base_config, expected, ran)
    for sentence in (*left_out, *no_room, *unbuildable, *no_disk, *hopeless):
        log.warning("%s", sentence)
    # The groups of a switch that divides the ranks would stay when the program runs again.
    divides_ranks = any(kind != "expert" for kind in (base_config.get(LAYOUTS) or {}).values())
    problem = SearchProblem(
        space=space,
        profile=profile,
        base_config=base_config,
        slots=setup.slots,
        device=setup.device,
        train_batch_size=kept_batch(arguments, base_config, profile, log),
        can_sweep=can_sweep and not profile.pipeline_parallel and not divides_ranks,
        only_micro_batch=_only_micro_batch(arguments, program, log),
        foreseen=foreseen,
        expected=expected,
    )
    of_data = largest_of_data(base_config, profile, program)
    fields = _settings(setup, metric_with(arguments.metric, profile_trial), of_data)
    search: Search = method.load()(method.settings(**fields), problem)
    for candidate, result in known:
        search.observe(candidate, result)
    return search


def why_micro_batch_is_kept(arguments: StudyArguments, program: ProgramProfile | None) -> str:
    """Why every candidate has the user's micro-batch, because its rows depend on each other. Empty if it may vary."""
    if program is None or program.typed_batch is None or program.across_rows is None or not program.across_rows.why:
        return ""
    is_freed = arguments.free_batch or arguments.max_micro_batch is not None
    # Another global batch that is asked for may have no room for it.
    left = (arguments.train_batch_size or 0) % program.typed_batch.micro_batch_size
    if is_freed or left or not METHODS[arguments.method].has_batch_policy:
        return ""
    return f"{program.across_rows.why} --max-micro-batch or --free-batch lets it vary."


def _only_micro_batch(arguments: StudyArguments, program: ProgramProfile | None, log: logging.Logger) -> int | None:
    # The one micro-batch size, if the program sets the samples of its batches by itself, or if they depend on each
    # other.
    if program is None or program.typed_batch is None:
        return None
    typed = program.typed_batch
    kept = why_micro_batch_is_kept(arguments, program)
    if kept:
        log.info("%s The micro-batch stays %d, and everything else is tuned.", kept, typed.micro_batch_size)
        return typed.micro_batch_size
    if program.across_rows is not None and program.across_rows.why:
        log.warning("%s", program.across_rows.why)
    if not (program.batch_varies or program.fixed_batch):
        return None
    reason = program.fixed_batch or (
        "The number of samples differs from micro-batch to micro-batch, because the program sets it by another rule, "
        "such as a number of tokens."
    )
    if not METHODS[arguments.method].has_batch_policy:
        raise InputError(
            f"this method varies only the micro-batch. {reason}",
            where=arguments.method,
            remedy="Use `zerotune tune` or `zerotune adaptive`, which leave the batches as they are, or map the flag "
            "that sets them.",
        )
    log.info("%s Batches stay as they are, and everything else is tuned.", reason)
    return typed.micro_batch_size


def _settings(setup: StudySetup, metric: str, of_data: int | None) -> dict[str, Any]:
    arguments = setup.arguments
    own = {"divisible_by": arguments.divisible_by, "memory_headroom": arguments.memory_headroom}
    return {
        **arguments.settings,
        "max_trials": arguments.max_trials,
        "zero_stages": arguments.zero_stages,
        "metric": metric,
        "seed": arguments.random_seed,
        "concurrency": setup.concurrency,
        "max_micro_batch": min(filter(None, (arguments.max_micro_batch, of_data)), default=None),
        **(own if METHODS[arguments.method].has_batch_policy else {}),
    }


# The foreseen arms that a search begins with, in a file of the study.


def keep_arms(arms: Iterable[ForeseenArm], file: Path) -> None:
    """Writes the foreseen arms that a search begins with, so that a resumed study begins with the same."""
    write_whole(file, json.dumps([asdict(arm) for arm in arms], indent=1))


def foreseen_in(file: Path) -> tuple[ForeseenArm, ...]:
    """The arms of a study's file; none if it does not exist. Raises InputError if it is damaged."""
    remedy = "Start a new study."
    try:
        text = read_own_text(file, "the record of foreseen arms", remedy)
        return tuple(ForeseenArm.from_json(arm) for arm in json.loads(text))
    except FileNotFoundError:
        return ()
    except (ValueError, LookupError, TypeError, AttributeError):
        said = "the record of foreseen arms is damaged or of another version."
        raise InputError(said, where=str(file), remedy=remedy) from None
