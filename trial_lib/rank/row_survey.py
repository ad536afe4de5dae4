"""Finds whether the rows of a micro-batch depend on each other, in the model or in the loss.

It looks at one training micro-batch of the user's, after everything else has been measured. First the model runs
without autograd on some of its rows in each other's place. Copies of one row of the other half replace the rows of one
half, or of both. All these passes have the same shapes, module state and random draws, so dropout draws alike, and a
row that depends on no other gives the same output. A loss that adds up its rows is additive in the two halves:
f(a, b) + f(x, y) = f(a, y) + f(x, b).

A loss that the code computes from the engine's outputs is not computed again. Its second derivatives show the same:
those between the outputs of two halves are zero if the loss adds up its rows. A loss that is piecewise linear has none.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice, product
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import _disable_current_modes

from zerotune.trial_lib.messages.measurement import AcrossRows
from zerotune.trial_lib.rank.device import Device
from zerotune.trial_lib.rank.loader_batches import batch_sizes, tensors_in, with_tensors
from zerotune.trial_lib.rank.row_passes import ForwardPass, KeptState, RowSwaps, by_rows, change_of, sampled
from zerotune.trial_lib.rank.torch_functions import eagerly

# How two rows of one sample, or several of an output that belong to one row, may lie: side by side, or in blocks.
_LAYOUTS = (False, True)
# Numbers of an output's row, and of a module's, that are compared
_MOST_COMPARED, _FEW_COMPARED = 4096, 64
_MOST_ARGUMENTS = 4  # of a module that are compared
# The largest relative change of a row that is rounding, by the format: kernels may add in another order.
_ROUNDING = {"bfloat16": 3e-2, "float16": 5e-3, "tf32": 5e-3}
_ROUNDING_FP32 = 1e-4
# A change has to be this many times what a repeated pass changes.
_ABOVE_NOISE = 10.0
# Rounding of a loss, in units of its own format's precision: it adds up many numbers in 32 bits, and few in 16.
_UNITS, _UNITS_16 = 64.0, 4.0
# Mixed second derivatives are exactly zero if a loss adds up its rows.
_LEAST_MIXED = 1e-6
# Nodes of a graph between a loss and a part of it that the model returns too
_MOST_NODES = 64
_IGNORED_LABEL = -100
# The first and second derivatives of a loss take so many times the memory of the outputs.
_ROOM_FOR_LOSS = 8


class RowSurvey:
    """Looks at one micro-batch. Every rank takes part, at the same forward pass.

    It holds the outputs of that micro-batch until its backward pass, whose loss shows which of them matter.
    """

    def __init__(
        self,
        engine: Any,
        device: Device,
        rounding: float,  # the largest relative change of a row that is rounding
        per_sample: int,  # rows of a sample
        dimension: int,  # of the inputs, that has the rows
        most: Callable[[list[float]], list[float]],
    ) -> None:
        self._engine, self._device, self._most = engine, device, most
        self._rounding = rounding
        self._per_sample = max(1, per_sample)
        self._dimension = dimension
        self._rows = 0
        self._swaps: list[RowSwaps] = []
        self._passes: list[dict[str, ForwardPass]] = []  # by layout of samples
        self._counts: list[torch.Tensor] = []
        self._outputs = 0  # tensors that the code has got
        self._returned: list[torch.Tensor] = []  # by the model itself
        self._inside: list[torch.Tensor] = []  # outputs of its last module, as the rest of the model gets them
        self._views: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # place, the output, and the code's view of it
        self._has_looked = self._is_over = self._is_doubled = False
        self._seconds = 0.0
        self.found = AcrossRows(undecided="no micro-batch reached the engine")

    # -- what the engine's watch calls ---------------------------------------------------------------------------

    def forward(self, plain: Callable[..., Any], counted: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs the code's forward pass by `counted`, and before it others by `plain`, in the first one."""
        if not self._has_looked:
            self._has_looked = True
            self._guarded(lambda: self._look(plain, args, kwargs))
            # A loss may gather the outputs of all ranks, so all of them go on, or none.
            (is_over,) = self._most([float(self._is_over)])
            if is_over and not self._is_over:
                self._end(undecided="another rank could not look at its micro-batch")
        if self._is_over:
            return counted(*args, **kwargs)

        def view(tensor: torch.Tensor) -> torch.Tensor:
            self._outputs += 1
            if not tensor.requires_grad:
                return tensor
            seen = tensor.view_as(tensor)
            self._views.append((self._outputs - 1, tensor, seen))
            return seen

        with self._seen_inside():
            outputs = counted(*args, **kwargs)
        # The code goes on with views, so that its loss leads to them and not into the model.
        return _with_views(outputs, view)

    @contextmanager
    def _seen_inside(self) -> Iterator[None]:
        # Has the model go on with views too, behind the last of its modules that has rows. DeepSpeed gets views of what
        # it returns: its own hooks stand on them, and must not run here.
        def go_on(_module: torch.nn.Module, _inputs: Any, output: Any) -> Any:
            def view(tensor: torch.Tensor) -> torch.Tensor:
                seen = tensor.view_as(tensor) if tensor.requires_grad else tensor
                self._inside += [seen] if tensor.requires_grad else []
                return seen

            return _with_views(output, view)

        def hand_over(module: torch.nn.Module, _inputs: Any, output: Any) -> Any:
            if module is not self._engine.module:
                return None
            self._returned += tensors_in(output)
            return _with_views(output, lambda tensor: tensor.view_as(tensor) if tensor.requires_grad else tensor)

        hooks = [register_module_forward_hook(hand_over)]
        for module, _, output in reversed(self._passes[0]["own"].modules):
            if output and module is not self._engine.module:
                hooks.append(module.register_forward_hook(go_on))
                break
            if module is not self._engine.module and any(True for _ in module.parameters(recurse=False)):
                # ZeRO 3 has its parameters in one backward pass alone.
                break
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def backward(self, loss: Any) -> None:
        """Looks at the loss, before its backward pass."""
        if self._has_looked and not self._is_over:
            self._guarded(lambda: self._conclude(loss))
            self._is_over = True
            self._views, self._passes, self._inside, self._returned = [], [], [], []

    def _guarded(self, look: Callable[[], None]) -> None:
        # Nothing of the training depends on it, so an error is no more than an answer that is missing.
        started = time.monotonic()
        try:
            with ExitStack() as entered:
                entered.enter_context(eagerly())
                entered.enter_context(_disable_current_modes())
                look()
        except Exception as error:  # noqa: BLE001 - the model's own code may raise anything
            first_line = (str(error).strip().splitlines() or [""])[0]
            self._end(undecided=f"{type(error).__name__}: {first_line[:200]}")
        self._seconds += time.monotonic() - started
        self.found = replace(self.found, seconds=self._seconds)

    def _end(self, kind: str = "", names: Sequence[str] = (), undecided: str = "", is_outside: bool = False) -> None:
        self._is_over = True
        self.found = AcrossRows(kind=kind, names=list(names), undecided=undecided, is_outside=is_outside)

    # -- the model ----------------------------------------------------------------------------------------------

    def _look(self, plain: Callable[..., Any], args: Any, kwargs: Any) -> None:
        sizes = batch_sizes([args, kwargs])
        rows = sizes[self._dimension] if self._dimension < len(sizes) else 0
        if not rows or rows % self._per_sample:
            self._end(undecided="the micro-batch shows no rows")
            return
        self._rows = rows
        if rows == self._per_sample:
            args, kwargs = with_tensors(list(args), self._with_another), with_tensors(dict(kwargs), self._with_another)
            self._rows, self._is_doubled = 2 * rows, True
        layouts = _LAYOUTS if self._per_sample > 1 else _LAYOUTS[:1]
        self._swaps = [RowSwaps(self._rows, self._per_sample, in_blocks) for in_blocks in layouts]
        self._counts = list(self._counted_in([args, kwargs]))
        state = KeptState(self._engine.module, self._device)
        orders = {"own": (False, False), "again": (False, False)}
        orders |= {"second": (False, True), "first": (True, False), "both": (True, True)}
        output_bytes = 0
        try:
            for swaps in self._swaps:
                passes: dict[str, ForwardPass] = {}
                for name, order in orders.items():
                    passes[name] = self._pass(plain, args, kwargs, swaps.order(*order), name in ("own", "second"))
                    state.restore()
                self._passes.append(passes)
                output_bytes = max(each.output_bytes for each in passes.values())
        finally:
            state.restore()
        available = self._device.available_bytes()
        if available is not None and available < _ROOM_FOR_LOSS * output_bytes:
            self._end(undecided="there is too little memory left to look at the loss")

    def _with_another(self, tensor: torch.Tensor) -> torch.Tensor:
        # Another sample beside the only one: the first half of its numbers, each twice, so that it is of the data too.
        axis = self._axis(tensor)
        if axis is None:
            return tensor
        other = tensor
        if tensor.dim() > 1:
            last = -1 if axis != tensor.dim() - 1 else 0
            other = tensor.index_select(last, torch.arange(tensor.shape[last], device=tensor.device) // 2)
        return torch.cat([tensor, other / 2 if tensor.is_floating_point() and tensor.dim() > 1 else other], dim=axis)

    @torch.no_grad()
    def _pass(
        self, plain: Callable[..., Any], args: Any, kwargs: Any, order: Sequence[int], with_modules: bool
    ) -> ForwardPass:
        def in_order(tensor: torch.Tensor) -> torch.Tensor:
            axis = self._axis(tensor)
            # The numbers of rows describe their places, and not their content.
            if axis is None or (tensor.dim() == 1 and tensor.tolist() == list(range(self._rows))):
                return tensor
            return tensor.index_select(axis, torch.tensor(order, device=tensor.device))

        found = ForwardPass()

        def note(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            found.modules.append((module, self._first_rows(inputs), self._first_rows(output)))

        swapped, named = with_tensors(list(args), in_order), with_tensors(dict(kwargs), in_order)
        hook = register_module_forward_hook(note) if with_modules else None
        try:
            outputs = plain(*swapped, **named)
        finally:
            if hook is not None:
                hook.remove()
        for place, tensor in enumerate(tensors_in(outputs)):
            found.output_bytes += tensor.nbytes
            if tensor.numel() == 1 and tensor.is_floating_point():
                found.scalars[place] = tensor.detach().reshape(()).clone()
            elif rows := sampled(tensor, self._rows, self._dimension, _MOST_COMPARED):
                found.rows[place] = rows
        return found

    def _axis(self, tensor: torch.Tensor) -> int | None:
        axes = [axis for axis in (self._dimension, 0) if axis < tensor.dim() and tensor.shape[axis] == self._rows]
        # A second dimension that is as large by chance has no rows.
        return axes[0] if axes and (axes[0] == self._dimension or tensor.dim() == 1) else None

    def _first_rows(self, value: Any) -> list[list[torch.Tensor]]:
        tensors = islice(tensors_in(value), _MOST_ARGUMENTS)
        found = (sampled(tensor, self._rows, self._dimension, _FEW_COMPARED) for tensor in tensors)
        return [each for each in found if each]

    def _counted_in(self, inputs: Any) -> Iterator[torch.Tensor]:
        # What each row may add to the number that a mean is divided by: its entries that are not some value.
        for tensor in tensors_in(inputs):
            axis = self._axis(tensor)
            if axis is None or tensor.is_complex():
                continue
            flat = tensor.transpose(0, axis).reshape(self._rows, -1)
            ignored = {0.0, float(_IGNORED_LABEL), *(flat[:, end].float().mode().values.item() for end in (0, -1))}
            if tensor.is_floating_point():
                ignored = {0.0}
            for value, start in product(ignored, (0, 1)):
                counts = (flat[:, start:] != value).sum(dim=1).double().cpu()
                # Equal numbers explain nothing.
                if counts.min() < counts.max():
                    yield counts

    # -- the loss -----------------------------------------------------------------------------------------------

    def _conclude(self, loss: torch.Tensor) -> None:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not self._views:
            self._end(undecided="the loss does not come from the engine's outputs in a way that can be followed")
            return
        views = [view for _, _, view in self._views]
        gradients = torch.autograd.grad(loss, views, create_graph=True, allow_unused=True)
        used = [
            (place, output, view, gradient)
            for (place, output, view), gradient in zip(self._views, gradients, strict=True)
            if gradient is not None and bool(gradient.detach().any())
        ]
        if not used:
            self._end(undecided="the loss does not come from the engine's outputs in a way that can be followed")
            return
        scalars = {place for place, output, _, _ in used if output.numel() == 1}
        losses = [self._returned[place] for place in scalars]
        scalars |= {
            place
            for place, output, _ in self._views
            if output.numel() == 1 and any(_leads_to(loss, self._returned[place]) for loss in losses)
        }
        of_rows = [(view, gradient) for _, output, view, gradient in used if output.numel() > 1]
        places = [place for place, output, _, _ in used if output.numel() > 1]
        for each in losses if self._inside else []:
            gradients = torch.autograd.grad(each, self._inside, create_graph=True, allow_unused=True)
            of_rows += [pair for pair in zip(self._inside, gradients, strict=True) if pair[1] is not None]
        self._end(*self._verdict(scalars, places, of_rows), is_outside=bool(places))

    def _verdict(
        self, scalars: set[int], places: Sequence[int], of_rows: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[str, Sequence[str], str]:
        # The kind, the layers and what is undecided. A dependence has to show in every layout of a sample's rows.
        changed = [self._changed_layers(swaps, passes) for swaps, passes in zip(self._swaps, self._passes, strict=True)]
        layers = changed[0] if all(changed) else []
        has_changed = all(
            any(
                self._has_changed(swaps, passes, place, bool(layers)) for place in places if place in passes["own"].rows
            )
            for swaps, passes in zip(self._swaps, self._passes, strict=True)
        )
        if has_changed:
            return "layers", layers, ""
        kinds = {
            place: {
                self._additivity(swaps, passes, place, bool(layers))
                for swaps, passes in zip(self._swaps, self._passes, strict=True)
            }
            for place in scalars
            if place in self._passes[0]["own"].scalars
        }
        mixed = self._mixes(of_rows) if of_rows else False
        if mixed or any(kind == {"across"} for kind in kinds.values()):
            return ("layers", layers, "") if layers and kinds else ("loss", [], "")
        if any("unequal" in kind and "additive" not in kind for kind in kinds.values()):
            return "unequal", [], ""
        if any("noisy" in kind for kind in kinds.values()):
            return "", [], "a repeated forward pass differs by itself"
        if mixed is None and places:
            return "", [], "the loss is computed outside the engine, and its second derivatives do not show it"
        return "", [], ""

    def _noise(self, swaps: RowSwaps, passes: dict[str, ForwardPass], place: int) -> float:
        return change_of(passes["own"].rows[place], passes["again"].rows[place], swaps.first)

    def _has_changed(self, swaps: RowSwaps, passes: dict[str, ForwardPass], place: int, is_expected: bool) -> bool:
        change = change_of(passes["own"].rows[place], passes["second"].rows[place], swaps.first)
        least = 0.0 if is_expected else self._rounding
        return change > max(least, _ABOVE_NOISE * self._noise(swaps, passes, place))

    def _changed_layers(self, swaps: RowSwaps, passes: dict[str, ForwardPass]) -> list[str]:
        # Classes of modules whose output changes in rows whose input does not, but for the whole model.
        found: list[torch.nn.Module] = []
        pairs = zip(passes["own"].modules, passes["second"].modules, strict=False)
        for (module, inputs, output), (other, other_inputs, other_output) in pairs:
            if module is not other or not (inputs and output) or len(inputs) != len(other_inputs):
                continue
            before = max(change_of(*each, swaps.first) for each in zip(inputs, other_inputs, strict=True))
            after = max(change_of(*each, swaps.first) for each in zip(output, other_output, strict=False))
            least = _ABOVE_NOISE * before if isinstance(module, _BatchNorm) else self._rounding
            is_inside = not any(inner in found for inner in module.modules())
            if is_inside and before <= self._rounding and after > least:
                found.append(module)
        return list(dict.fromkeys(type(module).__name__ for module in found if module is not self._engine.module))

    def _additivity(self, swaps: RowSwaps, passes: dict[str, ForwardPass], place: int, is_expected: bool) -> str:
        """How a scalar follows from the halves: `additive`, `unequal` (a mean over unequal numbers), or `across`."""
        own, again, second, first, both = (
            passes[name].scalars[place] for name in ("own", "again", "second", "first", "both")
        )
        values = [float(each) for each in (own, both, second, first)]
        size = max(map(abs, values))
        is_narrow = torch.finfo(own.dtype).bits < 32
        units = (_UNITS_16 if is_narrow else _UNITS) * torch.finfo(own.dtype).eps
        outputs = [change_of(rows, passes["second"].rows[key], swaps.first) for key, rows in passes["own"].rows.items()]
        # Rows that change by rounding, as a mixture's do, change the loss by as much.
        rounding = max((each for each in outputs if each <= self._rounding), default=0.0)
        noise = abs(float(again) - float(own))
        allowed = (units + _UNITS_16 * rounding) * size + _UNITS_16 * noise
        apart = values[0] + values[1] - values[2] - values[3]
        if not all(value == value and abs(value) != float("inf") for value in values):
            return "noisy"
        # In 16 bits a loss shows less than its layers.
        if is_expected and is_narrow:
            return "across"
        if abs(apart) <= allowed:
            return "additive"
        if noise > self._rounding * size:
            return "noisy"
        for counts in self._counts:
            orders = [swaps.order(*each) for each in ((False, False), (True, True), (False, True), (True, False))]
            weights = [float(counts[order].sum()) for order in orders]
            mean = sum(weights) / len(weights)
            if not mean:
                continue
            weighted = [value * weight / mean for value, weight in zip(values, weights, strict=True)]
            if abs(weighted[0] + weighted[1] - weighted[2] - weighted[3]) <= 2 * allowed:
                return "unequal"
        return "across"

    def _mixes(self, of_rows: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool | None:
        """Whether the loss has second derivatives between the outputs of two halves; None if it has none at all."""
        used = [(view, gradient) for view, gradient in of_rows if gradient.requires_grad]
        if not used:
            # It is linear in the outputs, as the mean of each row's loss is.
            return False
        views = [view for view, _ in of_rows]
        layouts = max(len(by_rows(view, self._rows, self._dimension)) for view in views)
        if self._is_doubled or not all(by_rows(view, self._rows, self._dimension) for view in views):
            return None
        found = [self._mixed(swaps, used, views, layout) for swaps in self._swaps for layout in range(layouts)]
        if any(each is None for each in found):
            return None
        return all(found)

    def _mixed(
        self,
        swaps: RowSwaps,
        used: Sequence[tuple[torch.Tensor, torch.Tensor]],
        views: Sequence[torch.Tensor],
        layout: int,
    ) -> bool | None:
        def rows_of(tensor: torch.Tensor) -> torch.Tensor:
            layouts = by_rows(tensor, self._rows, self._dimension)
            return layouts[min(layout, len(layouts) - 1)]

        products = []
        # The program's own generators stay as they are. No two outputs have the same weights, which could cancel.
        generator = torch.Generator(device=used[0][1].device).manual_seed(0)
        for _, gradient in used:
            weights = torch.randn(gradient.shape, generator=generator, device=gradient.device, dtype=torch.float32)
            seen = rows_of(gradient)[swaps.first] * rows_of(weights)[swaps.first]
            products.append(seen.sum())
        total = torch.stack(products).sum()
        derivatives = torch.autograd.grad(total, views, retain_graph=True, allow_unused=True)
        inside = across = 0.0
        for each in derivatives:
            if each is not None:
                inside = max(inside, float(rows_of(each)[swaps.first].abs().max()))
                across = max(across, float(rows_of(each)[swaps.second].abs().max()))
        if not inside + across or inside + across != inside + across or inside + across == float("inf"):
            return None
        return across > _LEAST_MIXED * inside


def _with_views(outputs: Any, view: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    try:
        return with_tensors(outputs, view)
    except Exception:  # noqa: BLE001 - a class of the user's own may not be made from its parts
        return outputs


def _leads_to(loss: torch.Tensor, part: torch.Tensor) -> bool:
    """Whether the graph of a loss has the node of another output near its end."""
    nodes = [loss.grad_fn]
    for node in nodes:
        if node is None or len(nodes) > _MOST_NODES:
            continue
        if node is part.grad_fn:
            return True
        nodes += [each for each, _ in node.next_functions]
    return False


def rounding_of(formats: Iterable[str]) -> float:
    """The largest relative change of a row that is rounding, by the names of the formats that a model computes in."""
    return max((_ROUNDING.get(name, _ROUNDING_FP32) for name in formats), default=_ROUNDING_FP32)


def batch_norms(module: torch.nn.Module) -> list[str]:
    """Classes of the layers that compute statistics of a micro-batch by torch's own code, whatever uses them."""
    found = [each for each in module.modules() if isinstance(each, _BatchNorm)]
    return list(dict.fromkeys(type(each).__name__ for each in found if each.training or each.running_mean is None))
