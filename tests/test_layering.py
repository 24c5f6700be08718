"""The layering rule and the habits that a parser can check, over every module of detcompile.

Each rule is a function from a parsed module to the lines that break it; `test_a_planted_violation_is_caught` shows
that each of them sees.
"""

import ast
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
# A module imports from its own layer and from the layers after it. Longest prefix wins.
LAYERS = [
    {"detcompile", "detcompile.__main__", "detcompile.commands", "detcompile.experimental"},
    {"detcompile.serving"},
    {"detcompile.exporting", "detcompile.models.spec", "detcompile.offline", "detcompile.reasoning", "detcompile.trl"},
    {"detcompile.api", "detcompile.training", "detcompile.workers"},
    {"detcompile.models.exported", "detcompile.models.remote"},
    {"detcompile.models"},
    {"detcompile.executors"},
    {"detcompile.archives"},
    {"detcompile.contrib", "detcompile.passes", "detcompile.runtime"},
    {"detcompile.templates"},
    {
        "detcompile.config",
        "detcompile.cuda_ipc",
        "detcompile.digests",
        "detcompile.gc_pause",
        "detcompile.other_names",
        "detcompile.orders",
        "detcompile.parallel",
        "detcompile.progress",
        "detcompile.read_ahead",
        "detcompile.releases",
        "detcompile.step",
        "detcompile.storage",
        "detcompile.weight_transfer",
        "detcompile.weights",
    },
    {"detcompile.torch_internals", "detcompile.transformers_internals"},
    {"detcompile.errors"},
]
# The same within a layer: each entry imports from itself and from those after it, longest prefix first.
FLOORS = [
    [{"templates.recorded_calls"}, {"templates.cpp_dispatch"}, {"templates.ops"}],
    [
        {"templates.ops"},
        {"templates.training"},
        {"templates.attention", "templates.collectives", "templates.exact", "templates.experts", "templates.quantized"},
        {"templates.matmul", "templates.recurrences", "templates.rows", "templates.tokens"},
        {"templates.registration"},
        {"templates.cpu", "templates.device"},
    ],
    [
        {"passes.lowering", "passes.packaging", "passes.training"},
        {"passes.program_source"},
        {"passes.batches", "passes.preparation", "passes.sharding.shares"} | {"passes.warm"},
        {"passes.tracing"},
        {"passes.backend"},
        {"passes.layers"},
        {"passes.calls", "passes.capture", "passes.pipeline", "passes.roles", "passes.sharding"},
        {"passes.adapters", "passes.programs", "passes.rewrites"},
        {"passes.modules", "passes.proof"},
        {"passes.graphs", "passes.release_probe"},
    ],
    [
        {"runtime.engine_setup"},
        {"runtime.engine", "runtime.memory_probe"},
        {"runtime.step_turns"},
        {"runtime.pipeline"},
        {"runtime.step_planner"},
        {"runtime.metrics", "runtime.request_book"},
        {"runtime.scheduler", "runtime.step_work"},
        {"runtime.policies"},
        {"runtime.dense", "runtime.engine_config", "runtime.pacing", "runtime.processes", "runtime.speculation"},
        {"runtime.step"},
        {"runtime.kv", "runtime.sampling"},
        {"runtime.requests"},
        {"runtime.grammars"},
        {"runtime.adapters", "runtime.device_memory"},
    ],
    [
        {"serving.app", "serving.server"},
        {
            "serving.anthropic",
            "serving.control",
            "serving.dashboard",
            "serving.pooling",
            "serving.tokens",
        },
        {"serving.openai"},
        {"serving.receipts.routes"},
        {"serving.service"},
        {"serving.journal"},
        {"serving.dashboard.history", "serving.receipts.issuer"},
        {"serving.tracing"},
        {"serving.request_log"},
        {
            "serving.access",
            "serving.bodies",
            "serving.connections",
            "serving.limiter",
            "serving.logs",
            "serving.metrics",
            "serving.responses",
            "serving.tokenizer_pool",
        },
        {"serving.chat_template", "serving.engines", "serving.grammar_check", "serving.http_errors"},
        {"serving.receipts"},
        {"serving.plain_tokenizer", "serving.tools"},
    ],
    [
        {"orders.numerics"},
        {"orders.gradient_orders", "orders.matmul_orders", "orders.row_orders", "orders.token_orders"},
        {"orders.float32", "orders.sum_order"},
    ],
]
STRANGERS = [
    {"detcompile.passes", "detcompile.runtime"},
    {"detcompile.passes.adapters", "detcompile.passes.proof"},
    {"detcompile.passes.modules", "detcompile.passes.proof"},
    {"detcompile.passes.proof", "detcompile.passes.rewrites"},
    {"detcompile.templates.cpu", "detcompile.templates.device"},
]
LINKED = {"detcompile.passes", "detcompile.runtime", "detcompile.templates"}  # links to them stand at the root
IMPORTED_ON_DEMAND = {"gguf", "triton"}  # optional: an extra; absent off Linux
READS_ENVIRONMENT = {"detcompile.config"}
BANNED_NAMES = {"Autotuner", "autotune", "atomic_add"}  # the first two pick by speed alone, the last adds in no order


class Module(NamedTuple):
    """One parsed file."""

    name: str
    source: str

    @property
    def tree(self) -> ast.Module:
        return _parse(self.source)


@functools.cache
def _parse(source: str) -> ast.Module:
    return ast.parse(source)


@functools.cache
def modules() -> dict[str, Module]:
    """Every module of the package by dotted name."""
    actual = {}
    for path in sorted((ROOT / "detcompile").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        actual[name] = Module(name, path.read_text())
    return actual


def depth_of(name: str, layers: list[set[str]]) -> int | None:
    """Depth from the top of the layer with the longest prefix of a module; None if no layer has one."""
    prefix = name
    while prefix:
        for depth, prefixes in enumerate(layers):
            if prefix in prefixes and (prefix != "detcompile" or name == "detcompile"):
                return depth
        prefix = prefix.rpartition(".")[0]
    return None


def layer(name: str) -> int:
    """A module's depth among LAYERS; one that no prefix covers must be given a layer."""
    depth = depth_of(name, LAYERS)
    assert depth is not None, f"{name} has no layer: add it to LAYERS in {Path(__file__).name}"
    return depth


def without_floor() -> list[str]:
    """Return modules of templates, passes and runtime that no floor covers. Bare packages import nothing."""
    covered = [[{f"detcompile.{name}" for name in names} for names in floors] for floors in FLOORS]
    inside = [name for name in modules() if name.rpartition(".")[0].startswith(tuple(LINKED))]
    return [name for name in inside if all(depth_of(name, floors) is None for floors in covered)]


def are_strangers(name: str, target: str) -> bool:
    inside = lambda module, package: module == package or module.startswith(package + ".")  # noqa: E731
    return any((inside(name, a) and inside(target, b)) or (inside(name, b) and inside(target, a)) for a, b in STRANGERS)


def imports(module: Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name of a module of detcompile) for each import of one."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules() else str(node.module) for name in submodules]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "detcompile")


def upward_imports(module: Module) -> list[str]:
    depth = layer(module.name)
    return [
        f"{module.name}:{line} imports {target}"
        for line, target in imports(module)
        if layer(target) < depth or are_strangers(module.name, target)
    ]


def climbing_imports(module: Module) -> list[str]:
    broken = []
    for names in FLOORS:
        floors = [{f"detcompile.{name}" for name in floor} for floor in names]
        depth = depth_of(module.name, floors)
        if depth is None:
            continue
        for line, target in imports(module):
            target_depth = depth_of(target, floors)
            if target_depth is not None and target_depth < depth:
                broken.append(f"{module.name}:{line} imports {target}, which stands above it")
    return broken


def relative_imports(module: Module) -> list[str]:
    return [
        f"{module.name}:{node.lineno} relative import"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]


def hidden_imports(module: Module) -> list[str]:
    broken = []
    for function in ast.walk(module.tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [str(node.module)]
            else:
                continue
            if any(name.split(".")[0] not in IMPORTED_ON_DEMAND for name in names):
                broken.append(f"{module.name}:{node.lineno} import inside a function")
    return broken


def environment_reads(module: Module) -> list[str]:
    if module.name in READS_ENVIRONMENT:
        return []
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    broken = []
    for node in ast.walk(module.tree):
        named = isinstance(node, ast.ImportFrom) and node.module == "os" and names & {a.name for a in node.names}
        used = isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os"
        if named or used:
            broken.append(f"{module.name}:{node.lineno} the environment belongs to config.py")
    return broken


def banned_constructs(module: Module) -> list[str]:
    broken = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            broken.append(f"{module.name}:{node.lineno} bare except")
        names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in {"triton", "tl", "triton.language"}:
            names.append(node.attr)
        broken += [f"{module.name}:{node.lineno} {name}" for name in names if name in BANNED_NAMES]
    return broken


def unsorted_names(module: Module) -> list[str]:
    broken = []
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = [] if isinstance(node.value, ast.Call) else ast.literal_eval(node.value)
            if names != sorted(set(names)):
                broken.append(f"{module.name}: __all__ should be {sorted(set(names))}")
    return broken


def missing_docstring(module: Module) -> list[str]:
    # The linked packages only refuse to be imported through their links.
    return [] if module.name in LINKED or ast.get_docstring(module.tree) else [f"{module.name} has no docstring"]


RULES: list[Callable[[Module], list[str]]] = [
    upward_imports,
    climbing_imports,
    relative_imports,
    hidden_imports,
    environment_reads,
    banned_constructs,
    unsorted_names,
    missing_docstring,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_module_keeps_the_rule(rule):
    broken = [line for module in modules().values() for line in rule(module)]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (upward_imports, "detcompile.templates.planted", "from detcompile.passes.capture import capture"),
        (upward_imports, "detcompile.passes.planted", "import detcompile.runtime"),
        (upward_imports, "detcompile.runtime.planted", "from detcompile import passes"),
        (upward_imports, "detcompile.errors", "from detcompile import config"),
        (upward_imports, "detcompile.templates.device.planted", "from detcompile.templates.cpu import library"),
        (upward_imports, "detcompile.passes.rewrites.planted", "from detcompile.passes.proof import provenance"),
        (climbing_imports, "detcompile.templates.rows.planted", "from detcompile.templates.experts import op"),
        (climbing_imports, "detcompile.passes.proof.planted", "from detcompile.passes import pipeline"),
        (climbing_imports, "detcompile.passes.graphs", "from detcompile.passes.proof import provenance"),
        (climbing_imports, "detcompile.runtime.kv.planted", "from detcompile.runtime.step import worker"),
        (relative_imports, "detcompile.passes.planted", "from . import capture"),
        (hidden_imports, "detcompile.api", "def f():\n    import torch"),
        (hidden_imports, "detcompile.api", "class C:\n    async def f(self):\n        from torch import fx"),
        (environment_reads, "detcompile.api", "import os\nx = os.environ.get('X')"),
        (environment_reads, "detcompile.api", "from os import getenv"),
        (banned_constructs, "detcompile.templates.planted", "@triton.autotune([])\ndef kernel(): ..."),
        (banned_constructs, "detcompile.templates.planted", "tl.atomic_add(p, x)"),
        (banned_constructs, "detcompile.templates.planted", "from triton import autotune"),
        (banned_constructs, "detcompile.api", "try:\n    pass\nexcept:\n    pass"),
        (unsorted_names, "detcompile.api", "__all__ = ['b', 'a']"),
        (missing_docstring, "detcompile.api", "x = 1"),
    ],
)
def test_a_planted_violation_is_caught(rule, name, source):
    assert len(rule(Module(name, source))) == 1


def test_a_module_without_a_layer_is_refused():
    with pytest.raises(AssertionError, match="add it to LAYERS"):
        layer("detcompile.nowhere")


def test_the_import_graph_has_no_cycle():
    edges = {name: {target for _, target in imports(module)} - {name} for name, module in modules().items()}
    while leaves := {name for name, targets in edges.items() if not targets & edges.keys()}:
        edges = {name: targets for name, targets in edges.items() if name not in leaves}
    assert not edges, f"an import cycle passes through some of {sorted(edges)}"


def test_every_module_has_a_floor():
    assert not without_floor(), "add them to FLOORS"
