"""Holding a configuration against the installed DeepSpeed: its own class judges, and each refusal gets its key.

DeepSpeed says what it refuses, and of many things not where. The key is found by leaving keys out: the one without
which DeepSpeed no longer says the same. Runs in the user's environment: standard library and DeepSpeed only.
"""

import contextlib
import copy
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from trial_lib.deepspeed_config.deepspeed_refusals import Refusal, complaints_in
from trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH

_BATCH = (TRAIN_BATCH, MICRO_BATCH, ACCUMULATION)
_MOST = 20  # refusals that are looked for, one after the other

KeyPath = tuple[str, ...]
"""A key with the sections that it stands in."""


def refusals_of(ds_config: Mapping[str, Any], slots: int) -> list[Refusal]:
    """Returns what the installed DeepSpeed refuses of a configuration, as far as that lies in one of its keys.

    What the code still has to fill in ("auto", a batch size that is missing) is left out of account.

    Args:
        ds_config: a complete DeepSpeed configuration.
        slots: devices that train together; any number of replicas that divides them may be the model's.
    """
    return _refusals_with(ds_config, _replicas_of(slots))


def _replicas_of(slots: int) -> list[int]:
    return [size for size in range(slots, 0, -1) if slots % size == 0]


def _refusals_with(ds_config: Mapping[str, Any], sizes: list[int]) -> list[Refusal]:
    """Returns what the installed DeepSpeed refuses with each of these numbers of replicas."""
    config, found = _decided(ds_config), list[Refusal]()
    with _by_itself() as replicas:
        while len(found) < _MOST:
            error = _error(config, sizes, replicas)
            paths = [] if error is None else _paths_of(config, error, sizes, replicas)
            if error is None or not paths:
                break
            found += _refusals(config, error, paths)
            config = _without(config, paths)
    return found


def refusal_behind(error: Exception, ds_config: Mapping[str, Any], slots: int) -> Refusal | None:
    """Returns the refusal behind what `deepspeed.initialize` has raised; None where it is not the configuration's.

    Args:
        error: what it has raised.
        ds_config: the configuration that it was given.
        slots: devices that train together.
    """
    with contextlib.suppress(Exception):
        # DeepSpeed names the replicas that it has, which the model's own parallelism may make fewer.
        for size in _replicas_of(slots):
            for refusal in _refusals_with(ds_config, [size]):
                if refusal.said == _said(error):
                    return refusal
    return None


def _decided(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration without what is still open; with a batch size in any case."""
    config = _without_auto(ds_config)
    if any(ds_config.get(key) == "auto" for key in _BATCH):
        # The other parts have to fit to what the code fills in: only their types can be told.
        config = {key: value for key, value in config.items() if key not in _BATCH or type(value) is not int}
    return config


def _without_auto(section: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else copy.deepcopy(value)
        for key, value in section.items()
        if value != "auto"
    }


@contextlib.contextmanager
def _by_itself() -> Iterator[list[int]]:
    """Has DeepSpeed's configuration do without a process group, and in silence; yields where the replicas stand."""
    from deepspeed.runtime import config as module

    replicas = [1]
    names = {"get_rank": lambda *_, **__: 0, "get_world_size": lambda *_, **__: replicas[0]}
    originals = {name: getattr(module.dist, name) for name in names}
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        for name, stand_in in names.items():
            setattr(module.dist, name, stand_in)
        yield replicas
    finally:
        for name, original in originals.items():
            setattr(module.dist, name, original)
        logging.disable(disabled)


def _error(config: Mapping[str, Any], sizes: list[int], replicas: list[int]) -> Exception | None:
    """Returns what DeepSpeed raises; None where it takes the configuration for one of the numbers of replicas."""
    from deepspeed.runtime.config import DeepSpeedConfig

    first: Exception | None = None
    has_size = any(config.get(key) is not None for key in (TRAIN_BATCH, MICRO_BATCH))
    for size in sizes:
        replicas[0] = size
        try:
            DeepSpeedConfig(copy.deepcopy({**config} if has_size else {**config, MICRO_BATCH: 1}))
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends `deepspeed.initialize`
            first = first or error
        else:
            return None
    return first


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _paths_of(config: dict[str, Any], error: Exception, sizes: list[int], replicas: list[int]) -> list[KeyPath]:
    """Returns the keys that an error lies in; none where leaving any of them out changes nothing."""

    def lies_in(path: KeyPath) -> bool:
        other = _error(_without(config, [path]), sizes, replicas)
        return other is None or _said(other) != _said(error)

    paths: list[KeyPath] = [(key,) for key in config if lies_in((key,))]
    of_no_number = [path for path in paths if path[0] in _BATCH and type(_at(config, path)) is not int]
    if of_no_number:
        return of_no_number[:1]
    if len(paths) > 1 and (TRAIN_BATCH,) in paths:
        # A contradiction between sizes; one that DeepSpeed would have derived to be the same is part of it.
        return [(key,) for key in _BATCH if key in config]
    if len(paths) != 1:
        return paths
    path = paths[0]
    named = [(*path, *complaint.key) for complaint in complaints_in(str(error))]
    if named and all(_has(config, each) for each in named):
        return named
    while isinstance(_at(config, path), Mapping):
        narrower = [(*path, key) for key in _at(config, path) if lies_in((*path, key))]
        if not narrower:
            break
        path = narrower[0]
    return [path]


def _refusals(config: dict[str, Any], error: Exception, paths: list[KeyPath]) -> list[Refusal]:
    """Returns a refusal for each key that DeepSpeed complains of by itself, else one for all."""
    complaints = complaints_in(str(error))
    if len(paths) == len(complaints) > 0:
        pairs = zip(paths, complaints, strict=True)
        return [Refusal([".".join(path)], _at(config, path), _said(error), each.what) for path, each in pairs]
    values = {".".join(path): _at(config, path) for path in paths}
    value = next(iter(values.values())) if len(paths) == 1 else values
    return [Refusal(list(values), value, _said(error))]


def _at(config: Mapping[str, Any], path: KeyPath) -> Any:
    value: Any = config
    for key in path:
        value = value[key]
    return value


def _has(config: Mapping[str, Any], path: KeyPath) -> bool:
    try:
        _at(config, path)
    except (KeyError, TypeError):
        return False
    return True


def _without(config: dict[str, Any], paths: list[KeyPath]) -> dict[str, Any]:
    rest = copy.deepcopy(config)
    for *sections, key in paths:
        if _has(rest, (*sections, key)):
            del _at(rest, tuple(sections))[key]
    return rest
