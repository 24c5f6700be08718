"""Which definitions of transformers a model class can reach, read from the source without importing it.

Reading is by name: a class reaches every module-level name that its body, its bases and its methods mention, and so
on. Annotations, weight initialisation and output recording mention classes that never run, so they do not count.
"""

import ast
import functools
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "Definition",
    "config_definition",
    "field_default",
    "find",
    "inherited",
    "mapping",
    "methods",
    "reach",
    "walk",
]

UNUSED_MEMBERS = {"_can_record_outputs", "_init_weights", "create_masks_for_generate", "generate"}
UNUSED_MEMBERS |= {"prepare_inputs_for_generation"}


def package_root() -> Path:
    """Folder of the installed transformers."""
    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


class Definition(NamedTuple):
    """A module-level class, function or assignment of one file."""

    path: Path
    name: str

    @property
    def node(self) -> ast.stmt:
        return _file(self.path).definitions[self.name]

    @property
    def is_class(self) -> bool:
        return isinstance(self.node, ast.ClassDef)


class _File(NamedTuple):
    definitions: dict[str, ast.stmt]
    imports: dict[str, Definition]  # names that other files under models/ define


@functools.cache
def _file(path: Path) -> _File:
    definitions: dict[str, ast.stmt] = {}
    imports: dict[str, Definition] = {}
    for node in _top_level(ast.parse(path.read_text(encoding="utf-8")).body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            definitions.setdefault(node.name, node)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            definitions.setdefault(node.targets[0].id, node)
        elif isinstance(node, ast.ImportFrom) and node.level:
            folder = path.parents[node.level - 1]
            target = folder.joinpath(*(node.module or "").split(".")).with_suffix(".py")
            if target.exists() and target.name.startswith(("modeling_", "configuration_")) and "models" in target.parts:
                imports |= {alias.asname or alias.name: Definition(target, alias.name) for alias in node.names}
    return _File(definitions, imports)


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, those under if and try included."""
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from _top_level(node.body + node.orelse)
            yield from (stmt for handler in getattr(node, "handlers", []) for stmt in _top_level(handler.body))
        else:
            yield node


def mapping(file: str, name: str) -> dict[str, str]:
    """A literal OrderedDict([...]) of models/auto as a dict."""
    node = _file(package_root() / "models" / "auto" / f"{file}.py").definitions[name]
    assert isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
    return dict(ast.literal_eval(node.value.args[0]))


@functools.cache
def _class_paths() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for pattern in ("modeling_*.py", "configuration_*.py"):
        for path in sorted((package_root() / "models").glob(f"*/{pattern}")):
            for name in re.findall(r"^class (\w+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE):
                found.setdefault(name, path)
    return found


def find(class_name: str) -> Definition:
    """The model or configuration class of that name."""
    return Definition(_class_paths()[class_name], class_name)


def config_definition(model_type: str) -> Definition:
    """Configuration class of a model type."""
    names = {"gpt-sw3": "GPT2Config"} | mapping("auto_mappings", "CONFIG_MAPPING_NAMES")
    return find(names[model_type])


def resolve(path: Path, name: str) -> Definition | None:
    """What a name means in a file, or None if it comes from outside models/."""
    file = _file(path)
    if name in file.definitions:
        return Definition(path, name)
    imported = file.imports.get(name)
    return imported if imported and imported.name in _file(imported.path).definitions else None


def inherited(definition: Definition) -> list[Definition]:
    """The class and its bases under models/, nearest first."""
    assert isinstance(definition.node, ast.ClassDef)
    lineage = [definition]
    for base in definition.node.bases:
        parent = resolve(definition.path, ast.unparse(base))
        if parent is not None and parent.is_class:
            lineage += inherited(parent)
    return lineage


def methods(definition: Definition) -> dict[str, ast.FunctionDef]:
    """Methods of a class by name, inherited ones included."""
    found: dict[str, ast.FunctionDef] = {}
    for ancestor in inherited(definition):
        assert isinstance(ancestor.node, ast.ClassDef)
        for node in ancestor.node.body:
            if isinstance(node, ast.FunctionDef):
                found.setdefault(node.name, node)
    return found


def field_default(config: Definition, field: str) -> ast.expr | None:
    """Default of a configuration's field, None where the class declares no such field."""
    for ancestor in inherited(config):
        assert isinstance(ancestor.node, ast.ClassDef)
        for node in ancestor.node.body:
            targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
            if any(ast.unparse(target) == field for target in targets):
                return node.value  # type: ignore[attr-defined]
    return None


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """ast.walk without annotations and without members that do not run in a forward."""
    yield node
    for field, child in ast.iter_fields(node):
        if field in {"annotation", "returns"}:
            continue
        for item in child if isinstance(child, list) else [child]:
            if not isinstance(item, ast.AST) or _is_unused(item):
                continue
            yield from walk(item)


def _is_unused(node: ast.AST) -> bool:
    if isinstance(node, ast.FunctionDef):
        return node.name in UNUSED_MEMBERS
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in UNUSED_MEMBERS


@functools.cache
def _mentions(definition: Definition) -> tuple[Definition, ...]:
    names = dict.fromkeys(node.id for node in walk(definition.node) if isinstance(node, ast.Name))
    found = (resolve(definition.path, name) for name in names)
    return tuple(target for target in found if target is not None and target != definition)


def reach(root: Definition, extra: dict[str, Definition], stop: re.Pattern[str]) -> dict[Definition, Definition | None]:
    """Every definition that root reaches, each with the one that mentioned it first (breadth first; None for root).

    Args:
        root: a model class.
        extra: what an outside name stands for here, e.g. "AutoModel" for the text model of a multimodal class.
        stop: definitions whose names match are left out, with all that only they reach.
    """
    parents: dict[Definition, Definition | None] = {root: None}
    queue = [root]
    for definition in queue:
        names = {node.id for node in walk(definition.node) if isinstance(node, ast.Name)}
        for target in (*_mentions(definition), *(extra[name] for name in sorted(names & extra.keys()))):
            if target not in parents and not stop.search(target.name) and target.path.name.startswith("modeling_"):
                parents[target] = definition
                queue.append(target)
    return parents
