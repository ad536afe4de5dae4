"""The check of a configuration by the installed DeepSpeed. DeepSpeed's own class judges, and each refusal gets its key.

DeepSpeed often does not name the key that it refuses. So the check leaves keys out, and takes the one without which
DeepSpeed's error changes. It runs in the user's environment: standard library and DeepSpeed only.
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
"""A key with its sections."""


def refusals_of(ds_config: Mapping[str, Any], slots: int) -> list[Refusal]:
    """Returns the installed DeepSpeed's refusals of a configuration, as far as they concern its keys.

    Parts that the code still has to fill in ("auto", a missing batch size) do not count.

    Args:
        ds_config: a complete DeepSpeed configuration.
        slots: devices that train together. The model may have any number of replicas that divides them.
    """
    return _refusals_with(ds_config, _replicas_of(slots))


def _replicas_of(slots: int) -> list[int]:
    return [size for size in range(slots, 0, -1) if slots % size == 0]


def _refusals_with(ds_config: Mapping[str, Any], sizes: list[int]) -> list[Refusal]:
    """Returns the refusals of the installed DeepSpeed with each of these numbers of replicas."""
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
    """Returns the refusal behind an error of `deepspeed.initialize`; None if it is not about the configuration.

    Args:
        error: the error.
        ds_config: the configuration that DeepSpeed was given.
        slots: devices that train together.
    """
    with contextlib.suppress(Exception):
        # DeepSpeed names its number of replicas, which the model's own parallelism may reduce.
        for size in _replicas_of(slots):
            for refusal in _refusals_with(ds_config, [size]):
                if refusal.said == _said(error):
                    return refusal
    return None


def _decided(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration without its open parts, but always with a batch size."""
    config = _without_auto(ds_config)
    if any(ds_config.get(key) == "auto" for key in _BATCH):
        # The other parts have to fit the values of the code. Only their types can be checked here.
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
    """Makes DeepSpeed's configuration work without a process group or output. Yields the replicas, to be set."""
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
    """Returns DeepSpeed's error; None if it accepts the configuration for one of the numbers of replicas."""
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
    """Returns the keys that cause an error; none if the error stays without any one of them."""

    def lies_in(path: KeyPath) -> bool:
        other = _error(_without(config, [path]), sizes, replicas)
        return other is None or _said(other) != _said(error)

    paths: list[KeyPath] = [(key,) for key in config if lies_in((key,))]
    of_no_number = [path for path in paths if path[0] in _BATCH and type(_at(config, path)) is not int]
    if of_no_number:
        return of_no_number[:1]
    if len(paths) > 1 and (TRAIN_BATCH,) in paths:
        # Sizes contradict each other. A size that DeepSpeed would have derived belongs to the contradiction.
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
    """Returns one refusal for each key that DeepSpeed refuses by itself, or one for all keys together."""
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
