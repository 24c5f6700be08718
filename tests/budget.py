"""Count the cost of a test run by folder, in numbers that do not depend on the machine.

The number of programs that are traced and of processes that are started decides how long the tests take, so
`pytest --budget` fails when one of them passes its limit.
"""

import resource
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from torch._dynamo.callback import CallbackTrigger, callback_handler

__all__ = ["LIMITS", "Budget"]

COLUMNS = ("CPU s", "tests", "programs", "processes")
STARTS_A_PROCESS = {"subprocess.Popen", "os.posix_spawn", "os.fork"}
# For `make test` with an empty cache: a fast machine started 756 processes, a slow one 978. Raise a limit only for
# tests that cannot share a program or a process.
LIMITS = {"programs": 300, "processes": 1_200}

Table = dict[str, dict[str, float]]


class Budget:
    """A pytest plugin that counts in every worker, and adds up, prints and checks in the main process."""

    def __init__(self, checked: bool) -> None:
        self._checked = checked
        self._costs: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._counts: Counter[str] = Counter()
        self._over: list[str] = []
        sys.addaudithook(self._on_audit)

    def _on_compile(self, arguments: Any) -> None:
        self._counts["programs"] += arguments.callback_trigger == CallbackTrigger.DYNAMO

    def _on_audit(self, event: str, _: object) -> None:
        self._counts["processes"] += event in STARTS_A_PROCESS

    def _now(self) -> Counter[str]:
        usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        seconds = sum(usage.ru_utime + usage.ru_stime for usage in usages)
        return Counter(self._counts | {"CPU s": seconds})

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        if self._on_compile not in callback_handler.start_callbacks:  # torch.compiler.reset() removes it
            callback_handler.register_start_callback(self._on_compile)
        before = self._now()
        try:
            return (yield)
        finally:
            cost = self._now()
            cost.subtract(before)
            cost["tests"] = 1
            self._costs[item.nodeid.partition("::")[0]].update(cost)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["budget"] = {file: dict(cost) for file, cost in self._costs.items()}
            return
        totals = self.total()
        self._over = [
            f"{totals[name]:.0f} {name}, {limit} allowed (tests/budget.py)"
            for name, limit in LIMITS.items()
            if totals[name] > limit
        ]
        if self._checked and self._over and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for file, cost in getattr(node, "workeroutput", {}).get("budget", {}).items():
            self._costs[file].update(cost)

    def total(self) -> Counter[str]:
        """Return the sum over all files."""
        return sum(self._costs.values(), Counter())

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        if hasattr(config, "workerinput") or not self._costs:
            return
        terminalreporter.section("costs by folder")
        terminalreporter.write_line("".join(f"{column:>10}" for column in COLUMNS))
        by_file = config.getoption("verbose") > 0
        folders: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for file, cost in self._costs.items():
            folders[file if by_file else Path(file).parent.as_posix()].update(cost)
        rows = sorted(folders.items(), key=lambda row: -row[1]["CPU s"])
        for folder, cost in [*rows, ("all", self.total())]:
            numbers = "".join(f"{cost[column]:10.0f}" for column in COLUMNS)
            terminalreporter.write_line(f"{numbers}  {folder}")
        for line in self._over:
            terminalreporter.write_line(line, red=self._checked)
