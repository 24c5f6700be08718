"""Modules that keep rows apart are certified, have the same bits in any batch, and torch's meaning.

A group of modules is compiled as one, which gives the results of all of them: most of the time is Inductor's.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel, DistilBertConfig, DistilBertModel, RobertaConfig, RobertaModel

from detcompile import Backend, Numerics
from tests.bits import assert_bitwise_equal
from tests.exhaustive import EXHAUSTIVE, exhaustive_unless
from tests.torch_versions import needs_torch_2_13, skip_before_torch_2_13

CHANNELS, LENGTH = 8, 21
BATCHES = (1, 2, 3, 8, 17)


class Each(nn.Module):
    """The results of several modules or functions for one input, by their names."""

    def __init__(self, parts: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.names = list(parts)
        self.parts = nn.ModuleList(part if isinstance(part, nn.Module) else Calls(part) for part in parts.values())

    def forward(self, x: Tensor) -> list[Tensor]:
        return [part(x) for part in self.parts]


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def drawn(module: nn.Module) -> nn.Module:
    """In eval mode, with weights and statistics of normalizations that change something."""
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.dim() == 1 and tensor.dtype.is_floating_point:
                tensor.uniform_(0.5, 1.5)
    return module.eval()


NORMS: dict[str, Callable[[], nn.Module]] = {
    "groups of channels": lambda: nn.GroupNorm(4, CHANNELS),
    "one group, no weights": lambda: nn.GroupNorm(1, CHANNELS, affine=False),
    "layer norm over two dimensions": lambda: nn.LayerNorm([CHANNELS, LENGTH]),
    "rms norm over two dimensions": lambda: nn.RMSNorm([CHANNELS, LENGTH]),
    "batch norm of running statistics": lambda: nn.BatchNorm1d(CHANNELS),
    "instance norm": lambda: nn.InstanceNorm1d(CHANNELS, affine=True),
}
SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum over the last dimension": lambda x: x.cumsum(-1),
    "cumsum over channels": lambda x: x.cumsum(1),
    "cumprod": lambda x: (x / 2 + 1).cumprod(-1),
    "cumsum of a mask": lambda x: (x > 0).cumsum(-1) * x,
    "softmax over channels": lambda x: x.softmax(1),
    "log softmax over channels": lambda x: x.log_softmax(1),
    "variance over two dimensions": lambda x: x.var((1, 2)),
    "deviation over two dimensions": lambda x: x / x.std((1, 2), keepdim=True),
    "logsumexp over two dimensions": lambda x: x.logsumexp((1, 2)),
    "a length over channels": lambda x: F.normalize(x, dim=1),
}
CONVOLUTIONS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Conv1d(CHANNELS, 6, 3),
    "even kernel, same length": lambda: nn.Conv1d(CHANNELS, 6, 4, padding="same"),
    "over an image": lambda: nn.Sequential(
        nn.Unflatten(2, (3, 7)), nn.Conv2d(CHANNELS, 6, (2, 3), stride=(1, 2), padding=(0, 1))
    ),
    "depthwise": lambda: nn.Conv1d(CHANNELS, 2 * CHANNELS, 3, groups=CHANNELS, padding=1),
    "averages": lambda: nn.AvgPool1d(3, 2, padding=1),
    "maxima": lambda: nn.MaxPool1d(3, 2, padding=1),
}
WINDOWS: dict[str, Callable[[], nn.Module]] = {
    "strided and dilated": lambda: nn.Conv1d(CHANNELS, 6, 3, stride=2, dilation=3, padding=2, bias=False),
    "reflected": lambda: nn.Conv1d(CHANNELS, 6, 3, padding=2, padding_mode="reflect"),
    "replicated": lambda: nn.Conv1d(CHANNELS, 6, 3, padding=2, padding_mode="replicate"),
    "circular": lambda: nn.Conv1d(CHANNELS, 6, 3, padding=2, padding_mode="circular"),
    "of two groups": lambda: nn.Conv1d(CHANNELS, 6, 3, groups=2, bias=False),
    "of patches": lambda: nn.Sequential(nn.Unflatten(2, (3, 7)), nn.Conv2d(CHANNELS, 6, (3, 7), stride=(3, 7))),
    "maxima of an image": lambda: nn.Sequential(nn.Unflatten(2, (3, 7)), nn.MaxPool2d(2, stride=1, dilation=(1, 2))),
    "averages of equal parts": lambda: nn.AdaptiveAvgPool1d(7),
    "maxima of equal parts": lambda: nn.Sequential(nn.Unflatten(2, (3, 7)), nn.AdaptiveMaxPool2d((3, 1))),
}


def hidden_ends(x: Tensor) -> Tensor:
    """Which tokens of [B, L, E] are padding: never the first."""
    return (x[..., 0] > 0.7) & (torch.arange(x.shape[1]) > 0)


class Encodes(nn.Module):
    """A layer of torch's under masks of its own, [B, 7, 24] -> [B, 7, 24]."""

    def __init__(self, queries: str = "", padding: bool = False, **options: Any) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(24, 4, 40, batch_first=True, **options)
        self.queries, self.padding = queries, padding
        self.register_buffer("later", torch.ones(7, 7, dtype=torch.bool).triu(1))
        self.register_buffer("later_scores", torch.ones(7, 7).tril().log())

    def forward(self, x: Tensor) -> Tensor:
        mask = {"": None, "bool": self.later, "float": self.later_scores}[self.queries]
        return self.layer(x, src_mask=mask, src_key_padding_mask=hidden_ends(x) if self.padding else None)


class Attends(nn.Module):
    """nn.MultiheadAttention of tokens to themselves, or to some of them; with its weights beside its result."""

    def __init__(self, weights: bool, across: bool = False) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(24, 4, batch_first=True)
        self.weights, self.across = weights, across

    def forward(self, x: Tensor) -> Tensor:
        others = x[:, :5] * 2 if self.across else x
        padding = None if self.across else hidden_ends(x)
        out, weights = self.attention(x, others, others, key_padding_mask=padding, need_weights=self.weights)
        return torch.cat([out, weights], -1) if self.weights else out


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 4, 40, batch_first=True), 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=hidden_ends(x))


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (4, 6)).transpose(1, 2)


ENCODERS: dict[str, Callable[[], nn.Module]] = {
    "gelu, norms first, padding": lambda: Encodes(activation="gelu", norm_first=True, padding=True),
    "a mask": lambda: Encodes("bool"),
    "shared heads": lambda: Calls(
        lambda x: F.scaled_dot_product_attention(heads(x), heads(x)[:, :2], heads(x)[:, :2], enable_gqa=True)
    ),
}
MASKED: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: Encodes(),
    "padding": lambda: Encodes(padding=True),
    "a mask of scores": lambda: Encodes("float"),
    "a mask and padding": lambda: Encodes("bool", padding=True),
    "layers stacked": Stacked,
    "products of tokens": lambda: Calls(lambda x: (x @ x.transpose(1, 2)).softmax(-1) @ x),
}
ATTENTIONS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: Attends(weights=False),
    "attention with weights": lambda: Attends(weights=True),
    "attention across": lambda: Attends(weights=False, across=True),
}


def made(parts: Mapping[str, Callable[[], nn.Module]]) -> Mapping[str, Callable[[Tensor], Tensor]]:
    return {name: make() for name, make in parts.items()}


class Group(NamedTuple):
    """Parts of one input [B, *shape]; certify_only: their certified graph runs as it is, without Inductor."""

    make: Callable[[], Mapping[str, Callable[[Tensor], Tensor]]]
    shape: tuple[int, ...]
    certify_only: bool
    batches: tuple[int, ...] = BATCHES


GROUPS = {
    "norms and sums": Group(lambda: made(NORMS) | SUMS, (CHANNELS, LENGTH), certify_only=False),
    "convolutions": Group(lambda: made(CONVOLUTIONS), (CHANNELS, LENGTH), certify_only=False),
    "more convolutions and pools": Group(lambda: made(WINDOWS), (CHANNELS, LENGTH), certify_only=True),
    "encoders": Group(lambda: made(ENCODERS), (7, 24), certify_only=False),
    "more encoders": Group(lambda: made(MASKED), (7, 24), certify_only=True),
    # torch's own code makes one row another graph here, which is refused
    "attention": Group(lambda: made(ATTENTIONS), (7, 24), certify_only=True, batches=(2, 3, 17)),
}

UNTRACED = {
    "convolutions": "guards on one row in convolutions of some kinds, which is refused",
    "encoders": "cannot trace the fast path of nn.TransformerEncoderLayer",
    "more encoders": "cannot trace the fast path of nn.TransformerEncoderLayer",
}


SLOW = ("convolutions", "encoders")  # Inductor takes 30 CPU seconds a group


def compiled(module: nn.Module, certify_only: bool = False) -> Callable[..., Any]:
    torch._dynamo.reset()
    backend = Backend(Numerics(), certify_only=True) if certify_only else "detcompile"
    return torch.compile(module, backend=backend)


@pytest.mark.parametrize("name", exhaustive_unless(lambda name: name not in SLOW, GROUPS))
def test_a_row_has_its_bits_in_every_batch_and_its_meaning(name: str) -> None:
    skip_before_torch_2_13(name, UNTRACED)
    group = GROUPS[name]
    module = drawn(Each(group.make()))
    x = torch.randn(max(BATCHES), *group.shape)
    with torch.no_grad():
        run, exact = compiled(module, group.certify_only), module(x)
        whole = run(x)
        for part, actual, expected in zip(module.names, whole, exact, strict=True):
            assert (actual - expected).abs().max() < 1e-4 * (1 + expected.abs().max()), part
        for rows in group.batches:
            start = len(x) - rows
            for part, actual, expected in zip(module.names, run(x[start:].clone()), whole, strict=True):
                assert_bitwise_equal(actual, expected[start:], f"{part}: {rows} rows")


SMALL = {"vocab_size": 60, "max_position_embeddings": 40}
BERT = SMALL | {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
MODELS: dict[str, Callable[[str], nn.Module]] = {
    "bert": lambda attention: BertModel(BertConfig(**BERT, attn_implementation=attention)),
    "roberta": lambda attention: RobertaModel(RobertaConfig(**BERT, attn_implementation=attention)),
    "distilbert": lambda attention: DistilBertModel(
        DistilBertConfig(**SMALL, dim=24, n_layers=2, n_heads=4, hidden_dim=40, attn_implementation=attention)
    ),
}


class Reads(nn.Module):
    """A model of transformers: hidden states, and the pooler's where there is one."""

    def __init__(self, model: nn.Module, masked: bool) -> None:
        super().__init__()
        self.model, self.masked = model, masked

    def forward(self, input_ids: Tensor) -> list[Tensor]:
        given: dict[str, Tensor] = {}
        if self.masked:
            given["attention_mask"] = (input_ids != 1).long()
            if not isinstance(self.model, DistilBertModel):
                given["token_type_ids"] = (input_ids > 30).long()
        return list(self.model(input_ids, **given).to_tuple())


def sentences() -> Tensor:
    """[17, 7], some of them padded with 1."""
    ids = torch.randint(2, 60, (max(BATCHES), 7), generator=torch.Generator().manual_seed(0))
    for row in range(0, len(ids), 2):
        ids[row, 2 + row % 5 :] = 1
    return ids


@pytest.mark.parametrize(
    ("name", "attention", "masked", "certify_only"),
    [
        pytest.param("bert", "sdpa", True, False, marks=EXHAUSTIVE),
        ("bert", "eager", True, True),
        ("roberta", "sdpa", True, True),
        ("roberta", "eager", False, True),
        ("distilbert", "sdpa", True, True),
    ],
)
def test_an_encoder_of_transformers_is_certified(name: str, attention: str, masked: bool, certify_only: bool) -> None:
    reason = "guards on one row in scaled_dot_product_attention with a mask, which is refused"
    skip_before_torch_2_13(attention, {"sdpa": reason})
    module, ids = drawn(Reads(MODELS[name](attention), masked)), sentences()
    with torch.no_grad():
        run, exact = compiled(module, certify_only), module(ids)
        whole = run(ids)
        for actual, expected in zip(whole, exact, strict=True):
            assert (actual - expected).abs().max() < 1e-5
        for rows in BATCHES:
            for actual, expected in zip(run(ids[-rows:].clone()), whole, strict=True):
                assert_bitwise_equal(actual, expected[-rows:], f"{rows} rows")


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (lambda: nn.ConvTranspose1d(CHANNELS, 6, 3), "a convolution that is transposed"),
        (lambda: nn.AvgPool1d(3, padding=1, count_include_pad=False), "a pool with windows of different sizes"),
        (lambda: nn.AvgPool1d(2, ceil_mode=True), "a pool with windows of different sizes"),
        (lambda: nn.MaxPool1d(2, ceil_mode=True), "a pool with windows of different sizes"),
        (lambda: Calls(lambda x: x.prod(-1)), "a product of floating-point numbers"),
        (lambda: Calls(lambda x: x.logcumsumexp(-1)), "a running sum whose order is not pinned"),
    ],
)
def test_what_is_left_out_is_refused_by_name(part: Callable[[], nn.Module], message: str) -> None:
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message):
        compiled(part().eval(), certify_only=True)(torch.randn(3, CHANNELS, LENGTH))


@needs_torch_2_13("cannot trace the fast path of nn.TransformerEncoderLayer")
def test_attention_over_dynamic_length_is_rejected_with_advice() -> None:
    x = torch.randn(3, 7, 24)
    torch._dynamo.mark_dynamic(x, 1)
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="mark_static"):
        compiled(Encodes().eval(), certify_only=True)(x)
