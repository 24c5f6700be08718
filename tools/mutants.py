"""Plant the mutants of tests/mutants.toml one at a time and run the tests that have to find them.

A mutant is planted in a copy of the tree, and its tests run until the first failure. The outcome is written at once, so
that an interrupted run continues where it stopped:

    python -m tools.mutants --results new.json            # the mutants that new.json lacks
    python -m tools.mutants --results new.json --clean    # check that the killing tests pass without mutants
    python -m tools.mutants --table old.json new.json     # Markdown: counts, and the mutants that a run did not kill
"""

import argparse
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

from tests.draws import seed_of_run

__all__ = ["MUTANTS", "Mutant", "read_mutants"]

ROOT = Path(__file__).parents[1]
MUTANTS = ROOT / "tests" / "mutants.toml"
PASSED, FAILED, INTERRUPTED, USAGE, NOTHING_RUN = 0, 1, 2, 4, 5  # exit codes of pytest
CRASHED = 70
KILLED = "killed"
# Imported once, before the forks, which saves seven seconds each; nothing of the mutated package.
PRELOADED = (
    "torch", "torch._dynamo", "torch._inductor.compile_fx", "torch._inductor.select_algorithm", "transformers",
    "transformers.models.auto.modeling_auto", "sklearn", "hypothesis", "tokenizers", "triton",
)  # fmt: skip
TIMEOUT = 1800.0  # seconds; a mutant that hangs until then counts as killed
LAST_FAILED = "v/cache/lastfailed"  # in pytest's cache: node ids
WHY_LETTERS = 160  # of the first line of a failure


class Mutant(NamedTuple):
    """A planted fault.

    Attributes:
        name: unique.
        file: path in the repository.
        breaks: the promise that it breaks.
        old: text that occurs once in the file.
        new: the text that replaces it.
        tests: files or node ids, the likeliest to fail first.
    """

    name: str
    file: str
    breaks: str
    old: str
    new: str
    tests: list[str]


class Run(NamedTuple):
    """One run of pytest.

    Attributes:
        code: exit code; None after a timeout.
        failed: node id of the first failure; empty if pytest named none.
        seconds: CPU seconds of pytest and the processes that it waited for.
        output: standard output and error.
    """

    code: int | None
    failed: str
    seconds: float
    output: str


def read_mutants() -> list[Mutant]:
    """Return all mutants, in the order of the file."""
    return [Mutant(name, **fields) for name, fields in tomllib.loads(MUTANTS.read_text()).items()]


def copy_tree(tree: Path, target: Path) -> None:
    """Copy the files that git tracks or does not ignore."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=tree, capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, names):
        source, place = tree / name, target / name
        if source.is_symlink() or source.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, place, follow_symlinks=False)


def run_tests(tree: Path, tests: Sequence[str]) -> Run:
    """Run tests in a tree until the first failure, in a fork of this process."""
    cache, log = tree / ".pytest_cache", tree / "mutants.log"
    for left in (cache, tree / ".hypothesis"):  # of the mutant before
        shutil.rmtree(left, ignore_errors=True)
    child = os.fork()
    if child == 0:
        options = ["-x", "-v", "--tb=short", "-m", "not exhaustive", "-o", f"cache_dir={cache}"]
        run_in_fork(tree, log, [*options, *tests])
    code, seconds = wait_for(child)
    output = log.read_text(errors="replace")
    return Run(code, first_failure(cache, output, code), seconds, output)


def preload() -> None:
    """Import what all tests need, under the settings of `make test`."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_SIZE_ASSERTS": "1"}
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def run_in_fork(tree: Path, log: Path, arguments: list[str]) -> NoReturn:
    """Run pytest as `python -m pytest` in the tree would, then exit."""
    code = CRASHED
    try:
        os.setsid()
        with log.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree)
        sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
        # Processes that tests spawn import the main module by its spec: it must not be this checkout's.
        sys.modules["__main__"].__spec__ = importlib.util.find_spec("pytest.__main__")
        for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "tools")]:
            del sys.modules[name]  # imported from this checkout
        code = int(pytest.main(arguments))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait_for(child: int) -> tuple[int | None, float]:
    """Return the exit code of a process (None after a timeout) and its CPU seconds; kill what it left running."""
    deadline = time.monotonic() + TIMEOUT
    late = False
    while True:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            late = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    seconds = round(usage.ru_utime + usage.ru_stime, 1)
    return None if late else os.waitstatus_to_exitcode(status), seconds


def first_failure(cache: Path, output: str, code: int | None) -> str:
    """Return the node id of the test that failed, or of the last one that started if pytest crashed."""
    if code in (PASSED, USAGE, NOTHING_RUN):
        return ""
    listed = cache / LAST_FAILED
    if listed.exists() and (names := list(json.loads(listed.read_text()))):
        return str(names[0])
    started = [line for line in output.splitlines() if line.startswith("tests/") and "::" in line]
    return re.sub(r" (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b.*", "", started[-1]).strip() if started else ""


def named_tests(tree: Path, tests: Iterable[str]) -> list[str]:
    """Return the tests, with the file in place of a test that it no longer has."""
    present = []
    for test in tests:
        path, _, node = test.partition("::")
        name = re.split(r"::|\[", node)[0]  # of a function or a class
        if (tree / path).exists():
            present.append(test if re.search(rf"\b{name}\b", (tree / path).read_text()) else path)
    return list(dict.fromkeys(present))


def try_mutant(tree: Path, mutant: Mutant) -> dict[str, Any]:
    """Plant a mutant, run its tests, and return the outcome."""
    place = tree / mutant.file
    source = place.read_text()
    if source.count(mutant.old) != 1:
        note = f"the old text occurs {source.count(mutant.old)} times"
        return {"outcome": "not planted", "test": "", "seconds": 0.0, "note": note}
    tests = named_tests(tree, mutant.tests)
    times = place.stat()
    place.write_text(source.replace(mutant.old, mutant.new))
    try:
        run = run_tests(tree, tests)
        if run.code == USAGE:  # a parameter that no longer exists
            run = run_tests(tree, list(dict.fromkeys(test.partition("::")[0] for test in tests)))
        return outcome(run)
    finally:
        place.write_text(source)
        os.utime(place, ns=(times.st_atime_ns, times.st_mtime_ns))  # its bytecode becomes valid again


def outcome(run: Run) -> dict[str, Any]:
    """Return what a run shows about a mutant, as it is written to the results."""
    if run.code in (PASSED, USAGE, NOTHING_RUN):
        name = "survived" if run.code == PASSED else "no tests"
        return {"outcome": name, "test": "", "seconds": run.seconds, "note": ""}
    note = {None: "hangs", FAILED: "", INTERRUPTED: "is not collected"}.get(run.code, f"ends pytest with {run.code}")
    why = next((line[1:].strip() for line in run.output.splitlines() if line.startswith("E  ")), "")
    return {"outcome": KILLED, "test": run.failed, "seconds": run.seconds, "note": note, "why": why[:WHY_LETTERS]}


def run_mutants(mutants: Sequence[Mutant], results: Path) -> None:
    """Run each mutant that the results lack."""
    known: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder)
        copy_tree(ROOT, copy)
        for mutant in mutants:
            if mutant.name in known:
                continue
            began = time.monotonic()
            result = known[mutant.name] = try_mutant(copy, mutant)
            results.write_text(json.dumps(known, indent=1) + "\n")
            wall = time.monotonic() - began
            words = [result["outcome"], mutant.name, result["test"], result["note"]]
            print(f"{result['seconds']:7.1f} s CPU {wall:6.0f} s ", " | ".join(filter(None, words)), flush=True)


def run_clean(known: dict[str, Any]) -> int:
    """Run the killing tests without a mutant; return pytest's exit code."""
    tests = [result["test"] for result in known.values() if result["outcome"] == KILLED]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder)
        copy_tree(ROOT, copy)
        run = run_tests(copy, named_tests(copy, dict.fromkeys(tests)))
    print(run.output[-3000:], f"{run.seconds} s CPU")
    return 1 if run.code is None else run.code


def table(mutants: Sequence[Mutant], runs: Sequence[dict[str, Any]]) -> str:
    """Return two Markdown tables: the counts of each run, and the mutants that some run did not kill."""
    counts = [Counter(result["outcome"] for result in run.values()) for run in runs]
    lines = [f"| outcome |{' mutants |' * len(runs)}", f"|---|{'---|' * len(runs)}"]
    for name in sorted(set().union(*counts)):
        lines.append(f"| {name} | {' | '.join(str(count[name]) for count in counts)} |")
    lines += ["", f"| mutant | breaks |{' outcome |' * len(runs)}", f"|---|---|{'---|' * len(runs)}"]
    for mutant in mutants:
        outcomes = [run[mutant.name]["outcome"] if mutant.name in run else "not run" for run in runs]
        if set(outcomes) != {KILLED}:
            lines.append(f"| {mutant.name} | {mutant.breaks} | {' | '.join(outcomes)} |")
    return "\n".join(lines)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="mutants in the order to run, by a part of their names; default: all")
    parser.add_argument("--results", type=Path, help="JSON file to which outcomes are added")
    parser.add_argument("--clean", action="store_true", help="run the killing tests of --results without mutants")
    parser.add_argument("--table", type=Path, nargs="+", help="print tables of these results")
    given = parser.parse_args()
    mutants = [mutant for name in given.names or [""] for mutant in read_mutants() if name in mutant.name]
    if given.table:
        print(table(mutants, [json.loads(path.read_text()) for path in given.table]))
        return 0
    if given.results is None:
        parser.error("--results is missing")
    seed_of_run()  # sets the environment: one seed for all, since a copy without git would draw one a run
    preload()
    if given.clean:
        return run_clean(json.loads(given.results.read_text()))
    run_mutants(mutants, given.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
