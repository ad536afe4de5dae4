"""Compares the speed of foreseen steps with public measurements: `python -m benchmarks.foresee.public_gpus.speed`.

Within a group of rows that differ by configuration alone: does the order agree, and how much is lost by taking the
first choice? The absolute error is reported as it is.
"""

import argparse
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.foresee.public_gpus.foreseen_rows import OLDER, code, store_of
from benchmarks.foresee.public_gpus.formula_run import formula_run
from benchmarks.foresee.public_gpus.model_of_row import ROWS, RowProgram, has_no_program, program_of, read_rows
from benchmarks.foresee.public_gpus.row_cluster import cluster_of
from benchmarks.foresee.public_gpus.row_runs import STORE, is_older, run_of
from benchmarks.foresee.public_gpus.sound_rows import MISTAKES
from zerotune.trial_lib.messages.foreseen_run import ForeseenRun
from zerotune.trial_lib.plan.devices import Cluster, Constant, Efficiencies
from zerotune.trial_lib.plan.step_time import PlannedStep, fused, model_flops, planned_step

RESULTS = Path(__file__).parents[2] / "results" / "foreseen_speed.json"
BARS = {"rank_correlation": 0.8, "lost_by_first_choice": 0.05}
"""What the order must reach: at least the one, at most the other."""

CONSTANTS = tuple(each.name for each in fields(Efficiencies))
"""The names of all constants of the foreseen time."""

# Parts of `tflops_def` of sources that count the repeated forward pass.
_RECOMPUTED = ("recompute", "8*n", "hardware", "megatron 96")
# Two usual counts of attention's FLOPs, all pairs of positions and half of them, may differ by so much.
_ALIKE = 1.25
# The torch of rows whose source is older than flash-attn 2, or has cuDNN's attention (torchtitan#1209). Others have
# flash-attn 2.
_TORCH = {"llm-foundry": "2.0", "issues/3901": "2.0", "nvfp4": "2.11"}
_USUAL_TORCH = "2.4"
# Those that DeepSpeed trains have its hooks around each module.
_PARTITIONS = "deepspeed"


@dataclass(frozen=True)
class Timed:
    """A row with its foreseen step.

    Attributes:
        row: the measurement.
        by: `foreseen run` or `formulas`: where the operations come from.
        metric: what is compared: `tokens_per_s`, `tflops` (of a device) or `mfu`.
        measured: its value.
        foreseen: its value.
        step: the whole step.
    """

    row: Mapping[str, Any]
    by: str
    metric: str
    measured: float
    foreseen: float
    step: PlannedStep

    @property
    def error(self) -> float:
        """The logarithm of foreseen over measured."""
        return math.log(self.foreseen / self.measured)


def changed(efficiencies: Efficiencies, logarithms: Mapping[str, float]) -> Efficiencies:
    """Returns constants, each multiplied by the exponential of its entry."""
    of = {name: getattr(efficiencies, name) for name in logarithms}
    return replace(
        efficiencies,
        **{name: Constant(each.value * math.exp(logarithms[name]), each.spread) for name, each in of.items()},
    )


def left_out(row: Mapping[str, Any]) -> str:
    """Returns why a row cannot be compared, in words; empty if it can."""
    return has_no_step(row) or _contradiction(row, *_measured(row))


def has_no_step(row: Mapping[str, Any]) -> str:
    """Returns why a row has no foreseen step or no measured one, in words; empty if it has both."""
    if row.get("unusable"):
        return str(row["unusable"])
    if "throughput" not in row["use_for"]:
        return "no throughput"
    if (row.get("pipeline_parallel") or 1) > 1:
        return "pipeline parallelism"
    if why := has_no_program(row):
        return why
    if cluster_of(row) is None:
        return f"unknown device: {row['gpu_kind'] or 'no gpu_kind'}"
    return "" if _measured(row)[0] else "no figure of speed"


def _contradiction(row: Mapping[str, Any], metric: str, value: float) -> str:
    """Returns why a figure of speed may mean two, or cannot be, in words; empty if it is sound."""
    program = program_for_speed(row)
    # FLOPs of a token: of its products, and of attention to all positions.
    products = 6.0 * program.layers * program.layer_parameters
    pairs = 12.0 * program.layers * program.hidden * row["seq_len"]
    if metric == "tokens_per_s" and value * (products + pairs / 2) > _peak(row, program):
        return "more FLOP/s than its device has"
    if metric in ("mfu", "tflops") and not row.get("tflops_def") and products + pairs > _ALIKE * (products + pairs / 2):
        return "it may count all of attention's FLOPs or half of them"
    return ""


def _peak(row: Mapping[str, Any], program: RowProgram) -> float:
    cluster = cluster_of(row)
    assert cluster is not None
    usual = {"fp16": "float16", "fp32": "tf32"}.get(program.precision, "bfloat16")
    return cluster.device.peak("float8" if "float8" in row["framework"].lower() else usual)


def program_for_speed(row: Mapping[str, Any]) -> RowProgram:
    """Returns the program of a row whose figures of memory may be missing."""
    unknown = {name: "none" for name in ("offload_optimizer", "offload_param") if row.get(name) == "unknown"}
    return program_of({**row, **unknown})


def timed(row: Mapping[str, Any], run: ForeseenRun, by: str, efficiencies: Efficiencies) -> Timed:
    """Returns a row beside its foreseen step.

    Args:
        row: the measurement.
        run: of its program.
        by: where the operations come from.
        efficiencies: the constants.
    """
    cluster = cluster_of(row)
    assert cluster is not None
    step = planned_step(run, cluster, efficiencies)
    metric, value = _measured(row)
    return Timed(row, by, metric, value, _foreseen(row, run, cluster, step, metric), step)


def _measured(row: Mapping[str, Any]) -> tuple[str, float]:
    if row.get("tokens_per_s_per_gpu"):
        return "tokens_per_s", row["tokens_per_s_per_gpu"]
    if row.get("samples_per_s") and row.get("seq_len"):
        return "tokens_per_s", row["samples_per_s"] * row["seq_len"] / row["gpus"]
    if row.get("step_time_s") and row.get("grad_accum"):
        replicas = row["gpus"] / (row["tensor_parallel"] * row["sequence_parallel"])
        tokens = row["micro_batch"] * row["grad_accum"] * row["seq_len"] * replicas
        return "tokens_per_s", tokens / row["step_time_s"] / row["gpus"]
    if row.get("tflops_per_gpu"):
        return "tflops", row["tflops_per_gpu"]
    return ("mfu", row["mfu"]) if row.get("mfu") else ("", 0.0)


def _foreseen(row: Mapping[str, Any], run: ForeseenRun, cluster: Cluster, step: PlannedStep, metric: str) -> float:
    if metric == "tokens_per_s":
        return (step.tokens_per_s or 0.0) / row["gpus"]
    rate = model_flops(run) / step.seconds
    if metric == "mfu":
        return rate / cluster.device.peak(run.formats[0])
    again = any(word in str(row.get("tflops_def")).lower() for word in _RECOMPUTED)
    return rate / 1e12 * (4 / 3 if again and row.get("activation_checkpointing") is not False else 1)


def runs_of(
    rows: Sequence[Mapping[str, Any]], only_formulas: bool, store: Path = STORE
) -> dict[int | str, tuple[ForeseenRun, str]]:
    """Returns the operations of each row, and where they come from.

    A group has one origin: foreseen runs if the files of runs have all of the group's programs, formulas otherwise. A
    row for which neither can be computed is left out.
    """
    runs: dict[int | str, tuple[ForeseenRun, str]] = {}
    for members in groups(rows, wide_key).values():
        found = [None if only_formulas else _run_of(row, store) for row in members]
        for row, run in zip(members, found, strict=True):
            if None not in found and run is not None:
                whole = replace(run, accumulation=row.get("grad_accum") or 1)
                runs[row["id"]] = _with_its_software(row, whole), "foreseen run"
                continue
            with suppress(*MISTAKES):
                runs[row["id"]] = _with_its_software(row, formula_run(row)), "formulas"
    return runs


def _with_its_software(row: Mapping[str, Any], run: ForeseenRun) -> ForeseenRun:
    """Returns a run with the kernels of a row's own torch, and compiled if the row was."""
    torch = next((version for words, version in _TORCH.items() if words in row["source"]), _USUAL_TORCH)
    run = replace(run, versions={"torch": torch})
    if not row.get("compiled"):
        return run
    # FSDP gathers a whole layer, so kernels may cross the modules in it.
    crosses = _PARTITIONS not in row["framework"].lower()
    return replace(fused(replace(run, stage=0) if crosses else run), stage=run.stage)


def _run_of(row: Mapping[str, Any], store: Path) -> ForeseenRun | None:
    try:
        return run_of(program_for_speed(row), store)
    except MISTAKES:
        return None


def wide_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Same source, model, devices and network."""
    return tuple(str(row.get(name)) for name in ("source", "model", "gpu_kind", "gpus", "interconnect"))


def narrow_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """The same program besides: shapes, length of sequences, compiled or not, whose code."""
    words = row["framework"].lower()
    code = next((name for name in ("megatron", "hf ") if name in words), "")
    shapes = ("layers", "hidden", "seq_len", "compiled", "loss")
    return (*wide_key(row), *(str(row.get(name)) for name in shapes), code)


def groups(
    rows: Sequence[Mapping[str, Any]], key: Callable[[Mapping[str, Any]], tuple[Any, ...]]
) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    """Returns the rows by a key."""
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return found


def order_of(members: Sequence[Timed]) -> dict[str, Any]:
    """Returns how the foreseen order of a group agrees with the measured one.

    The first choice is the row that is foreseen to be the fastest. If several are, their mean counts.
    """
    measured, foreseen = [each.measured for each in members], [each.foreseen for each in members]
    first = [each.measured for each in members if each.foreseen > max(foreseen) * (1 - 1e-6)]
    one = members[0].row
    return {
        "source": one["source"],
        "model": one["model"],
        "device": f"{one['gpus']} x {one['gpu_kind']}",
        "rows": len(members),
        "by": members[0].by,
        "rank_correlation": _rounded(rank_correlation(measured, foreseen)),
        "lost_by_first_choice": _rounded(1 - fmean(first) / max(measured)),
        "spread_measured": _rounded(max(measured) / min(measured)),
    }


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Returns Spearman's coefficient, with mean ranks for ties; None if one side is all ties."""
    ranks = [_ranks(each) for each in (one, other)]
    means = [fmean(each) for each in ranks]
    squares = [sum((rank - mean) ** 2 for rank in each) for each, mean in zip(ranks, means, strict=True)]
    if not all(squares):
        return None
    products = sum((a - means[0]) * (b - means[1]) for a, b in zip(*ranks, strict=True))
    return products / math.sqrt(squares[0] * squares[1])


def _ranks(values: Sequence[float]) -> list[float]:
    # Differences below a millionth are rounding.
    return [
        fmean(
            place
            for place, other in enumerate(sorted(values))
            if abs(other - value) <= 1e-6 * max(abs(value), abs(other))
        )
        for value in values
    ]


def summary(found: Sequence[Timed], key: Callable[[Mapping[str, Any]], tuple[Any, ...]]) -> dict[str, Any]:
    """Returns the figures over all groups of two rows or more."""
    by_id = {each.row["id"]: each for each in found}
    members = [
        [by_id[row["id"]] for row in rows]
        for rows in groups([each.row for each in found], key).values()
        if len(rows) > 1
    ]
    orders = [order_of(each) for each in members]
    decided = [each for each in orders if each["rank_correlation"] is not None]
    large = [each for each in decided if each["rows"] > 3]

    def over(some: Sequence[Mapping[str, Any]], of: Callable[[list[float]], float], name: str) -> float | None:
        return _rounded(of([each[name] for each in some])) if some else None

    return {
        "groups": len(orders),
        "rows": sum(each["rows"] for each in orders),
        "not_told_apart": len(orders) - len(decided),
        "rank_correlation_mean": over(decided, fmean, "rank_correlation"),
        "rank_correlation_median": over(decided, median, "rank_correlation"),
        "rank_correlation_mean_of_4_rows_or_more": over(large, fmean, "rank_correlation"),
        "groups_of_0.8_or_more": sum(each["rank_correlation"] >= BARS["rank_correlation"] for each in decided),
        "lost_by_first_choice_median": over(orders, median, "lost_by_first_choice"),
        "lost_by_first_choice_mean": over(orders, fmean, "lost_by_first_choice"),
        "each": orders,
    }


def absolute(found: Sequence[Timed]) -> dict[str, Any]:
    """Returns the absolute error, and how often the 90 % interval has the measured value."""
    sources: dict[str, list[float]] = defaultdict(list)
    for each in found:
        sources[f"{each.row['source']} ({each.row['gpu_kind']})"].append(each.error)
    if not found:
        return {"rows": 0}
    inside = [abs(each.error) <= math.log(each.step.high / each.step.seconds) for each in found]
    return {
        "rows": len(found),
        "median_error": _rounded(median(abs(math.expm1(each.error)) for each in found)),
        "median_of_logarithm": _rounded(median(each.error for each in found)),
        "within_90": _rounded(sum(inside) / len(inside)),
        "by_source": {
            name: {"rows": len(errors), "median_of_logarithm": _rounded(median(errors))}
            for name, errors in sorted(sources.items())
        },
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def compared(
    rows: Sequence[Mapping[str, Any]],
    efficiencies: Efficiencies,
    only_formulas: bool,
    store: Path = STORE,
    code: str = "",
) -> dict[str, Any]:
    """Returns all results.

    Args:
        rows: measurements.
        efficiencies: the constants.
        only_formulas: whether no foreseen run is taken.
        store: a file of runs, which counts besides the committed one.
        code: a mark of the code that foresees. Rows with runs of other code are not compared. Empty for any.
    """
    usable = [row for row in rows if not left_out(row)]
    older = [row for row in usable if code and not only_formulas and is_older(program_for_speed(row), code, store)]
    usable = [row for row in usable if row not in older]
    runs, found, failed = runs_of(usable, only_formulas, store), [], {}
    for row in usable:
        try:
            found.append(timed(row, *runs[row["id"]], efficiencies))
        except MISTAKES as error:
            failed[row["id"]] = f"{type(error).__name__}: {error}"
    reasons = Counter(reason for row in rows if (reason := left_out(row)) not in ("", "no throughput"))
    reasons.update({OLDER: len(older)} if older else {})
    return {
        "code": code,
        "bars": BARS,
        "constants": {name: getattr(efficiencies, name).value for name in CONSTANTS},
        "operations_by": dict(Counter(each.by for each in found)),
        "left_out": dict(sorted(reasons.items())),
        "failed": failed,
        "by_configuration_alone": summary(found, narrow_key),
        "with_length_and_code": summary(found, wide_key),
        "absolute": absolute(found),
        "rows": [
            {
                "id": each.row["id"],
                "metric": each.metric,
                "measured": each.measured,
                "foreseen": float(f"{each.foreseen:.4g}"),
                "bound": each.step.bound,
                "by": each.by,
            }
            for each in found
        ],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the comparison and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=ROWS, help="another file of rows with the same fields")
    parser.add_argument("--formulas", action="store_true", help="take no foreseen run, formulas alone")
    parser.add_argument("--to", type=Path, default=RESULTS)
    chosen = parser.parse_args(arguments)
    store = store_of(chosen.rows, STORE)
    results = compared(read_rows(chosen.rows), Efficiencies(), chosen.formulas, store, code())
    chosen.to.write_text(json.dumps(results, indent=1) + "\n")
    shown = {name: value for name, value in results.items() if name != "rows"}
    for name in ("by_configuration_alone", "with_length_and_code"):
        shown[name] = {key: value for key, value in results[name].items() if key != "each"}
    print(json.dumps(shown, indent=1))
    if older := results["left_out"].get(OLDER):
        raise SystemExit(
            f"{older} rows are left out, because older code has foreseen them. row_runs foresees them again."
        )


if __name__ == "__main__":
    main()
