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
MAX_LINES = 400

# A module imports from its own layer and from the layers after it. Longest prefix wins.
LAYERS = [
    {
        "detcompile",
        "detcompile.certificate_page",
        "detcompile.cli",
        "detcompile.demo",
        "detcompile.generate_command",
        "detcompile.order_drawing",
        "detcompile.text_input",
        "detcompile.tune_speculation",
        "detcompile.tune_speculation_command",
    },
    {"detcompile.axes", "detcompile.exporting", "detcompile.verification"},
    {"detcompile.api", "detcompile.workers"},
    {"detcompile.exported", "detcompile.remote_model"},
    {
        "detcompile.checkpoints",
        "detcompile.compiled",
        "detcompile.fingerprints",
        "detcompile.live_weights",
        "detcompile.machine",
    },
    {"detcompile.passes", "detcompile.runtime"},
    {"detcompile.templates"},
    {
        "detcompile.archive",
        "detcompile.config",
        "detcompile.manifest",
        "detcompile.numerics",
        "detcompile.orders",
        "detcompile.parallel",
        "detcompile.start_progress",
        "detcompile.step",
        "detcompile.storage",
        "detcompile.stored_weights",
        "detcompile.weights",
    },
    {"detcompile.float32", "detcompile.sum_order"},
    {"detcompile.errors"},
]
STRANGERS = {("detcompile.passes", "detcompile.runtime"), ("detcompile.runtime", "detcompile.passes")}
SUBPACKAGES = {"detcompile", "detcompile.passes", "detcompile.runtime", "detcompile.templates"}
IMPORTED_ON_DEMAND = {"triton"}  # optional: absent off Linux
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
    found = {}
    for path in sorted((ROOT / "detcompile").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name, path.read_text())
    return found


def layer(name: str) -> tuple[int, str]:
    """(depth from the top, prefix) of a module; a module that no prefix covers must be given a layer."""
    prefix = name
    while prefix:
        for depth, prefixes in enumerate(LAYERS):
            if prefix in prefixes and (prefix != "detcompile" or name == "detcompile"):
                return depth, prefix
        prefix = prefix.rpartition(".")[0]
    raise AssertionError(f"{name} has no layer: add it to LAYERS in {Path(__file__).name}")


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
    depth, prefix = layer(module.name)
    broken = []
    for line, target in imports(module):
        target_depth, target_prefix = layer(target)
        if target_depth < depth or (prefix, target_prefix) in STRANGERS:
            broken.append(f"{module.name}:{line} imports {target}")
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
    public = [
        node.name
        for node in module.tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]
    assigned = [
        node.value
        for node in module.tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    if not assigned:
        return [f"{module.name} defines {public[0]} and has no __all__"] if public else []
    names = ast.literal_eval(assigned[0])
    return [] if names == sorted(set(names)) else [f"{module.name}: __all__ should be {sorted(set(names))}"]


def missing_docstring(module: Module) -> list[str]:
    linked = module.name in SUBPACKAGES - {"detcompile"}  # these three only refuse to be imported through the links
    return [] if linked or ast.get_docstring(module.tree) else [f"{module.name} has no docstring"]


def too_long(module: Module) -> list[str]:
    lines = len(module.source.splitlines())
    return [f"{module.name} has {lines} lines"] if lines > MAX_LINES else []


RULES: list[Callable[[Module], list[str]]] = [
    upward_imports,
    relative_imports,
    hidden_imports,
    environment_reads,
    banned_constructs,
    unsorted_names,
    missing_docstring,
    too_long,
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
        (relative_imports, "detcompile.passes.planted", "from . import capture"),
        (hidden_imports, "detcompile.api", "def f():\n    import torch"),
        (hidden_imports, "detcompile.api", "class C:\n    async def f(self):\n        from torch import fx"),
        (environment_reads, "detcompile.api", "import os\nx = os.environ.get('X')"),
        (environment_reads, "detcompile.api", "from os import getenv"),
        (banned_constructs, "detcompile.templates.planted", "@triton.autotune([])\ndef kernel(): ..."),
        (banned_constructs, "detcompile.templates.planted", "tl.atomic_add(p, x)"),
        (banned_constructs, "detcompile.templates.planted", "from triton import autotune"),
        (banned_constructs, "detcompile.api", "try:\n    pass\nexcept:\n    pass"),
        (unsorted_names, "detcompile.api", "def f(): ..."),
        (unsorted_names, "detcompile.api", "__all__ = ['b', 'a']"),
        (missing_docstring, "detcompile.api", "x = 1"),
        (too_long, "detcompile.api", "x = 1\n" * (MAX_LINES + 1)),
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


def test_no_subpackage_below_the_three():
    packages = {".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "detcompile").rglob("*.py")}
    assert packages == SUBPACKAGES


def test_kernel_sources_are_not_too_long():
    sources = [path for path in (ROOT / "detcompile").rglob("*") if path.suffix in {".cpp", ".h", ".hpp"}]
    assert not [path.name for path in sources if len(path.read_text().splitlines()) > MAX_LINES]
