"""Every sentence that the runtime itself says, in every language it speaks.

The codes are stable: a Notice carries its code beside the text. A locale that is not spoken here
falls back to English.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from turnfence.axes import FailureReason, FallbackType


class Reply(StrEnum):
    # The entry guard's notices.
    NO_PENDING_ACTION = "NO_PENDING_ACTION"
    ACTION_NOT_ALLOWED = "ACTION_NOT_ALLOWED"
    CHOOSE_ACTION = "CHOOSE_ACTION"
    CHECKPOINT_NOT_ACTIVE = "CHECKPOINT_NOT_ACTIVE"
    EMPTY_MESSAGE = "EMPTY_MESSAGE"
    APPROVAL_EXPIRED = "APPROVAL_EXPIRED"
    # What became of a task.
    REJECTED = "REJECTED"
    VERIFY_CANCELLED = "VERIFY_CANCELLED"
    TASK_CANCELLED = "TASK_CANCELLED"
    NO_TASK_TO_CANCEL = "NO_TASK_TO_CANCEL"
    # Questions.
    APPROVE = "APPROVE"
    VERIFY = "VERIFY"
    CLARIFY = "CLARIFY"
    CHOOSE_AGENT = "CHOOSE_AGENT"
    # Parts of an answer.
    NOTHING_FOUND = "NOTHING_FOUND"
    SOURCES = "SOURCES"
    FACTS = "FACTS"
    EVIDENCE = "EVIDENCE"
    RECOMMENDATIONS = "RECOMMENDATIONS"
    MISSING_INFO = "MISSING_INFO"
    UNRESOLVED_WRITES = "UNRESOLVED_WRITES"
    FIELD = "FIELD"
    MORE_FIELDS = "MORE_FIELDS"
    # Why there is no conclusion.
    MISSING_REQUIRED_CONTEXT = "MISSING_REQUIRED_CONTEXT"
    INSUFFICIENT_EVIDENCE = "INSUFFICIENT_EVIDENCE"
    EVIDENCE_VALIDATION_FAILED = "EVIDENCE_VALIDATION_FAILED"
    SEMANTIC_UNSUPPORTED = "SEMANTIC_UNSUPPORTED"
    SEMANTIC_UNAVAILABLE = "SEMANTIC_UNAVAILABLE"
    # Why a run failed: uniform public texts, nothing of the inside.
    FAILED_TIMED_OUT = "FAILED_TIMED_OUT"
    FAILED_BUDGET_EXHAUSTED = "FAILED_BUDGET_EXHAUSTED"
    FAILED_FENCED = "FAILED_FENCED"
    FAILED_UNAVAILABLE = "FAILED_UNAVAILABLE"
    FAILED_MODEL_FAILED = "FAILED_MODEL_FAILED"
    FAILED_INVALID_DRAFT = "FAILED_INVALID_DRAFT"
    FAILED_INTERRUPTED = "FAILED_INTERRUPTED"
    FAILED_INTERNAL = "FAILED_INTERNAL"
    # What the user did, for a node's history.
    USER_CONFIRMED = "USER_CONFIRMED"
    USER_REJECTED = "USER_REJECTED"
    USER_SAYS_EFFECTIVE = "USER_SAYS_EFFECTIVE"
    USER_SAYS_NOT_EFFECTIVE = "USER_SAYS_NOT_EFFECTIVE"
    # What is going on, for progress events.
    WORKING_ON = "WORKING_ON"
    CALLING = "CALLING"
    CHECKING_WRITE = "CHECKING_WRITE"


DEFAULT_LOCALE = "en"

SENTENCES: Mapping[str, Mapping[Reply, str]] = {
    "en": {
        Reply.NO_PENDING_ACTION: "There is nothing waiting for your confirmation.",
        Reply.ACTION_NOT_ALLOWED: "This action is not possible now.",
        Reply.CHOOSE_ACTION: "Please choose one of the offered actions first.",
        Reply.CHECKPOINT_NOT_ACTIVE: "This request has changed; nothing was done.",
        Reply.EMPTY_MESSAGE: "Please say what I can do for you.",
        Reply.APPROVAL_EXPIRED: "This approval has expired; nothing was done. Please look at it again.",
        Reply.REJECTED: (
            "Cancelled, not executed: {summary}. If you would like it done differently, just tell me."
        ),
        Reply.VERIFY_CANCELLED: (
            "The task was given up. Whether this action took effect is still unknown: {summary}."
        ),
        Reply.TASK_CANCELLED: "The task was cancelled.",
        Reply.NO_TASK_TO_CANCEL: "There is no task to cancel.",
        Reply.APPROVE: "Please confirm before I run {tool}:",
        Reply.VERIFY: "Did the last action take effect? {tool}: {summary}",
        Reply.CLARIFY: "I am not sure what you would like me to do. Could you say it in other words?",
        Reply.CHOOSE_AGENT: "Which of these should take care of it: {agents}?",
        Reply.NOTHING_FOUND: "I found nothing about this in the knowledge base.",
        Reply.SOURCES: "Sources:",
        Reply.FACTS: "What was found:",
        Reply.EVIDENCE: "Evidence:",
        Reply.RECOMMENDATIONS: "Recommendations:",
        Reply.MISSING_INFO: "Still needed:",
        Reply.UNRESOLVED_WRITES: "Actions whose outcome is unknown:",
        Reply.FIELD: "{label}: {value}",
        Reply.MORE_FIELDS: "{count} more",
        Reply.MISSING_REQUIRED_CONTEXT: "I need more information before I can look into this.",
        Reply.INSUFFICIENT_EVIDENCE: "What could be checked is not enough for a conclusion.",
        Reply.EVIDENCE_VALIDATION_FAILED: "A conclusion was drawn, but its evidence could not be validated.",
        Reply.SEMANTIC_UNSUPPORTED: "A conclusion was drawn, but the evidence does not support it.",
        Reply.SEMANTIC_UNAVAILABLE: "A conclusion was drawn, but comparing it with its evidence failed.",
        Reply.FAILED_TIMED_OUT: "The time allowed for this request ran out.",
        Reply.FAILED_BUDGET_EXHAUSTED: "The budget allowed for this request ran out.",
        Reply.FAILED_FENCED: "A newer request in this conversation has taken over.",
        Reply.FAILED_UNAVAILABLE: "The service is temporarily unavailable. Please try again later.",
        Reply.FAILED_MODEL_FAILED: "The language model could not be used. Please try again later.",
        Reply.FAILED_INVALID_DRAFT: "No valid result was produced. Please try again.",
        Reply.FAILED_INTERRUPTED: "The request was interrupted. Please send it again.",
        Reply.FAILED_INTERNAL: "Something went wrong. Please try again later.",
        Reply.USER_CONFIRMED: "The user confirmed the action.",
        Reply.USER_REJECTED: "The user rejected the action.",
        Reply.USER_SAYS_EFFECTIVE: "The user says that the action took effect.",
        Reply.USER_SAYS_NOT_EFFECTIVE: "The user says that the action did not take effect.",
        Reply.WORKING_ON: "Working on: {title}",
        Reply.CALLING: "Calling {tool}",
        Reply.CHECKING_WRITE: "Checking whether {tool} took effect",
    },
    "zh-CN": {
        Reply.NO_PENDING_ACTION: "当前没有待确认的操作",
        Reply.ACTION_NOT_ALLOWED: "当前不能执行这个操作",
        Reply.CHOOSE_ACTION: "请先在页面上选择要执行的操作",
        Reply.CHECKPOINT_NOT_ACTIVE: "该请求已发生变化，未执行任何操作",
        Reply.EMPTY_MESSAGE: "请说明需要我做什么",
        Reply.APPROVAL_EXPIRED: "该审批已过期，未执行任何操作，请重新确认",
        Reply.REJECTED: "已取消，未执行：{summary}。如需换个做法，直接告诉我。",
        Reply.VERIFY_CANCELLED: "已放弃当前任务。以下操作是否生效仍未确认：{summary}。",
        Reply.TASK_CANCELLED: "已取消当前任务",
        Reply.NO_TASK_TO_CANCEL: "当前没有可取消的任务",
        Reply.APPROVE: "执行 {tool} 前请确认：",
        Reply.VERIFY: "上次的写操作是否已完成？{tool}：{summary}",
        Reply.CLARIFY: "我不确定你想让我做什么，可以换个说法吗？",
        Reply.CHOOSE_AGENT: "请选择由谁处理：{agents}",
        Reply.NOTHING_FOUND: "知识库中没有找到相关内容。",
        Reply.SOURCES: "来源：",
        Reply.FACTS: "已查到：",
        Reply.EVIDENCE: "证据：",
        Reply.RECOMMENDATIONS: "建议：",
        Reply.MISSING_INFO: "还需要：",
        Reply.UNRESOLVED_WRITES: "结果未确认的操作：",
        Reply.FIELD: "{label}：{value}",
        Reply.MORE_FIELDS: "另有 {count} 项",
        Reply.MISSING_REQUIRED_CONTEXT: "缺少必要信息，暂时无法排查。",
        Reply.INSUFFICIENT_EVIDENCE: "已完成的检查不足以得出结论。",
        Reply.EVIDENCE_VALIDATION_FAILED: "得出的结论未通过证据校验。",
        Reply.SEMANTIC_UNSUPPORTED: "现有证据不支持得出的结论。",
        Reply.SEMANTIC_UNAVAILABLE: "暂时无法核对结论与证据是否一致。",
        Reply.FAILED_TIMED_OUT: "处理超时。",
        Reply.FAILED_BUDGET_EXHAUSTED: "本次请求的预算已用尽。",
        Reply.FAILED_FENCED: "该会话已有更新的请求在处理。",
        Reply.FAILED_UNAVAILABLE: "服务暂时不可用，请稍后再试。",
        Reply.FAILED_MODEL_FAILED: "模型暂时不可用，请稍后再试。",
        Reply.FAILED_INVALID_DRAFT: "未能形成有效结果，请重试。",
        Reply.FAILED_INTERRUPTED: "处理被中断，请重新发送。",
        Reply.FAILED_INTERNAL: "处理失败，请稍后再试。",
        Reply.USER_CONFIRMED: "用户已确认执行。",
        Reply.USER_REJECTED: "用户已拒绝执行。",
        Reply.USER_SAYS_EFFECTIVE: "用户确认该操作已生效。",
        Reply.USER_SAYS_NOT_EFFECTIVE: "用户确认该操作未生效。",
        Reply.WORKING_ON: "正在处理：{title}",
        Reply.CALLING: "正在调用 {tool}",
        Reply.CHECKING_WRITE: "正在核实 {tool} 是否已生效",
    },
}

FALLBACK_REPLY: Mapping[FallbackType, Reply] = {kind: Reply(kind.value) for kind in FallbackType}
FAILURE_REPLY: Mapping[FailureReason, Reply] = {
    reason: Reply(f"FAILED_{reason.value}") for reason in FailureReason
}


def language(locale: str) -> str:
    """The spoken language nearest to a BCP 47 tag: ``zh``, ``zh-Hans-CN`` → ``zh-CN``; else ``en``."""
    primary = locale.replace("_", "-").split("-")[0].lower()
    return next((spoken for spoken in SENTENCES if spoken.split("-")[0] == primary), DEFAULT_LOCALE)


def say(reply: Reply, locale: str = DEFAULT_LOCALE, /, **values: str) -> str:
    """The sentence with its placeholders filled; KeyError when a value is missing."""
    return SENTENCES[language(locale)][reply].format_map(values)
