"""The parameters of a flow. They are the fields of a record of arguments, in Prefect's form and in a run."""

import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.json_schema import SkipJsonSchema

from trial_lib.messages.errors import InputError

_ArgumentsT = TypeVar("_ArgumentsT", bound=BaseModel)
_Function = Callable[..., Any]


def shows(
    model: type[BaseModel], derived: Collection[str] = (), older: Mapping[str, str] | None = None
) -> Callable[[_Function], _Function]:
    """Replaces `**arguments` in a function's signature by the fields of a record.

    The types, defaults and descriptions are the record's, so they are written down once.

    Args:
        model: the record, whose docstring describes its fields.
        derived: fields whose default depends on other fields. The form leaves them empty.
        older: names that fields had once, with their present names. A deployment that gives one still runs. The form
            does not show them.
    """

    def with_fields(function: _Function) -> _Function:
        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in inspect.signature(function).parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        fields = [_parameter(model, name, name in derived) for name in model.model_fields]
        hidden = [_hidden(model, name, present) for name, present in (older or {}).items()]
        function.__signature__ = inspect.Signature([*fields, *own, *hidden])  # type: ignore[attr-defined]
        described = (inspect.getdoc(model) or "").partition("Attributes:\n")[2]
        function.__doc__ = f"{inspect.getdoc(function)}\n{described}"
        return function

    return with_fields


def _parameter(model: type[BaseModel], name: str, is_derived: bool) -> inspect.Parameter:
    # The parameter of one field. A required field is optional here, because a resumed run has its record.
    field = model.model_fields[name]
    # The annotation has metadata, such as limits.
    annotation = model.__annotations__[name]
    if field.is_required() or is_derived:
        annotation, default = annotation | None, None
    else:
        default = field.get_default(call_default_factory=True)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _hidden(model: type[BaseModel], name: str, present: str) -> inspect.Parameter:
    # The parameter of a field under a name that it had once. Prefect leaves it out of the form's schema.
    annotation = SkipJsonSchema[model.__annotations__[present] | None]  # type: ignore[misc]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def checked(model: type[_ArgumentsT], given: Mapping[str, Any]) -> _ArgumentsT:
    """Returns the record of a flow's parameters. `model_dir` defaults to the YAML's folder.

    Raises:
        InputError: a path is relative, a parameter is missing, or values contradict each other.
    """
    present = {name: value for name, value in given.items() if value is not None}
    for name, value in present.items():
        for path in value if isinstance(value, list | tuple) else (value,):
            if isinstance(path, Path):
                _check_absolute(name, path)
    if present.get("config_path") is not None:
        present.setdefault("model_dir", present["config_path"].parent)
    try:
        return model(**present)
    except ValidationError as error:
        first = error.errors()[0]
        place = str(first["loc"][0]) if first["loc"] else "the parameters"
        message = first["msg"].removeprefix("Value error, ")
        raise InputError(
            f"{message}.", where=place, remedy="Start another run. The deployment's form describes each parameter."
        ) from None


def work_folder(given: Path | None) -> Path:
    """Returns the folder that a run writes its study or full experiment in.

    It is never the run's working folder, because a process worker removes that afterwards.

    Raises:
        InputError: no folder is given, it does not exist, or the path is relative.
    """
    if given is None:
        raise InputError(
            "there is no folder to write in.",
            where="work_dir",
            remedy="Set it in the deployment, or for the run with `--param work_dir=/absolute/path`.",
        )
    _check_absolute("work_dir", given)
    if not given.is_dir():
        raise InputError(
            f"{given} is not a folder.",
            where="work_dir",
            remedy="Create it on the run's host, or mount it in the run's container.",
        )
    return given


def _check_absolute(name: str, path: Path) -> None:
    """Checks a path. A run is seldom started on the host, or in the folder, that it runs in.

    Raises:
        InputError: the path is relative.
    """
    if not path.is_absolute():
        raise InputError(
            f"{path} is a relative path, and a run has no folder to resolve it in.",
            where=name,
            remedy="Give the absolute path on the run's host or in its container.",
        )
