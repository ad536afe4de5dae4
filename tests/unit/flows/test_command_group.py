"""The list of commands, and how their words are read: lists, and what follows `--`, which belongs to the user."""

import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from zerotune.flows.command_line import cli
from zerotune.flows.options import LONGEST_LINE, Section, TypedCommand, line_of, spread_lists
from zerotune.trial_lib.search.methods import METHODS


def in_section(section: Section) -> set[str]:
    return {name for name, command in cli.commands.items() if command.section is section}


def test_each_command_is_in_its_section() -> None:
    assert in_section(Section.TUNE) == {
        *("tune", "micro-batch", "plan", "resume", "show", "apply", "estimate"),
        *("list", "compare", "export", "share", "rm"),
    }
    assert in_section(Section.TRAIN) == {"train"}
    assert in_section(Section.SERVERS) == {"up", "down", "doctor", "sync"}
    assert in_section(Section.METHODS) == {method.name for method in METHODS.values() if method.confirms_winner}


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_a_command_explains_itself_by_the_short_flag_too(name: str) -> None:
    short, long = (CliRunner().invoke(cli, [name, flag]) for flag in ("-h", "--help"))
    assert (short.exit_code, short.output) == (0, long.output)


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_a_command_is_listed_by_a_short_sentence_in_the_imperative(name: str) -> None:
    command = cli.commands[name]
    line = line_of(command)
    assert command.help is not None
    # The whole first sentence.
    assert command.help.partition("\n")[0].partition(". ")[0].rstrip(".") == line
    assert len(line) <= LONGEST_LINE
    first = line.split()[0]
    assert first[0].isupper()
    assert not first.endswith("s"), f"{name}: {line}"


def test_the_list_shows_every_command_whole_under_its_heading() -> None:
    shown = CliRunner().invoke(cli, ["--help"], prog_name="zerotune").output
    assert "..." not in shown.partition("Tune:")[2]
    for section in Section:
        listed = re.search(rf"^{section.value}:\n((?:  .+\n)+)", shown, re.MULTILINE)
        assert listed is not None, shown
        assert {line.split()[0] for line in listed[1].splitlines()} == in_section(section)


def test_without_a_command_three_are_shown_to_begin_with() -> None:
    ended = CliRunner().invoke(cli, [], prog_name="zerotune")
    # As git, uv and click itself do: a script that forgets the command fails.
    assert ended.exit_code == 2
    assert ended.stdout == ""
    steps = re.findall(r"^  zerotune (\S+)", ended.stderr, re.MULTILINE)
    assert steps == ["tune", "show", "resume"]
    assert "`zerotune --help`" in ended.stderr


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_option_is_explained_in_whole_sentences(name: str) -> None:
    """They are in the imperative, so none begins with an article or a question word."""
    for param in cli.commands[name].params:
        if not isinstance(param, click.Option):
            continue
        assert param.help, param.name
        said = param.help.partition("  [default")[0]
        assert said[0].isupper()
        assert said.endswith("."), said
        assert said.split()[0] not in ("A", "An", "How", "Of", "The", "What", "Which"), said


def options_of(name: str) -> set[str]:
    return {flag for param in cli.commands[name].params if isinstance(param, click.Option) for flag in param.opts}


@pytest.mark.parametrize("name", ["asha", "binary", "random"])
def test_an_option_of_one_method_stands_on_its_own_command_and_in_the_docs(name: str) -> None:
    own = options_of(name) - options_of("tune")
    assert own
    written = (Path(__file__).parents[3] / "docs" / "experiment_file.md").read_text()
    for flag in own:
        (line,) = [line for line in written.splitlines() if line.startswith(f"| `{flag}` |")]
        assert f"`{name}`" in line


def typed_command() -> tuple[click.Group, dict[str, Any]]:
    """Returns a group whose command `tune` keeps what it is given, and what it has kept."""
    kept: dict[str, Any] = {}
    group = click.Group()

    @group.command("tune", cls=TypedCommand, section=Section.TUNE)
    @click.option("-z", "--zero-stages", "stages", multiple=True, type=click.IntRange(0, 3))
    def tune(**given: Any) -> None:
        kept.update(given)

    return group, kept


def test_the_words_behind_the_first_dashes_are_the_command() -> None:
    group, kept = typed_command()
    typed = ["python", "train.py", "-z", "1", "2", "--", "", "--help", "--include", "a", "b"]
    ended = CliRunner().invoke(group, ["tune", "-z", "1", "2", "--", *typed])
    assert ended.exit_code == 0, ended.output
    assert kept == {"stages": (1, 2), "typed": tuple(typed)}


def test_help_needs_no_command() -> None:
    ended = CliRunner().invoke(typed_command()[0], ["tune", "--help"])
    assert (ended.exit_code, ended.output[:6]) == (0, "Usage:")


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (["tune"], "There is no `--`"),
        (["tune", "python", "train.py"], "There is no `--`"),
        (["tune", "-z", "3", "--"], "Nothing follows `--`"),
    ],
)
def test_a_missing_command_is_an_error_that_names_ours_once(words: list[str], missing: str) -> None:
    ended = CliRunner().invoke(typed_command()[0], words, prog_name="zerotune")
    assert ended.exit_code == 2
    (error,) = (line for line in ended.stderr.splitlines() if line.startswith("Error:"))
    assert missing in error
    assert "`zerotune tune -- deepspeed train.py ARGUMENTS`" in error
    assert error.count("zerotune tune") == 1


def test_words_ahead_of_the_dashes_are_no_part_of_the_command() -> None:
    ended = CliRunner().invoke(typed_command()[0], ["tune", "deepspeed", "--", "train.py"])
    assert ended.exit_code == 2
    assert "unexpected extra argument (deepspeed)" in ended.stderr


@pytest.mark.parametrize(
    ("typed", "parsed"),
    [
        ("a.yaml m -z 0 1", "a.yaml m -z 0 -z 1"),
        ("a.yaml m -z 0,1", "a.yaml m -z 0 -z 1"),
        ("a.yaml m --zero-stages=0,1", "a.yaml m --zero-stages 0 --zero-stages 1"),
        ("a.yaml m -z 0, 1", "a.yaml m -z 0 -z 1"),
        ("a.yaml m --zero-stages 2 3 -mt 5", "a.yaml m --zero-stages 2 --zero-stages 3 -mt 5"),
        ("-z 1 a.yaml m", "-z 1 a.yaml m"),
        ("-z 1,2 a.yaml m", "-z 1 -z 2 a.yaml m"),
        ("a.yaml m -i lib utils.py -m latency", "a.yaml m -i lib -i utils.py -m latency"),
        ("a.yaml m -i a,b.py", "a.yaml m -i a,b.py"),
        ("a.yaml m --include lib -z 3", "a.yaml m --include lib -z 3"),
        ("a.yaml m --include=lib", "a.yaml m --include=lib"),
        ("a.yaml m -z", "a.yaml m -z"),
        ("a.yaml m -z --json", "a.yaml m -z --json"),
        ("a.yaml m -z 1,x", "a.yaml m -z 1,x"),
        ("--beside ddp,fsdp2 a.yaml m", "--beside ddp --beside fsdp2 a.yaml m"),
        ("--beside=ddp a.yaml m", "--beside ddp a.yaml m"),
    ],
)
def test_a_list_is_written_as_one_option_for_each_value(typed: str, parsed: str) -> None:
    assert spread_lists(typed.split(), cli.commands["asha"].params) == parsed.split()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan"], "There is no training to look at."),
        (["plan", "a.yaml"], "There is no training to look at."),
        (["plan", "--on", "h100-80gb:8", "--"], "Nothing follows `--`."),
        (["plan", "a.yaml", ".", "--", "python", "train.py"], "two things to plan"),
        (["plan", "--on"], "requires an argument"),
    ],
)
def test_a_plan_takes_a_command_or_a_yaml_and_not_both(words: list[str], said: str) -> None:
    ended = CliRunner().invoke(cli, words, prog_name="zerotune")
    assert ended.exit_code == 2
    assert said in ended.stderr


@pytest.mark.parametrize(
    ("words", "config", "typed"),
    [
        (["--on", "h100-80gb:8", "a.yaml", "m", "-z", "2", "3"], "a.yaml", ()),
        (["--on", "h100-80gb:8", "-z", "2,3", "--", "torchrun", "--on", "x"], None, ("torchrun", "--on", "x")),
    ],
)
def test_a_word_after_the_devices_of_a_plan_is_no_second_device(
    words: list[str], config: str | None, typed: tuple[str, ...]
) -> None:
    context = cli.commands["plan"].make_context("plan", words)
    assert context.params["on"] == ("h100-80gb:8",)
    assert context.params["zero_stages"] == (2, 3)
    assert context.params["config_path"] == (None if config is None else Path(config))
    assert context.params["typed"] == typed


def test_a_project_s_defaults_stand_behind_what_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.zerotune]\nmax-minutes = 30\nzero-stages = [1, 3]\n")
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    found: list[dict[str, Any]] = []
    monkeypatch.setattr("zerotune.flows.command_line._tune", lambda name, method, options, typed: found.append(options))
    CliRunner().invoke(cli, ["tune", "--", "python", "train.py"])
    CliRunner().invoke(cli, ["tune", "--max-minutes", "5", "--", "python", "train.py"])
    assert [(each["max_minutes"], tuple(each["zero_stages"])) for each in found] == [(30.0, (1, 3)), (5.0, (1, 3))]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tool.zerotune]\nmax-hours = 1", "no command has the flag --max-hours"),
        ("[tool.zerotune]\nmax-minutes = 'long'", "'long' is not a valid"),
        ("tool.zerotune = 3", "it is no table"),
    ],
)
def test_a_project_s_wrong_default_gets_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(cli, ["tune", "--", "python", "train.py"])
    assert ended.exit_code == 2
    assert said in ended.output
