"""compile(): the one function most users need."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from detcompile.errors import InvalidInput, NumericsError
from detcompile.executors.lowered_module import executor_of
from detcompile.models.checkpoints import load_checkpoint, require_json
from detcompile.models.compiled import CompiledModel
from detcompile.models.remote import compile_in_workers
from detcompile.orders.numerics import Numerics
from detcompile.parallel import tensor_parallel
from detcompile.passes import named_backend  # noqa: F401 - torch.compile knows the name from here on
from detcompile.passes.lowering import lower
from detcompile.passes.modules.positions import position_tables
from detcompile.progress import shown, stage
from detcompile.weights import named_weights

__all__ = ["TINY", "compile", "compile_here", "load_model"]

TINY = "tiny"  # the name of the embedded model
TINY_FOLDER = Path(__file__).parent / TINY
EMBEDDED = {TINY: TINY_FOLDER, "tiny-draft": TINY_FOLDER / "draft"}  # the second drafts for the first


def compile(
    model: PreTrainedModel | str | Path,
    *,
    tp: int = 1,
    numerics: Numerics | None = None,
    max_context: int | None = None,
    tp_group: ProcessGroup | None = None,
    replicate_attention: bool = False,
    progress: bool | None = None,
) -> CompiledModel:
    """Compile a causal LM so that each row's bits depend on the weights and on that row's own tokens.

    Args:
        model: a Hugging Face causal LM in eval mode, on the device and in the dtype it shall serve in; or a local
            folder of one; or "tiny", or its draft model "tiny-draft". A module is changed in place and belongs to the
            result afterwards, also if it is refused: load it again then.
        tp: tensor-parallel size. Above 1, so many worker processes are started, which load and run the model; the
            result is used like any other. Where torch.distributed was initialised before (torchrun), none are: each
            process then calls compile() with the same whole model and keeps its share of it, and from then on all of
            them make the same calls (docs/tensor_parallel.md).
        numerics: the declared orders; part of the fingerprint.
        max_context: tokens a sequence may hold; default: the config's max_position_embeddings. Rotary tables that
            look at the length are frozen to it, so it is part of the fingerprint.
        tp_group: the processes that share the model, of torch.distributed; default: all of them.
        replicate_attention: where the heads do not divide among the ranks, every rank computes all of them, instead
            of a refusal.
        progress: show the stages and their seconds on standard error, as one line of a terminal, or as lines; default:
            yes, unless DETCOMPILE_PROGRESS=0. Worker processes show no stages.

    Raises:
        UnsupportedModel: the model cannot be captured with its meaning intact.
        UncertifiedOp: an operation could make a row's bits depend on other rows; the message names it.
        NumericsError: the model does not fit the numerics.
        InvalidInput: an argument is off.
        WorkerError: a worker process could not start.
    """
    numerics = numerics or Numerics()
    if tp not in numerics.tp_sizes:
        raise NumericsError(f"tp={tp} is not one of Numerics.tp_sizes={numerics.tp_sizes}: declare it there")
    if tp > 1 and tp_group is None and not dist.is_initialized():
        options = {"replicate_attention": replicate_attention}
        return compile_in_workers(model, tp=tp, numerics=numerics, max_context=max_context, options=options)
    with shown(progress):
        return compile_here(model, tp, numerics, max_context, tp_group, replicate_attention)


def compile_here(
    model: PreTrainedModel | str | Path,
    tp: int,
    numerics: Numerics,
    max_context: int | None = None,
    tp_group: ProcessGroup | None = None,
    replicate_attention: bool = False,
    on_read: Callable[[int, int], None] | None = None,
) -> CompiledModel:
    """``compile`` in this process, a rank where tp is above 1.

    Args:
        on_read: where ranks share the model, is told the bytes of weights read so far and of how many.
    """
    ranks = tensor_parallel(tp, tp_group) if tp > 1 else None
    loaded = load_model(model) if isinstance(model, (str, Path)) else model
    context = _context(loaded, max_context)
    lowered = lower(loaded, numerics, context, ranks, replicate_attention, on_read)
    compiled = CompiledModel(executor_of(loaded, lowered, numerics, ranks))
    if ranks is not None:
        ranks.require_equal(compiled.fingerprint_parts)
    return compiled


def _context(model: PreTrainedModel, max_context: int | None) -> int:
    """Tokens a sequence may hold; never more than a learned table of positions has rows."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    context = limit if max_context is None else max_context
    if context is None:
        raise InvalidInput(f"{type(model).__name__} states no max_position_embeddings: pass max_context")
    if context < 1:
        raise InvalidInput(f"max_context={context}: a sequence holds at least one token")
    rows = {table.name: table.rows - table.first for table in position_tables(model)}
    rows |= {name: len(buffer) for name, buffer in model.named_buffers() if name.endswith("embed_positions")}  # GPT-J's
    for name, count in rows.items():
        if count < context:
            raise InvalidInput(
                f"max_context={context}, but {name} has {count} rows for positions: pass a max_context within them"
            )
    return context


def load_model(
    name: str | Path,
    *,
    random: bool = False,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> PreTrainedModel:
    """A causal LM from a local folder, "tiny" or "tiny-draft".

    Args:
        random: the folder's (or file's) config with random weights.
        dtype: default: the checkpoint's own. device: default: a GPU if there is one.

    Raises:
        InvalidInput: no such model, a file that is missing or damaged, or a weight that no file has.
    """
    path = EMBEDDED.get(str(name)) or Path(name)
    if not path.exists():
        embedded = " or ".join(map(repr, EMBEDDED))
        raise InvalidInput(f"{name}: no such folder; give a local Hugging Face model folder, or {embedded}")
    device = _device(device)
    with stage(f"load {path.name}") as loading:
        model = _random_model(path, dtype, device) if random else load_checkpoint(path, dtype).to(device).eval()
        num_bytes = sum(tensor.nbytes for tensor in named_weights(model).values())
        loading.becomes(f"load {path.name}, {num_bytes / 1e9:.2f} GB")
    return model


def _random_model(path: Path, dtype: torch.dtype | None, device: torch.device) -> PreTrainedModel:
    require_json(path.parent, [path.name]) if path.is_file() else require_json(path, ["config.json"])
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        with torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(0)
            return AutoModelForCausalLM.from_config(config, dtype=dtype or config.dtype or torch.float32).eval()
    except MemoryError:
        raise
    except Exception as error:  # a config may say anything
        raise InvalidInput(f"{path} is no config of a causal LM: {type(error).__name__}: {error}") from error


def _device(device: str | torch.device | None) -> torch.device:
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise InvalidInput(f"device={device!r}: give cpu or cuda") from error
    if chosen.type not in ("cpu", "cuda") or (chosen.type == "cuda" and not torch.cuda.is_available()):
        raise InvalidInput(f"device={device!r}: give cpu, or cuda where there is a CUDA GPU")
    return chosen
