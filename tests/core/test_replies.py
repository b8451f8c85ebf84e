"""Every sentence exists in every language, with the same placeholders."""

import string
from typing import Any

import pytest

from harness_service.core.replies import FAILURE_REPLY, FALLBACK_REPLY, SENTENCES, Reply, language, say
from turnfence.axes import FailureReason, FallbackType


def placeholders(sentence: Any) -> Any:
    return sorted(name for _, name, _, _ in string.Formatter().parse(sentence) if name)


@pytest.mark.parametrize("reply", Reply)
def test_every_reply_in_every_language(reply: Any) -> None:
    said = {spoken: sentences[reply] for spoken, sentences in SENTENCES.items()}
    assert all(said.values())
    assert len({tuple(placeholders(sentence)) for sentence in said.values()}) == 1


@pytest.mark.parametrize(
    ("locale", "spoken"),
    [
        ("en", "en"),
        ("en-GB", "en"),
        ("zh", "zh-CN"),
        ("zh-Hans-CN", "zh-CN"),
        ("zh_TW", "zh-CN"),
        ("fr", "en"),
        ("", "en"),
    ],
)
def test_language(locale: Any, spoken: Any) -> None:
    assert language(locale) == spoken


def test_the_documents_own_sentences() -> None:
    assert say(Reply.NO_PENDING_ACTION, "zh-CN") == "当前没有待确认的操作"
    assert say(Reply.ACTION_NOT_ALLOWED, "zh-CN") == "当前不能执行这个操作"
    assert say(Reply.CHOOSE_ACTION, "zh-CN") == "请先在页面上选择要执行的操作"
    assert say(Reply.REJECTED, "zh-CN", summary="X") == "已取消，未执行：X。如需换个做法，直接告诉我。"


def test_every_reason_has_its_sentence() -> None:
    assert set(FALLBACK_REPLY) == set(FallbackType)
    assert set(FAILURE_REPLY) == set(FailureReason)
    with pytest.raises(KeyError):
        say(Reply.REJECTED, "en")
