"""The catalogue loader: what it accepts, and that every fault is named where it stands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness_service.adapters.catalogue_yaml import CatalogueInvalid, Fault, load_catalogue
from harness_service.core.catalogue import ArgumentRule, EntityRule, McpServer, OnToolError, Share
from turnfence.axes import SideEffect

SOUND = """\
mcp_servers:
  ops: {command: [python, -m, some.server]}
  desk: {url: "http://127.0.0.1:9000/mcp", headers: {Authorization: "env:DESK_TOKEN"}}
agents:
  ops:
    title: Host operations
    skills: [look, ticketing]
skills:
  look:
    tools: [ops.disk, ops.find]
    inputs: {service: {from: [user, shared.service, prior.service.name], required: true, label: Service}}
    outputs: {culprit: {description: what it is, share: TASK}}
    delegatable: true
  ticketing:
    tools: [ops.find, desk.create]
    target: desk.create
tools:
  ops.disk:
    timeout: 500ms
    artifact: true
  ops.find:
    name: find_ticket
    empty: "length(items) == `0`"
    extract: {tickets: "items[*].id"}
  desk.create:
    side_effect: WRITE
    idempotency_key: [title, service.name]
    pass_key_as: request_id
    args:
      service: {from: [user, evidence, evidence.host.name], required: true}
      operator: {inject: platform.user_id}
    success: "status == 'created'"
    entities: {ticket: {id: id, display_name: title, attrs: [status], items: items}}
    verify: {tool: ops.find, args: {title: args.title}, found: "length(items) > `0`"}
    mask: [contact.phone]
    labels: {title: Title}
    timeout: 2m
    on_error: unknown
runbooks:
  look-around:
    kind: task
    agent: ops
    skill: look
    title: Look around
    match: {any: [look]}
    steps:
      - {tool: ops.disk, fact: "The disk is {disk.percent} % full."}
      - {output: culprit, value: "{disk.path}"}
"""


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder


def faults(folder: Path) -> list[Fault]:
    with pytest.raises(CatalogueInvalid) as caught:
        load_catalogue(folder)
    return caught.value.faults


# --- what is accepted -----------------------------------------------------------------------------


def test_everything_the_design_names_is_read(tmp_path: Path) -> None:
    catalogue = load_catalogue(write(tmp_path, one=SOUND))
    assert catalogue.mcp_servers["ops"] == McpServer("ops", command=("python", "-m", "some.server"))
    assert catalogue.mcp_servers["desk"].headers == {"Authorization": "env:DESK_TOKEN"}
    look = catalogue.skills["look"]
    assert look.inputs["service"] == ArgumentRule(
        ("user", "shared.service", "prior.service.name"), required=True, label="Service"
    )
    assert look.outputs["culprit"].share is Share.TASK
    assert [tool.name for tool in catalogue.tools_of("look")] == ["ops.disk", "ops.find"]
    assert catalogue.tools["ops.disk"].timeout == 0.5
    assert catalogue.tools["ops.find"].remote_name == "find_ticket"
    create = catalogue.tools["desk.create"]
    assert (create.server, create.remote_name, create.side_effect) == ("desk", "create", SideEffect.WRITE)
    assert create.confirm
    assert create.idempotency_key == ("title", "service.name")
    assert create.args["operator"] == ArgumentRule(inject="platform.user_id")
    assert create.entities["ticket"] == EntityRule("id", "title", ("status",), "items")
    assert create.verify is not None
    assert create.verify.args == {"title": "args.title"}
    assert (create.timeout, create.on_error) == (120.0, OnToolError.UNKNOWN)
    assert catalogue.runbooks[0]["name"] == "look-around"


def test_defaults_are_the_contracts(tmp_path: Path) -> None:
    tool = load_catalogue(write(tmp_path, one=SOUND)).tools["ops.disk"]
    assert (tool.server, tool.remote_name, tool.side_effect) == ("ops", "disk", SideEffect.NONE)
    assert tool.on_error is OnToolError.FAILED


def test_files_are_merged_and_names_may_cross_them(tmp_path: Path) -> None:
    head, _, tail = SOUND.partition("skills:\n  look:")
    catalogue = load_catalogue(write(tmp_path, a=head, b="skills:\n  look:" + tail, c="# only a comment\n"))
    assert set(catalogue.skills) == {"look", "ticketing"}


def test_other_files_and_folders_are_no_part_of_it(tmp_path: Path) -> None:
    write(tmp_path, one=SOUND)
    (tmp_path / "README.md").write_text("not: [yaml")
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "x.yaml").write_text("unknown: 1")
    assert load_catalogue(tmp_path).agents


# --- faults by a change of one line ---------------------------------------------------------------

SERVICE = "      service: {from: [user, evidence, evidence.host.name], required: true}"
ENTITIES = "    entities: {ticket: {id: id, display_name: title, attrs: [status], items: items}}"
VERIFY = '    verify: {tool: ops.find, args: {title: args.title}, found: "length(items) > `0`"}'
DESK = '  desk: {url: "http://127.0.0.1:9000/mcp", headers: {Authorization: "env:DESK_TOKEN"}}'

ONE_LINE = [
    # (id, the line as it is, as it becomes, part of the message)
    ("unknown key of a tool", "    artifact: true", "    artefact: true", "unknown key 'artefact'"),
    ("unknown key of an agent", "    title: Host operations", "    titel: x", "unknown key 'titel'"),
    (
        "unknown key deep inside",
        "    outputs: {culprit: {description: what it is, share: TASK}}",
        "    outputs: {culprit: {descr: what it is, share: TASK}}",
        "unknown key 'descr'",
    ),
    ("unknown section", "runbooks:", "playbooks:", "unknown section 'playbooks'"),
    ("text where a list belongs", "    mask: [contact.phone]", "    mask: contact.phone", "expected a list"),
    (
        "wrong type: boolean",
        "    artifact: true",
        "    artifact: 1",
        "expected true or false, found a number",
    ),
    ("wrong type: text", "    title: Host operations", "    title: 7", "expected text, found a number"),
    ("nothing at all", "    title: Host operations", "    title:", "expected text, found nothing"),
    ("not one of the values", "    on_error: unknown", "    on_error: maybe", "one of failed, unknown"),
    ("YAML's own idea of a value", "    title: Host operations", "    title: 2024-01-01", "quote it"),
    ("a key that is no text", "    title: Host operations", "    yes: x", "the key 'yes' is not text"),
    (
        "tool unknown to its skill",
        "    tools: [ops.find, desk.create]",
        "    tools: [ops.fnd, desk.create]",
        "no tool 'ops.fnd'",
    ),
    (
        "skill unknown to its agent",
        "    skills: [look, ticketing]",
        "    skills: [look, tickets]",
        "no skill 'tickets'",
    ),
    ("a name in a list twice", "    skills: [look, ticketing]", "    skills: [look, look]", "twice"),
    ("empty list", "    skills: [look, ticketing]", "    skills: []", "the list is empty"),
    ("server of a tool unknown", "    name: find_ticket", "    server: nowhere", "no MCP server 'nowhere'"),
    (
        "target is read-only",
        "    target: desk.create",
        "    target: ops.find",
        "not a write tool of this skill",
    ),
    (
        "target is not the skill's",
        "    target: desk.create",
        "    target: ops.other",
        "not a write tool of this skill",
    ),
    (
        "delegatable skill with a write tool",
        "    tools: [ops.disk, ops.find]",
        "    tools: [ops.disk, desk.create]",
        "a delegatable skill only reads, and 'desk.create' writes",
    ),
    (
        "verify by a write tool",
        VERIFY,
        '    verify: {tool: desk.create, args: {title: args.title}, found: "length(items) > `0`"}',
        "a check must not change anything",
    ),
    (
        "verify by an unknown tool",
        VERIFY,
        '    verify: {tool: ops.seek, args: {title: args.title}, found: "length(items) > `0`"}',
        "no tool 'ops.seek'",
    ),
    ("confirm of a read tool", "    artifact: true", "    confirm: false", "'confirm' is for tools"),
    (
        "key of a read tool",
        "    artifact: true",
        "    idempotency_key: [a]",
        "'idempotency_key' is for tools",
    ),
    ("on_error of a read tool", "    artifact: true", "    on_error: failed", "'on_error' is for tools"),
    ("pass_key_as of a read tool", "    artifact: true", "    pass_key_as: k", "'pass_key_as' is for tools"),
    (
        "verify of a read tool",
        "    artifact: true",
        "    verify: {tool: ops.find, args: {}, found: items}",
        "'verify' is for tools",
    ),
    (
        "success does not compile",
        "    success: \"status == 'created'\"",
        '    success: "status =="',
        "not a JMESPath",
    ),
    ("empty does not compile", '    empty: "length(items) == `0`"', '    empty: "["', "not a JMESPath"),
    ("a function that is none", '    empty: "length(items) == `0`"', "    empty: count(items)", "count"),
    (
        "extract does not compile",
        '    extract: {tickets: "items[*].id"}',
        '    extract: {tickets: "items["}',
        "not a JMESPath",
    ),
    (
        "entities do not compile",
        ENTITIES,
        '    entities: {ticket: {id: id, attrs: ["a b"], items: items}}',
        "not a JMESPath",
    ),
    (
        "entity without id",
        ENTITIES,
        "    entities: {ticket: {display_name: title}}",
        "'id' is missing",
    ),
    (
        "verify.args do not compile",
        VERIFY,
        "    verify: {tool: ops.find, args: {title: args.}, found: items}",
        "not a JMESPath",
    ),
    (
        "verify.found does not compile",
        VERIFY,
        '    verify: {tool: ops.find, args: {title: args.title}, found: "length("}',
        "not a JMESPath",
    ),
    (
        "verify without found",
        VERIFY,
        "    verify: {tool: ops.find, args: {title: args.title}}",
        "'found' is missing",
    ),
    (
        "bad source",
        SERVICE,
        "      service: {from: [users], required: true}",
        "'users' is not a source",
    ),
    (
        "source without its key",
        SERVICE,
        "      service: {from: [shared], required: true}",
        "'shared' is not a source",
    ),
    (
        "evidence path does not compile",
        SERVICE,
        '      service: {from: ["evidence.items["], required: true}',
        "not a JMESPath",
    ),
    (
        "bad inject",
        "      operator: {inject: platform.user_id}",
        "      operator: {inject: user_id}",
        "not injectable",
    ),
    (
        "from and inject",
        "      operator: {inject: platform.user_id}",
        "      operator: {inject: platform.user_id, from: [user]}",
        "either 'from' or 'inject'",
    ),
    ("duration without unit", "    timeout: 500ms", "    timeout: 10", "expected a duration"),
    ("duration of nothing", "    timeout: 500ms", "    timeout: 0s", "expected a duration"),
    ("duration with a strange unit", "    timeout: 500ms", "    timeout: 3 days", "expected a duration"),
    ("id with a space", "  look-around:", '  "look around":', "is not an id"),
    ("id too long", "  look-around:", f"  {'x' * 65}:", "is not an id"),
    (
        "server with both",
        "  ops: {command: [python, -m, some.server]}",
        '  ops: {command: [python], url: "http://127.0.0.1/"}',
        "either 'command' or 'url'",
    ),
    (
        "server with neither",
        "  ops: {command: [python, -m, some.server]}",
        "  ops: {}",
        "either 'command' or 'url'",
    ),
    (
        "server with an address of another kind",
        DESK,
        '  desk: {url: "ftp://127.0.0.1"}',
        "not an http or https address",
    ),
    (
        "header that names no variable",
        DESK,
        '  desk: {url: "http://127.0.0.1:9000/mcp", headers: {Authorization: "env:DESK-TOKEN"}}',
        "does not name an environment variable",
    ),
    ("runbook of an unknown agent", "    agent: ops", "    agent: nobody", "no agent 'nobody'"),
    ("runbook of an unknown skill", "    skill: look", "    skill: peer", "no skill 'peer'"),
    ("runbook of unknown kind", "    kind: task", "    kind: tasks", "one of task, knowledge, chat"),
    (
        "step with a tool that the skill lacks",
        '      - {tool: ops.disk, fact: "The disk is {disk.percent} % full."}',
        '      - {tool: desk.create, name: disk, fact: "The disk is {disk.percent} % full."}',
        "skill 'look' has no tool 'desk.create'",
    ),
    (
        "step with an unknown output",
        '      - {output: culprit, value: "{disk.path}"}',
        '      - {output: suspect, value: "{disk.path}"}',
        "skill 'look' has no output 'suspect'",
    ),
    (
        "template that reads what nothing gives",
        '      - {output: culprit, value: "{disk.path}"}',
        '      - {output: culprit, value: "{disc.path}"}',
        "nothing is called 'disc'",
    ),
    (
        "template with half a hole",
        '      - {output: culprit, value: "{disk.path}"}',
        '      - {output: culprit, value: "{disk.path"}',
        "a single '{'",
    ),
    ("runbook that never matches", "    match: {any: [look]}", "    match: {none: [x]}", "would never match"),
    (
        "regular expression",
        "    match: {any: [look]}",
        '    match: {regex: ["("]}',
        "not a regular expression",
    ),
]


@pytest.mark.parametrize(
    ("before", "after", "message"), [row[1:] for row in ONE_LINE], ids=[row[0] for row in ONE_LINE]
)
def test_a_fault_is_named_with_its_line(tmp_path: Path, before: str, after: str, message: str) -> None:
    lines = SOUND.splitlines()
    assert lines.count(before) == 1, "the table must change exactly one line"
    line = lines.index(before) + 1
    write(tmp_path, agents=SOUND.replace(f"{before}\n", f"{after}\n"))
    found = faults(tmp_path)
    assert [(fault.file, fault.line) for fault in found if message in fault.message] == [
        ("agents.yaml", line)
    ]


# --- faults of more than a line -------------------------------------------------------------------


def test_every_fault_is_named_at_once(tmp_path: Path) -> None:
    text = SOUND.replace("timeout: 500ms", "timeout: soon").replace("timeout: 2m", "timeout: later")
    write(
        tmp_path,
        a=text.replace("on_error: unknown", "on_err: unknown"),
        b="agents: {ops: {skills: [look]}}\n",
    )
    found = faults(tmp_path)
    assert [fault.file for fault in found] == ["a.yaml", "a.yaml", "a.yaml", "b.yaml"]
    changed = ("    timeout: 500ms", "    timeout: 2m", "    on_error: unknown")
    assert [fault.line for fault in found] == [*(1 + SOUND.splitlines().index(line) for line in changed), 1]


def test_a_name_defined_in_two_files_names_both_places(tmp_path: Path) -> None:
    write(tmp_path, a=SOUND, b="\n\ntools:\n  ops.disk: {}\n")
    (fault,) = faults(tmp_path)
    first = 1 + SOUND.splitlines().index("  ops.disk:")
    assert (fault.file, fault.line) == ("b.yaml", 4)
    assert f"already defined at a.yaml:{first}" in fault.message


def test_a_key_twice_in_one_mapping_is_a_fault_at_the_second(tmp_path: Path) -> None:
    lines = SOUND.replace("    timeout: 500ms\n", "    timeout: 500ms\n    timeout: 1s\n")
    write(tmp_path, a=lines)
    (fault,) = faults(tmp_path)
    second = 1 + lines.splitlines().index("    timeout: 1s")
    assert (fault.line, fault.message) == (second, f"the key 'timeout' is already at line {second - 1}")


def test_the_server_in_a_tools_name_must_exist(tmp_path: Path) -> None:
    write(tmp_path, a=SOUND, b="tools:\n\n  elsewhere.look: {timeout: 1s}\n  dotless: {}\n")
    assert [(fault.file, fault.line, fault.message) for fault in faults(tmp_path)] == [
        ("b.yaml", 3, "there is no MCP server 'elsewhere'"),
        ("b.yaml", 4, "there is no MCP server 'dotless'"),
    ]


def test_tools_that_a_model_cannot_tell_apart(tmp_path: Path) -> None:
    write(tmp_path, a=SOUND, b="tools:\n  ops__disk: {server: ops}\n")
    (fault,) = faults(tmp_path)
    assert "both are 'ops__disk'" in fault.message


def test_what_is_no_yaml_is_named_with_its_line(tmp_path: Path) -> None:
    write(tmp_path, a=SOUND, b="tools:\n  x: [1\n  y: 2\n")
    (fault,) = faults(tmp_path)
    assert (fault.file, fault.line) == ("b.yaml", 3)
    assert fault.message.startswith("not YAML:")


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    write(tmp_path, a=SOUND)
    (tmp_path / "b.yaml").write_bytes(b"tools: \xff\xfe")
    (fault,) = faults(tmp_path)
    assert (fault.file, fault.line) == ("b.yaml", 1)


def test_an_alias_that_contains_itself_ends(tmp_path: Path) -> None:
    write(tmp_path, a=SOUND, b="tools:\n  ops.x: &x {extract: *x}\n")
    assert any("nested too deeply" in fault.message for fault in faults(tmp_path))


def test_a_folder_without_an_agent_is_no_catalogue(tmp_path: Path) -> None:
    (fault,) = faults(tmp_path)
    assert fault.line == 0
    assert "no agent" in fault.message


def test_a_faulty_definition_is_not_reported_as_missing_too(tmp_path: Path) -> None:
    write(tmp_path, a=SOUND.replace("    timeout: 500ms", "    timeout: soon"))
    (fault,) = faults(tmp_path)
    assert "expected a duration" in fault.message


def paths_in(value: Any, here: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*here, key)
        yield from paths_in(item, (*here, key))


@pytest.mark.parametrize(
    "value", [None, [["x"]], {"tool": ["x"]}, 1.5], ids=["null", "list", "map", "number"]
)
def test_whatever_stands_anywhere_is_read_or_named_with_a_line(tmp_path: Path, value: object) -> None:
    named: list[Fault] = []
    for path in paths_in(yaml.safe_load(SOUND)):
        changed = yaml.safe_load(SOUND)
        holder = changed
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = value
        write(tmp_path, a=yaml.safe_dump(changed))
        try:
            load_catalogue(tmp_path)
        except CatalogueInvalid as invalid:
            named += invalid.faults
    assert len(named) > 80
    assert [fault for fault in named if fault.file != "a.yaml" or fault.line < 1] == []


def test_the_error_prints_a_line_for_each_fault(tmp_path: Path) -> None:
    write(tmp_path, a=SOUND, b="x: 1\n")
    with pytest.raises(CatalogueInvalid, match=r"^b\.yaml:1: unknown section 'x'"):
        load_catalogue(tmp_path)
