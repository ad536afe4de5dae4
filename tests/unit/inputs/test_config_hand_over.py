"""Whether DeepSpeed surely gets the file that a command names, told by the program's code."""

from pathlib import Path

import pytest

from zerotune.trial_lib.inputs.entrypoint import parse_entrypoint
from zerotune.trial_lib.inputs.program_code import is_handed_over

PARSES = """
import argparse, deepspeed
parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed_config", help="a file")
args = parser.parse_args()
"""
HANDS_OVER = {
    "by name": f"{PARSES}deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())",
    "by position": f"{PARSES}deepspeed.initialize(args, model)",
    "the function itself": f"{PARSES}from deepspeed import initialize\ninitialize(args=args, model=model)",
    "an explanation that names the file": f'"""Reads ds.json."""{PARSES}deepspeed.initialize(args=args, model=model)',
}
MAY_MEND = {
    "reads the file": f"{PARSES}import json\nconfig = json.load(open(args.deepspeed_config))\n"
    "del config['amp']\ndeepspeed.initialize(model=model, config=config)",
    "hands a configuration over by position": f"{PARSES}nothing = None\n"
    f"deepspeed.initialize(args, model, {', '.join(['nothing'] * 8)}, mended(args))",
    "names another file": f"{PARSES}args.deepspeed_config = mended(args)\ndeepspeed.initialize(args=args)",
    "by the name of the attribute": f"{PARSES}setattr(args, 'deepspeed_config', mended())\n"
    "deepspeed.initialize(args=args, model=model)",
    "by the name of the file": f"{PARSES}open('./conf/ds.json').read()\ndeepspeed.initialize(args=args, model=model)",
    "before the parser sees it": f"import sys\nsys.argv[2] = mended()\n{PARSES}\ndeepspeed.initialize(args=args)",
    "old name of the argument": f"{PARSES}deepspeed.initialize(args=args, model=model, config_params=mended(args))",
    "whatever it may hold": f"{PARSES}deepspeed.initialize(**anything)",
    "a list of whatever": f"{PARSES}deepspeed.initialize(*anything)",
    "no args": f"{PARSES}deepspeed.initialize(None, model)",
    "by a module of somebody else": "import their_trainer\ntheir_trainer.run()",
    "by another name": f"{PARSES}import deepspeed as ds\nds.initialize(args=args, model=model, config=mended(args))\n"
    "deepspeed.initialize(args=args, model=teacher)",
    "the Trainer": "from transformers import HfArgumentParser, Trainer, TrainingArguments\n"
    "(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\nTrainer(model, args)",
    "no Python": "deepspeed.initialize(",
}


def handed_over(folder: Path, code: str, command: str = "train.py --deepspeed_config conf/ds.json") -> bool:
    (folder / "train.py").write_text(code)
    return is_handed_over(parse_entrypoint(f"deepspeed {command}"), folder)


@pytest.mark.parametrize("code", HANDS_OVER.values(), ids=HANDS_OVER)
def test_a_program_that_leaves_the_file_to_deepspeed_hands_it_over(tmp_path: Path, code: str) -> None:
    assert handed_over(tmp_path, code)


@pytest.mark.parametrize("code", MAY_MEND.values(), ids=MAY_MEND)
def test_a_program_that_may_change_what_it_has_read_is_not_taken_to(tmp_path: Path, code: str) -> None:
    assert not handed_over(tmp_path, code)


def test_a_module_of_the_program_may_mend_the_file_too(tmp_path: Path) -> None:
    code = f"{PARSES}import mending\ndeepspeed.initialize(args=args, model=model)"
    (tmp_path / "mending.py").write_text("def mend(args): return args")
    assert handed_over(tmp_path, code)
    (tmp_path / "mending.py").write_text("def mend(args): args.deepspeed_config = None")
    assert not handed_over(tmp_path, code)


def test_a_file_by_another_flag_or_by_a_variable_is_the_programs_to_read(tmp_path: Path) -> None:
    code = HANDS_OVER["by name"]
    assert handed_over(tmp_path, code, "train.py --deepspeed_config=conf/ds.json")
    assert not handed_over(tmp_path, code, "train.py --deepspeed conf/ds.json")
    assert not handed_over(tmp_path, code, "train.py")
    assert not is_handed_over(parse_entrypoint("model_def:Trial"), tmp_path)


def test_a_program_that_is_run_as_a_module_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "__main__.py").write_text(HANDS_OVER["by name"])
    command = "deepspeed --module kit --deepspeed_config conf/ds.json"
    assert is_handed_over(parse_entrypoint(command), tmp_path)
    (tmp_path / "kit" / "__main__.py").write_text(MAY_MEND["reads the file"])
    assert not is_handed_over(parse_entrypoint(command), tmp_path)
