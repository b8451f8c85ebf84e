"""Expressions and texts with holes, as runbooks use them: JMESPath over one context, never code.

- An *expression* is a JMESPath. What cannot be evaluated (``max_by`` of nothing) is null.
- A *template* is text with ``{expression}`` holes; ``{{`` and ``}}`` are braces. A template with a
  null in a hole renders to None: a sentence with an unknown in it is not said.
- A *localised* text is one template, or one for each language: ``{en: …, zh: …}``.

Numbers are printed as JSON prints them, because a guard looks for them literally in the evidence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jmespath
import jmespath.exceptions
import msgspec

from harness_service.adapters.strict_reader import DataPath, Reader, jmes, kind_of, text


class Expression(msgspec.Struct, frozen=True):
    """A compiled JMESPath; ``names``: what it reads from the context itself."""

    source: str
    compiled: Any
    names: frozenset[str]

    def value(self, context: Mapping[str, Any]) -> Any:
        try:
            return self.compiled.search(context)
        except jmespath.exceptions.JMESPathError:
            return None  # a function met a null: what it would have given is unknown

    def holds(self, context: Mapping[str, Any]) -> bool:
        """JMESPath's truth: null, false and empty are false, and 0 is true."""
        found = self.value(context)
        return found is not None and found is not False and found not in ("", [], {})


class Template(msgspec.Struct, frozen=True):
    parts: tuple[str | Expression, ...]

    @property
    def names(self) -> frozenset[str]:
        return frozenset().union(*(part.names for part in self.parts if isinstance(part, Expression)))

    def value(self, context: Mapping[str, Any]) -> Any:
        """A template that is one hole keeps the hole's type; any other is text."""
        if len(self.parts) == 1 and isinstance(self.parts[0], Expression):
            return self.parts[0].value(context)
        return self.text(context)

    def text(self, context: Mapping[str, Any]) -> str | None:
        printed: list[str] = []
        for part in self.parts:
            found = part.value(context) if isinstance(part, Expression) else part
            if found is None:
                return None
            printed.append(as_text(found))
        return "".join(printed)


class Localised(msgspec.Struct, frozen=True):
    """Templates by language; a language that is missing falls back to English, then to the first."""

    by_language: Mapping[str, Template]

    @property
    def names(self) -> frozenset[str]:
        return frozenset().union(*(template.names for template in self.by_language.values()))

    def text(self, language: str, context: Mapping[str, Any]) -> str | None:
        return self._in(language).text(context)

    def value(self, language: str, context: Mapping[str, Any]) -> Any:
        return self._in(language).value(context)

    def _in(self, language: str) -> Template:
        options = self.by_language
        return options.get(language) or options.get("en") or next(iter(options.values()))


def as_text(value: Any) -> str:
    """Text as it is, a list by its items, anything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return ", ".join(as_text(item) for item in value)
    return json.dumps(value, ensure_ascii=False)


# --- reading --------------------------------------------------------------------------------------

_PIECES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]|[^{}]+")


def expression(reader: Reader, path: DataPath, value: object) -> Expression | None:
    source = jmes(reader, path, value)
    return None if source is None else compile_expression(source)


def compile_expression(source: str) -> Expression:
    """Raises ``jmespath.exceptions.JMESPathError`` when it does not compile."""
    compiled = jmespath.compile(source)
    return Expression(source, compiled, frozenset(_names_read(compiled.parsed)))


def template(reader: Reader, path: DataPath, value: object) -> Template | None:
    source = text(reader, path, value)
    if source is None:
        return None
    parts: list[str | Expression] = []
    for piece in _PIECES.finditer(source):
        if piece[1] is not None:
            hole = expression(reader, path, piece[1])
            if hole is None:
                return None
            parts.append(hole)
        elif piece[0] in "{}":
            reader.report(path, f"a single '{piece[0]}' in '{source}': write {piece[0] * 2} for a brace")
            return None
        else:
            parts.append(piece[0][0] if piece[0] in ("{{", "}}") else piece[0])
    return Template(tuple(parts))


def localised(reader: Reader, path: DataPath, value: object) -> Localised | None:
    if isinstance(value, str):
        single = template(reader, path, value)
        return None if single is None else Localised({"en": single})
    if not isinstance(value, dict) or not value:
        reader.report(path, f"expected text, or text by language, found {kind_of(value)}")
        return None
    by_language: dict[str, Template] = {}
    for language, source in value.items():
        if not re.fullmatch("[a-z]{2,3}", language):
            reader.report((*path, language), f"'{language}' is not a language such as en or zh")
        found = template(reader, (*path, language), source)
        if found is not None:
            by_language[language] = found
    return Localised(by_language) if by_language else None


# The children of these see what their left neighbour gives, not the context.
_NARROWING = frozenset(
    {"subexpression", "index_expression", "projection", "value_projection", "filter_projection", "pipe"}
)


def _names_read(node: Mapping[str, Any]) -> Iterator[str]:
    kind, children = node["type"], node["children"]
    if kind == "field":
        yield node["value"]
    elif kind in _NARROWING:
        yield from _names_read(children[0])
    elif kind != "expref":
        for child in children:
            yield from _names_read(child)
