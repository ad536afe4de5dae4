"""Finds the place from which a program has its batch size, if its batches do not follow the candidate."""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH
from trial_lib.measure.batches.program_options import ProgramOption, options_read
from trial_lib.measure.batches.typed_numbers import TypedNumber, numbers_in_files, numbers_in_objects, numbers_in_words

_BATCH_NAME = re.compile(r"batch|ims_per|(^|[-_.])(bs|bsz|mbs|mbsz|bz)($|[-_])", re.IGNORECASE)
_MOST_FILES, _LARGEST_FILE = 200, 100_000
_ENGINE = "from the engine (engine.train_micro_batch_size_per_gpu())"


@dataclass(frozen=True)
class BatchSource:
    """The places from which a program may read its batch size.

    Attributes:
        arguments: of its command line.
        environment: its environment variables.
        folder: its working directory.
        replicas: ranks that each feed a batch of their own.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    replicas: int = 1

    def ignored_batch_reason(
        self, asked: int, arrived: int, configuration: Mapping[str, Any] | None, accumulation: int = 1, among: int = 1
    ) -> str:
        """Returns the sentences for batches that do not follow the candidate, with the remedy that fits this program.

        Args:
            asked: the micro-batch size of the candidate.
            arrived: the size that arrived.
            configuration: the configuration that the code itself has passed to DeepSpeed.
            accumulation: of the candidate.
            among: the ranks that divide a batch of the size that is typed among them.
        """
        fed = f"The script fed batches of {arrived} to an engine that was set to a micro-batch of {asked}."
        divided = self._divided(asked, arrived)
        if divided:
            return f"{fed} {divided}"
        typed = replace(self, replicas=self.replicas // among)
        way = typed._way(arrived * among, configuration or {}, accumulation)
        return f"{fed} {way} If the data set itself is that small, use more data."

    def _divided(self, asked: int, arrived: int) -> str:
        """Returns the sentences for a size that the engine takes for one rank's, and the script for that of all."""
        if self.replicas == 1 or asked != arrived * self.replicas:
            return ""
        typed = [number.name for number in numbers_in_words(self.arguments) if _is_of_a_batch(number, asked)]
        read = [self._spelled(each) for each in options_read() if each.value == asked and _is_batch(each)]
        name = next(iter((*typed, *read)), None)
        if name is None:
            return ""
        return (
            f"It divides its {name} {asked} among its {self.replicas} ranks, as Accelerate does with split_batches, "
            f"but DeepSpeed takes that for the size of each rank. Turn the dividing off, and type your {name} divided "
            f"by {self.replicas}. Then the same rows arrive, and all sizes agree."
        )

    def ignored_accumulation_reason(self, asked: int, micro_batches: int) -> str:
        """Returns the sentences for optimizer steps that do not follow the candidate's accumulation.

        Args:
            asked: the accumulation.
            micro_batches: micro-batches before the step.
        """
        count = f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"
        way = "Train within `with accelerator.accumulate(model):`, or let" if "accelerate" in sys.modules else "Let"
        return (
            f"The script took an optimizer step after {count}, but its engine was set to an accumulation of {asked}. "
            f"The script counts by itself. {way} it read the number from the engine "
            "(engine.gradient_accumulation_steps()). It may also read an option or an environment variable. Name that "
            f"one with {_written('--accumulation', ACCUMULATION)}"
        )

    def _way(self, arrived: int, configuration: Mapping[str, Any], accumulation: int) -> str:
        typed = [number for number in numbers_in_words(self.arguments) if number.value == str(arrived)]
        variables = self._variables_of(arrived)
        named = [number for number in typed if _is_of_a_batch(number)]
        if named:
            return f"Its command line has {named[0].shown}. {_mapping(named[0].target)}"
        if variables:
            return f"Its environment has {variables[0]}={arrived}. {_mapping(variables[0])}"
        for number in numbers_in_files(self.arguments, self.folder):
            if number.value == str(arrived) and _is_of_a_batch(number):
                return f"A file of its command line has {number.shown}. {_mapping(number.target)}"
        for option in options_read():
            for key, size in ((MICRO_BATCH, arrived), (TRAIN_BATCH, arrived * self.replicas * accumulation)):
                if option.value == size and _is_batch(option):
                    name = self._spelled(option)
                    return f"Its option {name} is {size}. {_mapping(name, key)}"
        for number in numbers_in_objects(self.arguments):
            # DeepSpeed's own object there follows the trial.
            if number.value == str(arrived) and _is_of_a_batch(number) and number.name != TRAIN_BATCH:
                return (
                    f"It has {number.shown}, which no trial changes. Let it read the size {_ENGINE}. Or map its place "
                    "in the YAML or JSON file (FILE:KEY), if the command that you type names the file."
                )
        file = self._file_with(arrived)
        if file is not None:
            return (
                f"{file} has {MICRO_BATCH} {arrived}. If the code always reads that file, let it read the file that "
                f"its command line names, or the size {_ENGINE}."
            )
        if configuration.get(MICRO_BATCH) == arrived:
            return (
                f"The configuration in the code has {MICRO_BATCH} {arrived}. Let the code read the size {_ENGINE}, "
                "not from there."
            )
        if typed:
            return f"Its command line has {typed[0].shown}, which may be its batch size. {_mapping(typed[0].target)}"
        if "hydra" in sys.modules:
            return (
                "Its configuration is Hydra's. Name the override that sets the batch size, such as "
                f"{_written('trainer.batch_size')} A key without a dot is written ++batch_size."
            )
        return (
            f"Let it read the size {_ENGINE}, or from the JSON file that its command line names. It may also read an "
            f"option or an environment variable. Name that one with {_written('--batch-size')}"
        )

    def _spelled(self, option: ProgramOption) -> str:
        """Returns an option's name as it was typed, or else its longest name."""
        typed = (name for name in option.names for word in self.arguments if word.partition("=")[0] == name)
        return next(typed, max(option.names, key=len))

    def _variables_of(self, size: int) -> list[str]:
        """Returns the environment variables that have the name of a batch size and this value."""
        return [
            name
            for name, value in sorted(self.environment.items())
            if _BATCH_NAME.search(name) and value.strip() == str(size)
        ]

    def _file_with(self, size: int) -> Path | None:
        """Returns a DeepSpeed configuration in the working directory that has this micro-batch size."""
        for path in self._small_files():
            try:
                config = json.loads(path.read_text())
            except (OSError, ValueError):
                continue
            if isinstance(config, dict) and config.get(MICRO_BATCH) == size:
                return path.relative_to(self.folder)
        return None

    def _small_files(self) -> Iterator[Path]:
        paths = [*sorted(self.folder.glob("*.json")), *sorted(self.folder.glob("*/*.json"))]
        for path in paths[:_MOST_FILES]:
            if path.is_file() and path.stat().st_size <= _LARGEST_FILE:
                yield path


def _is_of_a_batch(number: TypedNumber, value: int | None = None) -> bool:
    return bool(_BATCH_NAME.search(number.name)) and value in (None, int(number.value))


def _is_batch(option: ProgramOption) -> bool:
    return any(map(_BATCH_NAME.search, option.names))


def _mapping(target: str, key: str = MICRO_BATCH) -> str:
    return f"Let each trial set it with {_written(target, key)}"


def _written(target: str, key: str = MICRO_BATCH) -> str:
    """Returns a mapping as a user writes it on the command line and in the YAML."""
    return f"--map {key}={target} (in a YAML: arg_mappings: {{{key}: {target}}})."
