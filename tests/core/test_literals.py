"""What a sentence states literally, and whether evidence has it."""

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness_service.core.literals import (
    Literal,
    LiteralKind,
    corpus_of,
    literals,
    missing,
    occurs,
    stands_in,
)

N, Q, H, P, I = (LiteralKind[name] for name in ("NUMBER", "QUOTED", "HOST", "PATH", "ID"))  # noqa: E741
T = LiteralKind.TIME


@pytest.mark.parametrize(
    ("sentence", "found"),
    [
        ("Disk / is 93% full.", {(N, "93")}),
        ("16GB of 17 GiB, 1,234.5ms", {(N, "16"), (N, "17"), (N, "1,234.5")}),
        ("1,2,3", {(N, "1"), (N, "2"), (N, "3")}),
        ("between 10-20 and the 3rd", {(N, "10"), (N, "20"), (N, "3")}),
        ("使用率为93%，进程3个", {(N, "93"), (N, "3")}),
        ("log says \"disk full\" and 'no space'", {(Q, "disk full"), (Q, "no space")}),
        ("日志出现“磁盘已满”和「只读」", {(Q, "磁盘已满"), (Q, "只读")}),
        ("the host's disk isn't full", set()),
        ("web-01.example.com at 10.0.0.1:8080", {(H, "web-01.example.com"), (H, "10.0.0.1"), (N, "8080")}),
        ("listens on fe80::1", {(H, "fe80::1")}),
        ("see /var/log/syslog, and/or ~/x.log", {(P, "/var/log/syslog"), (P, "~/x.log")}),
        ("at https://a.example/x?y=1.", {(P, "https://a.example/x?y=1")}),
        (r"in C:\Temp\a.txt", {(P, r"C:\Temp\a.txt")}),
        ("since 2026-07-29 10:32:05", {(T, "2026-07-29"), (T, "10:32:05")}),
        ("pod api-7f9 with p99 and used_percent", {(I, "api-7f9"), (I, "p99"), (I, "used_percent")}),
        ("id 550e8400-e29b-41d4-a716-446655440000", {(I, "550e8400-e29b-41d4-a716-446655440000")}),
        ("nothing literal here", set()),
    ],
)
def test_literals(sentence: Any, found: Any) -> None:
    assert {(literal.kind, literal.text) for literal in literals(sentence)} == found


CORPUS = corpus_of(
    [
        {
            "used_percent": 93.0,
            "mount": "/var",
            "note": "disk full,  no space; took 1,500 ms",
            "host": "Web-01.example.com",
            "at": "2026-07-29T10:32:05Z",
            "pids": [4242, "77"],
        }
    ]
)


@pytest.mark.parametrize(
    ("sentence", "absent"),
    [
        ("/var on web-01.example.com is 93% full since 2026-07-29 10:32:05", []),
        ("used_percent is 93.00", []),
        ("pid 77, 4242 and 1500ms, i.e. 1,500 ms", []),
        ('"disk full, no space"', []),
        ("93.5%", ["93.5"]),
        ("pid 424", ["424"]),
        ('"disk broken"', ["disk broken"]),
        ("/va", ["/va"]),
        ("host web-02.example.com", ["web-02.example.com"]),
        ("on 2026-07-30", ["2026-07-30"]),
    ],
)
def test_missing(sentence: Any, absent: Any) -> None:
    assert [literal.text for literal in missing(sentence, CORPUS)] == absent


@pytest.mark.parametrize(
    ("value", "text", "found"),
    [
        (80, "port 80.", True),
        (80, "port 8080", False),
        (80, "80.5", False),
        (0.5, "10.5", False),
        ("redis", "查看redis状态", True),
        ("redis", "redis2", False),
        ("a.b", "a.b", True),
        ("a.b", "axb", False),
        ("", "anything", True),
        (True, "it is true", True),
        ("中文", "有中文在", True),
    ],
)
def test_occurs(value: Any, text: Any, found: Any) -> None:
    assert occurs(value, text) is found


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_numbers_stand_by_value(one: Any, other: Any) -> None:
    assert stands_in(Literal(N, str(one)), corpus_of([{"x": other}])) is (one == other)
    assert stands_in(Literal(N, f"{one:,}"), corpus_of([f"{one}.0 things"]))


@given(st.text(max_size=80))
def test_every_text_can_be_read(text: Any) -> None:
    assert all(literal.text for literal in literals(text))


@pytest.mark.parametrize("text", ["12e99999999", "9e-99999999", "4e999999999 files", "1e1000000"])
def test_an_id_that_reads_like_a_number_out_of_range_is_no_number(text: str) -> None:
    assert corpus_of([{"evidence_id": text}]).numbers <= {Decimal(n) for n in (12, 9, 4, 1, 0)}
    assert missing("Nothing to see here.", corpus_of([text])) == ()
