"""A tool call's arguments: read, injected, checked, hashed (state 5.4 and 5.7, D37, D49, D56).

The model's arguments are untrusted text. What is hashed, approved and stored is the canonical text
of the arguments *with* what the platform injects and *without* the idempotency key, which is derived
from it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jmespath
import jmespath.exceptions
import jsonschema
import jsonschema.exceptions
import jsonschema.protocols
import jsonschema.validators
import msgspec
import referencing
import referencing.exceptions

from harness_service.core.canonical import JsonRefused, canonical, digest, parse_json, sha256_hex
from harness_service.core.catalogue import ArgumentRule, ToolContract
from harness_service.core.display import clean
from harness_service.core.literals import occurs
from harness_service.core.prior import prior_values
from turnfence.axes import SourceType
from turnfence.records import Prior, Source, Sourced

PLATFORM = "platform."
KEY_VERSION = "v1"
REASON_MAX_CHARS = 400


class ArgumentsRefused(Exception):
    """The call is not made; the model is told ``reason`` and ``next_step``, and may do better."""

    def __init__(self, reason: str, next_step: str) -> None:
        super().__init__(f"{reason}. Next step: {next_step}")
        self.reason = reason
        self.next_step = next_step


class UserText(msgspec.Struct, frozen=True):
    message_id: str
    text: str


class EvidencePayload(msgspec.Struct, frozen=True):
    """The parsed payload of a READY evidence of this node, its delegates or its upstream."""

    evidence_id: str
    value: Any


class KnownValues(msgspec.Struct, frozen=True):
    """Everything an argument may come from, in this turn and task."""

    user_texts: tuple[UserText, ...] = ()
    evidence: tuple[EvidencePayload, ...] = ()
    shared: Mapping[str, Sourced] = {}
    session: Mapping[str, Sourced] = {}
    prior: Prior | None = None


class PreparedCall(msgspec.Struct, frozen=True):
    """A call that may be made.

    ``args_json``: the canonical text that is hashed, shown for approval and stored.
    ``wire_json``: the same with ``pass_key_as`` filled in: what the tool gets.
    """

    args_json: str
    args_hash: str
    idempotency_key: str
    wire_json: str
    sources: Mapping[str, Source]

    @property
    def arguments(self) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(self.args_json)
        return parsed


# --- the whole way ----------------------------------------------------------------------------------


def prepare(
    tool: ToolContract,
    schema: Mapping[str, Any],
    arguments_json: str,
    known: KnownValues,
    platform: Mapping[str, str],
) -> PreparedCall:
    """The model's text → a call, or ArgumentsRefused.

    ``schema``: the tool's JSON Schema as its server gives it. ``platform``: ``user_id``,
    ``organ_id``, ``conversation_id``, ``run_id``.
    """
    given = parse_arguments(arguments_json)
    own = {name: value for name, value in given.items() if name not in unoffered(tool)}
    sources = check_sources(tool.args, own, known)
    return assemble(tool, schema, {**own, **injected(tool, platform)}, sources)


def assemble(
    tool: ToolContract,
    schema: Mapping[str, Any],
    arguments: Mapping[str, Any],
    sources: Mapping[str, Source] | None = None,
) -> PreparedCall:
    """Hash, key and schema check of arguments whose sources are settled (an approved write's too)."""
    args_json = canonical(arguments)
    args_hash = sha256_hex(args_json.encode())
    key = idempotency_key(tool, arguments)
    wire = {**arguments, tool.pass_key_as: key} if tool.pass_key_as else arguments
    check_schema(schema, wire)
    platform = {name: Source(SourceType.PLATFORM, ref=rule.inject) for name, rule in _injections(tool)}
    return PreparedCall(args_json, args_hash, key, canonical(wire), {**(sources or {}), **platform})


def parse_arguments(text: str) -> dict[str, Any]:
    """One JSON object within the limits of ``canonical.parse_json``; empty text means ``{}``."""
    try:
        value = parse_json(text or "{}")
    except JsonRefused as fault:
        reason = f"the arguments cannot be read: {fault}"
        raise ArgumentsRefused(reason, "send one valid JSON object") from fault
    if not isinstance(value, dict):
        raise ArgumentsRefused("the arguments are no JSON object", "send one JSON object")
    return value


# --- schema -----------------------------------------------------------------------------------------


def check_schema(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that do not fit the tool's JSON Schema; the reason names the place.

    References are resolved inside the schema alone: nothing is ever fetched.
    """
    try:
        fault = jsonschema.exceptions.best_match(_validator(canonical(dict(schema))).iter_errors(arguments))
    except (referencing.exceptions.Unresolvable, jsonschema.exceptions.SchemaError) as broken:
        raise ArgumentsRefused("the tool's own schema cannot be used", "do without this tool") from broken
    if fault is not None:
        place = ".".join(str(step) for step in fault.absolute_path) or "the arguments"
        reason = clean(f"{place}: {fault.message}", REASON_MAX_CHARS)
        raise ArgumentsRefused(reason, "correct the arguments to fit the tool's schema and call it again")


def offered_schema(tool: ToolContract, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema that the model sees: without what the platform fills in."""
    hidden = unoffered(tool)
    offered = dict(schema)
    if "properties" in schema:
        offered["properties"] = {
            name: rule for name, rule in schema["properties"].items() if name not in hidden
        }
    if "required" in schema:
        offered["required"] = [name for name in schema["required"] if name not in hidden]
    return offered


def unoffered(tool: ToolContract) -> frozenset[str]:
    """The arguments that the model never sets: injected ones and the key's."""
    names = {name for name, _ in _injections(tool)}
    return frozenset(names | {tool.pass_key_as} - {""})


def injected(tool: ToolContract, platform: Mapping[str, str]) -> dict[str, str]:
    """What the platform puts in; it replaces whatever the model wrote there. KeyError: a name unknown."""
    return {name: platform[rule.inject.removeprefix(PLATFORM)] for name, rule in _injections(tool)}


# --- identity ---------------------------------------------------------------------------------------


def idempotency_key(tool: ToolContract, arguments: Mapping[str, Any]) -> str:
    """SHA-256 of ``[version, tool, [[path, value]…]]`` over the contract's paths, sorted.

    Without paths, or when one of them is missing: of ``[version, tool, args hash]``, never a partial
    key (D37). A path that holds null is there.
    """
    pairs = [[path, _at(arguments, path)] for path in sorted(tool.idempotency_key)]
    if not pairs or any(value is _MISSING for _, value in pairs):
        return digest([KEY_VERSION, tool.name, digest(arguments)])
    return digest([KEY_VERSION, tool.name, pairs])


class _Missing:
    """Not there; null is something else."""


_MISSING = _Missing()


def _at(value: Any, path: str) -> Any:
    for step in path.split("."):
        if not isinstance(value, Mapping) or step not in value:
            return _MISSING
        value = value[step]
    return value


# --- sources ----------------------------------------------------------------------------------------


def check_sources(
    rules: Mapping[str, ArgumentRule], arguments: Mapping[str, Any], known: KnownValues
) -> dict[str, Source]:
    """Where each argument came from; ArgumentsRefused for one that has none of its allowed sources.

    An argument without a rule, or whose rule names no source, may come from anywhere (MODEL). Of a
    list or object every scalar inside must have a source; the first one's is recorded.
    """
    found: dict[str, Source] = {}
    for name, rule in rules.items():
        value = arguments.get(name)
        if value in (None, ""):
            if rule.required and not rule.inject:
                raise ArgumentsRefused(
                    f"{name} is required", f"find out {rule.label or name} first, or ask the user for it"
                )
            continue
        found[name] = source_of(name, rule, value, known)
    rest = {name: Source(SourceType.MODEL) for name in arguments if name not in rules}
    return {**rest, **found}


def source_of(name: str, rule: ArgumentRule, value: Any, known: KnownValues) -> Source:
    """The first allowed source that has the value."""
    if not rule.sources:
        return Source(SourceType.MODEL)
    found: Source | None = None
    for scalar in _scalars(value):
        source = next((hit for expression in rule.sources if (hit := _find(expression, scalar, known))), None)
        if source is None:
            raise ArgumentsRefused(
                f"the value of {name} comes from none of its allowed sources ({', '.join(rule.sources)})",
                f"take {rule.label or name} from one of them, or ask the user for it",
            )
        found = found or source
    return found or Source(SourceType.MODEL)


def bind_inputs(rules: Mapping[str, ArgumentRule], known: KnownValues) -> dict[str, Sourced]:
    """A skill's inputs that can be bound without a model: the first value of the first source.

    ``user`` and ``model`` bind nothing, since text has to be read first.
    """
    bound: dict[str, Sourced] = {}
    for name, rule in rules.items():
        for expression in rule.sources:
            value = next(iter(_values(expression, known)), None)
            if value is not None:
                source, content = value
                bound[name] = Sourced(canonical(content), source)
                break
    return bound


def _find(expression: str, scalar: Any, known: KnownValues) -> Source | None:
    if expression == "model":
        return Source(SourceType.MODEL)
    if expression == "user":
        for said in known.user_texts:
            if occurs(scalar, said.text, ignore_case=True):
                return Source(SourceType.USER, ref=said.message_id)
        return None
    return next(
        (source for source, content in _values(expression, known) if _holds_value(content, scalar)), None
    )


def _values(expression: str, known: KnownValues) -> Iterator[tuple[Source, Any]]:
    """The values behind one source expression, each with its source; none for ``user`` and ``model``."""
    kind, _, path = expression.partition(".")
    if kind == "evidence":
        for evidence in known.evidence:
            content = _search(path, evidence.value) if path else evidence.value
            if content is not None:
                yield Source(SourceType.EVIDENCE, ref=evidence.evidence_id, path=path), content
    elif kind == "shared" and path in known.shared:
        yield Source(SourceType.SHARED, ref=path), json.loads(known.shared[path].value_json)
    elif kind == "session" and path in known.session:
        yield Source(SourceType.SESSION, ref=path), json.loads(known.session[path].value_json)
    elif kind == "prior":
        for key, value in prior_values(known.prior, path):
            yield Source(SourceType.PRIOR_TASK, ref=key), value


def _holds_value(content: Any, scalar: Any) -> bool:
    """Whether a scalar equals one in ``content``, or stands in one of its texts."""
    return any(
        (isinstance(item, bool) is isinstance(scalar, bool) and item == scalar)
        or (isinstance(item, str) and not isinstance(scalar, bool) and occurs(scalar, item))
        for item in _scalars(content)
    )


def _scalars(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _scalars(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _scalars(item)
    elif value is not None:
        yield value


def _search(path: str, value: Any) -> Any:
    try:
        return jmespath.search(path, value)
    except jmespath.exceptions.JMESPathError:
        return None


def _injections(tool: ToolContract) -> Iterable[tuple[str, ArgumentRule]]:
    return [(name, rule) for name, rule in tool.args.items() if rule.inject]


@functools.lru_cache(maxsize=512)
def _validator(schema_json: str) -> jsonschema.protocols.Validator:
    schema = json.loads(schema_json)
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    kind.check_schema(schema)
    return kind(schema, registry=_NO_FETCHING)


_NO_FETCHING: referencing.Registry[Any] = referencing.Registry()
