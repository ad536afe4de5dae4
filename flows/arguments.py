"""The arguments and flags of the commands. Most flags are made from the records that they fill."""

from collections.abc import Callable
from pathlib import Path

import click

from flows.options import Decorator, option
from trial_lib.foresee.plan.plan_arguments import PlanArguments
from trial_lib.records.search_metrics import SEARCH_METRICS
from trial_lib.search.methods import METHODS, Method
from trial_lib.search.settings import SearchSettings
from trial_lib.study.arguments import BATCH_POLICY, OLDER_NAMES, StudyArguments

EXPERIMENT: list[Decorator] = [
    click.argument("config_path", type=click.Path(path_type=Path)),
    click.argument("model_dir", type=click.Path(path_type=Path)),
]
_MAP: Decorator = click.option(
    "--map",
    "mappings",
    multiple=True,
    metavar="KEY=TARGET",
    help="Say what sets a DeepSpeed key in your command, such as train_micro_batch_size_per_gpu=--batch-size. TARGET "
    "is an option, a variable (BATCH), an override (trainer.batch), a value in a file (conf.yaml:trainer.batch) or a "
    "word by its number (argv:2). You can repeat this option.",
)
_VARY: Decorator = click.option(
    "--vary",
    "varied",
    multiple=True,
    metavar="PLACE=VALUES",
    help="Vary a setting of your program together with DeepSpeed's, such as '--gradient_checkpointing=true,false' or "
    "OMP_NUM_THREADS=1,2. PLACE is what TARGET is in --map. With true and false an option is there or left out. You "
    "can repeat this option.",
)
JSON: Decorator = click.option(
    "--json", "as_json", is_flag=True, help="Print the result as one JSON document on standard output."
)


def _of_study(field: str, *flags: str, more: str = "") -> Decorator:
    older = tuple(f"--{name}" for name, present in OLDER_NAMES.items() if present == field)
    return option(StudyArguments, field, *flags, more=more, older=older)


def _zero_stages(default: str) -> Decorator:
    return option(StudyArguments, "zero_stages", "-z", "--zero-stages", default=default)


def _units() -> str:
    return f"The metrics are {', '.join(f'{metric.name} in {metric.unit}' for metric in SEARCH_METRICS.values())}."


INCLUDE = _of_study("include", "-i", "--include")
_MAX_TRIALS = _of_study("max_trials", "-mt", "--max-trials")
_MAX_SLOTS = _of_study("max_slots", "-ms", "--max-slots")
_MAX_MICRO_BATCH = _of_study("max_micro_batch")
_WINDOW = [_of_study("start_profile_step"), _of_study("end_profile_step")]
_START = _of_study("start")
_OPTIONS: list[Decorator] = [
    INCLUDE,
    _MAX_TRIALS,
    _of_study("max_minutes"),
    _MAX_SLOTS,
    _MAX_MICRO_BATCH,
    _of_study("max_concurrent_trials", "-mct", "--max-concurrent-trials"),
    _of_study("metric", "-m", "--metric", more=_units()),
    _of_study("from_earlier"),
    _of_study("foresee"),
    _of_study("plan"),
    _of_study("run_full_experiment"),
    _of_study("ray_address", "--ray"),
    *_WINDOW,
    _of_study("random_seed", "-r", "--random-seed"),
    _of_study("max_search_runner_restarts"),
    _START,
    JSON,
]
_BATCH_POLICY = [_of_study(field) for field in BATCH_POLICY]


def _stages_of_methods() -> str:
    """Returns which stages each method searches, such as `adaptive: 0 1 2 3; asha, binary: 1 2 3`."""
    methods = [method for method in METHODS.values() if method.confirms_winner]
    named = {stages: [each.name for each in methods if each.stages == stages] for stages in {m.stages for m in methods}}
    return "; ".join(f"{', '.join(names)}: {_numbers(stages)}" for stages, names in sorted(named.items()))


def _numbers(stages: tuple[int, ...]) -> str:
    return " ".join(map(str, stages))


def tune_options() -> list[Decorator]:
    """Returns the flags of `zerotune tune`."""
    method = click.option(
        "--method",
        type=click.Choice([method.name for method in METHODS.values() if method.confirms_winner]),
        default=StudyArguments.model_fields["method"].default,
        show_default=True,
        help="Search with this method and its default settings. `zerotune METHOD --help` shows them.",
    )
    return [method, _MAP, _VARY, _zero_stages(_stages_of_methods()), *_OPTIONS, *_BATCH_POLICY]


MICRO_BATCH_OPTIONS: list[Decorator] = [_MAP, _MAX_TRIALS, _MAX_SLOTS, _MAX_MICRO_BATCH, *_WINDOW, _START, JSON]


def method_options(method: Method) -> list[Decorator]:
    """Returns the arguments and flags of the command of one method."""
    policy = _BATCH_POLICY if method.has_batch_policy else []
    known = {*SearchSettings.model_fields, *StudyArguments.model_fields}
    own = [option(method.settings, field) for field in method.settings.model_fields if field not in known]
    return [*EXPERIMENT, _zero_stages(_numbers(method.stages)), *_OPTIONS, *policy, *own]


def with_options(command: Callable[..., None], options: list[Decorator]) -> Callable[..., None]:
    """Gives a command its arguments and flags."""
    for each in reversed(options):
        command = each(command)
    return command


RECORD_OPTIONS: list[Decorator] = [
    *EXPERIMENT,
    click.option(
        "-o",
        "--output",
        required=True,
        type=click.Path(path_type=Path),
        help="Write the table to this file, as JSON lines.",
    ),
    click.option(
        "-b",
        "--micro-batch-sizes",
        required=True,
        multiple=True,
        type=click.IntRange(min=1),
        help="Measure these micro-batch sizes, in samples, such as -b 1 2 4 8.",
    ),
    click.option(
        "--repeats",
        type=click.IntRange(min=1),
        default=2,
        show_default=True,
        help="Measure each candidate this often.",
    ),
    _zero_stages("0 1 2 3"),
    INCLUDE,
    *_WINDOW,
    _START,
]

ESTIMATE_OPTIONS: list[Decorator] = [*EXPERIMENT, INCLUDE, _MAX_MICRO_BATCH, _of_study("memory_headroom"), JSON]


def _of_plan(field: str, *flags: str, default: str | None = None) -> Decorator:
    return option(PlanArguments, field, *flags, default=default)


PLAN_OPTIONS: list[Decorator] = [
    click.argument("config_path", required=False, type=click.Path(path_type=Path)),
    click.argument("model_dir", required=False, type=click.Path(path_type=Path)),
    _of_plan("on"),
    _of_plan("price"),
    _of_plan("devices"),
    _MAP,
    _VARY,
    _of_plan("zero_stages", "-z", "--zero-stages", default="0 1 2 3"),
    _of_plan("train_batch_size"),
    _of_plan("free_batch"),
    _of_plan("max_micro_batch"),
    _of_plan("memory_headroom"),
    _of_plan("deadline"),
    _of_plan("max_processes"),
    _of_plan("from_earlier"),
    _of_plan("include", "-i", "--include"),
    JSON,
]

TRAIN_OPTIONS: list[Decorator] = [
    *EXPERIMENT,
    click.option(
        "--ds-config",
        type=click.Path(path_type=Path),
        help="Merge this DeepSpeed configuration, such as a study's best_ds_config.json, into that of the experiment.",
    ),
    INCLUDE,
    click.option(
        "--resume",
        is_flag=True,
        help="Resume the newest full experiment of this name, in this folder, that has not reached its end.",
    ),
    JSON,
]
