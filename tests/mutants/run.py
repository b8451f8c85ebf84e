"""``make mutants``: each mutant in a copy of the sources, with the tests that must notice it.

    python -m tests.mutants.run [NAME …]     all, or those whose name contains one of the words

Exits 1 when one survives. Nothing of the working folder is changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants.table import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("harness_service", "state_service", "protos", "tests", "pyproject.toml")
IGNORED = shutil.ignore_patterns("node_modules", "__pycache__", ".*_cache")
SECONDS = 300.0  # for one mutant's tests; a hang is a death too


def main(words: list[str]) -> int:
    chosen = [m for m in MUTANTS if not words or any(word in m.name for word in words)]
    survivors = []
    for mutant in chosen:
        started = time.monotonic()
        verdict = _verdict(mutant)
        print(f"{verdict:9} {time.monotonic() - started:5.1f} s  {mutant.name}", flush=True)
        if verdict != "killed":
            survivors.append(mutant.name)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} killed")
    return 1 if survivors or not chosen else 0


def _verdict(mutant: Mutant) -> str:
    with tempfile.TemporaryDirectory(prefix="turnfence-mutant-") as name:
        folder = Path(name)
        for part in COPIED:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, folder / part, ignore=IGNORED)
            else:
                shutil.copy(source, folder / part)
        target = folder / mutant.file
        text = target.read_text(encoding="utf-8")
        if text.count(mutant.old) != 1:
            return "misplaced"  # the code has moved on, and the table has to follow
        target.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        return _run(folder, mutant)


def _run(folder: Path, mutant: Mutant) -> str:
    paths = [str(folder), str(folder / "protos/gen"), str(folder / "protos/contract")]
    only = ["-k", mutant.only] if mutant.only else []
    tests = [test for test in mutant.tests if (folder / test.partition("::")[0]).exists()]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *only, *tests],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "killed"
    if done.returncode == 1:
        return "killed"
    if done.returncode == 0:
        return "SURVIVED"
    print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
    return "unrun"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
