"""What the first optimizer steps of a rank did: losses, norms of gradients, and the change of the weights by module.

Two trials train alike if these agree (`trial_lib/study/loss_agreement.py`). No copy of the weights is kept. They are
summed with random signs before the first step and after some updates. These sums are linear, so their difference is a
projection of the change.
"""

import contextlib
import functools
import itertools
import math
import re
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zerotune.trial_lib.messages.measurement import WeightChange
from zerotune.trial_lib.rank.rank_consensus import total
from zerotune.trial_lib.rank.tensor_parallel import Shard, expert_group, shards, tensor_parallel_size

# A fingerprint that shows whether two trials have started from the same weights, however each keeps them

_ELEMENTS = 64  # the first elements of each parameter
# Each parameter has its own factor, so that two that have changed places show.
_WEIGHTS = 7


class InitialWeights:
    """The weights of an engine, which has not trained, at the moment when this object is made."""

    def __init__(self, engine: Any) -> None:
        self._sums: tuple[float, float] | None = (0.0, 0.0)
        divided = shards(engine)
        for number, parameter in _numbered(engine.module):
            found, shard = _part(parameter), divided.get(id(parameter))
            if found is None or (shard is None and id(parameter) in divided):
                self._sums = None
                return
            start, part = found
            if shard is not None:
                places = shard.places(torch.arange(start, start + part.numel(), device=part.device))
                part = part[places < _ELEMENTS]
            else:
                part = part[: max(0, _ELEMENTS - start)]
            # Rounded to the coarsest format in which any engine keeps them.
            values = part.to("cpu", torch.bfloat16).double() * (1 + number % _WEIGHTS)
            holders = _holders(engine, parameter, shard)
            before, squares_before = self._sums
            self._sums = (
                before + float(values.sum()) / holders,
                squares_before + float(values.square().sum()) / holders,
            )

    def over_ranks(self, engine: Any) -> list[float]:
        """Sum and sum of squares over all ranks; empty if unknown. Every rank takes part."""
        *sums, unknown = total([*(self._sums or (0.0, 0.0)), float(self._sums is None)], engine)
        return [] if unknown else sums


def _numbered(module: Any) -> Iterator[tuple[int, Any]]:
    # The parameters of this rank, each with a number that it has in every layout. A stage of a pipeline has names of
    # the whole model (deepspeed/runtime/pipe/module.py). Stages with tied layers have copies, of which one counts. In
    # other models a wrapper may change the names, so the order numbers the parameters. Experts come last: a rank may
    # have some of them, and all ranks have the other parameters.
    if not hasattr(module, "_layer_specs"):
        experts = list(_experts(module))
        of_experts = {id(parameter) for _, parameter in experts}
        yield from enumerate(each for each in module.parameters() if id(each) not in of_experts)
        yield from experts
        return
    for name, parameter in module.named_parameters():
        if not getattr(parameter, "ds_pipe_replicated", False):
            yield zlib.crc32(name.encode()), parameter


def _experts(module: Any) -> Iterator[tuple[int, Any]]:
    # An expert has its number on whichever rank it is. Each rank of a group has as many experts of a layer as the
    # others, in the order of the ranks (deepspeed/moe/layer.py).
    layers = (each.deepspeed_experts for each in module.modules() if hasattr(each, "deepspeed_experts"))
    for layer, experts in enumerate(layers):
        for place, expert in enumerate(experts):
            for position, parameter in enumerate(each for each in expert.parameters() if expert_group(each)):
                number = place + len(experts) * _expert_rank(parameter)
                yield zlib.crc32(f"{layer}.{number}.{position}".encode()), parameter


def _expert_rank(parameter: Any) -> int:
    from deepspeed.utils import groups

    return int(groups._get_expert_parallel_rank(expert_group(parameter)))


def _holders(engine: Any, parameter: Any, shard: Shard | None, is_partitioned: bool = False) -> int:
    # How many ranks keep the same part of a parameter. An expert's is kept by a part of the replicas, and MiCS
    # partitions over a part of them.
    replicas, name = int(getattr(engine, "seq_dp_world_size", engine.dp_world_size)), expert_group(parameter)
    if name:
        from deepspeed.utils import groups

        replicas = int(groups._get_expert_data_parallel_world_size(name))
    if hasattr(parameter, "ds_process_group"):
        replicas = max(1, replicas // torch.distributed.get_world_size(parameter.ds_process_group))
    elif is_partitioned:
        replicas = 1
    return replicas if shard is not None else replicas * tensor_parallel_size(engine)


def _part(parameter: Any) -> tuple[int, torch.Tensor] | None:
    # This rank's part of a parameter that is computed with, and where it begins; None if not in memory.
    partition = getattr(parameter, "ds_tensor", None)
    if partition is None:
        # A part of FSDP2's would be gathered to be read.
        is_out_of_reach = parameter.is_meta or hasattr(parameter, "to_local")
        return None if is_out_of_reach else (0, parameter.detach().reshape(-1))
    if getattr(getattr(partition, "status", None), "name", "") != "AVAILABLE":
        return None
    start = torch.distributed.get_rank(parameter.ds_process_group) * partition.numel()
    # The last partition may be longer than the rest of the parameter.
    part: torch.Tensor = partition.reshape(-1)[: max(0, parameter.ds_numel - start)]
    return start, part.detach()


# The weights that the optimizer updates, and their sums

_BUCKETS = 8  # sums of a module: elements are summed by their place modulo this number
_MOMENTA = ("exp_avg", "momentum_buffer")  # in an optimizer's state: the gradients, before Adam divides them
_MODULES, _FEWEST = 64, 16  # at most, and enough; neighbours are merged if there are more
_PERIOD = 65_521  # of the signs; a prime, so that rows of a matrix do not share theirs
# In a DeepSpeed that keeps its weights elsewhere. They are not compared then.
_KEPT_ELSEWHERE = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
# It may be that of scaled gradients (deepspeed/runtime/fp16/unfused_optimizer.py).
_NORM_OF_SCALED = "FP16_UnfusedOptimizer"
# Wrappers that a candidate may put around modules
_WRAPPERS = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module)\.")


@functools.cache
def _signs(device: torch.device) -> torch.Tensor:
    drawn = torch.randint(0, 2, (_PERIOD,), generator=torch.Generator().manual_seed(1))
    return (2.0 * drawn - 1.0).float().to(device)


def _signed(values: torch.Tensor, start: int, number: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    # Pieces of some neighbouring elements of a parameter: the place of the first, the elements, and their signs.
    signs, done = _signs(values.device), 0
    while done < values.numel():
        at = (start + done + number * 7919) % _PERIOD
        count = min(values.numel() - done, _PERIOD - at)
        yield start + done, values[done : done + count], signs[at : at + count]
        done += count


def _summed(values: torch.Tensor, start: int, number: int) -> torch.Tensor:
    # The sums of some neighbouring elements, as float64 on their device
    sums = torch.zeros(_BUCKETS, dtype=torch.float64, device=values.device)
    for place, piece, signs in _signed(values, start, number):
        before = place % _BUCKETS
        after = -(before + piece.numel()) % _BUCKETS
        padded = torch.nn.functional.pad(piece.float() * signs, (before, after))
        sums += padded.view(-1, _BUCKETS).sum(0, dtype=torch.float64)
    return sums


def modules_of(names: list[str]) -> tuple[list[str], list[int]]:
    """Names of the modules that the weights are summed by, and for each parameter's name the number of its module."""
    paths = [_WRAPPERS.sub("", name).split(".")[:-1] for name in names]
    cut = [".".join(path[:1]) for path in paths]
    for depth in itertools.count(2):
        deeper = [".".join(path[:depth]) for path in paths]
        if deeper == cut or (len(set(deeper)) > _MODULES and len(set(cut)) >= _FEWEST):
            break
        cut = deeper
        if len(set(cut)) > _MODULES:
            break
    found = list(dict.fromkeys(cut))
    share = max(1.0, len(found) / _MODULES)
    merged = {name: int(place / share) for place, name in enumerate(found)}
    firsts = {number: name for name, number in reversed(merged.items())}
    return [firsts[number] for number in sorted(firsts)], [merged[name] for name in cut]


class Weights:
    """The weights that an engine's optimizer updates, by module, in the widest format that the engine keeps them in."""

    def __init__(self, engine: Any) -> None:
        module = engine.module
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        numbered = list(_numbered(module))
        if hasattr(module, "_layer_specs") or any(expert_group(each) for _, each in numbered):
            # No rank knows the names of all parts.
            self.modules, places = [""], [0] * len(numbered)
        else:
            self.modules, places = modules_of([names[id(parameter)] for _, parameter in numbered])
        self._engine = engine
        self._divided = shards(engine)
        self._all = [each for _, each in numbered]
        self._parameters = [
            (place, number, parameter)
            for place, (number, parameter) in zip(places, numbered, strict=True)
            if parameter.requires_grad
        ]

    def sums(self) -> torch.Tensor | None:
        """This rank's part of the sums of weights and of momenta, by module; None if a part is out of reach."""
        try:
            return self._sums()
        except _KEPT_ELSEWHERE:
            return None

    def _sums(self) -> torch.Tensor | None:
        engine, masters = self._engine, _masters(self._engine.optimizer)
        states = _states(engine.optimizer)
        by_device: dict[torch.device, torch.Tensor] = {}
        for place, number, parameter in self._parameters:
            # A divided parameter's elements are not neighbours.
            master = None if id(parameter) in self._divided else _master(parameter, self._engine.optimizer, masters)
            if master is None:
                return None
            holders = _holders(engine, parameter, None, master.is_partitioned)
            device = master.whole.device
            shape = 2, len(self.modules), _BUCKETS
            sums = by_device.setdefault(device, torch.zeros(shape, dtype=torch.float64, device=device))
            sums[0, place] += _summed(master.of(master.whole), master.start, number) / holders
            state = states.get(master.whole) or {}
            momentum = next((state[name] for name in _MOMENTA if torch.is_tensor(state.get(name))), None)
            if momentum is not None and momentum.numel() == master.whole.numel():
                sums[1, place] += _summed(master.of(momentum), master.start, number) / holders
        every = [sums.to(engine.device) for sums in by_device.values()]
        return sum(every[1:], every[0]) if every else torch.zeros(2, len(self.modules), _BUCKETS)

    def round(self, share: float) -> None:
        """Moves each weight, frozen or not, by this share of itself, up or down, in all its copies alike."""
        with contextlib.suppress(*_KEPT_ELSEWHERE):
            self._round(share)

    def _round(self, share: float) -> None:
        masters = _masters(self._engine.optimizer)
        for number, parameter in enumerate(self._all):
            part = _part(parameter)
            if part is None or id(parameter) in self._divided or not part[1].is_floating_point():
                continue
            start, values = part
            for _, piece, signs in _signed(values, start, number):
                piece.mul_(1.0 + share * signs)
            master = _master(parameter, self._engine.optimizer, masters) if parameter.requires_grad else None
            if master is None:
                continue
            kept = master.of(master.whole)
            if kept.numel() and kept.data_ptr() != values.data_ptr():
                kept.copy_(values[master.start - start : master.start - start + kept.numel()])


@dataclass(frozen=True)
class _Master:
    # This rank's part of a parameter as the optimizer updates it

    whole: torch.Tensor  # the tensor that the optimizer updates, by which it has its states
    start: int = 0  # where the part begins in the parameter
    begin: int = 0  # where the part begins in the tensor
    count: int | None = None  # elements of the part; None for all
    is_partitioned: bool = False  # whether each rank of a replica has another part

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.detach().reshape(-1)
        return flat if self.count is None else flat[self.begin : self.begin + self.count]


def _masters(optimizer: Any) -> dict[int, _Master]:
    # What DeepSpeed's optimizers without ZeRO keep in 32 bits, by the id of the parameter
    found: dict[int, _Master] = {}
    groups = getattr(optimizer, "fp16_groups", None) or ()
    for parameters, copies in zip(groups, getattr(optimizer, "fp32_groups", ()), strict=False):
        found |= {id(parameter): _Master(copy) for parameter, copy in zip(parameters, copies, strict=False)}
    for parameters, flat in zip(groups, getattr(optimizer, "fp32_groups_flat", ()), strict=False):
        begin = 0
        for parameter in parameters:
            found[id(parameter)] = _Master(flat, begin=begin, count=parameter.numel())
            begin += parameter.numel()
    return found


def _master(parameter: Any, optimizer: Any, masters: Mapping[int, _Master]) -> _Master | None:
    if hasattr(parameter, "ds_tensor"):
        part = _part(parameter)
        if part is None or getattr(optimizer, "swap_optimizer", False):
            return None
        start, values = part
        group, begin, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
        return _Master(optimizer.fp32_partitioned_groups_flat[group], start, begin, values.numel(), True)
    if hasattr(parameter, "_hp_mapping"):
        mapping = parameter._hp_mapping
        if mapping is None:
            return _Master(parameter, count=0, is_partitioned=True)
        place, flats = mapping.hp_fragment_address, getattr(optimizer, "single_partition_of_fp32_groups", None)
        whole = (flats or optimizer.fp32_groups_flat_partition)[mapping.param_group_index]
        return _Master(whole, mapping.lp_fragment_address.start, place.start, place.numel, True)
    return masters.get(id(parameter), None if parameter.is_meta else _Master(parameter))


# The first optimizer steps, which show whether two configurations train alike

_MOST = 16
UPDATES = 3
"""The weights are compared after this many updates, which every trial counts. A warm-up has no rate in the first."""


def _states(optimizer: Any) -> Mapping[Any, Any]:
    # The optimizer's states, by the tensors that it updates
    found: Mapping[Any, Any] = getattr(getattr(optimizer, "optimizer", optimizer), "state", {})
    return found


def _corrections(optimizer: Any) -> list[float]:
    # By which Adam has corrected the bias of its averages in the last updates, by its own count of them
    groups = getattr(optimizer, "param_groups", ())
    counts = [
        each["step"] for each in (*_states(optimizer).values(), *groups) if isinstance(each, Mapping) and "step" in each
    ]
    if not counts or not groups or "betas" not in groups[0]:
        return []
    # Other optimizers than Adam have three betas (Adan), or a beta of 1.
    with contextlib.suppress(ArithmeticError, TypeError, ValueError):
        last, (first, second) = int(counts[0]), groups[0]["betas"]
        steps = range(max(1, last - UPDATES + 1), last + 1)
        return [math.sqrt(1.0 - second**step) / (1.0 - first**step) for step in steps]
    return []


class FirstSteps:
    """The first optimizer steps of this rank. What they bring stays on its device."""

    def __init__(self, weighs: bool = False) -> None:
        self._weighs = weighs  # whether it notes gradients and weights too
        self._losses: list[torch.Tensor] = []
        self._applied: list[bool] = []
        self._norms: list[Any] = []
        self._initial: InitialWeights | None = None
        self._weights: Weights | None = None
        self._before: torch.Tensor | None = None
        self._after: torch.Tensor | None = None
        self._norm: torch.Tensor | None = None
        self._corrections: list[float] = []
        self._seconds = 0.0

    def begin(self, engine: Any) -> None:
        self._initial = InitialWeights(engine)

    def training_begins(self, engine: Any, rounding: float | None) -> None:
        """Notes the weights. With `rounding`, it first moves each by that share of itself.

        It then draws other random numbers too. The first batch has arrived, so the order of the data is drawn.
        """
        if not self._weighs:
            return
        started = time.monotonic()
        self._weights = Weights(engine)
        if rounding is not None:
            self._weights.round(rounding)
            torch.manual_seed(torch.initial_seed() + 1)
        self._before = self._weights.sums()
        self._seconds += time.monotonic() - started

    def step_begins(self, engine: Any) -> None:
        """Notes the gradients' norm if DeepSpeed does not (in 32 bits without ZeRO), before a step that counts."""
        self._norm = None
        is_noted = hasattr(engine.optimizer, "_global_grad_norm") or tensor_parallel_size(engine) > 1
        is_too_late = getattr(engine, "clips_before_its_step", False)
        if not self._weighs or is_noted or is_too_late or len(self._norms) >= UPDATES - 1:
            return
        gradients = [each.grad for each in engine.module.parameters() if each.grad is not None]
        if gradients and not any(each.is_sparse for each in gradients):
            self._norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in gradients]))

    def add(self, loss: torch.Tensor | None, engine: Any, applied: bool = True) -> None:
        """Adds the next step's loss, if the code shows one. Not `applied`: fp16's loss scaling has skipped the step."""
        if len(self._applied) >= _MOST:
            return
        self._applied.append(applied)
        if loss is not None:
            self._losses.append(loss)
        if not self._weighs:
            return
        started = time.monotonic()
        if applied and len(self._norms) < UPDATES:
            norm = engine.get_global_grad_norm() if self._norm is None else self._norm
            is_scaled = type(engine.optimizer).__name__ == _NORM_OF_SCALED
            self._norms.append(0.0 if norm is None or is_scaled else norm)
        if applied and sum(self._applied) == UPDATES and self._weights is not None:
            self._after, self._corrections = self._weights.sums(), _corrections(engine.optimizer)
        self._seconds += time.monotonic() - started

    def keep(self, count: int) -> None:
        del self._losses[count:], self._applied[count:]

    @property
    def skipped(self) -> list[int]:
        # Ranks skip a step together.
        return [number for number, applied in enumerate(self._applied, 1) if not applied]

    def over_ranks(self, engine: Any) -> dict[str, Any]:
        """The fields of a measurement. Every rank takes part."""
        return {
            "initial_weights": [] if self._initial is None else self._initial.over_ranks(engine),
            "losses": self._means(engine),
            "skipped_steps": self.skipped,
            "gradient_norms": [norm if math.isfinite(norm) else 0.0 for norm in map(float, self._norms)],
            "weight_change": self._change(engine),
        }

    def _means(self, engine: Any) -> list[float]:
        # The mean of each loss over all ranks, up to the first that is not finite
        own = [float(loss) for loss in self._losses]
        missing = [0.0] * (_MOST - len(own))
        # Every rank needs a list of the same length, however many losses it has.
        summed = total([*own, *missing, *(1.0 for _ in own), *missing], engine)
        means = [loss / count for loss, count in zip(summed[:_MOST], summed[_MOST:], strict=True) if count]
        return list(itertools.takewhile(math.isfinite, means))

    def _change(self, engine: Any) -> WeightChange | None:
        if not self._weighs:
            return None
        weights, before, after = self._weights, self._before, self._after
        # Every rank brings as many numbers as the others.
        (unknown,) = total([float(weights is None or before is None or after is None)], engine)
        if unknown or weights is None or before is None or after is None:
            return None
        # The momenta are none before the first step.
        summed = torch.stack((after[0] - before[0], after[1])).reshape(-1).tolist()
        numbers = [float(f"{value:.6g}") for value in total(summed, engine)]
        if not all(map(math.isfinite, numbers)):
            return None
        rows = [numbers[place : place + _BUCKETS] for place in range(0, len(numbers), _BUCKETS)]
        modules = weights.modules
        momenta = rows[len(modules) :] if any(map(any, rows[len(modules) :])) else []
        return WeightChange(
            updates=UPDATES,
            modules=modules,
            sums=rows[: len(modules)],
            momenta=momenta,
            is_linear=all(set(state) <= {"momentum_buffer"} for state in _states(engine.optimizer).values()),
            corrections=self._corrections,
            seconds=round(self._seconds, 6),
        )
