"""What the front and an engine process say to each other: msgpack in frames that begin with their length.

A sample's tokens travel once, as they are drawn. Neither side runs what the other sends: frames hold plain values.
"""

import struct
from typing import Any, Literal

import msgspec

from detcompile.serving.receipts.verdict import Verdict

__all__ = [
    "Add",
    "Broken",
    "Cancel",
    "Command",
    "Delta",
    "EngineSpec",
    "Heartbeat",
    "Hello",
    "Holding",
    "LENGTH",
    "Pool",
    "Pooled",
    "PoolingFacts",
    "Refused",
    "Report",
    "SampleDelta",
    "Statistics",
    "Step",
    "Token",
    "Tokens",
    "VERSION",
    "Verified",
    "Verify",
    "decode_command",
    "decode_report",
    "frame",
]

VERSION = 10
LENGTH = struct.Struct(">I")  # begins every frame: bytes that follow


class EngineSpec(msgspec.Struct, kw_only=True, tag=True):
    """The first frame that the front sends: which model to compile, and the engine's settings."""

    version: int = VERSION
    model: str
    random: bool = False
    dtype: str | None = None
    device: str | None = None
    tp: int = 1
    pp: int = 1
    tp_sizes: list[int] | None = None
    revision: str | None = None
    token: str | None = None
    trust_remote_code: bool = False
    config: dict[str, Any] = {}  # of EngineConfig; what is absent takes its default
    visible_devices: str | None = None  # becomes CUDA_VISIBLE_DEVICES
    task: Literal["generate", "classify", "embed"] | None = None  # None takes what the checkpoint was saved as
    generation_config: Literal["auto", "vllm"] = "auto"  # whether the model's own gives defaults of sampling
    speculation: Literal["off", "automatic", "always"] = "off"  # drafts that are looked up in the sequence itself


class Add(msgspec.Struct, tag=True, omit_defaults=True):
    """Serve a request.

    Attributes:
        resume: tokens that samples have drawn before, by their index.
        cache_salt: requests of another salt share no cached prefix with it.
    """

    request_id: str
    prompt: list[int]
    params: dict[str, Any]
    priority: int = 0
    resume: dict[int, list[int]] | None = None
    cache_salt: str = ""


class Verify(msgspec.Struct, tag=True):
    """Replay a receipt, given as JSON, when there is time."""

    request_id: str
    receipt: bytes


class Pool(msgspec.Struct, tag=True):
    """What a model without a language-model head says of each prompt."""

    request_id: str
    prompts: list[list[int]]
    pooling: Literal["last", "first", "mean"] | None  # of embeddings; None for the model's own
    normalize: bool


class Cancel(msgspec.Struct, tag=True):
    """End a request."""

    request_id: str


class PoolingFacts(msgspec.Struct, kw_only=True):
    """What the front has to know of a model that says one thing of a sequence.

    Attributes:
        num_columns: numbers a sequence.
        labels: names of the classes; none of embeddings.
        each_alone: whether several classes may hold at a time.
        reads_token_types: whether the model tells the texts of a pair apart by ids of their own.
    """

    task: Literal["classify", "embed"]
    num_columns: int
    labels: list[str]
    each_alone: bool
    reads_token_types: bool


class Hello(msgspec.Struct, kw_only=True, tag=True):
    """The first frame of an engine that is ready: all that the front has to know of its model."""

    name: str
    fingerprint: str
    fingerprint_parts: dict[str, str]
    certificate: str  # one JSON object
    max_context: int
    vocab_size: int
    num_blocks: int
    block_size: int
    token_budget: int  # tokens that a step computes at most
    default_params: dict[str, Any]  # of SamplingParams, where a request says nothing
    tokenizer: str | None  # one JSON object, of the tokenizers library; None for a model without one
    special_ids: list[int]
    special_tokens: dict[str, str]  # by the names that chat templates have for them
    chat_template: str | None
    tool_template: str | None = None  # of conversations with tools, where it is another
    tokenizer_class: str | None = None  # of transformers
    split_special_tokens: bool = False  # whether special tokens in a text are read as text
    pooling: PoolingFacts | None = None  # None for a causal LM

    def differing(self, other: "Hello") -> list[str]:
        """Names of what has two engines answer otherwise: parts of the fingerprint, and the tokenizer."""
        ours, theirs = (
            {
                **hello.fingerprint_parts,
                "tokenizer": hello.tokenizer,
                "split_special_tokens": str(hello.split_special_tokens),
            }
            for hello in (self, other)
        )
        found = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        return found or ["fingerprint"] * (self.fingerprint != other.fingerprint)


class Token(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities at one position: its token, and the likeliest tokens, likeliest first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


class SampleDelta(msgspec.Struct, array_like=True, gc=False):
    """What a sample has drawn since its last delta."""

    index: int
    token_ids: list[int]
    logprobs: list[Token] | None
    finish_reason: str | None
    stop_reason: int | str | None


class Delta(msgspec.Struct, array_like=True, gc=False):
    """What is new of a request.

    Attributes:
        refused: whether ``error`` is of what the request asks for, and not of the engine.
    """

    request_id: str
    samples: list[SampleDelta]
    finished: bool
    prompt_logprobs: list[Token | None] | None
    error: str | None
    num_cached_tokens: int
    first_scheduled: float | None  # seconds from its arrival in the engine, once it has ended
    num_preemptions: int = 0
    refused: bool = False


class Statistics(msgspec.Struct, array_like=True):
    """Counts of an engine since it started, and its state; as runtime.metrics.EngineStats has them.

    Attributes:
        busy_seconds: time that the engine process has spent in steps.
    """

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_queried_tokens: int = 0
    num_cached_tokens: int = 0
    busy_seconds: float = 0.0
    token_bound: int = 0
    num_late_steps: int = 0
    cost_error_seconds: float = 0.0

    @property
    def past(self) -> "Statistics":
        """What was counted, without the state: what stays of an engine that has ended."""
        return msgspec.structs.replace(
            self, num_running=0, num_waiting=0, num_blocks=0, num_free_blocks=0, token_bound=0
        )

    def plus(self, other: "Statistics") -> "Statistics":
        """Counts of two engines as one, which has the larger bound of a step."""
        found = {name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__}
        return Statistics(**found | {"token_bound": max(self.token_bound, other.token_bound)})


class Step(msgspec.Struct, array_like=True):
    """One step: seconds that it took beyond the end of the step before it, and what it computed."""

    seconds: float
    num_prefill_tokens: int
    num_decodes: int
    num_waiting: int


class Holding(msgspec.Struct, array_like=True):
    """What a request has of the KV cache. A block that several requests share counts for each of them."""

    request_id: str
    num_blocks: int


class Tokens(msgspec.Struct, tag=True, gc=False):
    """What a step has given."""

    deltas: list[Delta]


class Refused(msgspec.Struct, tag=True):
    """A request that cannot be served, and why."""

    request_id: str
    message: str


class Verified(msgspec.Struct, tag=True):
    """What came of a receipt."""

    request_id: str
    verdict: Verdict


class Pooled(msgspec.Struct, tag=True):
    """What came of prompts: [prompts, num_columns] in float32, little-endian."""

    request_id: str
    num_columns: int
    values: bytes


class Heartbeat(msgspec.Struct, tag=True):
    """The engine process lives; sent also while a step runs.

    Attributes:
        steps: the newest of those that ended since the heartbeat before, oldest first.
        holdings: blocks of the KV cache by request.
    """

    statistics: Statistics
    steps: list[Step] = []
    holdings: list[Holding] = []


class Broken(msgspec.Struct, tag=True):
    """The last frame of an engine that cannot go on; ``kind`` names the exception."""

    kind: str
    message: str


Command = EngineSpec | Add | Verify | Pool | Cancel
Report = Hello | Tokens | Verified | Pooled | Refused | Heartbeat | Broken
_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def frame(message: Command | Report) -> bytes:
    """A message as it travels."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def decode_command(body: bytes) -> Command:
    """A frame that an engine process received, less its length."""
    return _commands.decode(body)


def decode_report(body: bytes) -> Report:
    """A frame that the front received, less its length."""
    return _reports.decode(body)
