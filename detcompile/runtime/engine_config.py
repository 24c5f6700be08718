"""EngineConfig: scheduling and memory settings. No setting can change a bit of any result."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from detcompile.errors import InvalidInput
from detcompile.other_names import naming_equivalents
from detcompile.runtime.kv.block_pool import check_block_size
from detcompile.runtime.requests.plain_values import flag, number, or_none, shown, string, whole_number
from detcompile.runtime.step.runner import MOST_SEQUENCES

SchedulerName = Literal["stall_free", "prefill_first", "simple_chunking"]
AllocationName = Literal["lazy", "reserve"]
MOST_BLOCKS = (1 << 31) - 1  # block tables are int32
MOST_TOKENS = (1 << 31) - 1  # per step: cu_seqlens are int32


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Settings of ``CompiledModel.engine``.

    Args:
        scheduler: "stall_free": every decode in every step, and prefill chunks in the rest of the token budget
            (Sarathi-Serve, OSDI 2024); "prefill_first": whole prompts before any decode (vLLM's first scheduler);
            "simple_chunking": alternating steps of prefill chunks and of decodes.
        max_num_batched_tokens: token budget of a step.
        max_num_seqs: most sequences that run at a time.
        block_size: tokens per KV block, a multiple of 16.
        num_blocks: blocks of the KV cache; None derives it from memory_fraction.
        memory_fraction: fraction of a GPU's memory for weights, the largest step, CUDA graphs and the KV cache
            together, including what other processes already hold. On a CPU: fraction of the memory available now, for
            the KV cache alone.
        allocation: "lazy" allocates blocks as a sequence grows, and preempts the least urgent sequence when they run
            out; "reserve" allocates them for prompt and max_tokens before a sequence starts.
        prefix_caching: reuse keys and values of common prompt prefixes.
        cuda_graphs: replay recurring step shapes from CUDA graphs; None enables it on a GPU.
        overlap: plan and launch a step before the previous one's tokens are read back; None enables it on a GPU.
        aging: steps of waiting that make a request one priority level more urgent.
        tbt_slo: target for the time between two tokens of an answer, in milliseconds, to be met by 99 of 100 steps.
            Steps with decodes take only as many prompt tokens as fit, judged by measured step times; None: only the
            token budget limits them. Needs "stall_free".
        restarts: how often per minute lost worker processes are restarted; with 0, the first loss ends the engine.

    Raises:
        InvalidInput: a value is invalid.
    """

    scheduler: SchedulerName = "stall_free"
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 1024
    block_size: int = 64
    num_blocks: int | None = None
    memory_fraction: float = 0.9
    allocation: AllocationName = "lazy"
    prefix_caching: bool = True
    cuda_graphs: bool | None = None
    overlap: bool | None = None
    aging: int = 1000
    tbt_slo: float | None = None
    restarts: int = 5

    @property
    def whole_prompts(self) -> bool:
        """True if every prompt is computed in one step."""
        return self.scheduler == "prefill_first"

    def __post_init__(self) -> None:
        for name, read in READERS.items():
            object.__setattr__(self, name, read(getattr(self, name), f"EngineConfig: {name}"))
        check_block_size(self.block_size)
        for name, known in (("scheduler", get_args(SchedulerName)), ("allocation", get_args(AllocationName))):
            _require(getattr(self, name) in known, name, self, f"one of {', '.join(known)}")
        for name, least in (("max_num_batched_tokens", 1), ("max_num_seqs", 1), ("aging", 1), ("restarts", 0)):
            _require(getattr(self, name) >= least, name, self, f"at least {least}")
        _require(self.max_num_batched_tokens <= MOST_TOKENS, "max_num_batched_tokens", self, f"at most {MOST_TOKENS}")
        _require(self.max_num_seqs <= MOST_SEQUENCES, "max_num_seqs", self, f"at most {MOST_SEQUENCES}")
        fits = self.num_blocks is None or 2 <= self.num_blocks <= MOST_BLOCKS
        _require(fits, "num_blocks", self, f"None, or at least 2 and at most {MOST_BLOCKS}")
        finite = self.tbt_slo is None or 0 < self.tbt_slo < math.inf
        _require(finite, "tbt_slo", self, "None, or finite and above 0 milliseconds")
        if self.tbt_slo is not None and self.scheduler != "stall_free":
            raise InvalidInput(f"EngineConfig: tbt_slo needs scheduler='stall_free', got {self.scheduler!r}")
        _require(0 < self.memory_fraction <= 1, "memory_fraction", self, "above 0 and at most 1")


# vLLM's names of the settings, and vLLM's options that engines here do not have.
VLLM_NAMES = {
    "enable_chunked_prefill": 'pass scheduler="stall_free" for True, "prefill_first" for False',
    "enable_prefix_caching": "pass prefix_caching",
    "enforce_eager": "pass cuda_graphs=False for True",
    "gpu_memory_utilization": "pass memory_fraction",
    "max_model_len": "pass max_context to compile()",
    "max_num_batch_tokens": "pass max_num_batched_tokens",
    "num_gpu_blocks_override": "pass num_blocks",
    "num_speculative_tokens": "pass speculation=SpeculationConfig(...) to engine()",
    "pipeline_parallel_size": "pass pp to compile()",
    "scheduling_policy": "pass priority to generate() or add_request()",
    "speculative_config": "pass speculation=SpeculationConfig(...) to engine()",
    "tensor_parallel_size": "pass tp to compile()",
}
EngineConfig.__init__ = naming_equivalents("EngineConfig", VLLM_NAMES)(EngineConfig.__init__)  # type: ignore[method-assign]

READERS: dict[str, Callable[[Any, str], Any]] = {
    "scheduler": string,
    "max_num_batched_tokens": whole_number,
    "max_num_seqs": whole_number,
    "block_size": whole_number,
    "num_blocks": or_none(whole_number),
    "memory_fraction": number,
    "allocation": string,
    "prefix_caching": flag,
    "cuda_graphs": or_none(flag),
    "overlap": or_none(flag),
    "aging": whole_number,
    "tbt_slo": or_none(number),
    "restarts": whole_number,
}


def _require(condition: bool, name: str, config: EngineConfig, wanted: str) -> None:
    if not condition:
        raise InvalidInput(f"EngineConfig: {name}={shown(getattr(config, name))} must be {wanted}")


if READERS.keys() != {entry.name for entry in fields(EngineConfig)}:
    raise TypeError(f"READERS and the fields of EngineConfig differ: {READERS.keys() ^ set(EngineConfig.__slots__)}")
