"""ModelObject: the interface of a Hugging Face model besides calls and generate()."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch import nn
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel

from detcompile.errors import InvalidInput, UnservedAttribute
from detcompile.executors.executor import Executor
from detcompile.torch_internals.native import parse_to
from detcompile.transformers_internals.generation import prepare_generation_config

SHOWN_OF_PROGRAM = 12  # digits
# What to do instead of using an attribute of a Hugging Face model that a compiled one lacks.
INSTEAD = {
    "push_to_hub": "save_pretrained() writes a folder for it; detcompile.export(model, 'm.pt2') an archive",
    **dict.fromkeys(
        ("get_input_embeddings", "get_output_embeddings"),
        "read weights by state_dict(); update_weights() sets them",
    ),
    "load_state_dict": "update_weights() takes named tensors",
    **dict.fromkeys(
        (
            "modules",
            "named_modules",
            "children",
            "named_children",
            "get_submodule",
            "add_module",
            "apply",
            "register_forward_hook",
            "register_forward_pre_hook",
            "register_full_backward_hook",
        ),
        "a compiled model has no modules: read or change the Hugging Face model, then compile it",
    ),
    **dict.fromkeys(
        (
            "resize_token_embeddings",
            "set_input_embeddings",
            "tie_weights",
            "add_adapter",
            "load_adapter",
            "set_adapter",
            "merge_adapter",
        ),
        "change the Hugging Face model, then compile it",
    ),
    **dict.fromkeys(
        ("gradient_checkpointing_enable", "enable_input_require_grads", "requires_grad_", "zero_grad"),
        "a compiled model has no gradients: detcompile.trainer(model) trains",
    ),
    "forward": "call the model",
    "compile": "the model is compiled",
}

# Methods of the Hugging Face module that read its weights. In-place changes of these are noticed, like the module's.
READS_WEIGHTS = frozenset((
    "buffers", "get_buffer", "get_memory_footprint", "get_parameter", "get_parameter_or_buffer", "named_buffers",
    "named_parameters", "parameters", "save_pretrained", "state_dict",
))  # fmt: skip
OF_THE_MODULE = "it belongs to the Hugging Face model: use it there, before you compile"


class AnyConfig(PretrainedConfig):
    """The config under which transformers' Auto classes list compiled models.

    For a class that they do not list, a pipeline would log an error with the names of all models.
    """


class ModelObject:
    """The attributes and methods of transformers.PreTrainedModel that code for Hugging Face models uses.

    Weights, dtype and device are fixed: calls that would change them are rejected, others return the model. Methods
    that read weights (READS_WEIGHTS) are the module's, if this process has it whole.

    Raises:
        UnservedAttribute: another public attribute of transformers.PreTrainedModel; says what to use instead.

    Attributes:
        executor: runs the steps.
        model: the Hugging Face module, or its stand-in.
        dtype: dtype of the weights.
        device: where the weights live.
        training: False.
        main_input_name, input_modalities, output_modalities: inputs and outputs of a call, in transformers' terms.
    """

    executor: Executor
    model: Any
    dtype: torch.dtype
    device: torch.device
    training = False
    main_input_name = "input_ids"
    input_modalities = "text"
    output_modalities = ("text",)

    # transformers.pipeline uses this to fill in its defaults, and skips them silently if a model lacks it.
    _prepare_generation_config = prepare_generation_config

    if not TYPE_CHECKING:  # otherwise mypy would accept any name

        def __getattr__(self, name: str) -> Any:
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in READS_WEIGHTS:
                reason = self._no_whole_module()
                if reason is None:
                    return getattr(self.model, name)
                raise UnservedAttribute(f"{message}: {reason}")
            known = any(hasattr(kind, name) for kind in (PreTrainedModel, GenerationMixin))
            if name in INSTEAD or (known and not name.startswith("_")):
                raise UnservedAttribute(f"{message}: {INSTEAD.get(name, OF_THE_MODULE)}")
            raise AttributeError(message, name=name, obj=self)

    @property
    def config(self) -> PretrainedConfig:
        """The Hugging Face config. A model from the Hub has its commit there, as ``_commit_hash``."""
        return self.model.config

    @property
    def generation_config(self) -> GenerationConfig:
        """Defaults of ``generate``; may be changed, or replaced."""
        return self.model.generation_config

    @generation_config.setter
    def generation_config(self, config: GenerationConfig) -> None:
        self.model.generation_config = config

    @property
    def name_or_path(self) -> str:
        """The model's id on the Hugging Face Hub, or its folder; empty if neither is known."""
        name: str = self.model.name_or_path
        return name

    def can_generate(self) -> bool:
        """Return True: the model has ``generate``."""
        return True

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Return the number of parameters of the whole model, at every tensor-parallel size; quantized ones as stored.

        Args:
            only_trainable: count only parameters with a gradient; a compiled model has none.
            exclude_embeddings: leave out embedding tables.
        """
        count = self.executor.description.parameters
        return 0 if only_trainable else count.total - (count.embeddings if exclude_embeddings else 0)

    def eval(self) -> Self:
        """Return this model, which is in eval mode."""
        return self

    def train(self, mode: bool = True) -> Self:
        """Return this model, for ``train(False)``.

        Raises:
            InvalidInput: a compiled model has no gradients.
        """
        if mode:
            raise InvalidInput(
                "train(): a compiled model has no gradients. Train the Hugging Face module, then compile() it or pass"
                " its weights to update_weights()"
            )
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return this model, if it already has the device and the dtype.

        Args:
            *args, **kwargs: arguments of torch.nn.Module.to.

        Raises:
            InvalidInput: another device or dtype, which needs another program.
        """
        try:
            device, dtype = parse_to(*args, **kwargs)
        except (TypeError, RuntimeError, ValueError) as error:
            raise InvalidInput(f"to(): {error}") from error
        return self._settled("to", device, dtype)

    def cuda(self, device: int | torch.device | None = None) -> Self:
        """Return this model, if it is on this GPU; rejected as in ``to``."""
        return self._settled("cuda", torch.device("cuda", device) if isinstance(device, int) else device or "cuda")

    def cpu(self) -> Self:
        """Return this model, if it is on the CPU; rejected as in ``to``."""
        return self._settled("cpu", "cpu")

    def half(self) -> Self:
        """Return this model, if it is in float16; rejected as in ``to``."""
        return self._settled("half", dtype=torch.float16)

    def bfloat16(self) -> Self:
        """Return this model, if it is in bfloat16; rejected as in ``to``."""
        return self._settled("bfloat16", dtype=torch.bfloat16)

    def float(self) -> Self:
        """Return this model, if it is in float32; rejected as in ``to``."""
        return self._settled("float", dtype=torch.float32)

    def double(self) -> Self:
        """Return this model, if it is in float64; rejected as in ``to``."""
        return self._settled("double", dtype=torch.float64)

    def __repr__(self) -> str:
        """Return one line with the program's digest; the fingerprint would read all weights."""
        name = self.name_or_path
        title = Path(name).name if Path(name).is_absolute() else name
        known = self.executor.description
        return (
            f"{type(self).__name__}({title or type(self.model).__name__}, {str(self.dtype).removeprefix('torch.')},"
            f" {self.device}, {known.parameters.total:,} parameters, {len(known.certificate.orders)} sum orders,"
            f" program {known.program[:SHOWN_OF_PROGRAM]})"
        )

    def _no_whole_module(self) -> str | None:
        """Return why this process has no module with the whole weights by Hugging Face's names; None if it has."""
        instead = "read those of the Hugging Face model that you compiled"
        if not isinstance(self.model, nn.Module):
            return f"the weights are in an archive or in worker processes: {instead}"
        if self.executor.ranks is not None or self.executor.description.stage is not None:
            return f"this process has only a share of the weights: {instead}"
        is_exact = self.executor.description.numerics.is_exact
        if is_exact or getattr(self.config, "quantization_config", None) is not None:
            return f"the quantized weights are laid out for this program: {instead}"
        return None

    def _settled(self, method: str, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        place = None if device is None else torch.device(device)
        elsewhere = place is not None and (
            place.type != self.device.type or place.index not in (None, self.device.index or 0)
        )
        if elsewhere or dtype not in (None, self.dtype):
            _refuse(method, self, place if elsewhere else dtype)
        return self


def _refuse(method: str, model: ModelObject, wanted: object) -> NoReturn:
    raise InvalidInput(
        f"{method}(): the program was compiled for {model.dtype} on {model.device}, not for {wanted}: compile the model"
        " again, with compile(name, dtype=..., device=...) or from a module that was moved first"
    )
