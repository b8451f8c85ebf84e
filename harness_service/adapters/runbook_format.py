"""Runbooks in native types, and how they are read (format: harness_service/catalogue/README.md)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

import msgspec

from harness_service.adapters.strict_reader import (
    DataPath,
    Field,
    Parse,
    Reader,
    built,
    choice,
    identifier,
    integer,
    kind_of,
    list_of,
    map_of,
    matching,
    record,
    text,
)
from harness_service.adapters.templates import (
    Expression,
    Localised,
    Template,
    expression,
    localised,
    template,
)


class RunbookKind(StrEnum):
    TASK = "task"  # steps in a skill, ending in a draft
    KNOWLEDGE = "knowledge"  # an answer from the knowledge base
    CHAT = "chat"  # a fixed answer


class Match(msgspec.Struct, frozen=True):
    """Which texts a runbook answers to; ``order``: also while a task waits for the user's answer."""

    any: tuple[re.Pattern[str], ...] = ()
    regex: tuple[re.Pattern[str], ...] = ()
    none: tuple[re.Pattern[str], ...] = ()
    order: tuple[re.Pattern[str], ...] = ()

    def length(self, said: str) -> int:
        """Length of the longest hit in ``said``; 0 when the runbook does not match."""
        if any(pattern.search(said) for pattern in self.none):
            return 0
        hits = [hit for pattern in (*self.any, *self.regex) if (hit := pattern.search(said))]
        return max((hit.end() - hit.start() for hit in hits), default=0)

    def orders(self, said: str) -> bool:
        return any(pattern.search(said) for pattern in self.order)


class ToolStep(msgspec.Struct, frozen=True):
    """Call a tool; its result is bound to ``name``. ``attempts``: how often a failed call is made."""

    tool: str
    fact: Localised
    name: str
    args: Mapping[str, Any] = {}  # templates, numbers, booleans, lists and mappings of them
    when: Expression | None = None
    empty_fact: Localised | None = None
    gained: Expression | None = None
    attempts: int = 1


class AskStep(msgspec.Struct, frozen=True):
    """Ask the user; the answer is bound to ``answers.<name>``."""

    ask: Localised
    name: str
    when: Expression | None = None
    fields: tuple[str, ...] = ()
    suggestions: tuple[Localised, ...] = ()


class OutputStep(msgspec.Struct, frozen=True):
    """Publish one of the skill's outputs; a value that is null is not published."""

    output: str
    value: Localised
    when: Expression | None = None


Step = ToolStep | AskStep | OutputStep


class Sentence(msgspec.Struct, frozen=True):
    """A text for the draft, said when ``when`` holds and no hole in it is null."""

    text: Localised
    when: Expression | None = None


class Runbook(msgspec.Struct, frozen=True):
    name: str
    kind: RunbookKind
    match: Match
    title: Localised
    priority: int = 0
    agent: str = ""
    skill: str = ""
    capture: Mapping[str, tuple[re.Pattern[str], ...]] = {}
    let: Mapping[str, Expression] = {}
    steps: tuple[Step, ...] = ()
    conclusions: tuple[Sentence, ...] = ()
    missing_info: tuple[Sentence, ...] = ()
    recommendations: tuple[Sentence, ...] = ()
    answer: Localised | None = None
    not_found: Localised | None = None

    @property
    def tool_steps(self) -> tuple[ToolStep, ...]:
        return tuple(step for step in self.steps if isinstance(step, ToolStep))


class RunbookInvalid(Exception):
    """A runbook that does not follow the format; ``problems``: path and what is wrong there."""

    def __init__(self, problems: list[tuple[DataPath, str]]) -> None:
        self.problems = problems
        super().__init__("; ".join(f"{'.'.join(map(str, path))}: {message}" for path, message in problems))


# What every expression may read, whatever the steps are called.
CONTEXT_NAMES = frozenset(
    {
        "text",
        "request",
        "language",
        "inputs",
        "replies",
        "answers",
        "captured",
        "previous_result",
        "status",
        "args",
        "capabilities",
    }
)


def read_runbooks(raw: tuple[dict[str, Any], ...]) -> tuple[Runbook, ...]:
    """The catalogue's runbooks as types. Raises ``RunbookInvalid`` naming every problem."""
    reader = Reader()
    runbooks = [read_runbook(reader, ("runbooks", str(one.get("name", ""))), one) for one in raw]
    if reader.problems:
        raise RunbookInvalid(reader.problems)
    return tuple(runbook for runbook in runbooks if runbook is not None)


def read_runbook(reader: Reader, path: DataPath, value: object) -> Runbook | None:
    """One runbook; None after reporting every problem in it."""
    before = len(reader.problems)
    runbook = built(record(_RUNBOOK), Runbook)(reader, path, value)
    if isinstance(value, dict):
        for where, message in _shape_problems(value):
            reader.report((*path, *where), message)
    if runbook is not None:
        for where, message in _name_problems(runbook):
            reader.report((*path, *where), message)
    return runbook if len(reader.problems) == before else None


# --- the schema -----------------------------------------------------------------------------------


def _regex(reader: Reader, path: DataPath, value: object) -> re.Pattern[str] | None:
    source = text(reader, path, value)
    if source is None:
        return None
    try:
        return re.compile(source, re.IGNORECASE)
    except re.error as error:
        reader.report(path, f"'{source}' is not a regular expression: {error}")
        return None


def _keyword(reader: Reader, path: DataPath, value: object) -> re.Pattern[str] | None:
    """A phrase: whole words where words have spaces round them, anywhere in Chinese."""
    phrase = text(reader, path, value)
    if phrase is None:
        return None
    words = r"\s+".join(re.escape(word) for word in phrase.split())
    before = r"(?<![A-Za-z0-9])" if phrase[0].isascii() else ""
    after = r"(?![A-Za-z0-9])" if phrase[-1].isascii() else ""
    return re.compile(before + words + after, re.IGNORECASE)


def _argument(reader: Reader, path: DataPath, value: object) -> Any:
    if isinstance(value, str):
        return template(reader, path, value)
    if isinstance(value, list):
        return list_of(_argument)(reader, path, value)
    if isinstance(value, dict):
        return map_of(_argument)(reader, path, value)
    if value is None:
        reader.report(path, "an argument cannot be nothing: leave it out")
    return value


def _capture(reader: Reader, path: DataPath, value: object) -> tuple[re.Pattern[str], ...] | None:
    patterns = list_of(_regex, least=1)(reader, path, value)
    for index, pattern in enumerate(patterns or ()):
        if pattern.groups != 1:
            message = f"'{pattern.pattern}' needs exactly one group, has {pattern.groups}"
            reader.report((*path, index), message)
    return patterns


_NAME: Parse[str] = matching("[a-z][a-z0-9_]{0,63}", "a name (a-z 0-9 _, starting with a letter)")
_PATTERNS = Field(list_of(_regex, least=1))

_MATCH = {"any": Field(list_of(_keyword, least=1)), "regex": _PATTERNS, "none": _PATTERNS, "order": _PATTERNS}

_SENTENCE: Parse[Sentence] = built(
    record({"text": Field(localised, required=True), "when": Field(expression)}), Sentence
)

_TOOL_STEP: Parse[dict[str, Any]] = record(
    {
        "tool": Field(identifier, required=True),
        "name": Field(_NAME),
        "args": Field(map_of(_argument)),
        "when": Field(expression),
        "fact": Field(localised, required=True),
        "empty_fact": Field(localised),
        "gained": Field(expression),
        "attempts": Field(integer(1, 5)),
    }
)

_ASK_STEP: Parse[dict[str, Any]] = record(
    {
        "ask": Field(localised, required=True),
        "name": Field(_NAME, required=True),
        "when": Field(expression),
        "fields": Field(list_of(text)),
        "suggestions": Field(list_of(localised)),
    }
)

_OUTPUT_STEP: Parse[dict[str, Any]] = record(
    {
        "output": Field(identifier, required=True),
        "value": Field(localised, required=True),
        "when": Field(expression),
    }
)


def _tool_step(**fields: Any) -> ToolStep:
    after_dot = fields["tool"].rpartition(".")[2].replace("-", "_")
    return ToolStep(**{"name": after_dot, **fields})


_STEPS: Mapping[str, Parse[Any]] = {
    "tool": built(_TOOL_STEP, _tool_step),
    "ask": built(_ASK_STEP, AskStep),
    "output": built(_OUTPUT_STEP, OutputStep),
}


def _step(reader: Reader, path: DataPath, value: object) -> Step | None:
    if not isinstance(value, dict):
        reader.report(path, f"expected a mapping, found {kind_of(value)}")
        return None
    kinds = [kind for kind in _STEPS if kind in value]
    if len(kinds) != 1:
        reader.report(path, "a step has exactly one of 'tool', 'ask', 'output'")
        return None
    step: Step | None = _STEPS[kinds[0]](reader, path, value)
    return step


_RUNBOOK = {
    "name": Field(text, required=True),  # the key in the section, checked there
    "kind": Field(choice(RunbookKind), required=True),
    "match": Field(built(record(_MATCH), Match), required=True),
    "title": Field(localised, required=True),
    "priority": Field(integer(-100, 100)),
    "agent": Field(identifier),
    "skill": Field(identifier),
    "capture": Field(map_of(_capture, key=_NAME)),
    "let": Field(map_of(expression, key=_NAME)),
    "steps": Field(list_of(_step, least=1)),
    "conclusions": Field(list_of(_SENTENCE, least=1)),
    "missing_info": Field(list_of(_SENTENCE, least=1)),
    "recommendations": Field(list_of(_SENTENCE, least=1)),
    "answer": Field(localised),
    "not_found": Field(localised),
}


# --- what a table of fields cannot say ------------------------------------------------------------

_TASK_ONLY = ("agent", "skill", "capture", "let", "steps", "conclusions", "missing_info", "recommendations")
_NEEDS: Mapping[str, tuple[str, ...]] = {
    RunbookKind.TASK: ("agent", "skill", "steps"),
    RunbookKind.KNOWLEDGE: ("answer", "not_found"),
    RunbookKind.CHAT: ("answer",),
}
_REFUSES: Mapping[str, tuple[str, ...]] = {
    RunbookKind.TASK: ("answer", "not_found"),
    RunbookKind.KNOWLEDGE: _TASK_ONLY,
    RunbookKind.CHAT: (*_TASK_ONLY, "not_found"),
}


def _shape_problems(raw: Mapping[str, Any]) -> Iterator[tuple[DataPath, str]]:
    kind = str(raw.get("kind"))  # whatever it is: the schema reports a faulty one
    for key in _NEEDS.get(kind, ()):
        if key not in raw:
            yield (), f"a {kind} runbook needs '{key}'"
    for key in _REFUSES.get(kind, ()):
        if key in raw:
            yield (key,), f"a {kind} runbook has no '{key}'"
    match = raw.get("match")
    if isinstance(match, dict) and not match.keys() & {"any", "regex"}:
        yield ("match",), "needs 'any' or 'regex': it would never match"


def _name_problems(runbook: Runbook) -> Iterator[tuple[DataPath, str]]:
    """Two things of one name, and expressions that read what nothing gives."""
    known = set(CONTEXT_NAMES)
    for name in runbook.let:
        if name in known:
            yield ("let", name), f"'{name}' is taken"
        known.add(name)
    bound = set[str]()
    for index, step in enumerate(runbook.steps):
        if isinstance(step, OutputStep):
            continue
        taken = known | bound if isinstance(step, ToolStep) else bound
        if step.name in taken:
            yield ("steps", index), f"the name '{step.name}' is taken: give the step another 'name'"
        bound.add(step.name)
    known |= {step.name for step in runbook.tool_steps}
    for path, names in _reads(runbook):
        for name in sorted(names - known):
            yield path, f"nothing is called '{name}' here (known: {', '.join(sorted(known))})"


def _reads(runbook: Runbook) -> Iterator[tuple[DataPath, frozenset[str]]]:
    for key, one in runbook.let.items():
        yield ("let", key), one.names
    for index, step in enumerate(runbook.steps):
        for key in step.__struct_fields__:
            yield ("steps", index, key), names_in(getattr(step, key))
    for section in ("conclusions", "missing_info", "recommendations"):
        for index, sentence in enumerate(getattr(runbook, section)):
            yield (section, index, "when"), names_in(sentence.when)
            yield (section, index, "text"), names_in(sentence.text)
    yield ("answer",), names_in(runbook.answer)
    yield ("not_found",), names_in(runbook.not_found)


def names_in(value: Any) -> frozenset[str]:
    """Everything that the expressions inside ``value`` read from the context."""
    if isinstance(value, Expression | Template | Localised):
        return value.names
    if isinstance(value, Mapping):
        return frozenset().union(*(names_in(item) for item in value.values()))
    if isinstance(value, tuple):
        return frozenset().union(*(names_in(item) for item in value))
    return frozenset()
