"""Checkpoints that a program writes in training go to the trial's folder, and are read from there again."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch

from trial_lib.intercept.post_import import when_imported
from trial_lib.intercept.stand_in import stand_in


class WrittenCopies(Protocol):
    """Where the copies of the user's files are."""

    is_training: bool
    """Whether what is saved is a training's output, and no preparation for one."""

    def is_free(self, where: str) -> bool:
        """Returns whether a path is below a folder that none of this concerns."""

    def is_layered(self, where: str) -> bool:
        """Returns whether what is at a path, or would be, is the trial's own."""

    def path_of(self, path: Any) -> str:
        """Returns a path as text, absolute."""

    def is_old(self, where: str) -> bool:
        """Returns whether a path is something that was there before the study."""

    def has_copy(self, where: str) -> bool:
        """Returns whether a rank of this trial has written a path."""

    def new_copy(self, where: str) -> str:
        """Returns the path for a copy, whose folder is there."""

    def seen(self, path: Any) -> Any:
        """Returns what to read in the place of a path: its copy, if there is one, else the path as it is."""


def install(files: WrittenCopies) -> None:
    """Redirects what torch, safetensors and torch's distributed checkpoints write.

    Args:
        files: knows where to.
    """

    def to_write(path: Any) -> Any:
        if not isinstance(path, (str, os.PathLike)) or files.is_free(where := files.path_of(path)):
            return path
        if files.is_layered(where):
            return path
        if not (files.is_training or files.has_copy(where) or files.is_old(where)):
            return path
        return files.new_copy(where)

    def to_read(path: Any) -> Any:
        return files.seen(path) if isinstance(path, (str, os.PathLike)) else path

    save, load = torch.save, torch.load
    stand_in("save", save, _with_path(save, 1, "f", to_write))
    stand_in("load", load, _with_path(load, 0, "f", to_read))

    def redirect_safetensors(module: ModuleType) -> None:
        # What its functions call, under whatever name a program has them.
        module.serialize_file = _with_path(module.serialize_file, 1, "filename", to_write)  # type: ignore[attr-defined]
        module.safe_open = _with_path(module.safe_open, 0, "filename", to_read)  # type: ignore[attr-defined]

    def redirect_distributed(module: ModuleType) -> None:
        for name, redirected in (("_FileSystemWriter", to_write), ("FileSystemReader", to_read)):
            owner = getattr(module, name, None) or module.FileSystemWriter
            owner.__init__ = _then_move(owner.__init__, redirected)
            owner.reset = _then_move(owner.reset, redirected)

    when_imported("safetensors.torch", redirect_safetensors)
    when_imported("torch.distributed.checkpoint.filesystem", redirect_distributed)


def _with_path(
    function: Callable[..., Any], position: int, name: str, redirected: Callable[[Any], Any]
) -> Callable[..., Any]:
    """Returns a function whose argument at a position, or of a name, is redirected."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            args = (*args[:position], redirected(args[position]), *args[position + 1 :])
        elif name in kwargs:
            kwargs[name] = redirected(kwargs[name])
        return function(*args, **kwargs)

    return call


def _then_move(method: Callable[..., Any], redirected: Callable[[Any], Any]) -> Callable[..., Any]:
    """Returns a method of a reader or writer of checkpoints after which its path is redirected."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        path = getattr(self, "path", None)
        if path:
            self.path = Path(redirected(path))
        return result

    return call
