"""ModelSpec: a description of a model that another process can load and compile."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from detcompile.api import Compiled, compile, load_model
from detcompile.errors import InvalidInput
from detcompile.models.compiled import CompiledModel, require_causal
from detcompile.models.exported import load
from detcompile.models.hub import EMBEDDED
from detcompile.orders.numerics import Numerics
from detcompile.transformers_internals.configs import commit_of

ARCHIVE_SUFFIX = ".pt2"
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelSpec:
    """How to build a compiled model again in another process. ``name`` may be the path of an exported archive."""

    name: str
    random: bool = False
    dtype: str | None = None
    device: str | None = None
    tp_sizes: tuple[int, ...] = Numerics().tp_sizes
    revision: str | None = None
    token: str | None = field(default=None, repr=False)
    trust_remote_code: bool = False
    task: Literal["generate", "classify", "embed"] | None = None
    dequantize: bool | None = None
    arithmetic: str = "float"
    max_lora_rank: int | None = None

    def compile(self, tp: int = 1, pp: int = 1) -> CompiledModel:
        """Load and compile a causal LM, in ``pp * tp`` worker processes if that is more than one."""
        return require_causal(self.compile_any(tp, pp), "this command")

    def compile_any(self, tp: int = 1, pp: int = 1) -> Compiled:
        """Load and compile a model of any task."""
        if self.name.endswith(ARCHIVE_SUFFIX):
            return self._load_archive(pp * tp)
        numerics = Numerics(tp_sizes=tuple(self.tp_sizes), arithmetic=self.arithmetic)
        model = load_model(self.name, **self.options)
        return compile(model, tp=tp, pp=pp, numerics=numerics, max_lora_rank=self.max_lora_rank)

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments for ``load_model``.

        Raises:
            InvalidInput: the dtype is not supported.
        """
        if self.dtype and self.dtype not in DTYPES:
            raise InvalidInput(f"dtype {self.dtype} is not supported: use {', '.join(DTYPES)}")
        names = ("random", "dtype", "device", "revision", "token", "trust_remote_code", "task", "dequantize")
        return {name: getattr(self, name) for name in names}

    def pinned(self, model: CompiledModel) -> "ModelSpec":
        """Return this spec with ``revision`` set to the commit on the Hub that ``model`` was loaded from."""
        is_local = Path(self.name).exists() or self.name in EMBEDDED
        commit = None if is_local else commit_of(model.config)
        return self if commit is None else replace(self, revision=commit)

    def _load_archive(self, num_ranks: int) -> CompiledModel:
        has_defaults = replace(self, name="", tp_sizes=tuple(self.tp_sizes), token=None) == ModelSpec("")
        if not has_defaults or num_ranks != 1:
            raise InvalidInput(
                f"{self.name} is a compiled archive: its weights, dtype, device, numerics and parallel sizes are fixed."
                " Drop these options, or export the model again with others"
            )
        return load(self.name)
