"""The largest micro-batch that a study may try: what the global batch, the data and the user leave."""

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from trial_lib.deepspeed_config.batch import resolve_batch
from trial_lib.deepspeed_config.layout import LAYOUTS
from trial_lib.records.frozen_record import FrozenRecord
from trial_lib.records.result import ModelProfile, ProgramProfile
from trial_lib.search.methods import METHODS
from trial_lib.study.arguments import StudyArguments
from trial_lib.wire.errors import InputError


class SizeLimit(FrozenRecord):
    """A limit of the micro-batch size.

    Attributes:
        size: the largest, in samples.
        by: what sets it, as a noun.
    """

    size: int
    by: str


def size_limit(
    arguments: StudyArguments,
    base_config: Mapping[str, Any],
    profile: ModelProfile,
    program: ProgramProfile | None,
) -> SizeLimit | None:
    """Returns the lowest limit of all; None if the data's length is not known and nothing else is a limit."""
    limits = []
    with contextlib.suppress(InputError):
        batch = _own_batch(arguments, base_config, profile)
        if batch is not None:
            limits.append(SizeLimit(size=max(1, batch // profile.data_parallel_size), by="the global batch"))
    of_data = largest_of_data(base_config, profile, program)
    if of_data is not None:
        limits.append(SizeLimit(size=of_data, by="the length of the data"))
    if arguments.max_micro_batch is not None:
        limits.append(SizeLimit(size=arguments.max_micro_batch, by="--max-micro-batch"))
    return min(limits, key=lambda limit: limit.size, default=None)


def largest_of_data(
    base_config: Mapping[str, Any], profile: ModelProfile, program: ProgramProfile | None
) -> int | None:
    """Returns the samples that one rank's data have; None if that is not known.

    An arm with fewer replicas than the profile trial gives each of them more, at most all.
    """
    if program is None or program.samples_per_epoch is None or program.typed_batch is None:
        return None
    shares = profile.data_parallel_size if base_config.get(LAYOUTS) else 1
    return max(program.samples_per_epoch * shares, program.typed_batch.micro_batch_size)


def kept_batch(
    arguments: StudyArguments, base_config: Mapping[str, Any], profile: ModelProfile, log: logging.Logger
) -> int | None:
    """Returns the global batch, in samples, that every candidate keeps; None if it is free.

    Args:
        arguments: the study's.
        base_config: the user's DeepSpeed configuration, as far as it is known.
        profile: the model, as the profile trial found it.
        log: the study's log. It gets a warning if the global batch is not known.
    """
    try:
        return _own_batch(arguments, base_config, profile)
    except InputError as error:
        log.warning(
            "the global batch is not kept, because its size is not known. --train-batch-size sets it. %s", error
        )
        return None


def _own_batch(arguments: StudyArguments, base_config: Mapping[str, Any], profile: ModelProfile) -> int | None:
    if not METHODS[arguments.method].has_batch_policy or arguments.free_batch:
        return None
    return arguments.train_batch_size or resolve_batch(base_config, profile.data_parallel_size).train_batch_size
