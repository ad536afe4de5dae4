"""The user's program as a study knows it: from the experiment, and from the profile trial."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trial_lib.command.mapping_targets import spelling, typed_switch
from trial_lib.command.switches import PROGRAM, is_option, is_switch, own_switches, place_of
from trial_lib.deepspeed_config.layout import LAYOUTS, VARIABLES_OF_LAYOUTS, size_of
from trial_lib.deepspeed_config.overrides import (
    ACCUMULATION,
    MICRO_BATCH,
    TRAIN_BATCH,
    overwrite_deepspeed_config,
    with_typed_sizes,
    without_tuning_keys,
)
from trial_lib.experiment.read_experiment import Experiment
from trial_lib.experiment.search_space_section import read_search_space
from trial_lib.experiment.yaml_document import read_yaml
from trial_lib.records.result import ProgramProfile
from trial_lib.wire.errors import InputError
from trial_lib.wire.turned import COMPILE_PLACES, COMPILER, is_turned


@dataclass(frozen=True)
class KnownProgram:
    """The user's program, as far as it is known.

    Attributes:
        base_config: the user's DeepSpeed configuration, without the sections of tuners. If it is in the code, it is
            empty until the profile trial has run. From then on it also has the section `program`, if there are
            switches, and `layouts`, if some of them are layouts.
        switches: the program's switches that are varied, by their places, with the values in the command as typed.
        layouts: the kinds of those switches that are layouts, by their places.
        arg_mappings: the option, variable or place in a file that sets each DeepSpeed key.
        found: what the profile trial found; None before it has run.
    """

    base_config: dict[str, Any] = field(default_factory=dict)
    arg_mappings: dict[str, str] = field(default_factory=dict)
    found: ProgramProfile | None = None
    switches: Mapping[str, Any] = field(default_factory=dict)
    layouts: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, experiment: Experiment, environment: Mapping[str, str] | None = None) -> "KnownProgram":
        """Returns the program before it has run, from its experiment.

        Args:
            experiment: what the user submitted.
            environment: the environment of its ranks. None leaves the switches out.
        """
        mappings = {str(key): target for key, target in experiment.config.arg_mappings.items()}
        switches = {} if environment is None else typed_switches(experiment, environment)
        requests = () if environment is None else read_search_space(experiment.config.search_space)
        layouts = {place_of(each.path): each.layout for each in requests if each.layout}
        return cls(without_tuning_keys(experiment.ds_config), mappings, switches=switches, layouts=layouts)

    def learned(self, found: ProgramProfile) -> "KnownProgram":
        """Returns the program after its profile trial. The experiment's own statements go before what was found."""
        # An option that the program was seen to read a size from sets no other size.
        seen = {spelling(target): key for key, target in found.arg_mappings.items()}
        own = {key: target for key, target in self.arg_mappings.items() if seen.get(spelling(target), key) == key}
        mappings = {**found.arg_mappings, **own}
        config = completed_config(self.base_config, found)
        switches = learned_switches(self.switches, found)
        if switches:
            config[PROGRAM] = switches
        if self.layouts:
            config[LAYOUTS] = dict(self.layouts)
        return KnownProgram(config, mappings, found, switches, self.layouts)

    def on_ranks(self, count: int) -> "KnownProgram":
        """Returns the program on another number of ranks. If some divide a batch among them, all do."""
        if self.found is None or self.found.divided_among == 1:
            return self
        return replace(self, found=self.found.model_copy(update={"divided_among": count}))

    def own_config(self, experiment: Experiment) -> Mapping[str, Any]:
        """Returns the user's DeepSpeed configuration as it is written: in the file, or else in the code."""
        in_code = None if self.found is None else self.found.ds_config
        return experiment.ds_config or in_code or {}

    def in_words(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a configuration as the command types its micro-batch, which ranks may divide among them."""
        among, size = 1 if self.found is None else self.found.divided_among, config.get(MICRO_BATCH)
        return {**config, MICRO_BATCH: size * among} if type(size) is int else dict(config)

    def in_file(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a configuration for a file. The Trainer compares its sizes with the argument, whatever arrives."""
        is_divided = self.found is not None and MICRO_BATCH in self.found.batch
        return with_typed_sizes(config, self.found.divided_among) if self.found and is_divided else dict(config)

    @property
    def imported_later(self) -> tuple[str, ...]:
        """Modules that ranks with other values of the switches import, and that the profile trial may not have."""
        return (COMPILER,) if any(place in COMPILE_PLACES for place in self.switches) else ()

    @property
    def is_batch_in_code(self) -> bool:
        """Whether Hugging Face's training arguments are in the code: the engine had them, and no option sets them."""
        return self.found is not None and MICRO_BATCH in self.found.batch and MICRO_BATCH not in self.arg_mappings


def learned_switches(switches: Mapping[str, Any], found: ProgramProfile) -> dict[str, Any]:
    """Returns the values of the varied switches in the user's configuration, by their places.

    What was typed counts. The program's own value of a switch that ZeroTune turns, and the default of an option that
    was not typed, show when the program runs.

    Args:
        switches: in the command as typed. None stands for one that was not typed. A boolean option is then off.
        found: what the profile trial found.
    """
    return own_switches(switches, found.switches, found.turnable)


def named_in(file: Path | None) -> Callable[[str], str]:
    """Returns what names the place of a switch in an error: its line in the experiment's file, or its flag.

    Args:
        file: the YAML file that varies the switches; None if the command does.
    """

    def named(place: str) -> str:
        if file is None:
            return f"--vary {place}"
        try:
            return read_yaml(file).where(("search_space", PROGRAM, place))
        except InputError:
            # The file may be gone by now, or edited.
            return f"{file}: {place}"

    return named


def require_switchable(typed: Mapping[str, Any], found: ProgramProfile | None, file: Path | None = None) -> None:
    """Checks that the program takes the values of its switches, and that leaving an option out turns it off.

    Args:
        typed: the varied switches in the command as typed, by their places.
        found: what the profile trial found; None if it found nothing.
        file: the YAML file that varies the switches; None if the command does.

    Raises:
        InputError: the program has no such option, refuses a value of it, or has a boolean one on by default.
    """
    named = named_in(file)
    for place, reason in ({} if found is None else found.refused_options).items():
        raise InputError(f"{reason}.", where=named(place), remedy="Vary what your program takes.")
    for place in typed if found is not None else ():
        if found is not None and typed[place] is False and found.switches.get(place) is True:
            raise InputError(
                "your program's default of this option is true, so leaving it out does not turn it off.",
                where=named(place),
                remedy=f"Give the values as text, if the option takes one: {_as_text(place, file)}.",
            )


def _as_text(place: str, file: Path | None) -> str:
    """Returns the words that vary a boolean option by texts, in the command or in a YAML file."""
    return f"--vary \"{place}='true','false'\"" if file is None else f"`\"{place}\": ['true', 'false']`"


def varied_options(experiment: Experiment) -> dict[str, list[Any]]:
    """Returns the options of a program that a search varies, each with the values to try."""
    requests = read_search_space(experiment.config.search_space)
    places = ((place_of(each.path), each.values) for each in requests if is_switch(each.path))
    return {place: list(values) for place, values in places if is_option(place)}


def require_sizes(
    switches: Mapping[str, Any], layouts: Mapping[str, str], named: Callable[[str], str] | None = None
) -> None:
    """Checks that the sizes of the user's own layout are known.

    Args:
        switches: of the user's configuration, by their places.
        layouts: the kinds of those that are layouts.
        named: names the place of a switch in an error; None for its flag.

    Raises:
        InputError: one is neither typed nor a default that the program's parser shows.
    """
    named = named or named_in(None)
    for place, kind in layouts.items():
        if not size_of(switches.get(place)):
            raise InputError(
                f"the size of your own {kind} layout is not known, because your command does not set it.",
                where=named(place),
                remedy="Type it in your command as well.",
            )


def typed_switches(experiment: Experiment, environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the values of the varied switches in an experiment's command as typed, by their places.

    That of a switch that ZeroTune turns is None, unless the experiment sets it.

    Args:
        experiment: what the user submitted.
        environment: the environment of its ranks.

    Raises:
        InputError: a switch names a word, or a value in a file, that does not exist.
    """
    requests = [each for each in read_search_space(experiment.config.search_space) if is_switch(each.path)]
    arguments, folder = experiment.entrypoint.arguments, experiment.model_dir
    switches: dict[str, Any] = {}
    for request in requests:
        place = place_of(request.path)
        if is_turned(place):
            switches[place] = experiment.config.turned.get(place)
        else:
            typed = typed_switch(place, request.values, arguments, environment, folder)
            switches[place] = 1 if typed is None and place in VARIABLES_OF_LAYOUTS else typed
    return switches


def completed_config(base: Mapping[str, Any], program: ProgramProfile) -> dict[str, Any]:
    """Returns the user's DeepSpeed configuration with the values that it leaves open, as far as they are known.

    The batch is that of the engine when the program ran as it was typed. So are the precision and the reduce bucket, if
    the configuration leaves them "auto".

    Args:
        base: the configuration of the experiment; empty if it is in the code.
        program: what the profile trial found.
    """
    config = dict(base) or overwrite_deepspeed_config(without_tuning_keys(program.ds_config or {}), {})
    config = _settled(config, program.settled)
    if program.typed_batch is None:
        return config
    config[MICRO_BATCH] = program.typed_batch.micro_batch_size
    config[ACCUMULATION] = program.typed_batch.gradient_accumulation_steps
    if TRAIN_BATCH in config:
        config[TRAIN_BATCH] = program.typed_batch.train_batch_size
    return config


def _settled(config: Mapping[str, Any], settled: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration with each "auto" replaced by the value that the engine had, if that is known."""
    return {
        key: settled[key]
        if value == "auto" and key in settled
        else _settled(value, settled[key])
        if isinstance(value, Mapping) and isinstance(settled.get(key), Mapping)
        else value
        for key, value in config.items()
    }
