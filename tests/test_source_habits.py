"""Habits of the source that a parser can check."""

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.internals_page import entries, page

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "detcompile"
WRITTEN = ("detcompile", "tests", "docs", "benchmarks", "examples", "tools")  # folders whose text people read
SUFFIXES = {".py", ".md", ".toml", ".html"}
# Words in lower case. "cancelled" is missing: it is OpenAI's status and a method of asyncio's futures.
BRITISH = re.compile(
    "(un|de|re)?(initiali|materiali|maximi|minimi|normali|optimi|organi|parameteri|penali|quanti|randomi|recogni|seriali"
    "|speciali|summari|synchroni|tokeni)s(e|ed|er|es|ing|ations?)$"
    "|(behavio|colo|favo|hono|labo|neighbo)ur|(dia|labe|mode|signa|trave)ll(ed|ing)$|cent(red|re)$|analys(ed|e|ing)$"
    "|artefact|catalogue|grey|judgement|licence|towards$|whilst$"
)
INTERNALS = ("torch_internals/", "transformers_internals/")
# Modules of transformers that its documentation names; everything else of it is private.
OF_TRANSFORMERS = {
    "transformers",
    "transformers.activations",
    "transformers.generation",
    "transformers.modeling_outputs",
    "transformers.quantizers",
    "transformers.utils",
    "transformers.utils.logging",
    "transformers.utils.quantization_config",
}
DOCUMENTED = {"torch._check", "torch._foreach_mul_"}  # whatever its name says
OF_TRITON = {"_reinterpret", "_update_hash"}
OF_NAMED_TUPLES = {"_asdict", "_field_defaults", "_fields", "_replace"}
OWNERS = {"aten", "cls", "os", "self", "sys"}  # whose underscores are no matter of torch's: operations, and Python


def sources() -> dict[str, str]:
    """Return the text of every Python file by its path in the package."""
    return {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def test_no_memory_of_a_template_follows_the_default_dtype():
    """A kernel that writes float32 into what torch.set_default_dtype made smaller writes beyond its end."""
    floating = {"torch." + name for name in ["empty", "full", "linspace", "ones", "tensor", "zeros"]}
    actual = [
        f"{name}:{node.lineno}"
        for name, source in sources().items()
        if name.startswith(("templates/", "training/", "trl/"))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in floating
        if not {"dtype", None} & {keyword.arg for keyword in node.keywords}  # None: **keywords
    ]
    assert not actual, f"pass dtype to torch's constructors in {actual}"


def test_no_tensor_follows_the_default_device() -> None:
    """torch.set_default_device moves what a caller makes, not what a model needs on its own device."""
    makers = ["arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "tensor"]
    makes = {"torch." + name for name in [*makers, "zeros"]}
    actual = [
        f"{name}:{node.lineno}"
        for name, source in sources().items()
        if name.startswith(("models/", "passes/", "runtime/step/", "templates/", "training/"))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in makes
        if not {"device", None} & {keyword.arg for keyword in node.keywords}  # None: **keywords
    ]
    assert not actual, f"pass device to torch's constructors in {actual}"


def test_no_cancellation_of_a_request_is_lost():
    """asyncio.wait_for of Python 3.11 may return in place of raising CancelledError; asyncio.timeout does not."""
    actual = [
        f"{name}:{node.lineno}"
        for name, source in sources().items()
        if name.startswith("serving/")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and node.attr == "wait_for"
    ]
    assert not actual, f"use asyncio.timeout in {actual}"


def test_private_names_of_torch_stay_in_one_place() -> None:
    actual = [
        f"{name}:{use}"
        for name, source in sources().items()
        if not name.startswith(INTERNALS)
        for use in private_uses(source)
    ]
    assert not actual, f"put these into torch_internals or transformers_internals: {actual}"


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch import _inductor",
        "from torch._inductor import config",
        "from torch.fx import experimental",
        "from torch.fx.experimental.proxy_tensor import make_fx",
        "from torch.distributed import _symmetric_memory as memory",
        "import torch.fx.experimental.symbolic_shapes as shapes",
        "from transformers import masking_utils",
        "from transformers.masking_utils import create_causal_mask",
        "import transformers.modeling_utils as modeling",
        "torch._C._nn.pad(x, [1, 1])",
        "torch.fx.experimental.symbolic_shapes.ShapeEnv()",
        "transformers.masking_utils.create_causal_mask()",
        "module._parameters",
        "class A:\n    def _version(self): ...\n    def f(self, tensor): return tensor._version",
        "getattr(node.target, '_schema', None)",
        "mock.patch.object(torch.compiler, '_is_compiling_flag', True)",
        "getattr(module, f'_{kind}_hooks')",
    ],
)
def test_each_private_use_is_detected(source: str) -> None:
    assert len(private_uses(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "torch._check(n > 0)",
        "aten._to_copy.default",
        "self._parameters",
        "step._replace(rows=1)",
        "torch.__version__",
        "from transformers import PreTrainedModel, logging",
        "from torch.utils.checkpoint import checkpoint",
        "class A:\n    def _certify(self): ...\na._certify()",
    ],
)
def test_public_uses_are_not_reported(source: str) -> None:
    assert private_uses(source) == []


def private_uses(source: str) -> list[str]:
    """Return the line and the name of each private module or attribute that a module takes from elsewhere."""
    tree = ast.parse(source)
    known = defined_names(tree) - attributes_of_internals() | OF_TRITON | OF_NAMED_TUPLES
    actual = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            actual += [f"{node.lineno} {name}" for name in imported_names(node) if is_private_module(name)]
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            private = is_private(node.attr) and ast.unparse(node.value) not in OWNERS and node.attr not in known
            inner = isinstance(node.value, ast.Attribute) and is_private(node.value.attr)  # reported by itself
            if (private and not inner and name not in DOCUMENTED) or is_private_path(name):
                actual.append(f"{node.lineno} {name}")
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            function = ast.unparse(node.func).rpartition(".")[2]
            name = text_of(node.args[1])
            if function in ("getattr", "hasattr", "setattr", "delattr", "object") and is_private(name):
                if ast.unparse(node.args[0]) not in OWNERS and name not in known:
                    actual.append(f"{node.lineno} {name}")
    return actual


def imported_names(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    prefix = "" if isinstance(node, ast.Import) else f"{node.module}."
    yield from (f"{prefix}{alias.name}" for alias in node.names)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_private_module(name: str) -> bool:
    """Return whether an imported name of torch or transformers is private, or is of a private module."""
    library, *parts = name.split(".")
    if library == "torch":
        return any(map(is_private, parts)) or name.startswith("torch.fx.experimental")
    if library != "transformers":
        return False
    module = name if name in transformers_modules() else name.rpartition(".")[0] or name
    return any(map(is_private, parts)) or module not in OF_TRANSFORMERS


def is_private_path(name: str) -> bool:
    """Return whether a dotted name is that of a private module, such as transformers.masking_utils."""
    return name == "torch.fx.experimental" or (name in transformers_modules() and name not in OF_TRANSFORMERS)


def text_of(node: ast.expr) -> str:
    """Return the text of a string, or its beginning where the rest is computed."""
    if isinstance(node, ast.JoinedStr) and node.values:
        node = node.values[0]
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def defined_names(tree: ast.Module) -> set[str]:
    """Return the names that a module gives its functions, classes, variables and attributes."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) in ("self", "cls"):
                names.add(node.attr)
    return names


@functools.cache
def attributes_of_internals() -> frozenset[str]:
    """Return the private attributes of torch and transformers that the internals packages read."""
    trees = [ast.parse(source) for name, source in sources().items() if name.startswith(INTERNALS)]
    attributes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return frozenset(
        node.attr for node in attributes if is_private(node.attr) and ast.unparse(node.value) not in ("self", "cls")
    )


@functools.cache
def transformers_modules() -> frozenset[str]:
    """Return the modules of transformers, except those of single models."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parent
    paths = [path for pattern in ("*", "*/*") for path in root.glob(pattern) if path.parent.name != "models"]
    paths = [path for path in paths if path.suffix == ".py" or (path / "__init__.py").exists()]
    return frozenset(".".join(("transformers", *path.relative_to(root).with_suffix("").parts)) for path in paths)


def test_spelling_is_american() -> None:
    paths = [path for folder in WRITTEN for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    paths = [path for path in (*paths, *ROOT.glob("*.md")) if path != Path(__file__)]
    words = {path: set(re.findall("[a-z]+", path.read_text().lower())) for path in paths}
    british = {word for word in set().union(*words.values()) if BRITISH.match(word)}
    actual = [f"{path.relative_to(ROOT)}: {word}" for path in paths for word in words[path] & british]
    assert not actual, f"spell the American way: {actual}"


def test_every_internal_name_says_its_purpose() -> None:
    for name, source in sources().items():
        if name.startswith(INTERNALS) and not name.endswith("__init__.py"):
            assert entries(source), name


def test_internals_page_lists_every_name() -> None:
    rows = page().count("\n| `")
    assert rows == sum(len(entries(source)) for name, source in sources().items()
                       if name.startswith(INTERNALS) and not name.endswith("__init__.py"))  # fmt: skip
