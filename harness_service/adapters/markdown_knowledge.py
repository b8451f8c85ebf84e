"""Full-text search over a folder of Markdown files, in an SQLite FTS5 index in memory.

Chinese is indexed by pairs of characters: FTS5's own tokenizers take a whole run as one token, or miss
words of two characters. Ranking is bm25.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness_service.ports import KnowledgeUnavailable, Passage

EXCERPT_MAX_CHARS = 1200
QUERY_TOKENS_MAX = 64

_HEADING = re.compile(r"^(#{1,6})\s+(.*?)\s*#*$")
_FENCE = re.compile(r"^ {0,3}(`{3,}(?=[^`]*$)|~{3,})(.*)$")
_WORD = re.compile(r"[0-9A-Za-z_]+|[\u3400-\u9fff\uf900-\ufaff]+")
_CJK = re.compile(r"[\u3400-\u9fff\uf900-\ufaff]")
# Words that say nothing about what is asked: they would match every article.
_STOP_WORDS = """
a an and are as at be by can do does for from how i in is it me my of on or should the this to we
what when where which who why with you
"""
_STOP = frozenset(_STOP_WORDS.split())


class MarkdownKnowledge:
    """``KnowledgeBase`` over ``*.md`` below ``folder``, read once at start. ValueError: no such folder, or a
    file that cannot be read, is no UTF-8, or is a link out of the folder; it is named."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ValueError(f"the knowledge folder {folder} does not exist")
        rows = [
            (" ".join(tokens(f"{title} {title} {body}")), title, location, body)
            for file in _files(folder)
            for title, location, body in sections(file.relative_to(folder).as_posix(), _read(file, folder))
        ]
        # Held by the thread that searches, not by the task that waits for it and may give up.
        self._lock = threading.Lock()
        self._index = sqlite3.connect(":memory:", check_same_thread=False)
        self._index.execute(
            "CREATE VIRTUAL TABLE section USING fts5"
            "(tokens, title UNINDEXED, location UNINDEXED, body UNINDEXED, tokenize = 'unicode61')"
        )
        with self._index:
            self._index.executemany("INSERT INTO section VALUES (?, ?, ?, ?)", rows)

    async def search(self, query: str, *, limit: int, timeout: float) -> Sequence[Passage]:
        wanted = [token for token in dict.fromkeys(tokens(query)) if token not in _STOP][:QUERY_TOKENS_MAX]
        if not wanted:
            return ()
        match = " OR ".join(f'"{token}"' for token in wanted)
        try:
            async with asyncio.timeout(timeout):
                rows = await asyncio.to_thread(self._rows, match, limit)
        except (TimeoutError, sqlite3.Error) as error:
            raise KnowledgeUnavailable(type(error).__name__) from error
        return [Passage(title, location, body[:EXCERPT_MAX_CHARS]) for title, location, body in rows]

    def _rows(self, match: str, limit: int) -> list[tuple[str, str, str]]:
        with self._lock:
            return self._index.execute(
                "SELECT title, location, body FROM section WHERE section MATCH ?"
                " ORDER BY bm25(section), rowid LIMIT ?",
                (match, limit),
            ).fetchall()

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with self._lock:
            self._index.close()


def _files(folder: Path) -> Iterator[Path]:
    """Every ``*.md``, but nothing hidden: a mounted volume keeps second copies there."""
    for file in sorted(folder.rglob("*.md")):
        if file.is_dir() or any(part.startswith(".") for part in file.relative_to(folder).parts):
            continue
        yield file


def _read(file: Path, folder: Path) -> str:
    try:
        inside = file.resolve().is_relative_to(folder.resolve())
        text = file.read_text(encoding="utf-8-sig") if inside else ""
    except (OSError, RuntimeError, UnicodeDecodeError) as error:  # RuntimeError: a circle of links
        raise ValueError(f"the knowledge file {file} cannot be read: {error}") from error
    if not inside:
        raise ValueError(f"the knowledge file {file} is a link out of its folder")
    return text


def tokens(text: str) -> Iterator[str]:
    """Lower-case words, and each pair of neighbouring Chinese characters (a lone one by itself)."""
    for run in _WORD.findall(text.lower()):
        if not _CJK.match(run) or len(run) == 1:
            yield run
        else:
            yield from (run[place : place + 2] for place in range(len(run) - 1))


def sections(name: str, text: str) -> Iterator[tuple[str, str, str]]:
    """(title, location, body) of each heading's section; the title names the article too."""
    article = ""
    heading, body = "", list[str]()
    fence = ""  # the mark that opened a block of code: a comment in it is no heading

    def section() -> Iterator[tuple[str, str, str]]:
        content = "\n".join(body).strip()
        if content:
            title = article if heading in ("", article) else f"{article}: {heading}" if article else heading
            anchor = f"#{slug(heading)}" if heading and heading != article else ""
            yield title or name, f"{name}{anchor}", content

    for line in text.splitlines():
        mark = _FENCE.match(line)
        if mark is not None and not fence:
            fence = mark[1]
        elif mark is not None and mark[1].startswith(fence) and not mark[2].strip():
            fence = ""
        found = None if fence else _HEADING.match(line)
        if found is None:
            body.append(line)
            continue
        yield from section()
        heading, body = found[2], []
        if len(found[1]) == 1 and not article:
            article = heading
    yield from section()


def slug(heading: str) -> str:
    """``Free space: first steps`` → ``free-space-first-steps``."""
    return re.sub(r"[^\w\u3400-\u9fff]+", "-", heading.lower()).strip("-")
