"""C065, C125: what is the same, and what is refused."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness_service.core.canonical import JsonRefused, canonical, digest, parse_json, sha256_hex

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        pytest.param('{"a":1,"b":2}', '{ "b": 2, "a": 1 }', True, id="C065-key-order"),
        pytest.param('{"a":1}', '{"a":1.0}', True, id="C065-integral-float"),
        pytest.param('{"a":10}', '{"a":1e1}', True, id="C065-exponent"),
        pytest.param('{"a":0}', '{"a":-0.0}', True, id="C127-minus-zero"),
        pytest.param('{"a":1}', '{"a":"1"}', False, id="D37-typed"),
        pytest.param('{"a":"\\u00e9"}', '{"a":"e\\u0301"}', False, id="C065-NFC-NFD"),
        pytest.param('{"a":null}', "{}", False, id="C065-null-missing"),
        pytest.param('{"a":true}', '{"a":1}', False, id="D37-bool-is-no-number"),
        pytest.param('{"a":9007199254740993}', '{"a":9007199254740992}', False, id="C127-large-integers"),
        pytest.param('{"a":"1|b=2"}', '{"a":"1","b":"2"}', False, id="D37-delimiters"),
        pytest.param('{"a":[1,2]}', '{"a":[2,1]}', False, id="list-order"),
    ],
)
def test_what_is_the_same(one: Any, other: Any, same: Any) -> None:
    assert (digest(parse_json(one)) == digest(parse_json(other))) is same


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("[" * 66 + "]" * 66, id="depth"),
        pytest.param("[" * 100_000, id="depth-recursion"),
        pytest.param(json.dumps({str(i): i for i in range(10_001)}), id="keys"),
        pytest.param('{"a":NaN}', id="nan"),
        pytest.param('{"a":-Infinity}', id="infinity"),
        pytest.param('{"a":1e400}', id="overflow"),
        pytest.param('{"a":9223372036854775808}', id="2^63"),
        pytest.param('{"a":-9223372036854775808}', id="-2^63"),
        pytest.param('{"a":' + "9" * 5000 + "}", id="many-digits"),
        pytest.param('{"a":1,"a":1}', id="duplicate"),
        pytest.param('{"a":{"b":1,"b":2}}', id="duplicate-inside"),
        pytest.param('{"a":"\\ud800"}', id="surrogate"),
        pytest.param('{"\\udfff":1}', id="surrogate-key"),
        pytest.param("{", id="broken"),
        pytest.param("", id="empty"),
        pytest.param("{'a':1}", id="python"),
        pytest.param("1 2", id="two-documents"),
        pytest.param(b"\xff\xfe\xfd", id="no-utf8"),
    ],
)
def test_C125_refused(text: Any) -> None:
    with pytest.raises(JsonRefused):
        parse_json(text)


def test_the_limits_are_inclusive() -> None:
    assert parse_json("[" * 64 + "]" * 64)
    assert parse_json('{"a":9223372036854775807}') == {"a": 2**63 - 1}
    assert len(parse_json(json.dumps({str(i): i for i in range(10_000)}))) == 10_000
    assert parse_json('"\\u0000"') == "\x00"


def test_canonical_is_utf8_without_space() -> None:
    assert canonical({"b": [1.0, 2.5, "é"], "a": None}) == '{"a":null,"b":[1,2.5,"é"]}'
    assert sha256_hex(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@given(JSON)
def test_canonical_reads_back_to_itself(value: Any) -> None:
    text = canonical(value)
    assert canonical(parse_json(text)) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_no_float_loses_its_value(value: Any) -> None:
    assert math.isclose(json.loads(canonical(value)), value, rel_tol=0, abs_tol=0)
