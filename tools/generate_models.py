"""Write docs/models.json and docs/models.md: the result of each causal-LM architecture of transformers.

Run by `make models`. Each architecture is examined (tools/model_checks.py) in a separate process, with a limit of
time and of memory. Results are kept in models.json with the versions and the digest of the sources that gave them, so
that an interrupted run continues; --keep also accepts the results of older sources. On a machine with
a GPU, --gpu examines the named architectures there and writes models_gpu.json.
"""

import argparse
import json
import multiprocessing
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from detcompile.executors.fingerprints import source_digest
from tools.model_checks import examine, examine_exactly, examine_on_gpu, served
from tools.model_configs import ARCHITECTURES
from tools.models_page import page

__all__ = ["GPU_RESULTS", "PAGE", "RESULTS", "load", "run", "save"]

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS / "models.json"
GPU_RESULTS = DOCS / "models_gpu.json"
PAGE = DOCS / "models.md"
TIME_LIMIT = 600.0  # seconds
MEMORY_LIMIT = 8 << 30  # bytes of data
Result = dict[str, Any]


class Running(NamedTuple):
    """An architecture that a process examines."""

    model_type: str
    process: Any
    answer: Connection
    deadline: float


def load() -> dict[str, Result]:
    """Return the rows of models.json by architecture; no rows if another transformers or torch made them."""
    if not RESULTS.exists():
        return {}
    content = json.loads(RESULTS.read_text(encoding="utf-8"))
    return content["rows"] if content["versions"] == versions() else {}


def save(rows: dict[str, Result], path: Path = RESULTS) -> None:
    """Write models.json, or models_gpu.json with the GPU's name, sorted."""
    hardware = {"hardware": torch.cuda.get_device_name()} if path == GPU_RESULTS else {}
    content = hardware | {"versions": versions(), "rows": dict(sorted(rows.items()))}
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def versions() -> dict[str, str]:
    """Return the versions of what made the rows, besides this package."""
    return {"torch": version("torch").partition("+")[0], "transformers": version("transformers")}


def run(model_types: Iterable[str], jobs: int, codegen: bool, rows: dict[str, Result]) -> None:
    """Examine ``model_types`` and put each result into ``rows`` and models.json as it comes."""
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1
    examine("llama", codegen)  # here, so that every process inherits what a first compilation loads
    for name, result in _answers(model_types, jobs, "fork", _work, codegen):  # the imports take longer than most
        rows[name] = result
        save(rows)


def run_served(model_types: Iterable[str], jobs: int, rows: dict[str, Result]) -> None:
    """Compile and serve ``model_types`` in each dtype and put the results into their rows."""
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1
    served("llama")  # as in `run`
    for name, result in _answers(model_types, jobs, "fork", _work_served):
        rows[name] = rows[name] | {"served": result["served"], "served_by": result["sources"]}
        save(rows)


def run_exactly(model_types: Iterable[str], jobs: int, rows: dict[str, Result]) -> None:
    """Certify and run ``model_types`` in exact arithmetic and put the results into their rows."""
    torch.set_num_threads(1)
    examine_exactly("llama")  # as in `run`
    for name, result in _answers(model_types, jobs, "fork", _work_exactly):
        rows[name] = rows[name] | {"exact": result["exact"], "exact_by": result["sources"]}
        save(rows)


def run_on_gpu(model_types: Iterable[str], jobs: int) -> None:
    """Examine ``model_types`` on the GPU and write each result to models_gpu.json as it comes."""
    rows: dict[str, Result] = {}
    for name, result in _answers(model_types, jobs, "spawn", _work_on_gpu):  # CUDA does not survive a fork
        rows[name] = result
        save(rows, GPU_RESULTS)


def _answers(
    model_types: Iterable[str], jobs: int, method: str, work: Callable[..., None], *arguments: Any
) -> Iterator[tuple[str, Result]]:
    """Yield each architecture and its row as they come, at most ``jobs`` at a time."""
    waiting, running, sources = list(model_types), [], source_digest()[:12]
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(_start(waiting.pop(0), method, work, arguments))
        wait([one.answer for one in running], timeout=1.0)
        for one in list(running):
            result = _finished(one)
            if result is not None:
                running.remove(one)
                keys = ("verdict", "reason", "served", "exact", "seconds", "meaning")
                line = " ".join(str(result[key]) for key in keys if key in result)
                print(f"{one.model_type}: {line[:300]}", flush=True)
                yield one.model_type, result | {"sources": sources}


def _start(model_type: str, method: str, work: Callable[..., None], arguments: tuple[Any, ...]) -> Running:
    context: Any = multiprocessing.get_context(method)
    answer, give = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(model_type, give, *arguments))
    process.start()
    give.close()
    return Running(model_type, process, answer, time.monotonic() + TIME_LIMIT)


def _work(model_type: str, give: Connection, codegen: bool) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT, MEMORY_LIMIT))
    _be_silent()
    give.send(examine(model_type, codegen))


def _work_served(model_type: str, give: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT, MEMORY_LIMIT))
    _be_silent()
    start = time.monotonic()
    give.send({"served": served(model_type), "seconds": round(time.monotonic() - start, 1)})


def _work_exactly(model_type: str, give: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT, MEMORY_LIMIT))
    _be_silent()
    give.send({"exact": examine_exactly(model_type)})


def _work_on_gpu(model_type: str, give: Connection) -> None:
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1
    _be_silent()
    give.send(examine_on_gpu(model_type))


def _be_silent() -> None:
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)


def _finished(one: Running) -> Result | None:
    """Return the result, a row that says why none will come, or None while the process runs."""
    late = time.monotonic() > one.deadline
    if not one.answer.poll() and one.process.is_alive() and not late:
        return None
    try:
        result = one.answer.recv() if one.answer.poll() else None
    except EOFError:
        result = None
    if result is None:
        if late:
            one.process.kill()
        one.process.join()
        reason = f"took longer than {TIME_LIMIT:.0f} s" if late else f"its process ended with {one.process.exitcode}"
        result = {"verdict": "refused", "kind": "none", "reason": reason}
    one.process.join()
    one.answer.close()
    return result


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make models", description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures to examine again; default: those without a result")
    parser.add_argument("--jobs", type=int, default=1, help="at a time")
    parser.add_argument(
        "--graphs", action="store_true", help="run certified graphs without generated code; leaves out the axes"
    )
    parser.add_argument("--served", action="store_true", help="compile and serve certified architectures")
    parser.add_argument("--exact", action="store_true", help="examine certified architectures in exact16")
    parser.add_argument("--keep", action="store_true", help="keep results of older sources")
    parser.add_argument("--gpu", action="store_true", help="examine the named architectures on this machine's GPU")
    parser.add_argument("--page", action="store_true", help="write the page without examining anything")
    return parser.parse_args()


def main() -> None:
    """Examine the architectures without a result, then write the page."""
    options = _arguments()
    unknown = set(options.names) - set(ARCHITECTURES)
    if unknown:
        sys.exit(f"no such architecture: {', '.join(sorted(unknown))}")
    if options.gpu:
        run_on_gpu(options.names, options.jobs)
        return
    rows = load()
    digest = source_digest()[:12]
    if options.served:
        certified = [name for name, row in rows.items() if row["verdict"] == "certified"]
        old = [name for name in certified if not options.keep or "served" not in rows[name]]
        run_served(options.names or old, options.jobs, rows)
    if options.exact:
        certified = [name for name, row in rows.items() if row["verdict"] == "certified"]
        old = [name for name in certified if not options.keep or "exact" not in rows[name]]
        run_exactly(options.names or old, options.jobs, rows)
    fresh = {name for name, row in rows.items() if options.keep or row["sources"] == digest}
    if not options.graphs:
        fresh -= {name for name, row in rows.items() if row["verdict"] == "certified" and not row["axes"]}
    stale = [name for name in ARCHITECTURES if name not in fresh]
    if not (options.page or options.served or options.exact):
        run(options.names or stale, options.jobs, not options.graphs, rows)
    gpu = json.loads(GPU_RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(page(rows, versions(), gpu), encoding="utf-8")
    print(Counter(row["verdict"] for row in rows.values()))


if __name__ == "__main__":
    main()
