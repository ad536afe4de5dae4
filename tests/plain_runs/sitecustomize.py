"""Writes the configuration of each DeepSpeed engine of a training that runs without ZeroTune, to $ENGINES.

It comes into every Python by PYTHONPATH, and changes nothing else.
"""

import importlib.machinery
import json
import os
import sys
from pathlib import Path


class _Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "deepspeed":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                initialize = module.initialize

                def writing(*args, **kwargs):
                    made = initialize(*args, **kwargs)
                    folder = Path(os.environ["ENGINES"])
                    (folder / f"{os.environ.get('RANK', '0')}.json").write_text(
                        json.dumps(plain(vars(made[0]._config)))
                    )
                    return made

                module.initialize = writing

            spec.loader.exec_module = exec_module
        return spec


def plain(value):
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(each) for each in value]
    if hasattr(value, "value") and hasattr(value, "name"):
        return value.value
    if value is None or isinstance(value, (str, int, float)):
        return value
    if type(value).__module__ == "torch":
        return str(value)
    return plain(vars(value)) if hasattr(value, "__dict__") else type(value).__name__


if os.environ.get("ENGINES"):
    sys.meta_path.insert(0, _Finder())
