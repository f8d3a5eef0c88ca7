"""Evaluate the validation rules of the CRD: the part of the Common Expression Language that they use. Pure.

The rules are read from the CRD itself, so that a local run applies what the API server applies.
Why not by a library: docs/contribute/design/api.md. Language: https://github.com/google/cel-spec/blob/master/doc/langdef.md
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elasticjob._runtime.contract.commands.worker_count import quantity

Scope = Mapping[str, Any]
"""Values of variables: `self`, and those of macros."""
Expression = Callable[[Scope], Any]
"""Evaluates a parsed expression. KeyError, IndexError or TypeError where CEL has an error."""

_TOKEN = re.compile(
    r"""\s*(?:(\d+|[A-Za-z_]\w*|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|&&|\|\||[=!<>]=|[-%<>!?:.,()\[\]])|$)"""
)
_ESCAPE = re.compile(r"""\\([\\'"])""")
_RELATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda item, container: item in container,
}
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {"size": len, "type": type, "quantity": quantity}
_METHODS: dict[str, Callable[[Any, Any], bool]] = {
    "matches": lambda text, pattern: re.search(pattern, text) is not None,
    "startsWith": str.startswith,
    "endsWith": str.endswith,
    "isLessThan": operator.lt,
}
_MACROS: dict[str, Callable[[Any], bool]] = {
    "all": all,
    "exists": any,
    "exists_one": lambda found: sum(found) == 1,
}
_CONSTANTS: dict[str, Any] = {"true": True, "false": False, "int": int, "string": str}


class CelError(ValueError):
    """The text is not an expression of the supported part of CEL."""


def parse_cel(text: str) -> Expression:
    """Return the expression in `text`; CelError if it uses a part of CEL that is not supported."""
    parser = _Parser(_tokens(text))
    expression = parser.conditional()
    if parser.next is not None:
        raise CelError(f"unexpected {parser.next!r} in {text!r}")
    return expression


def _tokens(text: str) -> list[str]:
    tokens, at = [], 0
    while at < len(text.rstrip()):
        match = _TOKEN.match(text, at)
        if match is None or match[1] is None:
            raise CelError(f"not supported: {text[at:]!r}")
        tokens.append(match[1])
        at = match.end()
    return tokens


@dataclass(frozen=True)
class _Select:
    """`operand.name`: a field of an object."""

    operand: Expression
    name: str

    def __call__(self, scope: Scope) -> Any:
        return self.operand(scope)[self.name]

    def is_present(self, scope: Scope) -> bool:
        return self.name in self.operand(scope)


class _Parser:
    """A recursive descent parser. Each method reads one level of precedence, the lowest first."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0

    @property
    def next(self) -> str | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _skip(self, token: str) -> bool:
        """Return whether the next token is this one, and go past it if so."""
        found = self.next == token
        self._at += found
        return found

    def _take(self, token: str | None = None) -> str:
        found = self.next
        if found is None or token not in (None, found):
            raise CelError(f"want {token or 'a value'}, got {found or 'the end'}")
        self._at += 1
        return found

    def conditional(self) -> Expression:
        condition = self._either()
        if not self._skip("?"):
            return condition
        then = self._either()
        self._take(":")
        otherwise = self.conditional()
        return lambda scope: then(scope) if condition(scope) else otherwise(scope)

    def _either(self) -> Expression:
        terms = [self._both()]
        while self._skip("||"):
            terms.append(self._both())
        return terms[0] if len(terms) == 1 else lambda scope: any(term(scope) for term in terms)

    def _both(self) -> Expression:
        terms = [self._relation()]
        while self._skip("&&"):
            terms.append(self._relation())
        return terms[0] if len(terms) == 1 else lambda scope: all(term(scope) for term in terms)

    def _relation(self) -> Expression:
        left = self._difference()
        compare = _RELATIONS.get(self.next or "")
        if compare is None:
            return left
        self._take()
        right = self._difference()
        return lambda scope: compare(left(scope), right(scope))

    def _difference(self) -> Expression:
        value = self._remainder()
        while self._skip("-"):
            value = _subtract(value, self._remainder())
        return value

    def _remainder(self) -> Expression:
        value = self._unary()
        while self._skip("%"):
            value = _modulo(value, self._unary())
        return value

    def _unary(self) -> Expression:
        if self._skip("!"):
            operand = self._unary()
            return lambda scope: not operand(scope)
        if self._skip("-"):
            number = self._unary()
            return lambda scope: -number(scope)
        return self._member()

    def _member(self) -> Expression:
        value = self._primary()
        while True:
            if self._skip("."):
                name = self._take()
                value = self._call(value, name) if self._skip("(") else _Select(value, name)
            elif self._skip("["):
                value = self._index(value)
            else:
                return value

    def _index(self, target: Expression) -> Expression:
        index = self.conditional()
        self._take("]")
        return lambda scope: target(scope)[index(scope)]

    def _call(self, target: Expression, name: str) -> Expression:
        if name in _MACROS:
            return self._macro(target, _MACROS[name])
        if name not in _METHODS:
            raise CelError(f"function {name!r} is not supported")
        method, argument = _METHODS[name], self.conditional()
        self._take(")")
        return lambda scope: method(target(scope), argument(scope))

    def _macro(self, target: Expression, combine: Callable[[Any], bool]) -> Expression:
        variable = self._take()
        self._take(",")
        condition = self.conditional()
        self._take(")")
        return lambda scope: combine(condition({**scope, variable: item}) for item in target(scope))

    def _primary(self) -> Expression:
        token = self._take()
        if token == "(":  # noqa: S105
            inner = self.conditional()
            self._take(")")
            return inner
        if token == "[":  # noqa: S105
            return self._list()
        if token[0] in "'\"":
            return _constant(_ESCAPE.sub(r"\1", token[1:-1]))
        if token.isdigit():
            return _constant(int(token))
        return self._name(token)

    def _list(self) -> Expression:
        items: list[Expression] = []
        while not self._skip("]"):
            items.append(self.conditional())
            if self.next != "]":
                self._take(",")
        return lambda scope: [item(scope) for item in items]

    def _name(self, name: str) -> Expression:
        if not (name[0].isalpha() or name[0] == "_"):
            raise CelError(f"unexpected {name!r}")
        if self._skip("("):
            return self._function(name)
        return _constant(_CONSTANTS[name]) if name in _CONSTANTS else lambda scope: scope[name]

    def _function(self, name: str) -> Expression:
        argument = self.conditional()
        self._take(")")
        if name == "has" and isinstance(argument, _Select):
            return argument.is_present
        if name not in _FUNCTIONS:
            raise CelError(f"function {name!r} is not supported")
        function = _FUNCTIONS[name]
        return lambda scope: function(argument(scope))


def _subtract(left: Expression, right: Expression) -> Expression:
    return lambda scope: left(scope) - right(scope)


def _modulo(left: Expression, right: Expression) -> Expression:
    return lambda scope: int(math.fmod(left(scope), right(scope)))  # the sign of the dividend, as in CEL


def _constant(value: Any) -> Expression:
    return lambda scope: value
