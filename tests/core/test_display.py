"""D57: what people are shown cannot mislead them."""

from typing import Any

import pytest

from harness_service.core.display import MASK, clean, cut, masked


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\u202eb", "ab"),
        ("a\u2066b\u2069", "ab"),
        ("zero\u200bwidth\ufeff", "zerowidth"),
        ("bell\x07\x1b[31m", "bell[31m"),
        ("line\nfeed\ttab\u2028sep", "line feed tab sep"),
        ("many     spaces", "many spaces"),
        ("中文，可以", "中文，可以"),
    ],
)
def test_clean(text: Any, shown: Any) -> None:
    assert clean(text) == shown


def test_lines_can_be_kept() -> None:
    assert clean("a \n  b\r\nc", keep_lines=True) == "a\nb\nc"


def test_cut_is_visible() -> None:
    assert cut("12345", 5) == "12345"
    assert cut("123456", 5) == "1234…"
    assert clean("x" * 10, 4) == "xxx…"


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["phone"], {"phone": MASK, "contact": {"phone": "2", "all": [{"phone": "3"}]}}),
        (["contact.phone"], {"phone": "1", "contact": {"phone": MASK, "all": [{"phone": "3"}]}}),
        (["contact.all.phone"], {"phone": "1", "contact": {"phone": "2", "all": [{"phone": MASK}]}}),
        (["contact.all[*].phone"], {"phone": "1", "contact": {"phone": "2", "all": [{"phone": MASK}]}}),
        (["contact"], {"phone": "1", "contact": MASK}),
        (["absent.path", "phone.deeper"], {"phone": "1", "contact": {"phone": "2", "all": [{"phone": "3"}]}}),
    ],
)
def test_masked(paths: Any, expected: Any) -> None:
    value = {"phone": "1", "contact": {"phone": "2", "all": [{"phone": "3"}]}}
    assert masked(value, paths) == expected
    assert value["phone"] == "1", "the original is not touched"
