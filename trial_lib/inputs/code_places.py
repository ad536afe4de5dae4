"""The lines of the user's code at which a setting stands that no word of the command has, and what to put there."""

import ast
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from zerotune.trial_lib.inputs.documents import Key, edited, read_document, value_at
from zerotune.trial_lib.inputs.entrypoint import Entrypoint
from zerotune.trial_lib.inputs.program_code import module_file, own_code
from zerotune.trial_lib.messages.files import read_bounded
from zerotune.trial_lib.records.folders import FileChange, shown_in

# A call with one of these makes a Trainer's arguments.
_OF_A_TRAINER = ("output_dir", "per_device_train_batch_size", "gradient_accumulation_steps")


@dataclass(frozen=True)
class CodeEdits:
    """What to change in the user's code for an answer."""

    changes: tuple[FileChange, ...] = ()  # of the code, and of a DeepSpeed configuration file that it names
    # The other settings, each with the line of what it belongs to, as `train.py:31`; empty if none is found
    left: Mapping[str, str] = field(default_factory=dict)


def code_edits(entrypoint: Entrypoint, folder: Path, values: Mapping[str, Any]) -> CodeEdits:
    """The edits that give settings other values in the code, each where a plain value stands in one line.

    A setting of DeepSpeed's configuration has its path with dots. It is looked for in dictionaries, keywords and
    assignments of the program and of its own modules.
    """
    program = None if entrypoint.script is None else folder / entrypoint.script
    if entrypoint.module is not None:
        program = module_file(entrypoint.module, (folder,), "__main__.py") or module_file(entrypoint.module, (folder,))
    code = [] if program is None else [*own_code(program, (program.parent, folder))]
    nodes = [(path, node) for path, tree, _ in code for node in ast.walk(tree)]
    in_code: dict[Path, list[tuple[ast.expr, Any]]] = {}
    in_file: dict[Key, Any] = {}
    left: dict[str, str] = {}
    config = _named_config(nodes, folder)
    for setting, value in values.items():
        key = tuple(setting.split("."))
        found = [(path, own) for path, each in nodes for name, own in _named(each) if name == setting]
        plain = [(path, own) for path, own in found if isinstance(own, ast.Constant) and own.lineno == own.end_lineno]
        if len(found) == len(plain) == 1:
            in_code.setdefault(plain[0][0], []).append((plain[0][1], value))
        elif found:
            left[setting] = f"{shown_in(found[0][0], folder)}:{found[0][1].lineno}"
        elif config is not None and setting not in _OF_A_TRAINER and value_at(config[2], key) != "auto":
            in_file[key] = value
        elif config is None or setting in _OF_A_TRAINER:
            around = (f"{shown_in(path, folder)}:{each.lineno}" for path, each in nodes if _belongs(each, setting))
            left[setting] = next(around, "")
    changes = [_change(path, edits) for path, edits in in_code.items()]
    if config is not None and in_file:
        path, text, _ = config
        changes.append(FileChange(path=str(path), before=text, after=edited(text, path.name, in_file)))
    return CodeEdits(tuple(changes), left)


def _named_config(nodes: Sequence[tuple[Path, ast.AST]], folder: Path) -> tuple[Path, str, Any] | None:
    # The DeepSpeed configuration file that a string of the code names: its path, text and content.
    for code, node in nodes:
        name = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        for path in (folder / name, code.parent / name) if name.endswith(".json") else ():
            with contextlib.suppress(OSError, ValueError):
                text = read_bounded(path)
                content = read_document(text, name)
                if isinstance(content, dict) and "zero_optimization" in content:
                    return path, text, content
    return None


def _change(path: Path, edits: Sequence[tuple[ast.expr, Any]]) -> FileChange:
    # Columns count bytes. The last value of a line comes first, so that the others stay where they are.
    before = path.read_bytes()
    lines = before.splitlines(keepends=True)
    for node, value in sorted(edits, key=lambda edit: edit[0].col_offset, reverse=True):
        line = lines[node.lineno - 1]
        lines[node.lineno - 1] = line[: node.col_offset] + repr(value).encode() + line[node.end_col_offset :]
    return FileChange(path=str(path), before=before.decode(), after=b"".join(lines).decode())


def _named(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.keyword) and node.arg:
        yield node.arg, node.value
    elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            name = _dotted(target)
            if name:
                yield name, node.value
    elif isinstance(node, ast.Dict):
        yield from _paths(node, "")


def _paths(node: ast.Dict, prefix: str) -> Iterator[tuple[str, ast.expr]]:
    for key, value in zip(node.keys, node.values, strict=True):
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield f"{prefix}{key.value}", value
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


def _belongs(node: ast.AST, setting: str) -> TypeGuard[ast.Call | ast.Dict]:
    if setting in _OF_A_TRAINER:
        return isinstance(node, ast.Call) and any(keyword.arg in _OF_A_TRAINER for keyword in node.keywords)
    section = setting.rpartition(".")[0] or "zero_optimization"
    return isinstance(node, ast.Dict) and any(name == section for name, _ in _paths(node, ""))
