"""How the commands are read and listed: by section, lists with spaces or commas, a training command behind `--`."""

from collections.abc import Sequence
from enum import Enum
from typing import Any

import click

LONGEST_LINE = 45
"""Characters that the line of a command may have."""
_FIRST = {"tune": "-- deepspeed train.py", "show": "", "resume": "STUDY"}


class Section(str, Enum):
    """The headings of the list of commands, in its order."""

    TUNE = "Tune"
    TRAIN = "Train"
    SERVERS = "Servers"
    METHODS = "Search methods and tables"


class Command(click.Command):
    """A command. The first sentence of its help is its line in the list of all commands.

    Args:
        section: the heading that it is listed under.
        *arguments: of click's command.
        **options: of click's command.
    """

    def __init__(self, *arguments: Any, section: Section, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.section = section

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses zerotune's own words."""
        return super().parse_args(ctx, self.spread(args))

    def spread(self, args: list[str]) -> list[str]:
        """Returns words with lists as click understands them."""
        return spread_lists(args, self.params)


class TypedCommand(Command):
    """A command that takes a training command, word for word, behind `--`. It arrives as `typed`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the words before the first `--`, and keeps those behind it.

        Raises:
            UsageError: no command follows.
        """
        own, typed = list(args), []
        if "--" in args:
            position = args.index("--")
            own, typed = args[:position], args[position + 1 :]
        if not typed and "--help" not in own:
            missing = "Nothing follows `--`." if "--" in args else "There is no `--` with a command behind it."
            remedy = f"Write what you start your training with: `{ctx.command_path} -- deepspeed train.py ARGUMENTS`."
            raise click.UsageError(f"{missing} {remedy}", ctx)
        remaining = super().parse_args(ctx, own)
        ctx.params["typed"] = tuple(typed)
        return remaining


class TypedOrReadCommand(TypedCommand):
    """A command that takes a training command behind `--`, or an experiment's YAML and its folder.

    A word after a flag is never the flag's second value, because it may be the YAML.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the words.

        Raises:
            UsageError: there is neither, or there are both.
        """
        own = args[: args.index("--")] if "--" in args else args
        if "--" in args or "--help" in own:
            remaining = super().parse_args(ctx, args)
            if ctx.params.get("config_path") is not None:
                extra = f"`{ctx.params['config_path']}` stands before `--`, so there are two things to plan."
                raise click.UsageError(f"{extra} Leave one of them out.", ctx)
            return remaining
        remaining = Command.parse_args(self, ctx, own)
        if ctx.params.get("config_path") is None or ctx.params.get("model_dir") is None:
            raise click.UsageError(
                f"There is no training to look at. Write `{ctx.command_path} -- deepspeed train.py ARGUMENTS`, or "
                f"`{ctx.command_path} CONFIG_PATH MODEL_DIR`.",
                ctx,
            )
        ctx.params["typed"] = ()
        return remaining

    def spread(self, args: list[str]) -> list[str]:
        """Returns words with lists of numbers spread, and no others."""
        return spread_lists(args, [param for param in self.params if _is_number_list(param)])


class Commands(click.Group):
    """All commands, listed by section."""

    command_class = Command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the list of commands. The columns of all sections line up."""
        width = max(map(len, self.commands))
        for section in Section:
            commands = [command for command in self.commands.values() if command.section == section]
            with formatter.section(section.value):
                formatter.write_dl([(f"{command.name:{width}}", line_of(command)) for command in commands])

    def first_steps(self) -> str:
        """Returns what `zerotune` alone prints: what it is, and three commands to begin with."""
        formatter = click.HelpFormatter()
        formatter.write_text("ZeroTune finds the DeepSpeed configuration that trains your model fastest.")
        steps = [(f"zerotune {name} {words}".rstrip(), line_of(self.commands[name])) for name, words in _FIRST.items()]
        with formatter.section("Three commands to begin with"):
            formatter.write_dl(steps, col_max=40)
        formatter.write_paragraph()
        formatter.write_text("`zerotune --help` lists all commands.")
        return formatter.getvalue().rstrip()


def line_of(command: click.Command) -> str:
    """Returns the line of a command in a list: the first sentence of its help, without its full stop."""
    return command.get_short_help_str(limit=LONGEST_LINE + 1).rstrip(".")


def spread_lists(words: Sequence[str], params: Sequence[click.Parameter]) -> list[str]:
    """Returns words with `-z 1 2` and `-z 1,2` written as `-z 1 -z 2`, which click understands.

    The lists of Determined's `dsat` are separated by spaces. Only numbers are split at commas, because a file's name
    may contain one.

    Args:
        words: before any `--`.
        params: of the command. Options that may be repeated are lists.
    """
    lists = {flag: param for param in params if getattr(param, "multiple", False) for flag in param.opts}
    spread: list[str] = []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        flag, is_joined, joined = word.partition("=")
        if flag not in lists or (is_joined and not _is_number_list(lists[flag])):
            spread.append(word)
            continue
        values = [joined] if is_joined else []
        while not is_joined and remaining and _belongs(remaining[0], lists[flag]):
            values.append(remaining.pop(0))
        if _is_number_list(lists[flag]):
            values = [part for value in values for part in value.split(",") if part]
        if not values:
            spread.append(word)
        for value in values:
            spread += [flag, value]
    return spread


def _is_number_list(param: click.Parameter) -> bool:
    return isinstance(param.type, click.types.IntParamType)


def _belongs(word: str, param: click.Parameter) -> bool:
    return word.replace(",", "").isdigit() if _is_number_list(param) else not word.startswith("-")
