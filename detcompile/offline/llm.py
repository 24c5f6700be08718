"""LLM: vLLM's class of offline inference, as a thin layer over compile() and an engine."""

import itertools
import warnings
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from detcompile.api import compile
from detcompile.errors import EngineError, InvalidInput
from detcompile.models.certified import CertifiedModel
from detcompile.models.checkpoints import load_tokenizer
from detcompile.models.compiled import CompiledModel, require_causal
from detcompile.models.exported import load
from detcompile.models.remote import RemoteModel
from detcompile.offline.default_params import configured_params
from detcompile.offline.llm_options import NO_LORA, TEXT_ALONE, LLMOptions, read_options
from detcompile.offline.llm_outputs import LLMOutput, llm_output
from detcompile.runtime.dense.padded_batch import seed_of_row
from detcompile.runtime.engine import Engine
from detcompile.runtime.requests.plain_values import kind, shown
from detcompile.runtime.requests.prompts import Prompt, private_copy, prompts_of, tokenized
from detcompile.runtime.requests.sampling_params import SamplingParams

__all__ = ["LLM"]

# What compile() calls the options that are decided by then.
COMPILES_BY = {
    "max_model_len": "max_context",
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "hf_token": "token",
}


class LLM:
    """vLLM's LLM: a model, its tokenizer and an engine that serves lists of prompts.

    Answers are those of ``compile(model).engine()``: each depends on its prompt, its SamplingParams and its seed alone.
    A request without a seed gets ``seed_of_row(seed, n)``, n requests into this object, so that a script that is run
    again gives its answers again; every output carries its seed.

    Args:
        model: a name, as compile() takes it, an exported .pt2, a module of transformers, or a compiled model.
        tokenizer: a tokenizer of transformers, or the folder of one; None takes the model's own.
        seed: makes the seeds of requests that have none; None draws them afresh.
        options: vLLM's options by their names. Served are ``tensor_parallel_size``, ``pipeline_parallel_size``,
            ``dtype``, ``max_model_len``, ``gpu_memory_utilization``, ``max_num_seqs``, ``max_num_batched_tokens``,
            ``block_size``, ``num_gpu_blocks_override``, ``enable_prefix_caching``, ``enable_chunked_prefill``,
            ``enforce_eager``, ``revision``, ``hf_token``, ``trust_remote_code`` and ``generation_config`` ("auto" or
            "vllm"); others are taken where they ask for nothing.

    Attributes:
        model: the compiled model.
        engine: serves the requests; None once this is closed.

    Raises:
        InvalidInput: an option that is unknown or not served, or what compile() and the engine refuse.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel | CompiledModel,
        *,
        tokenizer: Any | None = None,
        seed: int | None = 0,
        **options: Any,
    ) -> None:
        read = read_options(options)
        self._seed = None if seed is None else SamplingParams(seed=seed).seed
        self._numbers = itertools.count()
        self._given = isinstance(model, CompiledModel)
        self.model = _compiled(model, read)
        self._tokenizer = self.model.tokenizer if tokenizer is None else _tokenizer(tokenizer)
        self._defaults = SamplingParams(**configured_params(self.model) if read.config_defaults else {})
        self.engine: Engine | None = self.model.engine(read.engine, tokenizer=self._tokenizer)
        self._reader = private_copy(self._tokenizer)  # get_tokenizer() hands the other out

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | SequenceOf[int] | None = None,
        lora_request: None = None,
        tokenization_kwargs: None = None,
        mm_processor_kwargs: None = None,
    ) -> list[LLMOutput]:
        """Serve prompts to their ends.

        Args:
            prompts: one prompt or a list: text, token ids, ``{"prompt": ...}`` or ``{"prompt_token_ids": ...}``.
            sampling_params: one for all prompts, or one a prompt; None takes ``get_default_sampling_params()``.
            use_tqdm: show a bar on the terminal.
            priority: an integer a prompt, or one for all; lower is served earlier.

        Returns:
            One LLMOutput a prompt, in their order; one that failed while it was served has its ``error``.

        Raises:
            InvalidInput: neither a prompt nor a list of them, not one of each a prompt, or a prompt that cannot be
                served: it is too long, say. None is served then.
            EngineError: this is closed, or the engine failed.
        """
        unserved = {
            "lora_request": (lora_request, NO_LORA),
            "tokenization_kwargs": (tokenization_kwargs, "pass token ids, or truncate_prompt_tokens"),
            "mm_processor_kwargs": (mm_processor_kwargs, TEXT_ALONE),
        }
        for name, (value, advice) in unserved.items():
            if value is not None:
                raise InvalidInput(f"{name} is not served: {advice}")
        engine, count = self._open(), len(prompts_of(prompts))
        priority = [priority] * count if isinstance(priority, int) else priority
        params = self._defaults if sampling_params is None else sampling_params
        if isinstance(params, SamplingParams):
            params = [params] * count
        seeded = [self._seeded(own) for own in params] if _are_params(params) else params
        outputs = engine.generate(prompts, seeded, progress=bool(use_tqdm), priority=priority, strict=True)
        failed = [output.error for output in outputs if output.error is not None]
        if failed:
            warnings.warn(
                f"{len(failed)} of {len(outputs)} prompts have no answer but an error; the first: {failed[0]}",
                stacklevel=2,
            )
        return [llm_output(output, self._reader) for output in outputs]

    def chat(
        self,
        messages: SequenceOf[Any],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int | SequenceOf[int] | None = None,
        lora_request: None = None,
        tokenization_kwargs: None = None,
        mm_processor_kwargs: None = None,
    ) -> list[LLMOutput]:
        """Answer a conversation, or a list of them, in the form of the tokenizer's chat template.

        Args:
            messages: dicts with "role" and "content"; or a list of such lists.
            sampling_params, use_tqdm, priority: the same as in ``generate``.
            chat_template: a Jinja template in place of the tokenizer's.
            chat_template_content_format: "auto" alone: the template gets the messages as they are.
            add_generation_prompt: begin an answer behind the last message.
            continue_final_message: go on with the last message; ``add_generation_prompt`` has to be False then.
            tools: JSON schemas of functions, for the template.
            chat_template_kwargs: further arguments of the template.

        Raises:
            InvalidInput: no template, or messages that it does not take.
        """
        self._open()
        if chat_template_content_format != "auto":
            form = shown(chat_template_content_format)
            raise InvalidInput(f"chat_template_content_format={form} is not served: the template gets what you give")
        tokenizer = self.get_tokenizer()
        if isinstance(messages, (str, Mapping)) or not isinstance(messages, SequenceOf) or not len(messages):
            raise InvalidInput(f"messages {shown(messages)} is {kind(messages)}: give a list of messages, or of lists")
        if not isinstance(chat_template_kwargs, (Mapping, type(None))):
            said = f"{shown(chat_template_kwargs)} is {kind(chat_template_kwargs)}"
            raise InvalidInput(f"chat_template_kwargs {said}: give a dict of arguments of the template")
        options = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            **(chat_template_kwargs or {}),
        }
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        texts = [_rendered(tokenizer, conversation, options) for conversation in conversations]
        prompts = [
            {"prompt": text, "prompt_token_ids": tokenized(self._reader, text, add_special_tokens=False)}
            for text in texts  # which have the special tokens of the template
        ]
        unserved = {"lora_request": lora_request, "tokenization_kwargs": tokenization_kwargs}
        unserved |= {"mm_processor_kwargs": mm_processor_kwargs}
        return self.generate(prompts, sampling_params, use_tqdm, priority=priority, **unserved)

    def get_tokenizer(self) -> Any:
        """The tokenizer.

        Raises:
            InvalidInput: there is none.
        """
        if self._tokenizer is None:
            raise InvalidInput("this model has no tokenizer: pass LLM(tokenizer=...)")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests are drawn with that say nothing: temperature, filters, repetition penalty and length of the
        model's ``generation_config``, as vLLM takes them; with ``generation_config="vllm"`` SamplingParams()."""
        return self._defaults

    def close(self) -> None:
        """Give back the KV cache, and end worker processes that this started; later calls raise EngineError."""
        engine, self.engine = self.engine, None
        if engine is not None and not self._given and isinstance(self.model, RemoteModel):
            self.model.close()

    def __repr__(self) -> str:
        return f"LLM({self.model!r}{'' if self.engine is not None else ', closed'})"

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _open(self) -> Engine:
        if self.engine is None:
            raise EngineError("this LLM was closed: make a new one")
        return self.engine

    def _seeded(self, params: SamplingParams) -> SamplingParams:
        number = next(self._numbers)
        if params.seed is not None or self._seed is None:
            return params
        return replace(params, seed=seed_of_row(self._seed, number))


def _compiled(model: str | Path | PreTrainedModel | CompiledModel, options: LLMOptions) -> CompiledModel:
    if isinstance(model, CertifiedModel):
        require_causal(model, "LLM")
    if isinstance(model, CompiledModel) or str(model).endswith(".pt2"):
        changed = {"dtype": options.dtype, "max_model_len": options.max_context, **options.hub}
        changed.pop("trust_remote_code", None)  # there is no code to run any more
        changed |= {"tensor_parallel_size": options.tp if options.tp > 1 else None}
        changed |= {"pipeline_parallel_size": options.pp if options.pp > 1 else None}
        for name, value in changed.items():
            if value is not None:
                own = COMPILES_BY.get(name, name)
                raise InvalidInput(f"LLM({name}={value}) of a model that is compiled before: pass {own} to compile()")
        return model if isinstance(model, CompiledModel) else load(model)
    how: dict[str, Any] = {"tp": options.tp, "pp": options.pp, "max_context": options.max_context, **options.hub}
    if isinstance(model, (str, Path)):
        how["dtype"] = options.dtype
    elif options.dtype is not None:
        model = model.to(options.dtype)
    return require_causal(compile(model, **how), "LLM")


def _tokenizer(given: Any) -> Any:
    if not isinstance(given, (str, Path)):
        return given
    found = load_tokenizer(str(given)) if Path(given).is_dir() else None
    if found is None:
        raise InvalidInput(f"tokenizer={str(given)!r}: no folder with a tokenizer; give one, or a tokenizer itself")
    return found


def _are_params(params: Any) -> bool:
    """What is no list of SamplingParams is left to the engine, which refuses it by name."""
    return isinstance(params, SequenceOf) and all(isinstance(own, SamplingParams) for own in params)


def _rendered(tokenizer: Any, conversation: Any, options: Mapping[str, Any]) -> str:
    """Return a conversation as the text of a prompt."""
    if isinstance(conversation, (str, Mapping)) or not isinstance(conversation, SequenceOf):
        said = f"{shown(conversation)}, which is {kind(conversation)}"
        raise InvalidInput(f"messages hold {said}: give a list of messages, or a list of such lists")
    try:
        text: str = tokenizer.apply_chat_template(list(conversation), tokenize=False, **options)
    except Exception as error:  # templates are programs
        raise InvalidInput(
            f"the chat template cannot render {shown(conversation)}: {error}. Give messages with a role and a content,"
            " and a chat_template if the tokenizer has none"
        ) from error
    return text
