"""The layouts that a program can have, and the best of them on devices that are not there. Pure."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from typing import Any

from zerotune.trial_lib.deepspeed_config.layout import (
    AUTOEP,
    AUTOTP,
    Layout,
    ModelShape,
    empty_stages,
    size_of,
    undivided_devices,
    undivided_experts,
    undivided_heads,
    unshared_heads,
    unshared_tokens,
)
from zerotune.trial_lib.messages.foreseen_run import ForeseenRun
from zerotune.trial_lib.messages.turned import CHECKPOINTING
from zerotune.trial_lib.plan.answer import EQUAL
from zerotune.trial_lib.plan.decoder import DecoderShape, decoder_of
from zerotune.trial_lib.plan.devices import Cluster
from zerotune.trial_lib.plan.evaluation import SAFE
from zerotune.trial_lib.plan.laid_out import LaidOutDecoder, Writing
from zerotune.trial_lib.plan.plan_record import LIKELY, PlanArguments, PlannedDevices, PlannedLayout, PlannedRange
from zerotune.trial_lib.plan.step_time import kind_of, step_of
from zerotune.trial_lib.search.arms import RequestedKnob

_MOST = 8  # that are named
_LARGEST = 256  # samples of a micro-batch
_GROUPS = (1, 2, 4, 8)
_KINDS = {AUTOTP: "tensor", AUTOEP: "expert"}


@dataclass(frozen=True, kw_only=True)
class LayoutChoices:
    """What a program can have."""

    tensors: Sequence[int] = (1,)
    sequences: Sequence[int] = (1,)
    pipelines: Sequence[int] = (1,)
    experts: Sequence[int] = (1,)
    zero_stages: Collection[int] = (0, 1, 2, 3)
    recomputed: Sequence[int] = (0,)  # layers
    by_autotp: bool = True  # whether DeepSpeed divides the linear layers, and not the program itself
    by_autoep: bool = True  # likewise the experts
    micro_batch: int | None = None  # samples, if every configuration has to have as many
    most: int = _LARGEST  # samples of a micro-batch
    zero: Mapping[str, Any] = field(default_factory=dict)  # the user's section `zero_optimization`
    writing: Writing = field(default_factory=Writing)

    @classmethod
    def of(
        cls,
        run: ForeseenRun,
        shape: DecoderShape,
        cluster: Cluster,
        requests: Sequence[RequestedKnob],
        zero_stages: Collection[int],
        most: int | None = None,
    ) -> "LayoutChoices":
        """Of the sizes that are requested, and of AutoTP's and AutoEP's groups if the program has no other ones."""
        asked = {_kind(each): {size for value in each.values if (size := size_of(value))} for each in requests}
        kinds, program, typed = {each.layout for each in requests}, run.program, as_typed(run, shape, cluster)
        by_autotp = "tensor" not in kinds and typed.tensor in (1, Layout.of(run.ds_config).tensor)
        by_autoep = "expert" not in kinds and not program.get("has_experts")
        counts = {"none": 0, "every_second": shape.layers // 2, "full": shape.layers}
        turnable = program.get("turnable", {}).get(CHECKPOINTING) or ()

        def sizes(kind: str, own: int, of_deepspeed: Sequence[int] = ()) -> list[int]:
            return sorted({own, *asked.get(kind, of_deepspeed)})

        return cls(
            tensors=sizes("tensor", typed.tensor, () if shape.experts or run.is_pipeline or not by_autotp else _GROUPS),
            sequences=sizes("sequence", typed.sequence),
            pipelines=sizes("pipeline", typed.stages),
            experts=sizes("expert", typed.expert, _GROUPS if shape.by_autoep and by_autoep else ()),
            zero_stages=zero_stages,
            recomputed=sorted({typed.recomputed, *(counts[value] for value in turnable if value in counts)}),
            by_autotp=by_autotp,
            by_autoep=by_autoep,
            micro_batch=run.micro_batch if program.get("fixed_batch") else None,
            most=most or _LARGEST,
            zero=typed.zero,
            writing=Writing.of(run, typed),
        )

    def on(self, shape: DecoderShape, cluster: Cluster, batch: int) -> Iterator[LaidOutDecoder]:
        """All that share a global batch (samples)."""
        sizes = product(self.tensors, self.sequences, self.pipelines, self.experts)
        for tensor, sequence, pipeline, expert in sizes:
            layout = Layout(tensor=tensor, sequence=sequence, pipeline=pipeline, expert=expert)
            if not self._is_possible(layout, shape, cluster):
                continue
            of_replica, rest = divmod(batch, cluster.ranks // layout.ranks)
            if rest or not of_replica:
                continue
            for zero_stage, recomputed in product(self._stages(layout), self.recomputed):
                for micro_batch in self._micro_batches(of_replica):
                    yield LaidOutDecoder(
                        shape=shape,
                        cluster=cluster,
                        tensor=tensor,
                        sequence=sequence,
                        stages=pipeline,
                        expert=expert,
                        zero_stage=zero_stage,
                        micro_batch=micro_batch,
                        accumulation=of_replica // micro_batch,
                        recomputed=recomputed,
                        divides_vocabulary=not self.by_autotp,
                        by_deepspeed=True,
                        zero=self.zero,
                        writing=self.writing,
                    )

    def _is_possible(self, layout: Layout, shape: DecoderShape, cluster: Cluster) -> bool:
        model = ModelShape((shape.heads, shape.kv_heads), shape.layers, (shape.experts or 1,), shape.tokens)
        undivided = (
            undivided_devices(layout, cluster.ranks)
            or undivided_heads(layout, model)
            or unshared_heads(layout, model)
            or unshared_tokens(layout, model)
            or empty_stages(layout, model)
            or undivided_experts(layout, model)
        )
        kinds = [layout.sequence, layout.expert, layout.pipeline, *([layout.tensor] if self.by_autotp else [])]
        # AutoTP divides no stages of a pipeline, and neither Ulysses nor experts are known together with others.
        return not undivided and layout.tensor <= cluster.per_host and sum(size > 1 for size in kinds) <= 1

    def _stages(self, layout: Layout) -> list[int]:
        # DeepSpeed's own mixtures have no stage 3 (deepspeed/runtime/engine.py), and pipelines stages 0 and 1.
        most = 1 if layout.pipeline > 1 else 3 if self.by_autoep else 2
        return [stage for stage in self.zero_stages if stage <= most]

    def _micro_batches(self, of_replica: int) -> list[int]:
        if self.micro_batch is not None:
            return [self.micro_batch] if of_replica % self.micro_batch == 0 else []
        return [size for size in range(1, min(of_replica, self.most) + 1) if of_replica % size == 0]


def as_typed(run: ForeseenRun, shape: DecoderShape, cluster: Cluster, writing: Writing | None = None) -> LaidOutDecoder:
    """A run's own layout, on as many devices of the cluster's kind as it has."""
    groups = max(1, run.replicas * run.pipeline_stages * run.sequence_ranks)
    layout = Layout.of(run.ds_config)
    last = step_of(run).last

    def flops(moment: str, *kinds: str) -> float:
        passes = (stretch.operations for stretch in last if stretch.moment == moment)
        return sum(each.flops for each in chain.from_iterable(passes) if kind_of(each) in kinds)

    # A backward pass has the products of two forward passes, and of a third one for what it computes again.
    again = flops("backward", "matmul") / (flops("forward", "matmul") or 1.0) - 2
    scores = {} if flops("forward", "attention", "whole_attention") else {"scores_moved": 14.0, "scores_kept": 8.0}
    return LaidOutDecoder(
        shape=shape,
        cluster=Cluster(device=cluster.device, per_host=run.world),
        tensor=max(1, run.world // groups),
        sequence=run.sequence_ranks,
        stages=run.pipeline_stages,
        expert=layout.expert,
        zero_stage=run.stage,
        micro_batch=run.micro_batch,
        accumulation=run.accumulation,
        recomputed=shape.layers * max(0, min(2, round(2 * again))) // 2,
        divides_vocabulary=False,
        by_deepspeed=True,
        writing=writing or Writing(torch=run.versions.get("torch", ""), **scores),
        zero=run.ds_config.get("zero_optimization") or {},
    )


def _kind(request: RequestedKnob) -> str:
    return request.layout or _KINDS.get(request.path, "")


def best_layouts(every: Iterable[LaidOutDecoder], capacity: float) -> list[LaidOutDecoder]:
    """The fastest that fit, each at its best ZeRO stage, micro-batch and number of recomputed layers.

    `capacity` is in bytes. A layout that surely fits in none of these ways may have one that fits at even odds.
    """
    alike: dict[tuple[Any, ...], dict[tuple[int, int], list[LaidOutDecoder]]] = {}
    for each in every:
        groups = each.tensor, each.sequence, each.stages, each.expert, each.divides_norms, each.writing
        alike.setdefault(groups, {}).setdefault((each.zero_stage, each.recomputed), []).append(each)
    best = []
    for ways in alike.values():
        for likely in (SAFE, LIKELY):
            found = [one for sizes in ways.values() if (one := _fastest(sizes, likely, capacity))]
            if found:
                best.append(_better(found))
                break
    return sorted(best, key=lambda each: (each.fits(capacity) < SAFE, -each.step.samples_per_s))


def _fastest(sizes: Sequence[LaidOutDecoder], likely: float, capacity: float) -> LaidOutDecoder | None:
    # Of micro-batches. Speed rises with them, but that of a pipeline falls when few are left.
    best = None
    for each in sorted(sizes, key=lambda each: -each.micro_batch):
        if each.fits(capacity) < likely:
            continue
        if best is not None and each.step.samples_per_s <= best.step.samples_per_s:
            break
        best = each
    return best


def _better(found: Sequence[LaidOutDecoder]) -> LaidOutDecoder:
    # The fastest; of those as fast the one that needs least memory.
    most = max(each.step.samples_per_s for each in found)
    return min((each for each in found if EQUAL * each.step.samples_per_s >= most), key=lambda each: each.bytes)


def with_layouts(
    devices: PlannedDevices,
    run: ForeseenRun,
    cluster: Cluster,
    batch: int,
    requests: Sequence[RequestedKnob],
    arguments: PlanArguments,
) -> PlannedDevices:
    """A table with the best layouts of a typed program for a global batch (samples), or the reason why it has none."""
    shape = decoder_of(run)
    if isinstance(shape, str):
        return devices.model_copy(update={"notes": (*devices.notes, f"No layouts are named: {shape}.")})
    choices = LayoutChoices.of(run, shape, cluster, requests, arguments.zero_stages, arguments.max_micro_batch)
    every = list(choices.on(shape, cluster, batch))
    layouts = planned_layouts(every, devices.usable)
    notes = (*devices.notes, *notes_on(devices, layouts, every, requests))
    return devices.model_copy(update={"layouts": layouts, "notes": notes})


def planned_layouts(every: Iterable[LaidOutDecoder], capacity: float) -> tuple[PlannedLayout, ...]:
    return tuple(_planned(each, capacity) for each in best_layouts(every, capacity)[:_MOST])


def _planned(each: LaidOutDecoder, capacity: float) -> PlannedLayout:
    return PlannedLayout(
        tensor=each.tensor,
        sequence=each.sequence,
        pipeline=each.stages,
        expert=each.expert,
        replicas=each.replicas,
        zero_stage=each.zero_stage,
        recomputed=each.recomputed,
        layers=each.shape.layers,
        micro_batch=each.micro_batch,
        accumulation=each.accumulation,
        fits=each.fits(capacity),
        bytes=each.bytes,
        tokens_per_s=PlannedRange.of_rate(each.step.samples_per_s * each.shape.tokens, each.step),
    )


# The sentences below the table.

LAYOUTS_BY = (
    "Layouts are foreseen by formulas. What a layer computes and keeps comes from your program's run. On public grids "
    "of other frameworks, speeds are 11 % off at the median unless a pipeline or a tensor-parallel group reaches over "
    "hosts. Those are 129 % off, and one in twenty was over 40 times slower: their intervals are as wide. The best of "
    "the first three of such a list is 2 % slower than the best of all at the mean up to four hosts, and 22 % beyond. "
    "Offload, and AutoTP with other groups, are not in the list."
)
"""How sure the table is: `python -m benchmarks.replay.layouts`."""


def notes_on(
    devices: PlannedDevices,
    layouts: Sequence[PlannedLayout],
    every: Sequence[LaidOutDecoder],
    requests: Sequence[RequestedKnob],
) -> tuple[str, ...]:
    """How sure the named layouts are, `every` being all that were looked at, and the requested sizes that none has."""
    if not layouts:
        return (f"None of {len(every)} layouts fits, by formulas.",)
    return tuple(filter(None, [LAYOUTS_BY, _beside_runs(devices, layouts), *_without(every, requests)]))


def _without(every: Sequence[LaidOutDecoder], requests: Sequence[RequestedKnob]) -> Iterator[str]:
    for each in requests:
        kind = _kind(each).replace("pipeline", "stages")
        sizes = {size for value in each.values if (size := size_of(value))} if kind else set()
        if lacking := [str(size) for size in sorted(sizes) if all(getattr(one, kind) != size for one in every)]:
            yield (
                f"No layout has {each.path.removeprefix('program.')} {' or '.join(lacking)}: it does not divide the "
                "devices, the batch, or the model."
            )


def _beside_runs(devices: PlannedDevices, layouts: Sequence[PlannedLayout]) -> str:
    # How formulas compare with the run of an arm that both have; empty if there is none.
    for each in layouts:
        arm = next((arm for arm in devices.arms if arm.label == f"z{each.zero_stage}" and arm.tokens_per_s), None)
        is_own = each.tensor == each.sequence == each.pipeline == each.expert == 1 and not each.recomputed
        if is_own and arm and arm.tokens_per_s and arm.peak and arm.micro_batch == each.micro_batch:
            ratio = each.tokens_per_s.value / arm.tokens_per_s.value
            return (
                f"Of {arm.label} without a layout they have {ratio:.2f} times the speed that its run has, and "
                f"{each.bytes / arm.peak.value:.2f} times the memory."
            )
    return ""
