"""What a sentence states literally (numbers, times, quotes, hosts, paths, ids), and where that occurs.

Extraction is deliberately eager: a literal that is found by mistake makes a fact fail and be
repaired; one that is missed could let an invented value through.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from enum import StrEnum
from typing import Any

import msgspec

from harness_service.core.canonical import canonical


class LiteralKind(StrEnum):
    NUMBER = "NUMBER"
    QUOTED = "QUOTED"
    HOST = "HOST"
    PATH = "PATH"
    TIME = "TIME"
    ID = "ID"


class Literal(msgspec.Struct, frozen=True):
    kind: LiteralKind
    text: str


class Corpus(msgspec.Struct, frozen=True):
    """What evidence says, ready to be searched: all its texts, and all its numbers by value."""

    text: str
    numbers: frozenset[Decimal]


_START = r"(?<![A-Za-z0-9_])"
_END = r"(?![A-Za-z0-9_])"
_STOP = r"\s\"'`<>|，。；：、！？（）()\[\]{}“”‘’「」『』"

_QUOTES = (('"', '"'), ("“", "”"), ("‘", "’"), ("「", "」"), ("『", "』"), ("`", "`"))
_QUOTED = "|".join(rf"{opening}([^{closing}\n]+){closing}" for opening, closing in _QUOTES)
_IPV6 = (
    rf"{_START}(?=[0-9a-fA-F:]*(?:::|[a-fA-F]))"  # a colon pair or a letter, else it is a time
    rf"(?:[0-9a-fA-F]{{0,4}}:){{2,7}}[0-9a-fA-F]{{0,4}}{_END}"
)
_DOMAIN = rf"{_START}(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?\.)+[a-z]{{2,}}{_END}"
_UNITS = (
    "s|ms|us|ns|mins?|hrs?|h|d|b|k|m|g|t|kb|mb|gb|tb|pb|kib|mib|gib|tib"
    "|x|c|f|v|w|px|bit|kbps|mbps|gbps|hz|mhz|ghz|st|nd|rd|th"
)
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
_MEASURED = rf"(?<![A-Za-z0-9_.,])(?<![A-Za-z_]-)({_DIGITS})(?i:{_UNITS}){_END}"
_TOKEN = (
    rf"{_START}(?=[A-Za-z0-9_.-]*[0-9_])(?=[A-Za-z0-9_.-]*[A-Za-z])"  # letters with digits or underscores
    r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
)

#: Tried in this order; what one pattern took, the next ones do not see.
_PATTERNS: tuple[tuple[LiteralKind, re.Pattern[str]], ...] = (
    (LiteralKind.QUOTED, re.compile(_QUOTED)),
    (LiteralKind.QUOTED, re.compile(r"(?<![A-Za-z0-9])'([^'\n]+)'(?![A-Za-z0-9])")),
    (LiteralKind.PATH, re.compile(rf"{_START}[A-Za-z][A-Za-z0-9+.-]*://[^{_STOP}]+")),
    (LiteralKind.PATH, re.compile(rf"(?<![A-Za-z0-9_/.~-])(?:~|\.{{1,2}})?/[^{_STOP}/][^{_STOP}]*")),
    (LiteralKind.PATH, re.compile(rf"{_START}[A-Za-z]:\\[^{_STOP}]+")),
    (LiteralKind.TIME, re.compile(r"(?<!\d)\d{4}-\d{2}-\d{2}(?!\d)")),
    (LiteralKind.TIME, re.compile(r"(?<![\d:])\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?![\d:])")),
    (LiteralKind.HOST, re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.]*\d)")),
    (LiteralKind.HOST, re.compile(_IPV6)),
    (LiteralKind.HOST, re.compile(_DOMAIN)),
    (LiteralKind.NUMBER, re.compile(_MEASURED)),
    (LiteralKind.ID, re.compile(_TOKEN)),
    (LiteralKind.NUMBER, re.compile(rf"(?<![A-Za-z0-9_.]){_DIGITS}")),
)

_PLAIN_NUMBER = re.compile(r"(?<![\d.])\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_GROUPED_NUMBER = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_TRAILING = ".,;:!?。，；：！？-"


def literals(sentence: str) -> tuple[Literal, ...]:
    """Every literal in a sentence, each once, in the order of the patterns."""
    rest = sentence
    found: dict[Literal, None] = {}
    for kind, pattern in _PATTERNS:
        for match in pattern.finditer(rest):
            text = next((group for group in match.groups() if group), match.group()).strip().rstrip(_TRAILING)
            if text:
                found[Literal(kind, text)] = None
        rest = pattern.sub(lambda match: " " * len(match.group()), rest)
    return tuple(found)


def corpus_of(values: Iterable[Any]) -> Corpus:
    """Everything that JSON values say: keys, texts, numbers; numbers inside texts too."""
    texts = [text for value in values for text in _texts(value)]
    numbers = {
        number
        for text in texts
        for pattern in (_PLAIN_NUMBER, _GROUPED_NUMBER)
        for match in pattern.finditer(text)
        if (number := _number(match.group())) is not None
    }
    return Corpus("\n".join(texts), frozenset(numbers))


def stands_in(literal: Literal, corpus: Corpus) -> bool:
    """Whether the literal occurs: numbers by value, quotes anywhere, the rest as a whole."""
    if literal.kind is LiteralKind.NUMBER:
        return _number(literal.text) in corpus.numbers
    if literal.kind is LiteralKind.TIME:  # beside the letters of ISO 8601
        return re.search(rf"(?<!\d){re.escape(literal.text)}(?!\d)", corpus.text) is not None
    if literal.kind is LiteralKind.QUOTED:
        return " ".join(literal.text.split()) in " ".join(corpus.text.split())
    return occurs(literal.text, corpus.text, ignore_case=literal.kind is LiteralKind.HOST)


def missing(sentence: str, corpus: Corpus) -> tuple[Literal, ...]:
    """The literals of a sentence that the corpus does not have."""
    return tuple(literal for literal in literals(sentence) if not stands_in(literal, corpus))


def occurs(value: Any, text: str, *, ignore_case: bool = False) -> bool:
    """Whether a scalar stands in ``text`` as a whole: ``80`` does not stand in ``8080`` or ``80.5``."""
    needle = value.strip() if isinstance(value, str) else canonical(value)
    if not needle:
        return True
    return re.search(_whole(needle), text, re.IGNORECASE if ignore_case else 0) is not None


@functools.lru_cache(maxsize=4096)
def _whole(needle: str) -> str:
    before = r"(?<![A-Za-z0-9_])(?<!\d\.)" if needle[0].isascii() and needle[0].isalnum() else ""
    after = r"(?![A-Za-z0-9_])(?!\.\d)" if needle[-1].isascii() and needle[-1].isalnum() else ""
    return before + re.escape(needle) + after


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, str):
        yield value
    elif value is not None:
        yield canonical(value)


def _number(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", "")).normalize()
    except ArithmeticError:  # an id such as 12e99999999 reads like a number that is none
        return None
