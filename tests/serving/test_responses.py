"""/v1/responses by the unmodified client: created, streamed and resumed, with the text of the chat."""

import asyncio
import hashlib
import io
import json
import time
from typing import Any

import httpx
import openai
import pydantic
import pytest

from detcompile.reasoning.formats import Piece
from detcompile.serving.app import new_app
from detcompile.serving.openai.response_output import ResponseOutput
from detcompile.serving.owned_cache import KEPT_BYTES, KEPT_SECONDS, KeptResponses
from tests.serving.conftest import Server
from tests.serving.scripted_service import running, scripted
from tests.serving.test_tools import ADD, SUB, check

ASKED: dict[str, Any] = {"model": "tiny", "input": "Write a function.", "temperature": 0.9, "max_output_tokens": 24}
SEED = {"extra_body": {"seed": 4}}
TOOLS = [
    {"type": "function", "name": "add", "parameters": ADD, "strict": True},
    {"type": "function", "name": "sub", "parameters": SUB, "strict": False},
]


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0)


def digest_of(response) -> str:
    """sha256 of a response without the parts that differ each time."""
    items = [item.model_dump(exclude={"id", "call_id"}) for item in response.output]
    return hashlib.sha256(json.dumps([items, response.status], sort_keys=True).encode()).hexdigest()


def test_response_equals_chat_on_every_path(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": ASKED["input"]}], temperature=0.9, max_tokens=24, seed=4
    )
    whole = client.responses.create(**ASKED, **SEED)
    messages = [{"role": "user", "content": ASKED["input"]}]
    ids = client.post("/tokenize", body={"messages": messages}, cast_to=object)["tokens"]
    completion = client.completions.create(model="tiny", prompt=ids, temperature=0.9, max_tokens=24, seed=4)
    assert whole.output_text == completion.choices[0].text
    assert whole.output_text == chat.choices[0].message.content and whole.seed == 4
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage.output_tokens == 24 and whole.system_fingerprint == chat.system_fingerprint
    digests = {"whole": digest_of(whole), "kept": digest_of(client.responses.retrieve(whole.id))}
    with client.responses.stream(**ASKED, **SEED) as stream:
        events = list(stream)
        digests["stream"] = digest_of(events[-1].response)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:4]] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text and events[-1].type == "response.incomplete"
    background = client.responses.create(background=True, **ASKED, **SEED)
    assert background.status == "in_progress" and background.output == []
    while background.status == "in_progress":
        time.sleep(0.05)
        background = client.responses.retrieve(background.id)
    digests["background"] = digest_of(background)
    parts = [{"role": "user", "content": [{"type": "input_text", "text": ASKED["input"]}]}]
    digests["parts"] = digest_of(client.responses.create(**ASKED | {"input": parts}, **SEED))
    assert set(digests.values()) == {digests["whole"]}, digests


@pytest.mark.parametrize("background", [True, False])
def test_lost_stream_resumes_where_it_ended(client: openai.OpenAI, background: bool) -> None:
    requests = ASKED | {"max_output_tokens": 60}
    whole = client.responses.create(**requests, **SEED)
    known = list(client.responses.create(stream=True, background=background, **requests, **SEED))
    name = known[0].response.id
    for cut in (0, 1, 4, len(known) - 2, len(known) - 1):
        again = list(client.responses.retrieve(name, stream=True, starting_after=known[cut].sequence_number))
        assert again == known[cut + 1 :]
    assert list(client.responses.retrieve(name, stream=True)) == known
    assert digest_of(client.responses.retrieve(name)) == digest_of(whole) == digest_of(known[-1].response)


def test_closed_stream_continues_in_background(client: openai.OpenAI) -> None:
    requests = ASKED | {"max_output_tokens": 200}
    whole = client.responses.create(**requests, **SEED)
    seen = []
    with client.responses.create(stream=True, background=True, **requests, **SEED) as stream:
        for event in stream:
            seen.append(event)
            if len(seen) == 6:
                break
    name, last = seen[0].response.id, seen[-1].sequence_number
    rest = list(client.responses.retrieve(name, stream=True, starting_after=last))
    assert [event.sequence_number for event in seen + rest] == list(range(len(seen) + len(rest)))
    text = "".join(event.delta for event in seen + rest if event.type == "response.output_text.delta")
    assert text == whole.output_text and digest_of(rest[-1].response) == digest_of(whole)


def test_disconnect_cancels_response(client: openai.OpenAI, http: httpx.Client) -> None:
    with client.responses.create(stream=True, **ASKED | {"max_output_tokens": 1900}) as stream:
        name = next(iter(stream)).response.id
    end = time.monotonic() + 30
    while (actual := http.get(f"/v1/responses/{name}").json())["status"] == "in_progress":
        assert time.monotonic() < end
        time.sleep(0.05)
    assert actual["status"] == "cancelled"


def test_response_can_be_canceled_and_deleted(client: openai.OpenAI) -> None:
    response = client.responses.create(background=True, **ASKED | {"max_output_tokens": 1900})
    assert client.responses.cancel(response.id).status == "cancelled"
    assert client.responses.retrieve(response.id).status == "cancelled"
    done = client.responses.create(**ASKED, **SEED)
    assert digest_of(client.responses.cancel(done.id)) == digest_of(done)  # it had ended
    client.responses.delete(done.id)
    with pytest.raises(openai.NotFoundError, match="unknown response id"):
        client.responses.retrieve(done.id)
    unkept = client.responses.create(store=False, **ASKED, **SEED)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_are_separate_items(client: openai.OpenAI, stream: bool) -> None:
    requests = ASKED | {
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_output_tokens": 200,
    }
    if stream:
        with client.responses.stream(**requests, **SEED) as events:
            arguments = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
            response = events.get_final_response()
        assert arguments == response.output[0].arguments
    else:
        response = client.responses.create(**requests, **SEED)
    [call] = response.output
    check(type("Call", (), {"function": call}))
    assert call.type == "function_call" and call.call_id.startswith("call_") and response.status == "completed"
    items = [{"role": "user", "content": ASKED["input"]}, *(item.model_dump() for item in response.output)]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
    longer = client.responses.create(**ASKED | {"input": [*items, result], "tools": TOOLS}, **SEED)
    same = client.responses.create(
        previous_response_id=response.id, **ASKED | {"input": [result], "tools": TOOLS}, **SEED
    )
    assert digest_of(longer) == digest_of(same) and longer.usage.input_tokens == same.usage.input_tokens


class Answer(pydantic.BaseModel):
    """What the text is."""

    ok: bool


def test_parse_returns_class_and_logprobs_equal_chat(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(text_format=Answer, **ASKED | {"max_output_tokens": 100}, **SEED)
    assert isinstance(parsed.output_parsed, Answer)
    include = ["message.output_text.logprobs"]
    response = client.responses.create(top_logprobs=2, include=include, **ASKED, **SEED)
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": ASKED["input"]}], temperature=0.9, max_tokens=24, seed=4,
        logprobs=True, top_logprobs=2,
    )  # fmt: skip
    entries = [entry.model_dump() for entry in response.output[0].content[0].logprobs]
    assert entries == [entry.model_dump() for entry in chat.choices[0].logprobs.content]
    instructed = client.responses.create(instructions="Be brief.", **ASKED, **SEED)
    assert instructed.usage.input_tokens > response.usage.input_tokens


def test_async_client_reads_many_responses_at_once(server: Server, client: openai.OpenAI) -> None:
    expected = client.responses.create(**ASKED, **SEED).output_text

    async def one(single: openai.AsyncOpenAI) -> str:
        stream = await single.responses.create(stream=True, **ASKED, **SEED)
        return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])

    async def many() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as single:
            return await asyncio.gather(*(one(single) for _ in range(8)))

    assert set(asyncio.run(many())) == {expected}


def test_a_receipt_of_a_response_verifies(client: openai.OpenAI, http: httpx.Client) -> None:
    response = client.responses.create(**ASKED, **SEED)
    envelope = http.get(f"/v1/receipts/{response.id}").json()
    assert http.post("/v1/verify", json=envelope).json()["outcome"] == "equal"


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"input": []}, 400, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 400, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "input[0].content[0]"),
        ({"input": [{"content": "x"}]}, 400, "input[0].role"),
        ({"input": [{"type": "function_call", "name": "x"}]}, 400, "input[0].call_id"),
        ({"tools": [{"type": "web_search"}]}, 400, "tools[0].type"),
        ({"text": {"format": {"type": "json_schema"}}}, 400, "text.format.schema"),
        ({"previous_response_id": "resp_none"}, 404, "response_id"),
        ({"background": True, "store": False}, 400, "background"),
        ({"conversation": "x"}, 400, "conversation"),
        ({"truncation": "auto"}, 400, "truncation"),
        ({"temperature": -1}, 400, "temperature"),
        ({"model": "other"}, 404, "model"),
        ({"input": "word " * 4000}, 400, "input"),
    ],
)
def test_unsupported_fields_are_named(http: httpx.Client, changes: dict, status: int, param: str | None) -> None:
    for sent in (changes, changes | {"stream": True}):
        answer = http.post("/v1/responses", json=ASKED | sent)
        assert answer.status_code == status and answer.json()["error"]["param"] == param, answer.text
    assert http.post("/v1/responses/resp_none/cancel").status_code == 404
    known = http.post("/v1/responses", json=ASKED).json()["id"]
    for wrong in ("-1", "x"):
        answer = http.get(f"/v1/responses/{known}", params={"stream": "true", "starting_after": wrong})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "starting_after"


def test_failed_response_reports_error_and_is_logged(in_the_root: None) -> None:
    requests = {"input": "a", "max_output_tokens": 2000}

    async def scenario() -> tuple[list[httpx.Response], list[dict[str, Any]]]:
        log = io.StringIO()
        service = scripted(chat_template="{{ messages[0].content }}", timeout=0.6)
        app = new_app(service, "test", request_log=log)
        transport = httpx.ASGITransport(app)
        async with running(service), httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answers = [
                await client.post("/v1/responses", json=requests | {"stream": stream}) for stream in (False, True)
            ]
            answers.append(await client.post("/v1/responses", json=requests | {"max_output_tokens": 3}))
            name = answers[1].headers["x-request-id"]
            answers.append(await client.get(f"/v1/responses/{name}"))
            message = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2000, "stream": True}
            answers.append(await client.post("/v1/messages", json=message))
        return answers, [json.loads(line) for line in log.getvalue().splitlines()]

    (whole, stream, short, kept, message), lines = asyncio.run(asyncio.wait_for(scenario(), 30))
    assert whole.status_code == 504 and whole.json()["error"]["code"] == "timeout"
    last = json.loads(stream.text.split("data: ")[-1])
    assert last["type"] == "response.failed" and last["response"]["error"]["code"] == "timeout"
    assert kept.json() == last["response"] and kept.json()["output"][0]["status"] == "incomplete"
    assert short.json()["status"] == "incomplete" and short.json()["output"][0]["content"][0]["text"]
    event, _, error = message.text.strip().split("\n\n")[-1].partition("\ndata: ")
    assert (event, json.loads(error)["error"]["type"]) == ("event: error", "timeout_error")
    assert lines[2]["generated_tokens"] == 3 and lines[2]["id"] == short.json()["id"] and lines[1]["error"]


async def test_response_is_sent_after_it_is_recorded(in_the_root: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording ends after the answer, because its receipt is issued in between."""

    service = scripted(chat_template="{{ messages[0].content }}")
    issue = service.issue

    async def issue_late(job: Any) -> Any:
        await asyncio.sleep(0.05)
        return await issue(job)

    monkeypatch.setattr(service, "issue", issue_late)
    async with running(service) as http:
        for num_tokens in (1, 3):
            for store in (True, False):
                body = {"input": "a", "max_output_tokens": num_tokens, "store": store}
                response = (await http.post("/v1/responses", json=body)).json()
                assert response["status"] == "incomplete" and response["output"][0]["status"] == "incomplete"
                assert response["usage"]["output_tokens"] == num_tokens
                if store:
                    assert (await http.get(f"/v1/responses/{response['id']}")).json() == response


async def test_only_completed_response_can_be_continued(in_the_root: None) -> None:
    """An unfinished response has partial text that changes all the time."""

    async with running(scripted(chat_template="{{ messages[0].content }}", timeout=0.6)) as client:

        async def respond(**fields: Any) -> httpx.Response:
            return await client.post("/v1/responses", json={"input": "a", "max_output_tokens": 2} | fields)

        async def require_refused(name: str, why: str) -> None:
            refused = await respond(previous_response_id=name)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, "previous_response_id"), error
            assert error["message"].startswith(f"previous_response_id: this response {why}")

        long = {"background": True, "max_output_tokens": 2000}
        failing, cancelled = [(await respond(**long)).json()["id"] for _ in range(2)]
        await require_refused(failing, "still runs")
        await client.post(f"/v1/responses/{cancelled}/cancel")
        await require_refused(cancelled, "was canceled")
        while (await client.get(f"/v1/responses/{failing}")).json()["status"] == "in_progress":
            await asyncio.sleep(0.02)
        await require_refused(failing, "has failed")
        done = (await respond()).json()
        assert done["status"] == "incomplete"
        assert (await respond(previous_response_id=done["id"])).status_code == 200


def test_text_after_tool_call_is_a_new_message() -> None:
    output = ResponseOutput("resp_1")
    pieces = [Piece(None, None, "a"), Piece(None, None, "b"), Piece(0, "f", ""), Piece(0, None, "{}"),
              Piece(1, "g", "{}"), Piece(None, None, "c")]  # fmt: skip
    events = [event for piece in pieces for event in output.add(piece, [])] + output.close("completed")
    assert [item["type"] for item in output.items] == ["message", "function_call", "function_call", "message"]
    assert [output.items[0]["content"][0]["text"], output.items[3]["content"][0]["text"]] == ["ab", "c"]
    assert [item["arguments"] for item in output.items[1:3]] == ["{}", "{}"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == output.items and len({item["id"] for item in done}) == 4


class Kept:
    """A response that has ended."""

    def __init__(self, name: str, ended: float | None, num_bytes: int, owner: str = "me") -> None:
        self.owner, self.name, self.ended, self.num_bytes = owner, name, ended, num_bytes


def test_flood_of_one_key_evicts_only_its_own_responses() -> None:
    kept, now, size = KeptResponses(), time.monotonic(), KEPT_BYTES // 10
    kept.add(Kept("bob's", now - 99, 4 * size, "bob"))
    for number in range(40):
        kept.add(Kept(str(number), now - 90 + number, size, "alice"))
        assert kept.num_bytes <= KEPT_BYTES
    assert kept.find("bob", "bob's") is not None and kept.find("alice", "bob's") is None
    assert [number for number in range(40) if kept.find("alice", str(number)) is not None] == [*range(34, 40)]
    for number in range(4):  # it holds the most now
        kept.add(Kept(f"b{number}", now, size, "bob"))
    assert kept.find("bob", "bob's") is None and kept.find("alice", "39") is not None


def test_kept_responses_expire_and_are_bounded() -> None:
    kept, now = KeptResponses(), time.monotonic()
    kept.add(Kept("old", now - KEPT_SECONDS - 1, 1))
    assert kept.find("me", "old") is None
    for name, ended, size in (("runs", None, 2 * KEPT_BYTES), ("a", now - 3, KEPT_BYTES // 2), ("b", now - 2, 9)):
        kept.add(Kept(name, ended, size))
    kept.add(Kept("c", now - 1, KEPT_BYTES // 2))
    assert [kept.find("me", name) is not None for name in ("runs", "a", "b", "c")] == [True, False, True, True]
    kept.drop("you", "c")
    assert kept.find("you", "c") is None and kept.find("me", "c") is not None
    kept.drop("me", "c")
    kept.drop("me", "c")
    assert kept.find("me", "c") is None
