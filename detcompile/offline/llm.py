"""LLM: vLLM's class for offline inference, as a thin layer over compile() and an engine."""

import itertools
import warnings
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
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
from detcompile.offline.chats import read_chats
from detcompile.offline.llm_options import TEXT_ALONE, LLMOptions, configured_params, read_options
from detcompile.offline.llm_outputs import LLMOutput, llm_output
from detcompile.runtime.dense.padded_batch import seed_of_row
from detcompile.runtime.engine import Engine
from detcompile.runtime.requests.plain_values import kind, or_none, shown, whole_number
from detcompile.runtime.requests.prompts import Prompt, private_copy, prompts_of
from detcompile.runtime.requests.sampling_params import SamplingParams

# The arguments of compile() for options that are fixed once a model is compiled.
COMPILES_BY = {
    "max_model_len": "max_context",
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "hf_token": "token",
}


@dataclass(frozen=True)
class LoRARequest:
    """vLLM's name for an adapter: its name, a number that nothing reads, and its folder in PEFT's format."""

    lora_name: str
    lora_int_id: int
    lora_path: str


class LLM:
    """vLLM's LLM: a model, its tokenizer and an engine that serves lists of prompts.

    Answers equal those of ``compile(model).engine()``: each depends only on its prompt, SamplingParams and seed. The
    n-th request of this object gets ``seed_of_row(seed, n)`` if it has no seed, so running a script again gives the
    same answers; every output carries its seed.

    Args:
        model: a name, as for compile(), an exported .pt2, a transformers module, or a compiled model.
        tokenizer: a transformers tokenizer, or its folder; None uses the model's.
        seed: derives the seeds of requests without one; None draws random seeds.
        options: vLLM's options by name. Supported: ``tensor_parallel_size``, ``pipeline_parallel_size``,
            ``dtype``, ``max_model_len``, ``gpu_memory_utilization``, ``max_num_seqs``, ``max_num_batched_tokens``,
            ``block_size``, ``num_gpu_blocks_override``, ``enable_prefix_caching``, ``enable_chunked_prefill``,
            ``enforce_eager``, ``enable_lora`` with ``max_lora_rank``, ``revision``, ``hf_token``,
            ``trust_remote_code``, compile()'s ``numerics``, ``generation_config`` ("auto" or "vllm") and
            ``reasoning_parser`` (None: as the chat template says; "none" for no parser); others are accepted only with
            values that have no effect.

    Attributes:
        model: the compiled model.
        engine: serves the requests; None after close().

    Raises:
        InvalidInput: an option is unknown or not supported, or compile() or the engine reject it.
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
        self._parser_name = read.reasoning_parser
        self._is_borrowed = isinstance(model, CompiledModel)
        self._adapters: dict[str, str] = {}  # folder of each adapter by name
        self.model = _compiled(model, read)
        self._tokenizer = self.model.tokenizer if tokenizer is None else _tokenizer(tokenizer)
        self._defaults = SamplingParams(**configured_params(self.model) if read.config_defaults else {})
        self.engine: Engine | None = self.model.engine(read.engine, tokenizer=self._tokenizer)
        self._reader = private_copy(self._tokenizer)  # users may change the one from get_tokenizer()

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | SequenceOf[int] | None = None,
        lora_request: Any | SequenceOf[Any] | None = None,
        tokenization_kwargs: None = None,
        mm_processor_kwargs: None = None,
    ) -> list[LLMOutput]:
        """Generate answers to prompts.

        Args:
            prompts: one prompt or a list: text, token ids, ``{"prompt": ...}`` or ``{"prompt_token_ids": ...}``.
            sampling_params: one for all prompts, or one per prompt; None uses ``get_default_sampling_params()``.
            use_tqdm: show a progress bar on the terminal.
            priority: an integer per prompt, or one for all; lower values are served earlier.
            lora_request: a LoRARequest for all prompts, or one per prompt (None for the plain model), with
                ``enable_lora=True``. Its folder is read at its first use.

        Returns:
            One LLMOutput per prompt, in order; a prompt that failed during generation has an ``error``.

        Raises:
            InvalidInput: ``prompts`` is not a prompt or a list of prompts, lengths of lists differ, or a prompt cannot
                be served, for example because it is too long. Then no prompt is served.
            EngineError: this object is closed, or the engine failed.
        """
        unserved = {
            "tokenization_kwargs": (tokenization_kwargs, "pass token ids, or truncate_prompt_tokens"),
            "mm_processor_kwargs": (mm_processor_kwargs, TEXT_ALONE),
        }
        for name, (value, advice) in unserved.items():
            if value is not None:
                raise InvalidInput(f"{name} is not supported: {advice}")
        engine, count = self._open(), len(prompts_of(prompts))
        priority = [priority] * count if isinstance(priority, int) else priority
        params = self._defaults if sampling_params is None else sampling_params
        if isinstance(params, SamplingParams):
            params = [params] * count
        seeded = [self._seeded(each) for each in params] if _are_params(params) else params
        how: dict[str, Any] = {"priority": priority, "adapter": self._adapter_names(engine, lora_request)}
        outputs = engine.generate(prompts, seeded, progress=bool(use_tqdm), strict=True, **how)
        failed = [output.error for output in outputs if output.error is not None]
        if failed:
            warnings.warn(
                f"{len(failed)} of {len(outputs)} prompts failed; the first error: {failed[0]}",
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
        thinking_token_budget: int | None = None,
        priority: int | SequenceOf[int] | None = None,
        lora_request: Any | SequenceOf[Any] | None = None,
        tokenization_kwargs: None = None,
        mm_processor_kwargs: None = None,
    ) -> list[LLMOutput]:
        """Answer a conversation, or a list of them, formatted by the tokenizer's chat template.

        The reasoning of a thinking model is apart from its content, in ``outputs[i].reasoning`` and ``.content``.
        Grammars and stop strings begin after the reasoning.

        Args:
            messages: a list of dicts with "role" and "content"; or a list of such conversations.
            sampling_params, use_tqdm, priority, lora_request: as in ``generate``.
            chat_template: a Jinja template in place of the tokenizer's.
            chat_template_content_format: only "auto": the template gets the messages unchanged.
            add_generation_prompt: start an answer after the last message.
            continue_final_message: continue the last message; ``add_generation_prompt`` must then be False.
            tools: JSON schemas of functions, for the template.
            chat_template_kwargs: further arguments of the template.
            thinking_token_budget: most tokens of the reasoning; its end is forced when they are used up.

        Raises:
            InvalidInput: there is no template, it cannot render the messages, or the grammar or the budget cannot be
                combined with the model's reasoning.
        """
        self._open()
        if chat_template_content_format != "auto":
            form = shown(chat_template_content_format)
            raise InvalidInput(f"chat_template_content_format={form} is not supported: messages are passed unchanged")
        tokenizer = self.get_tokenizer()
        if isinstance(messages, (str, Mapping)) or not isinstance(messages, SequenceOf) or not len(messages):
            raise InvalidInput(f"messages {shown(messages)} is {kind(messages)}: pass a list of messages, or of lists")
        if not isinstance(chat_template_kwargs, (Mapping, type(None))):
            what = f"{shown(chat_template_kwargs)} is {kind(chat_template_kwargs)}"
            raise InvalidInput(f"chat_template_kwargs {what}: pass a dict of arguments of the template")
        options = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            **(chat_template_kwargs or {}),
        }
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        params = self._defaults if sampling_params is None else sampling_params
        if isinstance(params, SamplingParams):
            params = [params] * len(conversations)
        unserved: dict[str, Any] = {"lora_request": lora_request, "tokenization_kwargs": tokenization_kwargs}
        unserved |= {"mm_processor_kwargs": mm_processor_kwargs}
        valid = _are_params(params) and len(params) == len(conversations)  # generate() rejects others
        chats = read_chats(
            tokenizer,
            self._reader,
            conversations,
            params if valid else [self._defaults] * len(conversations),
            options,
            parser_name=self._parser_name,
            budget=or_none(whole_number)(thinking_token_budget, "thinking_token_budget"),
        )
        read = [chat.params for chat in chats] if valid else params
        outputs = self.generate([chat.prompt for chat in chats], read, use_tqdm, priority=priority, **unserved)
        for output, chat in zip(outputs, chats, strict=True):
            for part in output.outputs:
                part.reasoning, part.content = chat.split(part.text)
        return outputs

    def get_tokenizer(self) -> Any:
        """Return the tokenizer.

        Raises:
            InvalidInput: the model has no tokenizer.
        """
        if self._tokenizer is None:
            raise InvalidInput("this model has no tokenizer: pass LLM(tokenizer=...)")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the SamplingParams of requests without any.

        They are the model's ``generation_config``, as vLLM reads it (temperature, filters, repetition penalty and
        length), or SamplingParams() with ``generation_config="vllm"``.
        """
        return self._defaults

    def close(self) -> None:
        """Free the KV cache, and end worker processes that this object started; later calls raise EngineError."""
        engine, self.engine = self.engine, None
        if engine is not None and not self._is_borrowed and isinstance(self.model, RemoteModel):
            self.model.close()

    def __repr__(self) -> str:
        return f"LLM({self.model!r}{'' if self.engine is not None else ', closed'})"

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _open(self) -> Engine:
        if self.engine is None:
            raise EngineError("this LLM is closed: create a new one")
        return self.engine

    def _adapter_names(self, engine: Engine, requests: Any) -> list[str | None] | str | None:
        """Return the adapter of each prompt, or one for all, after reading those that are new."""
        if requests is None:
            return None
        if isinstance(requests, SequenceOf) and not isinstance(requests, (str, bytes)):
            return [None if request is None else self._adapter_name(engine, request) for request in requests]
        return self._adapter_name(engine, requests)

    def _adapter_name(self, engine: Engine, request: Any) -> str:
        name, path = getattr(request, "lora_name", None), str(getattr(request, "lora_path", ""))
        if not isinstance(name, str) or not path:
            raise InvalidInput(f"lora_request {shown(request)} is {kind(request)}: pass LoRARequest(name, id, path)")
        if name not in engine.adapters:
            engine.load_adapter(name, path)
            self._adapters[name] = path
        if self._adapters.get(name) != path:
            raise InvalidInput(
                f"adapter {name!r} was read from {self._adapters.get(name)}, not {path}: choose another name"
            )
        return name

    def _seeded(self, params: SamplingParams) -> SamplingParams:
        number = next(self._numbers)
        if params.seed is not None or self._seed is None:
            return params
        return replace(params, seed=seed_of_row(self._seed, number))


def _compiled(model: str | Path | PreTrainedModel | CompiledModel, options: LLMOptions) -> CompiledModel:
    if isinstance(model, CertifiedModel):
        require_causal(model, "LLM")
    if isinstance(model, CompiledModel) or str(model).endswith(".pt2"):
        changed = {"dtype": options.dtype, "max_model_len": options.max_context, **options.compiling}
        changed.pop("trust_remote_code", None)  # the model's code no longer runs
        changed |= {"tensor_parallel_size": options.tp if options.tp != 1 else None}
        changed |= {"pipeline_parallel_size": options.pp if options.pp != 1 else None}
        lacks_slots = getattr(getattr(model, "executor", None), "adapters", None) is None
        changed |= {"max_lora_rank": options.max_lora_rank if lacks_slots else None}
        for name, value in changed.items():
            if value is not None:
                argument = COMPILES_BY.get(name, name)
                raise InvalidInput(
                    f"LLM({name}={value}) cannot change a model that is already compiled: pass {argument} to compile()"
                )
        return model if isinstance(model, CompiledModel) else load(model)
    how: dict[str, Any] = {"tp": options.tp, "pp": options.pp, "max_context": options.max_context, **options.compiling}
    how["max_lora_rank"] = options.max_lora_rank
    if isinstance(model, (str, Path)):
        how["dtype"] = options.dtype
    elif options.dtype is not None:
        model = model.to(options.dtype)
    return require_causal(compile(model, **how), "LLM")


def _tokenizer(source: Any) -> Any:
    if not isinstance(source, (str, Path)):
        return source
    tokenizer = load_tokenizer(str(source)) if Path(source).is_dir() else None
    if tokenizer is None:
        raise InvalidInput(f"tokenizer={str(source)!r} is not a folder with a tokenizer; pass one, or a tokenizer")
    return tokenizer


def _are_params(params: Any) -> bool:
    """Return True for a list of SamplingParams; the engine rejects anything else by name."""
    return isinstance(params, SequenceOf) and all(isinstance(each, SamplingParams) for each in params)
