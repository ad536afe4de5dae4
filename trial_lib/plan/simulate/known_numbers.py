"""The real numbers behind fake tensors, where they are known.

A fake tensor that came from real numbers keeps them beside it while they are few or whole numbers. So does a short one
that was filled with whole numbers, such as lengths. A long one with one number everywhere is known when known numbers
are written at places of it, as routers do. Results of such tensors are computed as well. Memory into which an operator
writes unknown numbers is unknown from then on, in all tensors that share it.

Numbers may be invented. Whoever uses them, or what was computed of them, is noted.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

MASKS = (torch.bool, torch.uint8)
"""Number formats of indices that choose places by a yes or no."""

_KNOWN = "_foreseen_known"
_MOST_KNOWN_NUMBERS, _MOST_KNOWN_FRACTIONS = 2**23, 2**12
# What follows from invented numbers may be as many: a mask of 32,768 tokens for each of 8 of 128 experts.
_MOST_OF_INVENTED = 2**25
# Marks real numbers that are invented, or follow from such: what notes that somebody has used them.
_INVENTED = "_foreseen_invented"
# Operators whose results follow from plain arguments.
_FILLS = frozenset(("zeros", "ones", "full", "arange", "scalar_tensor"))
# Longer ones are masks and positions, which no program asks, and which take time in each pass.
_MOST_FILLED = 2**10
# The one number that an operator fills memory with, or the place of that number among its arguments.
_FILLED_WITH = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
_FILLED_BY = {"full": 1, "full_like": 1, "new_full": 2}
# Marks memory with one number everywhere: the number, and its format.
_FILLED = "_foreseen_filled"
# Marks memory to which known numbers were written: the real memory that has them.
_BEHIND = "_foreseen_behind"
_WRITE_AT_PLACES = frozenset(
    f"{name}{ending}"
    for name in ("scatter", "scatter_add", "index_add", "index_fill", "index_put")
    for ending in ("", "_")
)
# CUDA counts whole numbers by it, and a host does not.
_COUNTS = torch.ops.aten.histc.default
# Their results have numbers that nobody has written.
_LEAVE_OPEN = ("empty", "new_empty", "resize")
# More gathered numbers are not copied for each rank.
_MOST_GATHERED = 2**20
# Marks real memory whose numbers are no longer those of the fake one.
_OVERWRITTEN = "_foreseen_overwritten"


def is_known(fake: torch.Tensor) -> bool:
    return _KNOWN in vars(fake)


def known_numbers(fake: torch.Tensor) -> torch.Tensor | None:
    found: torch.Tensor | None = vars(fake).get(_KNOWN)
    if found is not None and hasattr(found.untyped_storage(), _OVERWRITTEN):
        return None
    return found


def keep(fake: torch.Tensor, real: torch.Tensor) -> None:
    """Keeps the real numbers of a fake tensor, unless they are too many."""
    if _are_few(real, _origin(real) is not None):
        vars(fake)[_KNOWN] = real


def invent(fake: torch.Tensor, real: torch.Tensor, note: Callable[[], None]) -> None:
    """Gives a fake tensor invented numbers. `note` is called when somebody uses them, or what follows from them."""
    vars(fake)[_KNOWN] = _marked(real, note)


def used(real: Any) -> None:
    """Notes that somebody uses real numbers, if they are invented."""
    note = _origin(real)
    if note is not None:
        note()


def used_in(func: Any, real: Any) -> Any:
    """What an operator makes of real arguments, as lists and keywords. Notes that somebody uses them."""
    used(real)
    return _marked(func(*real[0], **real[1]), _origin(real))


def _origin(real: Any) -> Callable[[], None] | None:
    # What notes a use of arguments with real numbers; None if none of them is invented.
    for each in leaves((real,)):
        if isinstance(each, torch.Tensor) and _INVENTED in vars(each):
            note: Callable[[], None] = vars(each)[_INVENTED]
            return note
    return None


def _marked(real: Any, note: Callable[[], None] | None) -> Any:
    for each in leaves((real,)) if note is not None else ():
        if isinstance(each, torch.Tensor):
            vars(each)[_INVENTED] = note
    return real


def _are_few(tensor: torch.Tensor, follows_from_invented: bool = False) -> bool:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.numel() <= _MOST_KNOWN_FRACTIONS
    return tensor.numel() <= (_MOST_OF_INVENTED if follows_from_invented else _MOST_KNOWN_NUMBERS)


def follow(func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor], out: Any) -> None:
    """Computes the numbers of a result if those of its inputs are known, or forgets those that it overwrites."""
    if not tensors:
        return
    _note_filled(func, args, out)
    result = _result(func, args, kwargs, out) if all(map(is_known, tensors)) else None
    if result is None:
        if func._opname in _WRITE_AT_PLACES and _follow_written(func, args, kwargs, out):
            return
        if func._schema.is_mutable:
            _forget_written(func, args, kwargs)
        return
    for fake, number in zip(leaves((out,)), leaves((result,)), strict=True):
        if isinstance(fake, FakeTensor) and isinstance(number, torch.Tensor):
            keep(fake, number)


def _note_filled(func: Any, args: Any, out: Any) -> None:
    # Notes that an operator has made memory with one number everywhere.
    name = func._opname
    value: Any = None
    if name in _FILLED_WITH:
        value = _FILLED_WITH[name]
    elif name in _FILLED_BY:
        value = args[_FILLED_BY[name]]
    elif name == "_to_copy" and isinstance(args[0], FakeTensor):
        value, _ = getattr(args[0].untyped_storage(), _FILLED, (None, None))
    if isinstance(value, (bool, int, float)):
        setattr(out.untyped_storage(), _FILLED, (value, out.dtype))


def _could_be_known(value: Any) -> bool:
    # Whether a value is no fake tensor, or one with numbers that cost memory only when they are asked for.
    if not isinstance(value, FakeTensor):
        return True
    return known_numbers(value) is not None or hasattr(value.untyped_storage(), _FILLED)


def _filled(fake: torch.Tensor) -> torch.Tensor | None:
    # The numbers of a tensor with one number everywhere; None of any other.
    value, dtype = getattr(fake.untyped_storage(), _FILLED, (None, None))
    if value is None or (dtype != fake.dtype and value != 0) or fake.numel() > _MOST_OF_INVENTED:
        return None
    return torch.full(fake.shape, value, dtype=fake.dtype, device="cpu")


def _follow_written(func: Any, args: Any, kwargs: Any, out: torch.Tensor) -> bool:
    # Computes what known numbers at known places make of memory. Returns whether all of it is known.
    if not all(_could_be_known(each) for each in leaves((args, kwargs))):
        return False
    real = real_of((args, kwargs), _filled)
    result = None if real is None else _computed(func, *real)
    if result is None:
        return False
    # Routers count their choices in numbers with fractions as well.
    vars(out)[_KNOWN] = _marked(result, _origin(real))
    if func._schema.is_mutable:
        memory = out.untyped_storage()
        if hasattr(memory, _FILLED):
            delattr(memory, _FILLED)
        setattr(memory, _BEHIND, result.untyped_storage())
    return True


def _result(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    # What an operator makes of known numbers; None if that stays unknown.
    if func.namespace != "aten" or func._opname.startswith(_LEAVE_OPEN):
        return None
    if torch.Tag.nondeterministic_seeded in func.tags:
        return None
    real = real_of((args, kwargs))
    if real is None:
        return None
    note = _origin(real)
    if not all(_are_few(each, note is not None) for each in leaves((out,)) if isinstance(each, torch.Tensor)):
        return None
    return _marked(_computed(func, *real), note)


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    try:
        if func is _COUNTS and not args[0].dtype.is_floating_point:
            return func(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
        return func(*args, **kwargs)
    except (NotImplementedError, RuntimeError):
        # An operator of devices alone, or of types that the host has none for.
        return None


def places_of(
    indices: Sequence[torch.Tensor | None], chooses_all: Callable[[], bool] = lambda: False
) -> list[torch.Tensor | None] | None:
    """The indices of `aten.index` with the places that masks choose; None if a mask is unknown.

    A mask has one index for each of its dimensions. `chooses_all` is asked whether an unknown mask chooses all places.
    """
    places: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in MASKS:
            places.append(index)
            continue
        mask = known_numbers(index)
        used(mask)
        if mask is None and chooses_all():
            mask = torch.ones(index.shape, dtype=torch.bool, device="cpu")
        if mask is None:
            return None
        places += mask.nonzero(as_tuple=True)
    return places


def largest(lengths: Sequence[int] | torch.Tensor) -> int | None:
    """None if the lengths are unknown."""
    known = known_numbers(lengths) if isinstance(lengths, torch.Tensor) else torch.tensor(lengths)
    return None if known is None or not known.numel() else int(known.max())


def fills(func: Any) -> bool:
    """Whether the numbers of an operator's result follow from plain arguments."""
    return func.namespace == "aten" and func._opname in _FILLS and not func._schema.is_mutable


def fill(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Lets whole numbers that fill a short tensor be known, and notes which number a longer one has everywhere."""
    if out.numel() <= _MOST_FILLED and not (out.dtype.is_floating_point or out.dtype.is_complex):
        real = _computed(func, *mapped((args, kwargs), torch.device, lambda _: torch.device("cpu")))
        if real is not None:
            keep(out, real)
            return
    _note_filled(func, args, out)


def take_memory(fake: torch.Tensor, other: torch.Tensor) -> None:
    """Gives a tensor the numbers of the one whose memory it takes. They are unknown if those are."""
    vars(fake).pop(_KNOWN, None)
    if is_known(other):
        vars(fake)[_KNOWN] = vars(other)[_KNOWN]


def gather(gathered: torch.Tensor, given: torch.Tensor) -> None:
    """Lets gathered numbers be known if the rank's own are, as if all ranks gave the same."""
    known = known_numbers(given) if isinstance(given, FakeTensor) else given
    memory = known_numbers(gathered) if isinstance(gathered, FakeTensor) else gathered
    times, rest = divmod(gathered.numel(), max(1, given.numel()))
    if known is None or rest or not known.numel() or gathered.numel() > _MOST_GATHERED:
        forget(gathered)
        return
    numbers = _marked(known.detach().reshape(-1).repeat(times).reshape(gathered.shape), _origin(known))
    if memory is not None:
        # Its views have the same memory.
        memory.detach().copy_(numbers)
    elif gathered.numel() * gathered.element_size() == gathered.untyped_storage().nbytes():
        keep(gathered, numbers)


def forget(fake: torch.Tensor) -> None:
    """Forgets the numbers of a fake tensor, and of all others that share its memory."""
    memory = fake.untyped_storage()
    if hasattr(memory, _FILLED):
        delattr(memory, _FILLED)
    behind = getattr(memory, _BEHIND, None)
    real = vars(fake).pop(_KNOWN, None)
    for each in (behind, None if real is None else real.untyped_storage()):
        if each is not None:
            setattr(each, _OVERWRITTEN, True)


def _forget_written(func: Any, args: Any, kwargs: Any) -> None:
    # Forgets the numbers of tensors that an operator writes to.
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for each in leaves((value,)):
                if isinstance(each, torch.Tensor):
                    forget(each)


def real_of(value: Any, otherwise: Callable[[torch.Tensor], torch.Tensor | None] = lambda _: None) -> Any:
    """Arguments with the known numbers in the place of fake tensors; None if some are unknown."""
    missing = False

    def real(each: torch.Tensor) -> torch.Tensor:
        nonlocal missing
        if not isinstance(each, FakeTensor):
            return each
        found = known_numbers(each)
        found = otherwise(each) if found is None else found
        missing |= found is None
        return each if found is None else found

    found = mapped(value, torch.Tensor, real)
    return None if missing else mapped(found, torch.device, lambda _: torch.device("cpu"))


def leaves(values: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if isinstance(value, (list, tuple)):
            found += leaves(value)
        elif type(value) is dict:
            found += leaves(tuple(value.values()))
        else:
            found.append(value)
    return found


def mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, kind):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(mapped(each, kind, change) for each in value)
    if type(value) is dict:
        return {name: mapped(each, kind, change) for name, each in value.items()}
    return value
