"""MarkdownKnowledge over real folders: what is found in English and Chinese, in which order, how much of it,
and which folders are refused before anything is served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from harness_service.adapters.markdown_knowledge import (
    EXCERPT_MAX_CHARS,
    QUERY_TOKENS_MAX,
    MarkdownKnowledge,
    sections,
    slug,
    tokens,
)
from harness_service.ports import KnowledgeUnavailable, Passage
from harness_service.server import BUNDLED


def write(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[MarkdownKnowledge]:
    knowledge = MarkdownKnowledge(folder)
    try:
        yield knowledge
    finally:
        await knowledge.close()


async def found(knowledge: MarkdownKnowledge, query: str, limit: int = 5) -> list[Passage]:
    return list(await knowledge.search(query, limit=limit, timeout=10))


async def places(knowledge: MarkdownKnowledge, query: str, limit: int = 5) -> list[str]:
    return [passage.location for passage in await found(knowledge, query, limit)]


# --- search ---------------------------------------------------------------------------------------

BUNDLED_QUERIES: Mapping[str, str] = {
    "no space left on device": "disk-full.md",
    "What should I do when the disk is full?": "disk-full.md",
    "OOM killer": "memory-pressure.md",
    "the load is HIGH": "high-load.md",
    "address already in use": "port-in-use.md",
    "how do I open a ticket": "ticket-policy.md",
    "磁盘满了怎么处理": "disk-full.zh.md",
    "磁盘空间": "disk-full.zh.md",
    "日志轮转": "disk-full.zh.md",
    "什么时候开工单": "ticket-policy.zh.md",
    "工单": "ticket-policy.zh.md",
    "检查inode是否耗尽": "disk-full.zh.md",
}


@pytest.mark.parametrize(("query", "file"), BUNDLED_QUERIES.items())
async def test_the_bundled_articles_answer_in_the_language_of_the_question(query: str, file: str) -> None:
    async with opened(BUNDLED / "knowledge") as knowledge:
        best = (await places(knowledge, query))[0]
    assert best.split("#")[0] == file


FOLDER: Mapping[str, str] = {
    "a.md": "# Queues\n\nIt grows: a consumer is slow.\n\n## Drain a queue\n\nStop the producer first.\n",
    "deep/er/b.md": "# 消息队列积压\n\n消费者处理缓慢，队列增长。\n\n## 处理步骤\n\n先扩容，再限流生产者。\n",
    "c.md": "No heading at all, but a walrus.\n",
    "d.md": "## Only a small heading\n\nAn okapi.\n",
    "empty.md": "",
    "bare.md": "# Nothing but a heading\n",
    "notes.txt": "walrus walrus walrus",
}
QUERIES: Mapping[str, tuple[str, list[tuple[str, str]]]] = {
    "a_word": ("producer", [("Queues: Drain a queue", "a.md#drain-a-queue")]),
    "any_case": ("PRODUCER", [("Queues: Drain a queue", "a.md#drain-a-queue")]),
    "chinese_words_that_are_not_neighbours": (
        "生产者如何扩容",
        [("消息队列积压: 处理步骤", "deep/er/b.md#处理步骤")],
    ),
    "two_characters": ("限流", [("消息队列积压: 处理步骤", "deep/er/b.md#处理步骤")]),
    "no_heading": ("walrus", [("c.md", "c.md")]),
    "small_heading": ("okapi", [("Only a small heading", "d.md#only-a-small-heading")]),
    "not_there": ("rhinoceros", []),
    "half_a_word": ("walr", []),
    "characters_that_only_meet_across_a_comma": ("慢队", []),
}


@pytest.mark.parametrize(("query", "expected"), QUERIES.values(), ids=QUERIES.keys())
async def test_a_passage_is_a_section_with_its_articles_title_and_its_place(
    tmp_path: Path, query: str, expected: list[tuple[str, str]]
) -> None:
    async with opened(write(tmp_path, FOLDER)) as knowledge:
        assert [(passage.title, passage.location) for passage in await found(knowledge, query)] == expected


NOTHING_ASKED = ("", "   \n\t", "?!,.;", "？！，。", "what is the", "How do I do this", "🙂", "\x00")


@pytest.mark.parametrize("query", NOTHING_ASKED)
async def test_a_query_that_asks_nothing_finds_nothing(tmp_path: Path, query: str) -> None:
    folder = write(tmp_path, {"a.md": "# What is the\n\nHow do I do this? What is the matter 🙂\n"})
    async with opened(folder) as knowledge:
        assert await found(knowledge, query) == []


HOSTILE = (
    'walrus"',
    "walrus AND NOT walrus",
    "NEAR(walrus, 1)",
    "title:walrus",
    "walrus*",
    "-walrus",
    "^walrus",
    "walrus'; DROP TABLE section; --",
    "(walrus",
    "{walrus}",
    "walrus\x00",
    "\ud800 walrus",
)


@pytest.mark.parametrize("query", HOSTILE)
async def test_the_index_languages_own_signs_mean_nothing_in_a_query(tmp_path: Path, query: str) -> None:
    async with opened(write(tmp_path, {"c.md": "A walrus.\n"})) as knowledge:
        assert await places(knowledge, query) == ["c.md"]
        assert await places(knowledge, "walrus") == ["c.md"]


# --- ranking --------------------------------------------------------------------------------------


async def test_the_section_that_says_more_of_what_was_asked_comes_first(tmp_path: Path) -> None:
    filler = "Something else is said here at the same length as elsewhere. " * 5
    folder = write(
        tmp_path,
        {
            "1-one-word.md": f"# One\n\nA replica. {filler}",
            "2-both-words.md": f"# Two\n\nA replica that lags. {filler}",
            "3-title.md": f"# Replica lags\n\nA replica that lags. {filler}",
            "4-neither.md": f"# Four\n\n{filler}",
        },
    )
    async with opened(folder) as knowledge:
        assert await places(knowledge, "the replica lags") == [
            "3-title.md",
            "2-both-words.md",
            "1-one-word.md",
        ]


async def test_a_rare_word_weighs_more_than_a_common_one(tmp_path: Path) -> None:
    files = {f"{n}.md": f"The service number {n} restarts.\n" for n in range(10)} | {
        "z.md": "A walrus restarts.\n"
    }
    async with opened(write(tmp_path, files)) as knowledge:
        assert (await places(knowledge, "service walrus"))[0] == "z.md"


async def test_equal_passages_come_in_the_order_of_their_files_every_time(tmp_path: Path) -> None:
    names = [f"{name}.md" for name in "cabed"]
    async with opened(write(tmp_path, dict.fromkeys(names, "A walrus.\n"))) as knowledge:
        for _ in range(3):
            assert await places(knowledge, "walrus") == sorted(names)


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "count"), [(0, 0), (1, 1), (3, 3), (7, 7), (100, 7)])
async def test_no_more_than_asked_for_is_found(tmp_path: Path, limit: int, count: int) -> None:
    files = {f"{n}.md": f"A walrus, number {n}.\n" for n in range(7)}
    async with opened(write(tmp_path, files)) as knowledge:
        assert len(await found(knowledge, "walrus", limit)) == count


async def test_an_excerpt_is_the_start_of_its_section_and_bounded(tmp_path: Path) -> None:
    body = "海象 " + "象" * (3 * EXCERPT_MAX_CHARS)
    async with opened(
        write(tmp_path, {"a.md": f"# 海象\n\n{body}\n", "b.md": "# B\n\nshort\n"})
    ) as knowledge:
        assert (await found(knowledge, "海象"))[0].excerpt == body[:EXCERPT_MAX_CHARS]
        assert (await found(knowledge, "short"))[0].excerpt == "short"


async def test_of_a_long_query_only_the_first_words_count(tmp_path: Path) -> None:
    words = [f"word{n}" for n in range(QUERY_TOKENS_MAX)]
    async with opened(write(tmp_path, {"a.md": "A walrus.\n"})) as knowledge:
        assert await places(knowledge, " ".join([*words[:-1], "walrus"])) == ["a.md"]
        assert await places(knowledge, " ".join([*words, "walrus"])) == []
        assert await places(knowledge, "word0 " * 1000 + "walrus") == ["a.md"]  # said twice counts once
        assert await places(knowledge, "walrus " + "磁盘已满" * 100_000) == ["a.md"]


# --- a folder that is refused ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["not-there", "file.md"])
def test_a_folder_that_is_none_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    write(tmp_path, {"file.md": "x"})
    with pytest.raises(ValueError, match=name):
        MarkdownKnowledge(tmp_path / name)


@pytest.mark.parametrize("content", [b"caf\xe9", b"\xff\xfeh\x00i\x00", "磁盘".encode("gbk")])
def test_a_file_that_is_no_utf8_is_refused_by_its_name(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, {"good.md": "x", "sub/bad.md": content})
    with pytest.raises(ValueError, match=r"sub/bad\.md cannot be read"):
        MarkdownKnowledge(tmp_path)


@pytest.mark.parametrize("target", ["missing.md", "link.md"], ids=["to_nothing", "to_itself"])
def test_a_link_that_leads_nowhere_is_refused_by_its_name(tmp_path: Path, target: str) -> None:
    (tmp_path / "link.md").symlink_to(tmp_path / target)
    with pytest.raises(ValueError, match=r"link\.md cannot be read"):
        MarkdownKnowledge(tmp_path)


@pytest.mark.parametrize("target", ["{0}/secret.md", "../secret.md", "sub/../../secret.md"])
def test_a_link_out_of_the_folder_is_refused_by_its_name(tmp_path: Path, target: str) -> None:
    folder = write(tmp_path, {"secret.md": "the password", "kb/sub/a.md": "x"}) / "kb"
    (folder / "link.md").symlink_to(target.format(tmp_path))
    with pytest.raises(ValueError, match=r"link\.md is a link out of its folder") as caught:
        MarkdownKnowledge(folder)
    assert "password" not in str(caught.value)


async def test_a_linked_folder_outside_is_not_entered(tmp_path: Path) -> None:
    folder = write(tmp_path, {"elsewhere/secret.md": "A walrus.", "kb/a.md": "An okapi."}) / "kb"
    (folder / "sub").symlink_to(tmp_path / "elsewhere")
    async with opened(folder) as knowledge:
        assert await places(knowledge, "walrus okapi") == ["a.md"]


async def test_a_folder_of_links_as_a_mounted_volume_has_them_is_read_once(tmp_path: Path) -> None:
    """The files lie in a hidden folder, and what is seen are links into it."""
    folder = write(tmp_path, {"kb/..2024_01/a.md": "A walrus.", ".git/x.md": "walrus"}) / "kb"
    (folder / "..data").symlink_to("..2024_01")
    (folder / "a.md").symlink_to("..data/a.md")
    linked = tmp_path / "linked"
    linked.symlink_to(folder)
    for root in (folder, linked):
        async with opened(root) as knowledge:
            assert await places(knowledge, "walrus") == ["a.md"]


async def test_a_folder_called_like_a_file_is_no_file(tmp_path: Path) -> None:
    async with opened(write(tmp_path, {"dir.md/a.md": "A walrus."})) as knowledge:
        assert await places(knowledge, "walrus") == ["dir.md/a.md"]


async def test_no_query_is_a_path(tmp_path: Path) -> None:
    folder = write(tmp_path, {"secret.md": "The password.", "kb/a.md": "An okapi."}) / "kb"
    async with opened(folder) as knowledge:
        for query in ("../secret.md", str(tmp_path / "secret.md"), "password"):
            assert all("password" not in passage.excerpt for passage in await found(knowledge, query))


# --- reading again, and the end -------------------------------------------------------------------


async def test_the_folder_is_read_at_the_start_and_a_new_start_reads_it_again(tmp_path: Path) -> None:
    write(tmp_path, {"a.md": "A walrus.", "b.md": "An okapi."})
    async with opened(tmp_path) as knowledge:
        write(tmp_path, {"a.md": "A tapir."})
        (tmp_path / "b.md").unlink()
        assert await places(knowledge, "walrus okapi tapir") == ["a.md", "b.md"]
    async with opened(tmp_path) as knowledge:
        assert await places(knowledge, "walrus okapi tapir") == ["a.md"]
        assert (await found(knowledge, "tapir"))[0].excerpt == "A tapir."


async def test_an_empty_folder_is_a_knowledge_base_that_knows_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path) as knowledge:
        assert await found(knowledge, "walrus") == []


@pytest.mark.parametrize("timeout", [0, -1])
async def test_no_time_left_is_an_unavailable_knowledge_base(tmp_path: Path, timeout: float) -> None:
    async with opened(write(tmp_path, {"a.md": "A walrus."})) as knowledge:
        with pytest.raises(KnowledgeUnavailable):
            await knowledge.search("walrus", limit=1, timeout=timeout)
        assert await places(knowledge, "walrus") == ["a.md"]


async def test_after_its_end_it_is_unavailable(tmp_path: Path) -> None:
    async with opened(write(tmp_path, {"a.md": "A walrus."})) as knowledge:
        await knowledge.close()
        with pytest.raises(KnowledgeUnavailable):
            await found(knowledge, "walrus")


async def test_searches_at_once_and_searches_given_up_leave_the_index_whole(tmp_path: Path) -> None:
    files = {f"{n}.md": "# Walrus\n\n" + "A walrus and an okapi. " * 200 for n in range(50)}
    async with opened(write(tmp_path, files)) as knowledge:
        tasks = [asyncio.create_task(found(knowledge, "walrus okapi", 50)) for _ in range(40)]
        await asyncio.sleep(0)  # every search has begun
        for task in tasks[::2]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results[::2])
        assert all(isinstance(result, list) and len(result) == 50 for result in results[1::2])
        given_up = asyncio.create_task(found(knowledge, "walrus okapi", 50))
        await asyncio.sleep(0)
        given_up.cancel()  # its thread may still search while the index is closed


# --- the parts ------------------------------------------------------------------------------------

TOKENS: Mapping[str, list[str]] = {
    "": [],
    "Disk FULL": ["disk", "full"],
    "df -h /var_log": ["df", "h", "var_log"],
    "磁盘满": ["磁盘", "盘满"],
    "满": ["满"],
    "MySQL主从延迟8秒": ["mysql", "主从", "从延", "延迟", "8", "秒"],
    "磁盘，空间": ["磁盘", "空间"],
}


@pytest.mark.parametrize(("text", "expected"), TOKENS.items())
def test_words_are_words_and_chinese_is_pairs(text: str, expected: list[str]) -> None:
    assert list(tokens(text)) == expected


SECTIONS: Mapping[str, tuple[str, list[tuple[str, str, str]]]] = {
    "before_any_heading": ("intro\n# A\nbody", [("x.md", "x.md", "intro"), ("A", "x.md", "body")]),
    "closed_heading": ("# A ##\nbody", [("A", "x.md", "body")]),
    "no_heading_without_a_space": ("#A\nbody", [("x.md", "x.md", "#A\nbody")]),
    "second_title": ("# A\na\n# B\nb", [("A", "x.md", "a"), ("A: B", "x.md#b", "b")]),
    "a_comment_in_code": (
        "# A\n```sh\n# no heading\n```\nend",
        [("A", "x.md", "```sh\n# no heading\n```\nend")],
    ),
    "tildes_and_a_shorter_fence": (
        "# A\n~~~~\n~~~\n# no\n~~~~\n## B\nb",
        [("A", "x.md", "~~~~\n~~~\n# no\n~~~~"), ("A: B", "x.md#b", "b")],
    ),
    "code_within_a_line_is_no_fence": (
        "```x``` is code\n# A\na",
        [("x.md", "x.md", "```x``` is code"), ("A", "x.md", "a")],
    ),
    "line_ends_of_windows": ("# A\r\nbody\r\n", [("A", "x.md", "body")]),
}


@pytest.mark.parametrize(("text", "expected"), SECTIONS.values(), ids=SECTIONS.keys())
def test_a_text_is_cut_at_its_headings(text: str, expected: list[tuple[str, str, str]]) -> None:
    assert list(sections("x.md", text)) == expected


async def test_a_byte_order_mark_hides_no_heading(tmp_path: Path) -> None:
    async with opened(write(tmp_path, {"a.md": b"\xef\xbb\xbf# Walrus\n\nbody\n"})) as knowledge:
        assert [passage.title for passage in await found(knowledge, "body")] == ["Walrus"]


@pytest.mark.parametrize(
    ("heading", "expected"),
    [("Free space: first steps", "free-space-first-steps"), ("处理步骤（一）", "处理步骤-一"), ("!", "")],
)
def test_a_headings_anchor_is_its_words(heading: str, expected: str) -> None:
    assert slug(heading) == expected
