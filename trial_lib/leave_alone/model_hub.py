"""A trial uploads nothing of the program to Hugging Face's hub, and creates no repository there.

Models, tokenizers, processors and configurations of transformers and PEFT upload by `PushToHubMixin`. Their
`save_pretrained` does so too, if it is called with `push_to_hub=True`. In a trial it only saves.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from trial_lib.intercept.post_import import when_imported

_ASKS = "push_to_hub"


def install() -> None:
    """Keeps the program's objects away from the hub. Call it before the user's program runs."""
    when_imported("transformers.utils.hub", lambda module: _upload_nothing(module))


def _upload_nothing(module: ModuleType) -> None:
    owner: type[Any] = module.PushToHubMixin
    before = vars(owner).get("__init_subclass__")

    def init_subclass(cls: type, /, **kwargs: Any) -> None:
        if before is None:
            super(owner, cls).__init_subclass__(**kwargs)
        else:
            before.__func__(cls, **kwargs)
        _only_save(cls)

    setattr(owner, "__init_subclass__", classmethod(init_subclass))  # noqa: B010 - mypy refuses an assignment
    # The fork server may have imported classes already.
    for each in (owner, *_below(owner)):
        _only_save(each)
    # For a `save_pretrained` that reads its arguments in another way. Older versions of transformers have the second.
    _replace(owner, "_upload_modified_files", lambda original: lambda *args, **kwargs: None)
    _replace(owner, "_create_repo", lambda original: lambda self, repo_id, *args, **kwargs: repo_id)


def _below(owner: type[Any]) -> Iterator[type[Any]]:
    """Yields all classes that derive from a class."""
    for each in owner.__subclasses__():
        yield each
        yield from _below(each)


def _only_save(owner: type) -> None:
    """Makes the methods that a class itself defines save without an upload."""
    _replace(owner, "save_pretrained", _without_push)
    # Some classes have a copy of their own.
    _replace(owner, _ASKS, lambda original: lambda *args, **kwargs: None)


def _without_push(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method that gets no `push_to_hub`, which callers give by position or by name."""
    names = list(inspect.signature(original).parameters)
    place = names.index(_ASKS) if _ASKS in names else None

    def save(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop(_ASKS, None)
        if place is not None and len(args) > place:
            args = (*args[:place], False, *args[place + 1 :])
        return original(*args, **kwargs)

    return save


def _replace(owner: type, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = vars(owner).get(name)
    if inspect.isfunction(original):
        setattr(owner, name, functools.wraps(original)(wrap(original)))
