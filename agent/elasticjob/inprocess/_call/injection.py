"""Pass a value to the parameters of a function that are annotated with its class."""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def substitute(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], value: object, cls: type
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with `value` for each parameter that is annotated with `cls` or `cls | None`.

    The value replaces what the caller passed there. Arguments that do not match the signature are returned as they
    are: the call then raises Python's own error.
    """
    names = annotated_parameters(function, cls)
    if not names:
        return tuple(args), dict(kwargs)
    signature = inspect.signature(function)
    try:
        bound = signature.bind_partial(*args, **kwargs)
    except TypeError:
        return tuple(args), dict(kwargs)
    bound.arguments.update(dict.fromkeys(names, value))
    positional_only = inspect.Parameter.POSITIONAL_ONLY
    if any(signature.parameters[name].kind is positional_only for name in names):
        bound.apply_defaults()  # an omitted parameter before it would end the positional arguments
    return _in_order(signature, bound, len(args))


def annotated_parameters(function: Callable[..., Any], cls: type) -> list[str]:
    """Return the names of the parameters that are annotated with `cls`, also optionally or as text."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some callables written in C
        return []
    scope = _names(function)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        name
        for name, parameter in parameters.items()
        if parameter.kind not in variadic and _is_of(parameter.annotation, cls, scope)
    ]


def _is_of(annotation: Any, cls: type, scope: Mapping[str, Any]) -> bool:
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        try:
            evaluated = eval(annotation, {**scope})  # noqa: S307  (what typing.get_type_hints does)
        except Exception:  # a name that exists for type checkers only
            return bool(annotation.rpartition(".")[2].strip() == cls.__name__)
        return evaluated != annotation and _is_of(evaluated, cls, scope)  # text in text: a quoted annotation
    if annotation is cls:
        return True
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _is_of(typing.get_args(annotation)[0], cls, scope)
    if origin is not typing.Union and origin is not types.UnionType:
        return False
    return any(_is_of(choice, cls, scope) for choice in typing.get_args(annotation))


def _names(function: Callable[..., Any]) -> dict[str, Any]:
    function = inspect.unwrap(function)
    function = getattr(function, "func", function)  # functools.partial
    if not inspect.isroutine(function):  # an object with __call__
        function = type(function).__call__
    module = sys.modules.get(getattr(function, "__module__", "") or "")
    names = {**vars(typing), **(vars(module) if module else {}), **getattr(function, "__globals__", {})}
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    return {**names, **dict(zip(code.co_freevars, map(_content, cells), strict=True))} if code and cells else names


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _in_order(
    signature: inspect.Signature, bound: inspect.BoundArguments, given: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments; those that the caller gave by position stay so, later ones become keywords."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for index, (name, parameter) in enumerate(signature.parameters.items()):
        if name not in bound.arguments:
            continue
        value = bound.arguments[name]
        match parameter.kind:
            case inspect.Parameter.POSITIONAL_ONLY:
                args.append(value)
            case inspect.Parameter.VAR_POSITIONAL:
                args += value
            case inspect.Parameter.VAR_KEYWORD:
                kwargs.update(value)
            case inspect.Parameter.POSITIONAL_OR_KEYWORD if index < given:
                args.append(value)
            case _:
                kwargs[name] = value
    return tuple(args), kwargs
