"""The call wrapper as the value of parameters that are annotated with its class."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any, ForwardRef, Optional, Union

import pytest

from elasticjob.inprocess._call.injection import substitute


class Call:
    """The class of the value."""


class Other:
    pass


def plain(a: int, call: Call) -> None: ...
def optional(a: int, call: Optional[Call] = None) -> None: ...  # noqa: UP045
def union(a: int, call: Union[Call, None] = None) -> None: ...  # noqa: UP007
def pipe(a: int, call: Call | None = None) -> None: ...
def text(a: int, call: "Call | None" = None) -> None: ...  # noqa: UP037
def annotated(a: int, call: Annotated[Call, "hint"]) -> None: ...
def unresolved(a: int, call: "elsewhere.Call") -> None: ...  # type: ignore[name-defined]  # noqa: F821, UP037
def keyword_only(a: int, *, call: Call) -> None: ...
def positional_only(a: int, b: int = 5, call: Optional[Call] = None, /) -> None: ...  # noqa: UP045
def variadic(call: Call, *rest: int, **more: int) -> None: ...
def two(first: Call, a: int, second: Call) -> None: ...
def none(a: int, call: Other | None = None, *calls: Call) -> None: ...


class Trainer:
    def method(self, a: int, call: Call) -> None: ...

    def __call__(self, a: int, call: Call) -> None: ...


VALUE = Call()
bound, partial, instance = Trainer().method, functools.partial(plain, 1), Trainer()


def with_closure() -> Callable[..., Any]:
    LocalName: Any = Call  # noqa: N806

    def function(a: int, call: LocalName | None = None) -> object:
        return LocalName()

    return function


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "expected"),
    [
        (plain, (1,), {}, ((1,), {"call": VALUE})),
        (plain, (1, None), {}, ((1, VALUE), {})),
        (plain, (), {"a": 1, "call": None}, ((), {"a": 1, "call": VALUE})),
        (optional, (1,), {}, ((1,), {"call": VALUE})),
        (union, (1,), {}, ((1,), {"call": VALUE})),
        (pipe, (1,), {}, ((1,), {"call": VALUE})),
        (text, (1,), {}, ((1,), {"call": VALUE})),
        (annotated, (1,), {}, ((1,), {"call": VALUE})),
        (unresolved, (1,), {}, ((1,), {"call": VALUE})),
        (keyword_only, (1,), {}, ((1,), {"call": VALUE})),
        (positional_only, (1,), {}, ((1, 5, VALUE), {})),
        (variadic, (None, 2, 3), {"x": 4}, ((VALUE, 2, 3), {"x": 4})),
        (two, (), {"a": 1}, ((), {"first": VALUE, "a": 1, "second": VALUE})),
        (bound, (1,), {}, ((1,), {"call": VALUE})),
        (partial, (), {}, ((), {"call": VALUE})),
        (instance, (1,), {}, ((1,), {"call": VALUE})),
        (with_closure(), (1,), {}, ((1,), {"call": VALUE})),
        (none, (1,), {}, ((1,), {})),
        (plain, (1, 2, 3), {}, ((1, 2, 3), {})),  # Python's own error follows
        (dict, (), {"a": 1}, ((), {"a": 1})),
    ],
)
def test_annotated_parameters_get_the_value(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], expected: object
) -> None:
    found = substitute(function, args, kwargs, VALUE, Call)
    assert found == expected
    if found[0] != (1, 2, 3):
        function(*found[0], **found[1])


@pytest.mark.parametrize(
    ("annotation", "gets_it"),
    [
        (Call, True),
        (Optional[Call], True),  # noqa: UP045
        (Call | None, True),
        (None | Call, True),
        (Annotated[Call | None, "hint"], True),
        (ForwardRef("Call"), True),
        ("Call", True),
        ("'Call'", True),
        (Other, False),
        (Other | None, False),
        (list[Call], False),
        ("Other", False),
        ("Unknown", False),
        (Any, False),
        (None, False),
    ],
)
def test_annotations_that_are_objects_or_text(annotation: object, gets_it: bool) -> None:
    def function(call: object) -> None: ...

    function.__annotations__ = {"call": annotation}
    assert substitute(function, (), {"call": None}, VALUE, Call) == ((), {"call": VALUE if gets_it else None})
