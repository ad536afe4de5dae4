"""The lines of the user's code at which a setting stands that no word of the command has."""

import ast
from collections.abc import Iterator
from pathlib import Path

from zerotune.trial_lib.inputs.entrypoint import Entrypoint
from zerotune.trial_lib.inputs.program_code import module_file, own_code

# A call with one of these makes a Trainer's arguments.
_OF_A_TRAINER = ("output_dir", "per_device_train_batch_size", "gradient_accumulation_steps")


def code_place(entrypoint: Entrypoint, folder: Path, setting: str) -> str:
    """The line with the value of a setting, or else of what it belongs to, as `train.py:31`; empty if none is found.

    A setting of DeepSpeed's configuration has its path with dots. It is looked for in dictionaries, keywords and
    assignments of the program and of its own modules.
    """
    program = None if entrypoint.script is None else folder / entrypoint.script
    if entrypoint.module is not None:
        program = module_file(entrypoint.module, (folder,), "__main__.py") or module_file(entrypoint.module, (folder,))
    if program is None:
        return ""
    around = ""
    for path, tree, _ in own_code(program, (program.parent, folder)):
        for node in ast.walk(tree):
            for name, line in _named(node):
                if name == setting:
                    return f"{_shown(path, folder)}:{line}"
            if not around and isinstance(node, ast.Call | ast.Dict) and _belongs(node, setting):
                around = f"{_shown(path, folder)}:{node.lineno}"
    return around


def _named(node: ast.AST) -> Iterator[tuple[str, int]]:
    if isinstance(node, ast.keyword) and node.arg:
        yield node.arg, node.value.lineno
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            name = _dotted(target)
            if name:
                yield name, node.lineno
    elif isinstance(node, ast.Dict):
        yield from _paths(node, "")


def _paths(node: ast.Dict, prefix: str) -> Iterator[tuple[str, int]]:
    for key, value in zip(node.keys, node.values, strict=True):
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield f"{prefix}{key.value}", value.lineno
            if isinstance(value, ast.Dict):
                yield from _paths(value, f"{prefix}{key.value}.")


def _dotted(target: ast.expr) -> str:
    # `config["zero_optimization"]["stage"]`, `args.per_device_train_batch_size` and a plain name, without the first.
    keys: list[str] = []
    while isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
        keys.insert(0, str(target.slice.value))
        target = target.value
    if isinstance(target, ast.Attribute):
        keys.insert(0, target.attr)
    elif isinstance(target, ast.Name) and not keys:
        keys.append(target.id)
    return ".".join(keys)


def _belongs(node: ast.Call | ast.Dict, setting: str) -> bool:
    if setting in _OF_A_TRAINER:
        return isinstance(node, ast.Call) and any(keyword.arg in _OF_A_TRAINER for keyword in node.keywords)
    section = setting.rpartition(".")[0] or "zero_optimization"
    return isinstance(node, ast.Dict) and any(name == section for name, _ in _paths(node, ""))


def _shown(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)
