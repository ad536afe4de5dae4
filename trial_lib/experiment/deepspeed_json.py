"""Reading a DeepSpeed configuration file.

A rank imports this module from the user's environment: standard library only.
"""

import json
from pathlib import Path
from typing import Any

from trial_lib.experiment.errors import InputError


def read_deepspeed_json(path: Path) -> dict[str, Any]:
    """Returns the DeepSpeed configuration in a JSON file.

    Raises:
        InputError: the file is missing or unreadable, is not JSON (with line and column), holds something other than
            an object, or has a key twice (JSON would keep the last in silence).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(
            "the DeepSpeed configuration does not exist.",
            where=str(path),
            remedy="Name an existing JSON file, relative to the model directory.",
        ) from None
    except (OSError, ValueError) as error:  # not UTF-8, or a name that no file can have
        raise InputError(
            f"the DeepSpeed configuration cannot be read ({error}).",
            where=str(path),
            remedy="Make it a readable UTF-8 file.",
        ) from None

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        section = dict(pairs)
        if len(section) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise InputError(
                f'the key "{twice}" stands twice in one object.', where=str(path), remedy="Keep one of the two."
            )
        return section

    try:
        config = json.loads(text, object_pairs_hook=refuse_duplicates)
    except json.JSONDecodeError as error:
        raise InputError(
            f"not valid JSON: {error.msg}.",
            where=f"{path}:{error.lineno}:{error.colno}",
            remedy="Mend the JSON there (no comments, no trailing commas).",
        ) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise InputError(f"not usable JSON: {error}.", where=str(path), remedy="Mend the JSON.") from None
    if not isinstance(config, dict):
        raise InputError(
            f"a DeepSpeed configuration is a JSON object, this is {type(config).__name__}.",
            where=str(path),
            remedy='Wrap it in { } with DeepSpeed\'s keys, such as "train_micro_batch_size_per_gpu".',
        )
    return config
