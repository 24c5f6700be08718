"""Requests that wait for a grammar check or the tokenizer, both within bounds."""

import asyncio
import hashlib
import json
import sys
import threading
import unicodedata
from pathlib import Path
from typing import Any

import msgspec
import pytest

from detcompile.digests import fingerprint
from detcompile.runtime.grammars.compiler import masks_version
from detcompile.serving.app import new_app
from detcompile.serving.grammar_check import FairLock, GrammarCheck
from detcompile.serving.journal.journal import Journal
from detcompile.serving.plain_tokenizer import NFC_SHRINKS, longest_token, tokenizer_digest
from detcompile.serving.receipts.envelope import seal
from detcompile.serving.receipts.receipt import Prompt, Receipt, Sample, Served, WrittenGrammar, encode_receipt
from detcompile.serving.tokenizer_pool import LONG, TokenizerPool
from tests.serving.scripted_engine import HELLO
from tests.serving.scripted_service import running, scripted

pytestmark = pytest.mark.usefixtures("in_the_root")


def grammar(source: str) -> WrittenGrammar:
    return WrittenGrammar(kind="regex", source=source, hashed=False, llguidance=masks_version())


def envelope_of(**fields: Any) -> dict[str, Any]:
    """An unsigned receipt of the scripted engine, as POST /v1/verify takes it."""
    sample = Sample(index=0, token_ids=[40], finish_reason="length", stop_reason=None, text=None, logprobs=None)
    served = Served(detcompile="1", tokenizer=tokenizer_digest(HELLO.tokenizer), chat_template=None)
    item: dict[str, Any] = {"id": "cmpl-1", "created": 1, "model": "scripted", "level": "tokens", "params": {}}
    prompts = [Prompt(token_ids=[5], logprobs=None, samples=[sample])]
    parts = {"fingerprint": fingerprint({}), "fingerprint_parts": {}}
    receipt = Receipt(**item | parts | {"served": served, "seed": "1", "prompts": prompts} | fields)
    return msgspec.to_builtins(seal(encode_receipt(receipt), None))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"grammar": grammar("(")}, "regex cannot be served"),
        ({"params": {"stop": [f"stop {number}" for number in range(65)]}}, "more than 64 stop strings"),
    ],
    ids=["a grammar", "stop strings"],
)
async def test_harmful_receipts_are_refused_before_the_engine(fields: dict[str, Any], message: str) -> None:
    async with running(scripted(timeout=5.0)) as client:  # the scripted engine answers no Verify
        answer = await client.post("/v1/verify", json=envelope_of(**fields))
        assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text


async def test_journaled_grammar_is_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []

    async def require(self: GrammarCheck, grammar: Any, *_options: Any) -> None:
        checked.append("" if grammar is None else grammar.source)

    monkeypatch.setattr(GrammarCheck, "require", require)
    body = {"prompt": [5], "max_tokens": 400, "guided_regex": "a+"}

    for _ in range(2):
        service = scripted(journal=Journal(tmp_path / "journal"))
        async with running(service) as client:
            requests = client.post("/v1/completions", json=body, headers={"Idempotency-Key": "a"})
            task = asyncio.create_task(requests)
            while not any(answer.num_tokens for answer in service.open.values()):
                await asyncio.sleep(0.01)
        await asyncio.gather(task, return_exceptions=True)
    assert checked == ["a+", "a+"]


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sources of checked grammars in order. The number in each is its checking time in hundredths of a second."""
    checked: list[str] = []

    async def refusal(self: GrammarCheck, tokenizer: str, grammar: Any) -> str:
        checked.append(grammar.source)
        await asyncio.sleep(int(grammar.source[1:]) / 100)
        return "grammar: no" if grammar.source[0] == "n" else ""

    monkeypatch.setattr(GrammarCheck, "_refusal", refusal)
    return checked


async def ask(client: Any, source: str, key: str = "") -> tuple[int, dict[str, Any]]:
    body = {"prompt": [5], "max_tokens": 1, "guided_regex": source}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = await client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200 or answer.status_code == 400 or answer.headers["retry-after"]
    return answer.status_code, answer.json()


async def test_slow_grammars_of_one_key_do_not_delay_others(checks: list[str]) -> None:
    digests = [hashlib.sha256(key.encode()).digest() for key in ("a", "b")]
    async with running(scripted(max_queue=8), digests) as client:
        slow = [asyncio.create_task(ask(client, f"a{20 + number}", "a")) for number in range(7)]
        while not checks:
            await asyncio.sleep(0.01)
        quick = await asyncio.gather(*[ask(client, f"b{number}", "b") for number in range(3)])
        assert [status for status, _ in quick] == [200] * 3
        assert [source[0] for source in checks][:4] == ["a", "b", "b", "b"]
        actual = sorted(status for status, _ in await asyncio.gather(*slow))
        assert actual == [200] * 5 + [429] * 2  # one is checked, and half of the queue waits at most


async def test_grammar_wait_is_bounded_and_refusal_is_cached(checks: list[str]) -> None:
    service = scripted(queue_timeout=0.3)
    async with running(service) as client:
        slow = asyncio.create_task(ask(client, "n60"))
        while not checks:
            await asyncio.sleep(0.01)
        same = asyncio.create_task(ask(client, "n60"))
        status, calls = await ask(client, "b0")
        assert status == 503 and "check of its grammar for over 0.3 s" in calls["error"]["message"]
        assert (await same)[0] == 503 and (await slow)[0] == 400
        assert await ask(client, "n60") == await slow and checks == ["n60"]
        assert (await ask(client, "b0"))[0] == 200 and service.limiter.num_waiting == 0


async def test_disconnect_does_not_wait_for_grammar_check(checks: list[str]) -> None:
    body = json.dumps({"prompt": [5], "max_tokens": 1, "guided_regex": "b0"}).encode()
    fields = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": fields, "query_string": b""}

    service = scripted()
    async with running(service) as client:
        slow = asyncio.create_task(ask(client, "a150"))
        while not checks:
            await asyncio.sleep(0.01)
        left, parts = asyncio.Event(), [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if parts:
                return parts.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(_message: Any) -> None:
            """Drop the message: the client has disconnected."""

        requests = asyncio.create_task(new_app(service, "test")(scope, receive, send))
        while not service.limiter.num_waiting:
            assert not slow.done(), "the check ended before the second request came"
            await asyncio.sleep(0.01)
        left.set()
        await requests
        assert not slow.done() and service.limiter.num_waiting == 0
        assert (await slow)[0] == 200 and checks == ["a150"] and not service.open


async def test_lock_granted_to_canceled_task_goes_to_next() -> None:
    lock, had = FairLock(), []

    async def work(owner: str) -> None:
        async with lock.hold(owner, 5):
            had.append(owner)
            await asyncio.sleep(0)

    tasks = {owner: asyncio.create_task(work(owner)) for owner in "abc"}
    while not had:
        await asyncio.sleep(0)
    while lock.num_waiting("b"):
        await asyncio.sleep(0)
    tasks["b"].cancel()  # it was granted the lock and has not run yet
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert had == ["a", "c"] and not lock.num_waiting("c")


async def test_oversized_prompt_is_refused_before_tokenization(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    real = TokenizerPool._encode

    def encode(self: TokenizerPool, text: str, add_special_tokens: bool) -> list[int]:
        read.append(len(text))
        return real(self, text, add_special_tokens)

    monkeypatch.setattr(TokenizerPool, "_encode", encode)
    endless = "\n" * (1 + HELLO.max_context * 4 * 32)  # of the longest token, and what NFC may make shorter

    async with running(scripted(chat_template="{{ messages[0].content }}")) as client:
        chat = {"messages": [{"role": "user", "content": endless}]}
        for path, body in [
            ("/v1/completions", {"prompt": endless}),
            ("/v1/completions", {"prompt": ["short", endless]}),
            ("/v1/chat/completions", chat),
            ("/v1/responses", {"input": endless}),
            ("/v1/messages", chat | {"max_tokens": 4}),
        ]:
            answer = await client.post(path, json=body)
            assert answer.status_code == 400 and not read, (path, answer.text)
            assert "maximum context length is 2048 tokens" in answer.json()["error"]["message"], path
        for path in ("/tokenize", "/v1/messages/count_tokens"):  # whose texts need not fit
            answer = await client.post(path, json=chat)
            assert answer.status_code == 200 and read.pop() == len(endless)


async def test_oversized_prompt_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, real = [], TokenizerPool.decode

    def decode(self: TokenizerPool, token_ids: list[int], **options: bool) -> str:
        lengths.append(len(token_ids))
        return real(self, token_ids, **options)

    monkeypatch.setattr(TokenizerPool, "decode", decode)

    async with running(scripted()) as client:
        body = {"prompt": [[300] * 9, [300] * 9999], "echo": True, "max_tokens": 1}
        answer = await client.post("/v1/completions", json=body)
        assert answer.json()["error"]["code"] == "context_length_exceeded" and 9999 not in lengths
        assert (await client.post("/v1/completions", json=body | {"prompt": [300] * 9})).status_code == 200
        assert 9 in lengths


async def test_long_texts_are_bounded_and_do_not_delay_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, real = threading.Event(), TokenizerPool._encode

    def encode(self: TokenizerPool, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) > LONG:
            goes_on.wait(10)
        return real(self, text, add_special_tokens)

    monkeypatch.setattr(TokenizerPool, "_encode", encode)

    service = scripted(max_queue=4)
    async with running(service) as client:
        body = {"prompt": "a " * (LONG // 2 + 1)}
        long = [asyncio.create_task(client.post("/tokenize", json=body)) for _ in range(3)]
        while service.limiter.num_waiting < 3:
            await asyncio.sleep(0.01)
        short = await client.post("/v1/completions", json={"prompt": "return " * 700, "max_tokens": 1})
        assert short.status_code == 200, short.text
        long.append(asyncio.create_task(client.post("/tokenize", json=body)))
        while service.limiter.num_waiting < 4:
            await asyncio.sleep(0.01)
        for path in ("/v1/completions", "/tokenize"):
            refused = await client.post(path, json={"prompt": "return " * 700})
            assert refused.status_code == 429 and refused.headers["retry-after"]
        goes_on.set()
        assert [answer.status_code for answer in await asyncio.gather(*long)] == [200] * 4
        assert service.limiter.num_waiting == 0


def test_nfc_shrinks_text_by_declared_factor_at_most() -> None:
    forms: dict[str, str] = {}  # what each letter that is not its own canonical decomposition is made of
    for letter in map(chr, range(sys.maxunicode + 1)):
        if not "\ud800" <= letter <= "\udfff" and not unicodedata.is_normalized("NFD", letter):
            forms[letter] = unicodedata.normalize("NFD", letter)
    longest = {part: len(part.encode()) for form in forms.values() for part in form}
    for letter, form in forms.items():
        if len(form) == 1:
            longest[form] = max(longest[form], len(letter.encode()))
    whole = set(map(unicodedata.normalize, ["NFC"] * len(forms), forms))
    assert all(len(letter.encode()) <= sum(longest[part] for part in form) for letter, form in forms.items())
    letters = {letter for text in whole for letter in text} | longest.keys()
    made = {letter: forms.get(letter, letter) for letter in letters}
    actual = max(sum(longest[part] for part in form) / len(letter.encode()) for letter, form in made.items())
    assert 3 < actual <= NFC_SHRINKS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda item: None, 32 * NFC_SHRINKS),
        (lambda item: item.update(normalizer=None), 32),
        (lambda item: item["added_tokens"][0].update(content="é" * 20), 40 * NFC_SHRINKS),
        (lambda item: item["added_tokens"][0].update(rstrip=True), None),
        (lambda item: item.update(normalizer={"type": "NFKC"}), None),
        (lambda item: item.update(normalizer={"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}), None),
        (lambda item: item["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed"), None),
        (lambda item: item["pre_tokenizer"]["pretokenizers"].pop(), None),
        (lambda item: item.update(pre_tokenizer=None), None),
        (lambda item: item["model"]["vocab"].pop("Ġ"), None),
        (lambda item: item.update(model={"type": "Unigram", "vocab": []}), None),
    ],
)
def test_longest_token_is_known_only_if_certain(change: Any, message: int | None) -> None:
    item = json.loads(HELLO.tokenizer)
    change(item)
    assert longest_token(json.dumps(item)) == message
