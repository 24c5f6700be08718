"""What no engine sees yet: grammars that are checked first, and texts that are tokenized; both wait within bounds."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from detcompile.digests import fingerprint
from detcompile.runtime.grammars.compiler import llguidance_version
from detcompile.serving.grammar_check import GrammarCheck
from detcompile.serving.journal.journal import Journal
from detcompile.serving.plain_tokenizer import tokenizer_digest
from detcompile.serving.receipts.envelope import seal
from detcompile.serving.receipts.receipt import Prompt, Receipt, Sample, Served, WrittenGrammar, encode_receipt
from tests.serving.scripted_engine import HELLO
from tests.serving.scripted_service import running, scripted

pytestmark = pytest.mark.usefixtures("in_the_root")


def grammar(source: str) -> WrittenGrammar:
    return WrittenGrammar(kind="regex", source=source, hashed=False, llguidance=llguidance_version())


def envelope_of(**fields: Any) -> dict[str, Any]:
    """An unsigned receipt of the scripted engine, as POST /v1/verify takes it."""
    sample = Sample(index=0, token_ids=[40], finish_reason="length", stop_reason=None, text=None, logprobs=None)
    served = Served(detcompile="1", tokenizer=tokenizer_digest(HELLO.tokenizer), chat_template=None)
    own: dict[str, Any] = {"id": "cmpl-1", "created": 1, "model": "scripted", "level": "tokens", "params": {}}
    prompts = [Prompt(token_ids=[5], logprobs=None, samples=[sample])]
    parts = {"fingerprint": fingerprint({}), "fingerprint_parts": {}}
    receipt = Receipt(**own | parts | {"served": served, "seed": "1", "prompts": prompts} | fields)
    return msgspec.to_builtins(seal(encode_receipt(receipt), None))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"grammar": grammar("(")}, "regex cannot be served"),
        ({"params": {"stop": [f"stop {number}" for number in range(65)]}}, "over 64 stop strings"),
    ],
    ids=["a grammar", "stop strings"],
)
def test_an_engine_gets_no_receipt_that_would_ruin_it(fields: dict[str, Any], said: str) -> None:
    async def scenario() -> None:
        async with running(scripted(timeout=5.0)) as client:  # the scripted engine answers no Verify
            answer = await client.post("/v1/verify", json=envelope_of(**fields))
            assert answer.status_code == 400 and said in answer.json()["error"]["message"], answer.text

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_a_grammar_of_the_journal_is_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []

    async def require(self: GrammarCheck, grammar: Any, *_options: Any) -> None:
        checked.append("" if grammar is None else grammar.source)

    monkeypatch.setattr(GrammarCheck, "require", require)
    body = {"prompt": [5], "max_tokens": 400, "guided_regex": "a+"}

    async def scenario() -> None:
        for _ in range(2):
            service = scripted(journal=Journal(tmp_path / "journal"))
            async with running(service) as client:
                asked = client.post("/v1/completions", json=body, headers={"Idempotency-Key": "a"})
                task = asyncio.create_task(asked)
                while not any(answer.num_tokens for answer in service.open.values()):
                    await asyncio.sleep(0.01)
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(asyncio.wait_for(scenario(), 20))
    assert checked == ["a+", "a+"]
