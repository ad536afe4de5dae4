"""A whole study of a command, put behind `zerotune tune --` as it is typed without it."""

import json
from pathlib import Path

import pytest
from study_fixtures import Zerotune

from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.folders import OwnCommand
from zerotune.trial_lib.records.result import Outcome

pytestmark = pytest.mark.alone

# Of the program itself: what an argument has to survive.
ARGUMENTS = ["two words", 'it\'s "quoted"', "", "$HOME *", "ünï", "-z", "1", "2", "line\nline"]
SHOWS_ITS_ARGUMENTS = "\nimport json, sys\nprint('arguments ' + json.dumps(sys.argv[1:]), flush=True)\n"


@pytest.mark.long
def test_a_command_is_tuned_as_it_is_typed(tmp_path: Path, home: Path) -> None:
    zerotune = Zerotune(tmp_path, home)
    zerotune.folder = zerotune.model
    script = zerotune.model / "train.py"
    text = script.read_text().replace("parse_arguments() ->", "parse_arguments(argv: list[str]) ->")
    text = text.replace(".parse_args()", ".parse_args(argv)")
    text = text.replace("args = parse_arguments()", "args = parse_arguments(sys.argv[1 : sys.argv.index('--')])")
    script.write_text(text.replace("import argparse\n", "import argparse" + SHOWS_ITS_ARGUMENTS))
    own = ["--deepspeed_config", "ds_config.json", "--largest_micro_batch", "8"]
    own_words = [*own, "--", *ARGUMENTS]
    command = ["deepspeed", "--num_gpus", "1", "train.py", *own_words]
    ended = zerotune.run("tune", "-mt", "3", "-m", "throughput", "-z", "1", "2", "--json", "--", *command)
    assert ended.returncode == 0, ended.stderr

    study = zerotune.study
    results = list(study.results.values())
    assert {result.outcome for result in results} <= {Outcome.COMPLETED, Outcome.OUT_OF_MEMORY, Outcome.TOO_SLOW}
    for result in results:
        line = next(line for line in Path(result.logs[0]).read_text().splitlines() if line.startswith("arguments "))
        # The user's configuration runs as it was typed.
        as_typed = result.purpose is Purpose.SUBMITTED
        local_rank, option, config, *rest = json.loads(line[len("arguments ") :])
        assert (local_rank, option) == ("--local_rank=0", "--deepspeed_config")
        # The study stands within the program's folder, of which a trial sees a layer: its records are beside that.
        own_config = "ds_config.json" if as_typed else f"records/{result.number:04d}/ds_config.json"
        assert config == own_config if as_typed else config.endswith(f"/{own_config}")
        assert rest == ["--largest_micro_batch", "8", "--", *ARGUMENTS]

    change = f"in the command: ds_config.json -> {study.paths.trial(0).ds_config}"
    assert ended.stderr.count("in the command: ") == 1
    assert change in ended.stderr
    assert change in study.paths.log.read_text()

    best = study.paths.best_command.read_text()
    assert f"cd {zerotune.model}\n" in best
    own = OwnCommand.of(study.paths)
    assert own is not None, best
    # A copy is named as one types it in this folder.
    named = [str(Path(path).relative_to(zerotune.model)) for path in own.copies] or ["ds_config.json"]
    assert f"deepspeed --num_gpus 1 train.py --deepspeed_config {named[0]} " in best
    assert list(own.applied[4:]) == own_words
    assert json.loads(ended.stdout)["command"] == best
    assert not (zerotune.model / "experiment.yaml").exists()
