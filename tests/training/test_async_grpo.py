"""TRL's AsyncGRPOTrainer over a server: each step is on policy to the bit, and the server has the trainer's weights."""

import socket
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import detcompile
from detcompile import InvalidInput
from detcompile.models.hub import EMBEDDED
from detcompile.weight_transfer import TransferGroup
from detcompile.weights import weight_digests

trl = pytest.importorskip("trl", reason="the trainers of TRL come with the extra trl")
for needed in ("fastapi", "uvicorn", "msgspec"):
    pytest.importorskip(needed, reason="the server comes with the extra serve")
from accelerate import PartialState  # noqa: E402 - comes with trl
from datasets import Dataset  # noqa: E402 - comes with trl

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl.chat_template_utils import qwen3_chat_template
    from trl.experimental.async_grpo import AsyncGRPOConfig, weight_transfer
    from trl.experimental.async_grpo.packing import TreeRow
    from trl.experimental.async_grpo.vllm_client import VLLMClient

from detcompile.trl import AsyncGRPOTrainer  # noqa: E402
from tests.exhaustive import EXHAUSTIVE  # noqa: E402
from tests.serving.conftest import Server, started  # noqa: E402

pytestmark = EXHAUSTIVE  # the extra `trl` comes with make test-all

MODEL = EMBEDDED["tiny-draft"]
STEPS = 10
PROMPTS = ["def add(first, second):\n    return", "import json\n", "class Point:\n", "x = 1\n"]


def spaces(completions: list[Any], **others: Any) -> list[float]:
    """A reward: the share of blanks."""
    texts = [messages[-1]["content"] for messages in completions]
    return [text.count(" ") / max(1, len(text)) for text in texts]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--admin-key", "none", "--device", "cpu", "--num-blocks", "64", "--no-spare")
    actual = started(tmp_path_factory.mktemp("server"), *options, model=MODEL, name=str(MODEL))
    yield actual
    assert actual.stop() == 0


def config(folder: Path, **changed: Any) -> Any:
    given = {
        "output_dir": str(folder), "max_steps": STEPS, "num_generations": 4, "max_completion_length": 8,
        "per_device_train_batch_size": 8, "learning_rate": 1e-3, "save_strategy": "no", "report_to": "none",
        "use_cpu": True, "seed": 3, "disable_tqdm": True, "max_staleness": 0, "token_budget": 0,
    }  # fmt: skip
    return AsyncGRPOConfig(**given | changed)


def logged(made: AsyncGRPOTrainer, name: str) -> list[float]:
    return [entry[name] for entry in made.state.log_history if name in entry]


def served(server: Server, names: Iterable[str]) -> dict[str, str]:
    """Return the server's digests of tensors."""
    digests = httpx.post(f"{server.url}/weight_checker", json={"action": "checksum"}).json()["checksums"]
    return {name: digests[name] for name in names}


def test_each_step_is_on_policy(server: Server, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = qwen3_chat_template  # TRL's worker takes those that it knows
    prompts = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in PROMPTS]})
    args = config(tmp_path, vllm_server_base_url=server.url)
    made = AsyncGRPOTrainer(MODEL, spaces, args, train_dataset=prompts, processing_class=tokenizer)
    first = int(httpx.get(f"{server.url}/weight_info").json()["weight_version"])
    before = weight_digests(made.policy.serving_weights())
    made.train()
    assert logged(made, "kl") == [0.0] * STEPS and logged(made, "ratio") == [1.0] * STEPS
    assert logged(made, "sample/staleness_max") == [0.0] * STEPS
    assert min(logged(made, "grad_norm")) > 0
    weights = made.policy.serving_weights()
    after = weight_digests({name: weights[name] for name, _ in made.model.named_parameters()})
    assert [name for name in after if after[name] != before[name]]
    info = httpx.get(f"{server.url}/weight_info").json()
    assert int(info["weight_version"]) == first + STEPS + 1  # one before the first step
    assert served(server, after) == after
    assert all(weight is made.policy.get_parameter(name) for name, weight in made.model.named_parameters())


def test_trl_client_sends_weights(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's client of vLLM is unmodified; only vLLM's NCCL group, which needs GPUs, is replaced by gloo."""
    PartialState()  # TRL's logger needs it
    monkeypatch.setattr(weight_transfer, "is_vllm_available", lambda: True)
    monkeypatch.setattr(weight_transfer, "_HAS_STATEFUL_TRAINER_ENGINE", True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def endpoint(info: dict[str, Any]) -> TransferGroup:
        rank_and_size = 0, info["world_size"]
        return TransferGroup(info["master_address"], info["master_port"], *rank_and_size, torch.device("cpu"), 60)

    def produce(iterator: Any, group: TransferGroup, src: int, post_iter_func: Any) -> None:
        group.send(iterator, packed=True)

    of_vllm = {"get_ip": lambda: "127.0.0.1", "get_open_port": lambda: port, "open_trainer_endpoint": endpoint}
    for name, function in (of_vllm | {"packed_nccl_broadcast_producer": produce}).items():
        monkeypatch.setattr(weight_transfer, name, function, raising=False)
    model = detcompile.load_model(MODEL, device="cpu")
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.5)
    named = dict(model.named_parameters())
    info = {
        "names": list(named),
        "dtype_names": [str(weight.dtype).removeprefix("torch.") for weight in named.values()],
        "shapes": [list(weight.shape) for weight in named.values()],
    }
    client = VLLMClient(server.url, 60)
    sender = weight_transfer.WeightTransferClient(client, info, weight_sync_timeout=60)
    sender.init_weight_transfer()
    assert (client.get_dtype(), client.get_world_size()) == ("torch.bfloat16", 1)
    assert client.get_max_model_len() == 2048
    sender.pause()
    sender.send_weights(iter(named.items()))
    sender.resume()
    expected = weight_digests(named)
    assert served(server, expected) == expected


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncGRPOConfig, "world_size", property(lambda self: 2))
    with pytest.raises(InvalidInput, match=r"2 processes: .* Start one process"):
        AsyncGRPOTrainer(MODEL, spaces, config(tmp_path))


def test_tree_scores_as_sequences() -> None:
    """Samples that share prompts, prefixes or all tokens score as in a batch without sharing."""
    policy = detcompile.trainer(MODEL, device="cpu", max_context=64)
    made: Any = object.__new__(AsyncGRPOTrainer)
    made.policy = policy
    shared = [5, 6, 7, 8]
    texts = [[*shared, 9, 10], [*shared, 9, 11, 12], [*shared, 9, 10], [20, 21], [*shared, 13], [5, 6], [20, 21, 22]]
    row = TreeRow()
    for text in texts:
        mask = np.asarray([0, 1, *[1] * (len(text) - 2)])
        sample = {"input_ids": np.asarray(text), "completion_mask": mask, "old_log_probs": np.zeros(len(text))}
        row.add(sample | {"advantage": 1.0, "group_id": 0})
    packed = row.pack()
    with torch.no_grad():
        output = made._score(
            input_ids=packed["input_ids"][None], fused_lm_head=True, tree_kv_index=packed["tree_kv_index"],
            tree_cu_seqlens_k=packed["tree_cu_seqlens_k"],
        )  # fmt: skip
        alone = [policy.logprobs(torch.tensor([text])) for text in texts]
    assert output.log_probs.shape == packed["input_ids"][None].shape
    expected = torch.cat([scores[0] for scores in alone])
    assert output.log_probs.flatten()[packed["token_index"]].equal(expected)
    assert output.entropy.flatten()[packed["token_index"]].equal(torch.cat([s.entropy[0] for s in alone]))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"temperature": 0.5}, "temperature=0.5 is not supported"),
        ({"top_p": 0.9}, "another distribution"),
        ({"fp16": True}, "fp16=True"),
        ({"token_budget": 512}, "max_staleness=0 needs token_budget=0"),
        ({"token_budget": None}, "max_staleness=0 needs token_budget=0"),
        ({"optim": "sgd"}, "optim='sgd'"),
    ],
)
def test_unsupported_options_are_rejected(changed: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=message):
        AsyncGRPOTrainer(MODEL, spaces, config(tmp_path, **changed))
