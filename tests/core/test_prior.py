"""State document 5.9."""

from typing import Any

import pytest

from harness_service.core.prior import build_prior, prior_values
from turnfence.axes import TaskStatus
from turnfence.records import ArtifactRef, EntityEntry, TaskRecord

RECORDS = [
    TaskRecord(f"t{i}", "ops", TaskStatus.SUCCEEDED, closed_at=i, artifacts=[ArtifactRef(f"e{i}", "n", 1)])
    for i in range(8)
]
ENTITIES = {
    "service:old": EntityEntry("Old", '{"name":"old"}', seen_at=1),
    "service:new": EntityEntry("New", '{"name":"new","port":80}', seen_at=9),
    "host:h1": EntityEntry("Host", seen_at=5),
}


def test_the_latest_tasks_and_entities() -> None:
    prior = build_prior(RECORDS, ENTITIES, reason="START_WITH_CONTEXT", tasks_max=2, entities_max=2)
    assert [task.task_id for task in prior.tasks] == ["t7", "t6"]
    assert list(prior.entities) == ["service:new", "host:h1"]
    assert [artifact.evidence_id for artifact in prior.artifacts] == ["e7", "e6"]
    assert prior.reason == "START_WITH_CONTEXT"
    assert len(build_prior(RECORDS, ENTITIES, reason="").tasks) == 5


@pytest.mark.parametrize(
    ("expression", "values"),
    [
        (
            "service",
            [("service:new", "new"), ("service:new", "New"), ("service:old", "old"), ("service:old", "Old")],
        ),
        ("service.port", [("service:new", 80)]),
        ("service.id", [("service:new", "new"), ("service:old", "old")]),
        ("host.displayName", [("host:h1", "Host")]),
        ("host.absent", []),
        ("user", []),
    ],
)
def test_prior_values(expression: Any, values: Any) -> None:
    assert list(prior_values(build_prior([], ENTITIES, reason=""), expression)) == values
    assert list(prior_values(None, expression)) == []
