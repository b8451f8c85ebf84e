"""What the environment means to the harness service, and how a bad variable is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness_service.settings import Settings, load_settings
from turnfence.serving.settings import InvalidSettings, parse_span


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TURNFENCE_")]:
        monkeypatch.delenv(name)


def _settings(monkeypatch: pytest.MonkeyPatch, **environment: str) -> Settings:
    for name, value in environment.items():
        monkeypatch.setenv(f"TURNFENCE_{name}", value)
    return load_settings()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("10s", 10.0),
        ("1.5s", 1.5),
        ("10m", 600.0),
        ("24h", 86_400.0),
        ("7d", 604_800.0),
        ("7 d", 604_800.0),
        ("PT10M", 600.0),
        ("P2D", 172_800.0),
        ("PT0.25S", 0.25),
        ("0", 0.0),
        (3.5, 3.5),
    ],
)
def test_spans(text: object, seconds: float) -> None:
    assert parse_span(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "10", "ten", "10 weeks", "m", "1h30m", "Pxyz", "10M"])
def test_a_span_without_a_known_unit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"unit|duration"):
        parse_span(text)


def test_the_defaults_are_those_of_the_contract() -> None:
    settings = load_settings()
    assert (settings.harness_listen, settings.state_target) == ("127.0.0.1:7070", "127.0.0.1:7071")
    assert (settings.state.lease, settings.state.heartbeat) == (30.0, 10.0)
    assert (settings.react.max_rounds, settings.react.max_no_progress_rounds) == (32, 3)
    assert settings.react.brief_max_chars == 200
    assert settings.state.reconfirm_after == 24 * 3600
    assert settings.model.provider == "runbook"
    assert settings.guard_model is None
    assert settings.budget.deadline == 600
    assert not settings.insecure


def test_nested_names_reach_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = _settings(
        monkeypatch,
        STATE__LEASE="1s",
        STATE__HEARTBEAT="300ms",
        STATE__WRITE_CONFIRM_BYPASS_TOOLS="ops.create_ticket, ops.close_ticket",
        REACT__MAX_ROUNDS="5",
        MODEL__PROVIDER="openai",
        MODEL__BASE_URL="http://127.0.0.1:9/v1",
        MODEL__NAME="m",
        MODEL__API_KEY="s3cret",
        GUARD_MODEL__PROVIDER="runbook",
        CATALOGUE="/srv/agents",
        INSECURE="1",
    )
    assert (settings.state.lease, settings.state.heartbeat) == (1.0, 0.3)
    assert settings.state.write_confirm_bypass_tools == ("ops.create_ticket", "ops.close_ticket")
    assert settings.react.max_rounds == 5
    assert settings.model.api_key.get_secret_value() == "s3cret"
    assert "s3cret" not in repr(settings)
    assert settings.guard_model is not None
    assert settings.catalogue == Path("/srv/agents")
    assert settings.insecure


def test_an_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNFENCE_HARNESS_LISTEN", "127.0.0.1:1")
    assert load_settings(harness_listen="unix:/tmp/h").harness_listen == "unix:/tmp/h"
    assert load_settings(harness_listen=None).harness_listen == "127.0.0.1:1"


def test_names_of_the_state_service_may_lie_in_the_same_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _settings(monkeypatch, STATE__CONVERSATION_TTL="7d", STATE__DIALOGUE_MAX="60").state.lease == 30.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("STATE__LEASE", "30"),
        ("STATE__LEASE", "-PT1S"),
        ("STATE__MESSAGE_MAX_BYTES", "0"),
        ("REACT__MAX_ROUNDS", "many"),
        ("REACT__MAX_ROUND", "3"),  # misspelt
        ("MODEL__PROVIDER", "oracle"),
        ("BUDGET__DEADLINE", "soon"),
        ("LIMITS__RUNS", "-1"),
        ("LOG__LEVEL", "loud"),
        ("INSECURE", "perhaps"),
    ],
)
def test_a_bad_variable_is_named_and_its_value_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    with pytest.raises(InvalidSettings) as caught:
        _settings(monkeypatch, **{name: value})
    assert f"TURNFENCE_{name}:" in str(caught.value)


def test_every_bad_variable_is_named_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidSettings) as caught:
        _settings(monkeypatch, STATE__LEASE="x", REACT__MAX_ROUNDS="x", LOG__LEVEL="x")
    assert str(caught.value).count("TURNFENCE_") == 3


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"STATE__LEASE": "1s", "STATE__HEARTBEAT": "800ms"}, "heartbeat must be at most half"),
        ({"MODEL__PROVIDER": "openai"}, "needs base_url and name"),
        ({"TLS__CERT": "/etc/cert.pem"}, "TURNFENCE_TLS__… is not served"),
        ({"AUTH__TOKENS": "t=organ"}, "TURNFENCE_AUTH__… is not served"),
    ],
)
def test_what_does_not_go_together_is_refused(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], said: str
) -> None:
    with pytest.raises(InvalidSettings, match=said):
        _settings(monkeypatch, **environment)


def test_a_secret_is_never_part_of_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidSettings) as caught:
        _settings(monkeypatch, MODEL__API_KEY="s3cret", MODEL__TIMEOUT="s3cret", MODEL__UNKNOWN="s3cret")
    assert "s3cret" not in str(caught.value)
