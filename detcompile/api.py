"""compile(): the one function most users need."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from detcompile.errors import InvalidInput, NumericsError, UnsupportedModel
from detcompile.executors.description import ParameterCount
from detcompile.executors.lowered_module import executor_of
from detcompile.models.compiled import CompiledModel
from detcompile.models.loading import Load, LoadOptions, find, loaded_before
from detcompile.models.pooling import CompiledClassifier, CompiledEmbedder
from detcompile.models.remote import compile_in_workers
from detcompile.orders.numerics import Numerics
from detcompile.other_names import naming_equivalents
from detcompile.parallel import PipelineStage, tensor_parallel
from detcompile.passes.capture import require_ready
from detcompile.passes.lowering import lower
from detcompile.passes.modules.low_rank import add_slots
from detcompile.passes.modules.pooling_heads import PoolingModel, as_pooling_model, has_pooling_head
from detcompile.passes.modules.positions import position_tables
from detcompile.passes.release_probe import require_release
from detcompile.progress import shown
from detcompile.runtime.requests import plain_values
from detcompile.templates.device.launcher import on_device

CALLED_HERE = {
    "attn_implementation": "attention is compiled as the model declares it; leave it out",
    "backend": 'torch.compile(module, backend="detcompile") takes torch.compile\'s arguments',
    "cache_dir": "set HF_HUB_CACHE",
    "device_map": "pass device; tp and pp share a model among GPUs",
    "dynamic": 'torch.compile(module, backend="detcompile") takes torch.compile\'s arguments',
    "fullgraph": 'torch.compile(module, backend="detcompile") takes torch.compile\'s arguments',
    "gpu_memory_utilization": "pass config=EngineConfig(memory_fraction=...) to engine()",
    "hf_token": "pass token",
    "load_in_4bit": "a checkpoint's own quantization is read (docs/quantization.md)",
    "load_in_8bit": "a checkpoint's own quantization is read (docs/quantization.md)",
    "local_files_only": "set HF_HUB_OFFLINE=1",
    "low_cpu_mem_usage": "leave it out",
    "max_len": "pass max_context",
    "max_length": "pass max_context",
    "max_model_len": "pass max_context",
    "max_num_seqs": "pass config=EngineConfig(max_num_seqs=...) to engine()",
    "max_seq_len": "pass max_context",
    "mode": 'torch.compile(module, backend="detcompile") takes torch.compile\'s arguments',
    "pipeline_parallel_size": "pass pp",
    "quantization": "a checkpoint's own quantization is read (docs/quantization.md)",
    "quantization_config": "a checkpoint's own quantization is read (docs/quantization.md)",
    "subfolder": "give the subfolder as a local folder",
    "tensor_parallel_size": "pass tp",
    "tokenizer": "pass it to engine()",
    "torch_dtype": "pass dtype",
    "use_auth_token": "pass token",
}
LARGEST_RANK = 128  # of an adapter; float32 products over more than 128 inputs sum in another order
Compiled = CompiledModel | CompiledClassifier | CompiledEmbedder


@naming_equivalents("compile()", CALLED_HERE)
@torch.inference_mode(False)  # inference tensors have no version counter, so changes of weights would go unseen
def compile(
    model: PreTrainedModel | str | Path,
    *,
    tp: int = 1,
    pp: int = 1,
    numerics: Numerics | None = None,
    max_context: int | None = None,
    tp_group: ProcessGroup | None = None,
    replicate_attention: bool = False,
    progress: bool | None = None,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    trust_remote_code: bool = False,
    task: Literal["generate", "classify", "embed"] | None = None,
    gguf_file: str | None = None,
    dequantize: bool | None = None,
    max_lora_rank: int | None = None,
) -> Compiled:
    """Compile a model so that each row's bits depend only on the weights and that row's tokens.

    A causal LM becomes a CompiledModel, a classifier or reward model a CompiledClassifier. A base model, of a decoder
    or of an encoder of the BERT family, becomes a CompiledEmbedder.

    Args:
        model: a name, as for ``load_model``: a local folder or GGUF file, the id of a repository on the Hugging Face
            Hub, "tiny", or its draft model "tiny-draft". Or a Hugging Face causal LM in eval mode, on the device and
            in the dtype to serve in. A module is changed in place and belongs to the result, even if it is refused:
            load it again then. A PEFT model with LoRA of linears is accepted; its adapters stay separate weights.
        tp: tensor-parallel size. Above 1, that many worker processes are started, which load and run the model; the
            result is used like any other. If torch.distributed is already initialized (torchrun), none are started:
            each process calls compile() with the same whole model, keeps its share, and from then on must make the
            same calls as the others (docs/tensor_parallel.md).
        pp: pipeline-parallel size: number of stages that share the layers, in ``pp * tp`` worker processes. Bits and
            fingerprint do not depend on it (docs/pipeline_parallel.md).
        numerics: the declared orders; part of the fingerprint.
        max_context: maximum number of tokens of a sequence; default: the config's max_position_embeddings. Rotary
            tables that depend on the length are frozen at it, so it is part of the fingerprint.
        tp_group: torch.distributed group of the processes that share the model; default: all of them.
        replicate_attention: if heads do not divide among the ranks, every rank computes all of them instead of
            raising.
        progress: show the stages and their seconds on standard error, as one line of a terminal, or as lines; default:
            yes, unless DETCOMPILE_PROGRESS=0. Among worker processes, only rank 0 reports. Downloads from the Hub
            have Hugging Face's progress bars, which HF_HUB_DISABLE_PROGRESS_BARS=1 hides.
        dtype, device, revision, token, trust_remote_code, task, gguf_file, dequantize: how to load a model given by
            name, as for ``load_model``. Refused with a module.
        max_lora_rank: reserve room beside every linear except the head for a LoRA adapter of up to this rank, so that
            engines load adapters by name (``Engine.load_adapter``). From 1 to 128, with ``tp`` and ``pp`` 1; None
            reserves none.

    Raises:
        UnsupportedModel: the model cannot be captured with its meaning intact.
        UnsupportedRelease: the installed torch, transformers or triton is untested and fails a probe.
        UncertifiedOp: an operation could make a row's bits depend on other rows; the message names it.
        NumericsError: the model does not fit the numerics.
        InvalidInput: an argument is invalid.
        WorkerError: a worker process could not start.
    """
    numerics = numerics_of(numerics)
    tp, pp = plain_values.whole_number(tp, "tp"), plain_values.whole_number(pp, "pp")
    require_declared(tp, numerics)
    max_lora_rank = _checked_rank(max_lora_rank, tp * pp, numerics)
    if pp < 1:
        raise InvalidInput(f"pp={pp}: a pipeline has at least one stage")
    max_context = _checked_context(max_context)
    replicate_attention = plain_values.flag(replicate_attention, "replicate_attention")
    progress = None if progress is None else plain_values.flag(progress, "progress")
    how: LoadOptions = {"dtype": dtype, "device": device, "revision": revision, "token": token}
    how |= {"trust_remote_code": trust_remote_code, "task": task, "gguf_file": gguf_file, "dequantize": dequantize}
    with shown(progress):
        require_release()  # as capture does; here before weights are loaded and workers are started
        given = find(model, **how) if isinstance(model, (str, Path)) else loaded_before(model, **how)
    alone = tp_group is None and not dist.is_initialized()
    if pp > 1 and not alone:
        raise InvalidInput(f"pp={pp}: compile() starts the stages' processes: do not call it under torchrun")
    if pp * tp > 1 and alone:
        options = {"replicate_attention": replicate_attention}
        compiled: Compiled = compile_in_workers(
            given, tp=tp, pp=pp, numerics=numerics, max_context=max_context, options=options
        )
    else:
        with shown(progress):
            beside = isinstance(given, Load) and tp == 1 and given.device.type == "cuda"
            with given.under_way(beside=beside) if isinstance(given, Load) else nullcontext(given) as module:
                if max_lora_rank is not None:
                    add_slots(module, max_lora_rank)
                compiled = compile_here(module, tp, numerics, max_context, tp_group, replicate_attention)
    compiled.tokenizer  # noqa: B018 - its files may change, or be of another folder, once this has returned
    return compiled


def compile_here(
    model: PreTrainedModel,
    tp: int,
    numerics: Numerics,
    max_context: int | None = None,
    tp_group: ProcessGroup | None = None,
    replicate_attention: bool = False,
    on_read: Callable[[int, int], None] | None = None,
    stage: PipelineStage | None = None,
) -> Compiled:
    """Run ``compile`` in this process, which is a rank if tp is above 1.

    Args:
        on_read: called with the bytes of weights read so far and in total, if ranks share the model.
        stage: the part of the layers that runs here; None for all.
    """
    if model.device.type == "meta":
        raise InvalidInput(f"{type(model).__name__} is on the meta device, without weights: load them first")
    ranks = tensor_parallel(tp, tp_group) if tp > 1 else None
    kind = _kind(model)
    if kind is not CompiledModel and not isinstance(model, PoolingModel):  # it is one if it was compiled before
        if ranks is not None or stage is not None:
            raise UnsupportedModel(f"{type(model).__name__} has no language-model head: compile it with tp=1 and pp=1")
        require_ready(model)
        as_pooling_model(model)
    context = context_of(model, max_context)
    parameters = ParameterCount.of(model)
    with on_device(model.device):
        lowered = lower(model, numerics, context, ranks, replicate_attention, on_read, stage)
        compiled = kind(executor_of(model, lowered, numerics, parameters, ranks))
    if ranks is not None:
        ranks.require_equal(compiled.fingerprint_parts)
    return compiled


def require_declared(tp: int, numerics: Numerics) -> None:
    """Raise NumericsError unless this many ranks may share a model: any number, in exact arithmetic."""
    if tp < 1:
        raise InvalidInput(f"tp={tp}: a model has at least one rank")
    if tp not in numerics.tp_sizes and not numerics.is_exact:
        raise NumericsError(
            f"tp={tp} is not one of Numerics.tp_sizes={numerics.tp_sizes}: declare it, such as by"
            f" numerics=Numerics(tp_sizes=(1, {max(tp, 2)})) in Python or --tp-sizes 1,{max(tp, 2)} of a command"
        )


def _checked_context(max_context: int | None) -> int | None:
    """Return a valid ``max_context``; None leaves it to the model.

    Raises:
        InvalidInput: not an integer, or below 1.
    """
    if max_context is None:
        return None
    max_context = plain_values.whole_number(max_context, "max_context")
    if max_context < 1:
        raise InvalidInput(f"max_context={max_context}: a sequence holds at least one token")
    return max_context


def _checked_rank(rank: int | None, num_processes: int, numerics: Numerics) -> int | None:
    """Return a valid ``max_lora_rank``.

    Raises:
        InvalidInput: not an integer from 1 to 128, several processes, or exact arithmetic.
    """
    if rank is None:
        return None
    rank = plain_values.whole_number(rank, "max_lora_rank")
    if not 1 <= rank <= LARGEST_RANK:
        raise InvalidInput(f"max_lora_rank={rank} must be from 1 to {LARGEST_RANK}")
    if num_processes > 1 or numerics.is_exact:
        raise InvalidInput(
            f"max_lora_rank={rank}: adapters by name run in one process and in floating point: pass tp=1 and pp=1, and"
            " no Numerics.arithmetic"
        )
    return rank


def numerics_of(given: Numerics | None) -> Numerics:
    """Return the caller's Numerics, or the defaults.

    Raises:
        InvalidInput: not a Numerics.
    """
    if given is not None and not isinstance(given, Numerics):
        raise InvalidInput(f"numerics {plain_values.shown(given)} is {plain_values.kind(given)}: give Numerics(...)")
    return Numerics() if given is None else given


def _kind(model: PreTrainedModel) -> type[Compiled]:
    """Return the class of the compiled model: by whether a module has a language-model head, another head, or none."""
    if model.get_output_embeddings() is not None or not (has_pooling_head(model) or model.base_model is model):
        return CompiledModel
    return CompiledEmbedder if model.base_model is model else CompiledClassifier


def context_of(model: PreTrainedModel, max_context: int | None) -> int:
    """Return the maximum number of tokens of a sequence: at most the rows of a learned position table.

    Raises:
        InvalidInput: the config has no layers or positions, or max_context exceeds them.
    """
    config = model.config.get_text_config()
    if getattr(config, "num_hidden_layers", 1) < 1:
        raise InvalidInput(f"{type(model).__name__}: num_hidden_layers={config.num_hidden_layers}, must be at least 1")
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and isinstance(model, PoolingModel):  # RoBERTa's first rows are for padding
        limit = min([limit, *(table.rows - table.first for table in position_tables(model))])
    given = _checked_context(max_context)
    context = limit if given is None else given
    if context is None:
        raise InvalidInput(f"{type(model).__name__} states no max_position_embeddings: pass max_context")
    if context < 1:
        raise InvalidInput(f"{type(model).__name__}: max_position_embeddings={context}: pass max_context, at least 1")
    rows = {table.name: table.rows - table.first for table in position_tables(model)}
    rows |= {name: len(buffer) for name, buffer in model.named_buffers() if name.endswith("embed_positions")}  # GPT-J's
    for name, count in rows.items():
        if count < context:
            raise InvalidInput(
                f"max_context={context}, but {name} has {count} rows for positions: pass a max_context within them"
            )
    return context


@naming_equivalents("load_model()", CALLED_HERE)
def load_model(
    name: str | Path,
    *,
    random: bool = False,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    trust_remote_code: bool = False,
    task: Literal["generate", "classify", "embed"] | None = None,
    gguf_file: str | None = None,
    dequantize: bool | None = None,
) -> PreTrainedModel:
    """Return a model by its name, in eval mode.

    Config, tokenizer and weights (.safetensors, else .bin) are downloaded from the Hugging Face Hub into its cache.
    Without a network, or with HF_HUB_OFFLINE=1, only the cache is used. ``model.config._commit_hash`` is the commit
    that was loaded.

    Args:
        name: a local folder; or the id of a repository on the Hub, such as "Qwen/Qwen3-0.6B"; or a GGUF file, such as
            "model.gguf", or "Qwen/Qwen3-0.6B-GGUF:Qwen3-0.6B-Q8_0.gguf" on the Hub; or "tiny", the embedded model, or
            "tiny-draft", or "smollm2" after `detcompile fetch smollm2`. An existing path takes precedence over an id.
        random: take the config of ``name`` (or of a file) with random weights.
        dtype: a dtype or its name; None and "auto" take the checkpoint's.
        device: where to load it; None takes a GPU if there is one.
        revision: branch, tag or commit on the Hub; None takes the main branch.
        token: access token of the Hub; None takes HF_TOKEN, or the token that `hf auth login` stored.
        trust_remote_code: run Python code from the checkpoint. Checkpoints that need it are refused otherwise.
        task: load a causal LM, a model for sequence classification, or a base model without a head; None takes the
            class that the checkpoint was saved as.
        gguf_file: the GGUF file in the folder or repository ``name``.
        dequantize: False keeps the linears of a GGUF file, or the experts of another quantized checkpoint, quantized in
            memory, with the same bits (docs/quantization.md). None and True dequantize them when they are loaded.

    Raises:
        InvalidInput: the model, a file or a weight is missing or damaged, or needs code that is not trusted. On the
            Hub: the repository or revision does not exist or is gated, or there is no network and no cached copy.
        UnsupportedModel: the quantization, or a part of a GGUF file, is not supported.
        StorageError: the Hub's cache cannot be written.
    """
    how: LoadOptions = {"dtype": dtype, "device": device, "revision": revision, "token": token}
    how |= {"trust_remote_code": trust_remote_code, "task": task, "gguf_file": gguf_file, "dequantize": dequantize}
    load = find(name, random=random, **how)
    return load.on(load.device)
