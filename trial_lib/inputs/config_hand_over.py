"""Finds out whether DeepSpeed gets a command's configuration file unchanged. It reads the code and imports nothing.

A program may read its file, remove what its DeepSpeed refuses, and hand over the rest as a dictionary. DeepSpeed surely
gets the file itself if the program calls `deepspeed.initialize` with its `args`, and if neither that call nor any
other line of the code names the configuration.
"""

import ast
from collections.abc import Sequence
from pathlib import Path

from trial_lib.inputs.entrypoint import Entrypoint, split_flag
from trial_lib.inputs.program_code import module_file, own_code, texts

_FLAG = "--deepspeed_config"
_INITIALIZE = "deepspeed.initialize"
_CONFIG_ARGUMENTS = ("config", "config_params")
_POSITION_OF_CONFIG = 10
# These names give a program the path that its argument parser has read.
_NAMES = ("deepspeed_config", "deepscale_config", "argv")


def is_handed_over(entrypoint: Entrypoint, folder: Path) -> bool:
    """Returns whether DeepSpeed surely gets the file behind `--deepspeed_config` unchanged.

    Args:
        entrypoint: the command.
        folder: the command's working directory.
    """
    program = _file_of(entrypoint, folder)
    if program is None or not _is_named_by_flag(entrypoint):
        return False
    names = (*_NAMES, *(Path(value).name for value in entrypoint.config_values))
    has_call = False
    for tree, imported in own_code(program, (program.parent, folder)):
        if _names_it(tree, names):
            return False
        for call in _calls_of_initialize(tree):
            if not _gets_args_alone(call):
                return False
            called = ast.unparse(call.func)
            has_call |= called == _INITIALIZE or (called == "initialize" and _INITIALIZE in imported)
    return has_call


def _file_of(entrypoint: Entrypoint, folder: Path) -> Path | None:
    if entrypoint.module is not None:
        return module_file(entrypoint.module, (folder,), "__main__.py")
    return None if entrypoint.script is None else folder / entrypoint.script


def _is_named_by_flag(entrypoint: Entrypoint) -> bool:
    words, positions = entrypoint.arguments, entrypoint.config_positions
    flags = [split_flag(words[position])[0].rstrip("=") or words[max(position - 1, 0)] for position in positions]
    return flags == [_FLAG] and not entrypoint.config_variables


def _names_it(tree: ast.Module, names: Sequence[str]) -> bool:
    named = {
        *(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)),
        *(node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)),
        *(node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg),
    }
    own_texts = [text for text in texts(tree) if not text.startswith("--")]
    return not named.isdisjoint(names) or any(name in text for name in names for text in own_texts)


def _calls_of_initialize(tree: ast.Module) -> list[ast.Call]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func).rpartition(".")[2] == "initialize"]


def _gets_args_alone(call: ast.Call) -> bool:
    # Whether a call passes `args`, and surely no configuration beside it.
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if None in given or not given.keys().isdisjoint(_CONFIG_ARGUMENTS) or len(call.args) > _POSITION_OF_CONFIG:
        return False
    if any(isinstance(argument, ast.Starred) for argument in call.args):
        return False
    args = call.args[0] if call.args else given.get("args")
    return args is not None and not (isinstance(args, ast.Constant) and args.value is None)
