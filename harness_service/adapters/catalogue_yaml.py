"""The catalogue from a folder of YAML files (design: catalogue.md): all of it is right, or none of it loads.

``load_catalogue`` names every fault with file and line. It works in four steps: YAML nodes become plain
data and the place of every path in it; the files are merged; a table of fields reads the data strictly;
rules that join several definitions are checked last. YAML's merge keys (``<<``) are not supported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from harness_service.adapters.runbook_format import Runbook, read_runbook
from harness_service.adapters.strict_reader import (
    DataPath,
    Field,
    Parse,
    Reader,
    boolean,
    built,
    choice,
    duration,
    identifier,
    jmes,
    kind_of,
    list_of,
    map_of,
    matching,
    record,
    text,
)
from harness_service.core.catalogue import (
    Agent,
    ArgumentRule,
    Catalogue,
    EntityRule,
    McpServer,
    OnToolError,
    OutputRule,
    Share,
    Skill,
    ToolContract,
    VerifyContract,
)
from turnfence.axes import SideEffect


class Fault(msgspec.Struct, frozen=True, order=True):
    """``file`` is relative to the catalogue's folder; ``line`` counts from 1, 0 is the folder itself."""

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"


class CatalogueInvalid(Exception):
    """The catalogue has faults; every one of them is in ``faults``, ordered by file and line."""

    def __init__(self, faults: list[Fault]) -> None:
        self.faults = sorted(faults)
        super().__init__("\n".join(str(fault) for fault in self.faults))


def load_catalogue(folder: Path) -> Catalogue:
    """Read ``*.yaml`` and ``*.yml`` of ``folder`` (not of folders in it) as one catalogue.

    Raises ``CatalogueInvalid`` naming every fault; nothing is guessed and nothing is skipped.
    """
    source = _Merged()
    for file in sorted(folder.glob("*.y*ml")):
        if file.suffix in (".yaml", ".yml"):
            source.add(file)
    reader = Reader()
    read = {name: _read_section(reader, source.sections[name], name) for name in _SECTIONS}
    for rule in _RULES:
        for path, message in rule(_Joined(source.sections)):
            reader.report(path, message)
    faults = [*source.faults, *(source.fault(path, message) for path, message in reader.problems)]
    if not faults and not read["agents"]:
        faults = [Fault(folder.name, 0, "there is no agent in this folder's *.yaml files")]
    if faults:
        raise CatalogueInvalid(faults)
    return Catalogue(
        agents=read["agents"],
        skills=read["skills"],
        tools=read["tools"],
        mcp_servers=read["mcp_servers"],
        runbooks=tuple({**raw, "name": name} for name, raw in source.sections["runbooks"].items()),
    )


# --- YAML to plain data ---------------------------------------------------------------------------

_DEEPEST = 64  # far above any catalogue; an alias that contains itself never ends
_SCALARS = frozenset(f"tag:yaml.org,2002:{name}" for name in ("str", "bool", "int", "float", "null"))
_Place = tuple[str, int]


class _Merged:
    """The merged sections as plain data, and where each path of them stands."""

    def __init__(self) -> None:
        self.sections: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
        self.places: dict[DataPath, _Place] = {}
        self.faults: list[Fault] = []

    def fault(self, path: DataPath, message: str) -> Fault:
        """The fault at ``path``, or at the nearest thing round it that has a line."""
        for end in range(len(path), 0, -1):
            if place := self.places.get(path[:end]):
                return Fault(*place, message)
        return Fault("", 0, message)

    def add(self, file: Path) -> None:
        try:
            root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            message = f"not YAML: {error.problem or error.context}"
            self.faults.append(Fault(file.name, mark.line + 1 if mark else 1, message))
            return
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            self.faults.append(Fault(file.name, 1, f"cannot be read: {error}"))
            return
        if root is None:
            return  # nothing but comments
        plain = _Plain(file.name)
        data = plain.convert(root, ())
        self.faults += plain.faults
        if not isinstance(data, dict):
            self.faults.append(Fault(file.name, 1, f"expected a mapping of sections, found {kind_of(data)}"))
            return
        for section, entries in data.items():
            self._merge(section, entries, plain.places)

    def _merge(self, section: str, entries: object, places: Mapping[DataPath, _Place]) -> None:
        here = places[(section,)]
        if section not in _SECTIONS:
            known = ", ".join(_SECTIONS)
            self.faults.append(Fault(*here, f"unknown section '{section}' (known: {known})"))
        elif not isinstance(entries, dict):
            message = f"'{section}' must be a mapping of names, found {kind_of(entries)}"
            self.faults.append(Fault(*here, message))
        else:
            for name, definition in entries.items():
                self._define(section, name, definition, places)

    def _define(self, section: str, name: str, definition: object, places: Mapping[DataPath, _Place]) -> None:
        if name in self.sections[section]:
            first = self.places[(section, name)]
            message = f"{section}: '{name}' is already defined at {first[0]}:{first[1]}"
            self.faults.append(Fault(*places[(section, name)], message))
            return
        self.sections[section][name] = definition
        self.places |= {path: place for path, place in places.items() if path[:2] == (section, name)}


class _Plain:
    """One file's nodes as plain data; the place of a mapping's value is the line of its key."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.places: dict[DataPath, _Place] = {}
        self.faults: list[Fault] = []
        self._scalars = yaml.constructor.SafeConstructor()

    def convert(self, node: yaml.Node, path: DataPath) -> Any:
        if len(path) > _DEEPEST:
            self._fault(node, "nested too deeply")
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self._item(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._scalar(node)

    def _mapping(self, node: yaml.MappingNode, path: DataPath) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag != "tag:yaml.org,2002:str":
                shown = key_node.value if isinstance(key_node, yaml.ScalarNode) else "…"
                self._fault(key_node, f"the key '{shown}' is not text: quote it")
                continue
            key = key_node.value
            if key in mapping:
                first = self.places[(*path, key)]
                self._fault(key_node, f"the key '{key}' is already at line {first[1]}")
                continue
            self.places[(*path, key)] = self._place(key_node)
            mapping[key] = self.convert(value_node, (*path, key))
        return mapping

    def _item(self, node: yaml.Node, path: DataPath) -> Any:
        self.places[path] = self._place(node)
        return self.convert(node, path)

    def _scalar(self, node: yaml.Node) -> Any:
        if node.tag not in _SCALARS:
            self._fault(node, f"'{node.value}' is read as {node.tag.rpartition(':')[2]}: quote it")
            return None
        try:
            value = self._scalars.construct_object(node)
        except ValueError:
            self._fault(node, f"'{node.value}' is not a number: quote it")
            return None
        if isinstance(value, float) and not math.isfinite(value):
            self._fault(node, f"'{node.value}' is not a finite number")
            return None
        return value

    def _place(self, node: yaml.Node) -> _Place:
        return self.file, node.start_mark.line + 1

    def _fault(self, node: yaml.Node, message: str) -> None:
        self.faults.append(Fault(*self._place(node), message))


# --- the schema -----------------------------------------------------------------------------------

_ORIGINS = (
    "user",
    "model",
    r"evidence(\..+)?",
    r"(shared|session)\.[A-Za-z0-9_.\-]+",
    r"prior\.[A-Za-z0-9_\-]+(\.[A-Za-z0-9_\-]+)?",
)
_PLATFORM = ("user_id", "organ_id", "conversation_id", "run_id")

_origin_form = matching(
    "|".join(_ORIGINS), "a source (user, model, evidence[.path], shared.key, session.key, prior.type[.attr])"
)
_dotted: Parse[str] = matching(r"[^.\s]+(\.[^.\s]+)*", "a path of names with dots")
_inject: Parse[str] = matching(
    rf"platform\.({'|'.join(_PLATFORM)})", f"injectable (platform.{', platform.'.join(_PLATFORM)})"
)
_url: Parse[str] = matching(r"https?://\S+", "an http or https address")
_HEADER_REFERENCE = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*")


def _origin(reader: Reader, path: DataPath, value: object) -> str | None:
    source = _origin_form(reader, path, value)
    if source is not None and source.startswith("evidence."):
        return source if jmes(reader, path, source.removeprefix("evidence.")) else None
    return source


def _header(reader: Reader, path: DataPath, value: object) -> str | None:
    header = text(reader, path, value)
    if header is not None and header.startswith("env:") and not _HEADER_REFERENCE.fullmatch(header):
        reader.report(path, f"'{header}' does not name an environment variable")
        return None
    return header


_INPUT = {
    "from": Field(list_of(_origin, least=1), to="sources"),
    "required": Field(boolean),
    "label": Field(text),
}
_ARGUMENT = {**_INPUT, "inject": Field(_inject)}

_SERVER = {
    "command": Field(list_of(text, least=1)),
    "url": Field(_url),
    "headers": Field(map_of(_header)),
}
_AGENT = {
    "title": Field(text),
    "description": Field(text),
    "instructions": Field(text),
    "skills": Field(list_of(identifier, least=1), required=True),
}
_OUTPUT = {"description": Field(text), "share": Field(choice(Share))}
_SKILL = {
    "title": Field(text),
    "objective": Field(text),
    "tools": Field(list_of(identifier, least=1), required=True),
    "inputs": Field(map_of(built(record(_INPUT), ArgumentRule), key=identifier)),
    "outputs": Field(map_of(built(record(_OUTPUT), OutputRule), key=identifier)),
    "target": Field(identifier),
    "delegatable": Field(boolean),
}
_ENTITY = {
    "id": Field(jmes, required=True),
    "display_name": Field(jmes),
    "attrs": Field(list_of(jmes)),
    "items": Field(jmes),
}
_VERIFY = {
    "tool": Field(identifier, required=True),
    "args": Field(map_of(jmes), required=True),
    "found": Field(jmes, required=True),
}
_TOOL = {
    "server": Field(identifier),
    "name": Field(text, to="remote_name"),
    "side_effect": Field(choice(SideEffect)),
    "confirm": Field(boolean),
    "idempotency_key": Field(list_of(_dotted, least=1)),
    "pass_key_as": Field(text),
    "args": Field(map_of(built(record(_ARGUMENT), ArgumentRule))),
    "success": Field(jmes),
    "empty": Field(jmes),
    "extract": Field(map_of(jmes)),
    "entities": Field(map_of(built(record(_ENTITY), EntityRule), key=identifier)),
    "verify": Field(built(record(_VERIFY), VerifyContract)),
    "mask": Field(list_of(_dotted)),
    "labels": Field(map_of(text)),
    "timeout": Field(duration),
    "on_error": Field(choice(OnToolError)),
    "artifact": Field(boolean),
}

_Build = Callable[[Reader, DataPath, object], Any]


def _keyed(fields: Mapping[str, Field], type_: Callable[..., Any]) -> Callable[[str], _Build]:
    return lambda name: built(record(fields), lambda **values: type_(key=name, **values))


def _tool(name: str) -> _Build:
    server, _, after_dot = name.partition(".")
    derived = {"name": name, "server": server, "remote_name": after_dot or name}
    return built(record(_TOOL), lambda **values: ToolContract(**{**derived, **values}))


def _runbook(name: str) -> _Build:
    def read(reader: Reader, path: DataPath, value: object) -> Runbook | None:
        if isinstance(value, dict) and "name" in value:
            reader.report((*path, "name"), "unknown key 'name': a runbook's name is its key")
            return None
        return read_runbook(reader, path, {**value, "name": name} if isinstance(value, dict) else value)

    return read


_SECTIONS: Mapping[str, Callable[[str], _Build]] = {
    "mcp_servers": _keyed(_SERVER, McpServer),
    "agents": _keyed(_AGENT, Agent),
    "skills": _keyed(_SKILL, Skill),
    "tools": _tool,
    "runbooks": _runbook,
}


def _read_section(reader: Reader, entries: Mapping[str, Any], section: str) -> dict[str, Any]:
    read: dict[str, Any] = {}
    for name, definition in entries.items():
        path: DataPath = (section, name)
        named = identifier(reader, path, name)
        found = _SECTIONS[section](name)(reader, path, definition)
        if named is not None and found is not None:
            read[name] = found
    return read


# --- rules that join definitions ------------------------------------------------------------------


class _Joined:
    """The raw sections, read leniently: what is faulty itself is reported once, by the schema."""

    def __init__(self, raw: Mapping[str, Mapping[str, Any]]) -> None:
        self.raw = raw

    def at(self, *path: str | int) -> Any:
        """The value at ``path``, None where there is none."""
        value: Any = self.raw
        for key in path:
            if isinstance(value, Mapping):
                value = value.get(str(key))
            elif isinstance(value, list) and isinstance(key, int):
                value = value[key]
            else:
                return None
        return value

    def mappings(self, *path: str | int) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for name, definition in _items(self.at(*path)):
            if isinstance(definition, Mapping):
                yield name, definition

    def listed(self, *path: str | int) -> list[tuple[int, Any]]:
        value = self.at(*path)
        return list(enumerate(value)) if isinstance(value, list) else []

    def knows(self, section: str, name: object) -> bool:
        """True for a name that is defined, and for what is no name at all."""
        return not isinstance(name, str) or name in self.raw[section]

    def side_effect(self, tool: object) -> SideEffect | None:
        """None for a tool that is not defined, or whose side effect is not one."""
        definition = self.raw["tools"].get(tool) if isinstance(tool, str) else None
        if not isinstance(definition, Mapping):
            return None
        stated = definition.get("side_effect", SideEffect.NONE.value)
        return SideEffect(stated) if stated in list(SideEffect) else None


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, Mapping) else []


_Problems = Iterator[tuple[DataPath, str]]


def _servers(joined: _Joined) -> _Problems:
    for name, server in joined.mappings("mcp_servers"):
        if ("command" in server) == ("url" in server):
            yield ("mcp_servers", name), "a server has either 'command' or 'url'"
        elif "headers" in server and "command" in server:
            yield ("mcp_servers", name, "headers"), "only a server with 'url' has headers"


def _agents(joined: _Joined) -> _Problems:
    for name, _ in joined.mappings("agents"):
        yield from _references(joined, ("agents", name, "skills"), "skill")


def _skills(joined: _Joined) -> _Problems:
    for name, skill in joined.mappings("skills"):
        here: DataPath = ("skills", name)
        yield from _references(joined, (*here, "tools"), "tool")
        for index, tool in joined.listed(*here, "tools"):
            if skill.get("delegatable") is True and joined.side_effect(tool) is SideEffect.WRITE:
                yield (*here, "tools", index), f"a delegatable skill only reads, and '{tool}' writes"
        target = skill.get("target")
        own = [tool for _, tool in joined.listed(*here, "tools")]
        if isinstance(target, str) and (target not in own or joined.side_effect(target) is SideEffect.NONE):
            yield (*here, "target"), f"the target '{target}' is not a write tool of this skill"


_WRITE_ONLY = ("confirm", "idempotency_key", "pass_key_as", "verify", "on_error")


def _tools(joined: _Joined) -> _Problems:
    for name, tool in joined.mappings("tools"):
        here: DataPath = ("tools", name)
        server = tool.get("server", name.partition(".")[0])
        if not joined.knows("mcp_servers", server):
            yield (*here, "server"), f"there is no MCP server '{server}'"
        if joined.side_effect(name) is SideEffect.NONE:
            for key in _WRITE_ONLY:
                if key in tool:
                    yield (*here, key), f"'{key}' is for tools with side_effect WRITE"
        for argument, rule in joined.mappings(*here, "args"):
            if "from" in rule and "inject" in rule:
                yield (*here, "args", argument), "an argument has either 'from' or 'inject'"


_LONGEST_FUNCTION_NAME = 64  # of the models' APIs


def _wire_names(joined: _Joined) -> _Problems:
    first_of: dict[str, str] = {}
    for name, _ in joined.mappings("tools"):
        wire_name = name.replace(".", "__")
        first = first_of.setdefault(wire_name, name)
        if first != name:
            yield ("tools", name), f"a model cannot tell '{name}' from '{first}': both are '{wire_name}'"
        if len(name) <= _LONGEST_FUNCTION_NAME < len(wire_name):
            yield ("tools", name), f"the function name '{wire_name}' is longer than {_LONGEST_FUNCTION_NAME}"
        if wire_name.startswith("builtin_"):
            yield ("tools", name), "names starting with builtin_ belong to the built-in tools"


def _verify(joined: _Joined) -> _Problems:
    for name, _ in joined.mappings("tools"):
        check = joined.at("tools", name, "verify", "tool")
        here: DataPath = ("tools", name, "verify", "tool")
        if not joined.knows("tools", check):
            yield here, f"there is no tool '{check}'"
        elif joined.side_effect(check) is SideEffect.WRITE:
            yield here, f"'{check}' writes: a check must not change anything"


def _runbooks(joined: _Joined) -> _Problems:
    for name, runbook in joined.mappings("runbooks"):
        here: DataPath = ("runbooks", name)
        agent, skill = runbook.get("agent"), runbook.get("skill")
        skills = [key for _, key in joined.listed("agents", str(agent), "skills")]
        if not joined.knows("agents", agent):
            yield (*here, "agent"), f"there is no agent '{agent}'"
        if not joined.knows("skills", skill):
            yield (*here, "skill"), f"there is no skill '{skill}'"
        elif skills and isinstance(skill, str) and skill not in skills:
            yield (*here, "skill"), f"agent '{agent}' has no skill '{skill}'"
        if isinstance(skill, str) and joined.at("skills", skill):
            yield from _steps(joined, skill, here)


def _steps(joined: _Joined, skill: str, here: DataPath) -> _Problems:
    tools = [tool for _, tool in joined.listed("skills", skill, "tools")]
    outputs = [key for key, _ in _items(joined.at("skills", skill, "outputs"))]
    for index, _ in joined.listed(*here, "steps"):
        for key, own in (("tool", tools), ("output", outputs)):
            named = joined.at(*here, "steps", index, key)
            if isinstance(named, str) and named not in own:
                yield (*here, "steps", index, key), f"skill '{skill}' has no {key} '{named}'"


def _references(joined: _Joined, path: DataPath, kind: str) -> _Problems:
    listed = joined.listed(*path)
    for index, name in listed:
        if not joined.knows(f"{kind}s", name):
            yield (*path, index), f"there is no {kind} '{name}'"
        if name in [earlier for _, earlier in listed[:index]]:
            yield (*path, index), f"'{name}' is in the list twice"


_RULES: tuple[Callable[[_Joined], _Problems], ...] = (
    _servers,
    _agents,
    _skills,
    _tools,
    _wire_names,
    _verify,
    _runbooks,
)
