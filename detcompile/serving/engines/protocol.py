"""The protocol between front end and engine process: length-prefixed msgpack frames.

A token is sent once, when it is drawn. Frames hold plain values only, so neither side can run code of the other.
"""

import struct
from typing import Any, Literal

import msgspec

from detcompile.digests import differing_parts
from detcompile.serving.receipts.verdict import Verdict

VERSION = 15
LENGTH = struct.Struct(">I")  # prefix of every frame: bytes that follow


class AdapterFile(msgspec.Struct, frozen=True):
    """A LoRA adapter.

    Attributes:
        path: its folder in PEFT's format.
        digest: its sha256; empty before it was read.
        loaded_as: its name in engines, which no other adapter has had.
    """

    path: str
    digest: str = ""
    loaded_as: str = ""


class EngineSpec(msgspec.Struct, kw_only=True, tag=True):
    """The front end's first frame: the model to compile, and the engine's settings."""

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
    config: dict[str, Any] = {}  # fields of EngineConfig; missing ones take their defaults
    visible_devices: str | None = None  # becomes CUDA_VISIBLE_DEVICES
    task: Literal["generate", "classify", "embed"] | None = None  # None: the checkpoint's task
    generation_config: Literal["auto", "vllm"] = "auto"  # "auto": sampling defaults from generation_config.json
    speculation: Literal["off", "automatic", "always"] = "off"  # n-gram drafts
    dequantize: bool | None = None
    weights: str | None = None  # folder of weights that replace the model's
    max_lora_rank: int | None = None  # room for adapters; None for none
    adapters: dict[str, AdapterFile] = {}  # by the names that requests give
    numerics: str | None = None  # an exact arithmetic; None: float


class Weights(msgspec.Struct, frozen=True):
    """A version of the model's weights.

    Attributes:
        version: its name.
        number: how many versions came before.
        fingerprint: the model's fingerprint with them.
        digest: the fingerprint's part for the weights.
    """

    version: str
    number: int
    fingerprint: str
    digest: str


class WeightSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a sample that one version drew: those from ``start`` to the next span."""

    start: int
    weights: Weights


class Add(msgspec.Struct, tag=True, omit_defaults=True):
    """Add a request.

    Attributes:
        resume: tokens already drawn, by sample index.
        cache_salt: requests with different salts share no cached prefix.
        adapter: name of the adapter that draws the tokens; empty for the plain model.
    """

    request_id: str
    prompt: list[int]
    params: dict[str, Any]
    priority: int = 0
    resume: dict[int, list[int]] | None = None
    cache_salt: str = ""
    adapter: str = ""


class Verify(msgspec.Struct, tag=True):
    """Replay a receipt (JSON) between steps."""

    request_id: str
    receipt: bytes


class Pool(msgspec.Struct, tag=True):
    """Compute embeddings or class scores of prompts."""

    request_id: str
    prompts: list[list[int]]
    pooling: Literal["last", "first", "mean"] | None  # for embeddings; None: the model's default
    normalize: bool


class Cancel(msgspec.Struct, tag=True):
    """Cancel a request."""

    request_id: str


class Control(msgspec.Struct, tag=True):
    """Change or read the engine's weights or caches between steps, while it has no request.

    Attributes:
        call_id: repeated in the report.
        action: an action of controls.Controls.
    """

    call_id: int
    action: str
    arguments: dict[str, Any] = {}


class PoolingFacts(msgspec.Struct, kw_only=True):
    """What the front end needs to know about an embedding or classification model.

    Attributes:
        num_columns: values per sequence.
        labels: class names; empty for embeddings.
        each_alone: classes are independent (multi-label).
        reads_token_types: the model needs token type ids to tell the texts of a pair apart.
    """

    task: Literal["classify", "embed"]
    num_columns: int
    labels: list[str]
    each_alone: bool
    reads_token_types: bool


class Hello(msgspec.Struct, kw_only=True, tag=True):
    """The first frame of a ready engine: what the front end needs to know about its model."""

    name: str
    fingerprint: str
    fingerprint_parts: dict[str, str]
    certificate: str  # one JSON object
    max_context: int
    vocab_size: int
    num_blocks: int
    block_size: int
    token_budget: int  # maximum tokens of a step
    default_params: dict[str, Any]  # of SamplingParams, for fields that a request omits
    dtype: str  # of the weights, such as torch.bfloat16
    tokenizer: str | None  # JSON of the tokenizers library; None for a model without tokenizer
    special_ids: list[int]
    special_tokens: dict[str, str]  # by their names in chat templates
    chat_template: str | None
    tool_template: str | None = None  # a separate template for conversations with tools
    tokenizer_class: str | None = None  # the class in transformers
    split_special_tokens: bool = False  # encode special tokens in a text as plain text
    pooling: PoolingFacts | None = None  # None for a causal LM
    adapters: dict[str, str] = {}  # sha256 of the loaded adapters by name

    def differing(self, other: "Hello") -> list[str]:
        """Return the names of differences that change answers: fingerprint parts and the tokenizer."""
        ours, theirs = (
            {
                **hello.fingerprint_parts,
                "tokenizer": hello.tokenizer,
                "split_special_tokens": str(hello.split_special_tokens),
            }
            for hello in (self, other)
        )
        return sorted(differing_parts(ours, theirs)) or ["fingerprint"] * (self.fingerprint != other.fingerprint)


class Token(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities at one position: of its token, and of the likeliest tokens, likeliest first.

    Attributes:
        rank: the token's rank, from 1; 0 in records of versions without ranks.
        sampling: the same logprobs in the distribution that the token was drawn from; None if not requested.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    rank: int = 0
    sampling: tuple[float, list[tuple[int, float]]] | None = None


class SampleDelta(msgspec.Struct, array_like=True, gc=False):
    """A sample's tokens since its last delta."""

    index: int
    token_ids: list[int]
    logprobs: list[Token] | None
    finish_reason: str | None
    stop_reason: int | str | None


class Delta(msgspec.Struct, array_like=True, gc=False):
    """A request's progress since its last delta.

    Attributes:
        refused: ``error`` is the request's fault, not the engine's.
    """

    request_id: str
    samples: list[SampleDelta]
    finished: bool
    prompt_logprobs: list[Token | None] | None
    error: str | None
    num_cached_tokens: int
    first_scheduled: float | None  # seconds since arrival in the engine; set at the end
    num_preemptions: int = 0
    refused: bool = False


class Statistics(msgspec.Struct, array_like=True):
    """Counts of an engine since it started, and its state, as in runtime.metrics.EngineStats.

    Attributes:
        busy_seconds: time that the engine process spent in steps.
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
        """Return the counters without the gauges: what remains of an ended engine."""
        return msgspec.structs.replace(
            self, num_running=0, num_waiting=0, num_blocks=0, num_free_blocks=0, token_bound=0
        )

    def plus(self, other: "Statistics") -> "Statistics":
        """Return the sum of two engines' counts; ``token_bound`` is the larger one."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__}
        return Statistics(**sums | {"token_bound": max(self.token_bound, other.token_bound)})


class Step(msgspec.Struct, array_like=True):
    """One step: seconds since the end of the previous step, and its work."""

    seconds: float
    num_prefill_tokens: int
    num_decodes: int
    num_waiting: int


class Holding(msgspec.Struct, array_like=True):
    """KV blocks of a request. A shared block counts for each of its requests."""

    request_id: str
    num_blocks: int


class Tokens(msgspec.Struct, tag=True, gc=False):
    """The deltas of a step."""

    deltas: list[Delta]


class Refused(msgspec.Struct, tag=True):
    """Rejection of a request."""

    request_id: str
    message: str


class Verified(msgspec.Struct, tag=True):
    """The verdict on a receipt."""

    request_id: str
    verdict: Verdict


class Pooled(msgspec.Struct, tag=True):
    """The result of a Pool: [prompts, num_columns] in float32, little-endian."""

    request_id: str
    num_columns: int
    values: bytes


class Controlled(msgspec.Struct, tag=True):
    """The end of a Control.

    Attributes:
        error: why it failed; nothing was changed then.
        refused: the error is the caller's fault, not the engine's.
    """

    call_id: int
    value: dict[str, Any] = {}
    error: str | None = None
    refused: bool = False


class Heartbeat(msgspec.Struct, tag=True):
    """Sent regularly, also while a step runs.

    Attributes:
        steps: the most recent steps since the last heartbeat, oldest first.
        holdings: KV blocks by request.
    """

    statistics: Statistics
    steps: list[Step] = []
    holdings: list[Holding] = []


class Broken(msgspec.Struct, tag=True):
    """The last frame of a failed engine; ``kind`` names the exception."""

    kind: str
    message: str


Command = EngineSpec | Add | Verify | Pool | Cancel | Control
Report = Hello | Tokens | Verified | Pooled | Refused | Controlled | Heartbeat | Broken
_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def frame(message: Command | Report) -> bytes:
    """Encode a message with its length prefix."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def decode_command(body: bytes) -> Command:
    """Decode the body of a frame from the front end."""
    return _commands.decode(body)


def decode_report(body: bytes) -> Report:
    """Decode the body of a frame from an engine."""
    return _reports.decode(body)
