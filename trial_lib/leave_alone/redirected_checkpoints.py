"""Redirects checkpoints that a program writes in training into the trial's folder, and reads them from there."""

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
    """The copies of the user's files."""

    is_training: bool
    """Whether a saved file is an output of training. Before, it is preparation."""

    def is_free(self, where: str) -> bool:
        """Returns whether a path is in a folder that ZeroTune does not protect."""

    def is_layered(self, where: str) -> bool:
        """Returns whether a file at this path belongs to the trial's own file system."""

    def path_of(self, path: Any) -> str:
        """Returns an absolute path as text."""

    def is_old(self, where: str) -> bool:
        """Returns whether a path is older than the study."""

    def has_copy(self, where: str) -> bool:
        """Returns whether a rank of this trial has written a path."""

    def new_copy(self, where: str) -> str:
        """Returns the path for a copy, and makes its folder."""

    def seen(self, path: Any) -> Any:
        """Returns the path to read: the copy if there is one, else the path itself."""


def install(files: WrittenCopies) -> None:
    """Redirects the files that torch, safetensors and torch's distributed checkpoints write.

    Args:
        files: has the paths of the copies.
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
        # Functions that the public ones call, so that every name under which a program has them is covered.
        module.serialize_file = _with_path(module.serialize_file, 1, "filename", to_write)  # type: ignore[attr-defined]

    def redirect_safe_open(module: ModuleType) -> None:
        original: Any = module.safe_open
        stand_in("safe_open", original, _with_path(original, 0, "filename", to_read))

    def redirect_distributed(module: ModuleType) -> None:
        for name, redirected in (("_FileSystemWriter", to_write), ("FileSystemReader", to_read)):
            owner = getattr(module, name, None) or module.FileSystemWriter
            owner.__init__ = _then_move(owner.__init__, redirected)
            owner.reset = _then_move(owner.reset, redirected)

    # transformers and PEFT take it from the package itself.
    when_imported("safetensors", redirect_safe_open)
    when_imported("safetensors.torch", redirect_safetensors)
    when_imported("torch.distributed.checkpoint.filesystem", redirect_distributed)


def _with_path(
    function: Callable[..., Any], position: int, name: str, redirected: Callable[[Any], Any]
) -> Callable[..., Any]:
    """Returns a function that redirects its argument at a position, or of a name."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            args = (*args[:position], redirected(args[position]), *args[position + 1 :])
        elif name in kwargs:
            kwargs[name] = redirected(kwargs[name])
        return function(*args, **kwargs)

    return call


def _then_move(method: Callable[..., Any], redirected: Callable[[Any], Any]) -> Callable[..., Any]:
    """Returns a method of a reader or writer of checkpoints that redirects its path after the call."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        path = getattr(self, "path", None)
        if path:
            self.path = Path(redirected(path))
        return result

    return call
