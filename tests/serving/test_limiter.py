"""Bounds on open and waiting work: per request, per API key, and in total."""

import contextlib
import hashlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from detcompile.serving.http_errors import HTTPError
from detcompile.serving.limiter import AdmissionLimiter, Reservation, Slot
from detcompile.serving.metrics import Metrics
from tests.draws import seed_of_run
from tests.serving.instant_fleet import InstantFleet
from tests.serving.test_slots import CHAT, Kind, serving

QUEUE, TOKENS = 8, 100


def limiter_of(keys: Sequence[str] = ()) -> tuple[AdmissionLimiter, Metrics]:
    metrics = Metrics(InstantFleet(), QUEUE, TOKENS)
    return AdmissionLimiter(QUEUE, TOKENS, metrics, keys), metrics


def status(limiter: AdmissionLimiter, owner: str, num_samples: int, lengths: Sequence[int]) -> int:
    """What a request gets."""
    try:
        limiter.require(owner, num_samples, lengths)
    except HTTPError as error:
        return error.status
    return 200


def test_slot_taken_after_release_is_freed_at_once() -> None:
    limiter, metrics = limiter_of()
    reservation, other = Reservation(), Reservation()
    reservation.add(limiter.take("", 2, 30).release)
    assert b"detcompile:open_slots 2.0" in metrics.text() and b"detcompile:queued_tokens 30.0" in metrics.text()
    reservation.move_to(other)
    reservation.release()
    assert (limiter.num_open, limiter.num_queued) == (2, 30)
    other.release()
    other.release()
    other.add(limiter.take("", 1, 10).release)
    reservation.add(limiter.take("", 1, 10).release)
    assert (limiter.num_open, limiter.num_queued) == (0, 0)


def test_prompts_above_total_bound_are_refused_unless_alone() -> None:
    limiter, _ = limiter_of()
    assert status(limiter, "", 2, [TOKENS, 1]) == 400 and status(limiter, "", 2, [TOKENS - 1, 1]) == 200
    assert status(limiter, "", QUEUE + 1, [1]) == 400
    longer = [TOKENS * 9]
    slot = limiter.take("", 1, 1)
    assert status(limiter, "", 1, longer) == 429  # something else waits
    slot.begin()
    assert status(limiter, "", 1, longer) == 200
    slot = limiter.take("", 1, *longer)
    assert limiter.num_queued == TOKENS and status(limiter, "", 1, [1]) == 429
    slot.begin()
    assert limiter.num_queued == 0 and status(limiter, "", 1, [1]) == 200


def test_one_key_gets_half_of_the_bound_at_most() -> None:
    limiter, _ = limiter_of("ab")
    assert status(limiter, "a", QUEUE // 2 + 1, [1]) == 400 and status(limiter, "a", 2, [TOKENS // 2, 1]) == 400
    slots = [limiter.take("a", 1, TOKENS)]  # counts as half
    assert limiter.num_queued == TOKENS // 2
    assert status(limiter, "a", 1, [1]) == 429 and status(limiter, "b", 1, [TOKENS]) == 200
    slots += [limiter.take("a", 1, 0) for _ in range(QUEUE // 2 - 1)]
    slots[0].begin()
    with pytest.raises(HTTPError, match="4 answers of this API key are open") as refused:
        limiter.require("a", 1)
    assert refused.value.headers["Retry-After"]
    assert status(limiter, "b", QUEUE // 2, [1] * 4) == 200
    for slot in slots:
        slot.release()
    assert not limiter._owners and limiter.num_open == 0


@pytest.mark.parametrize("keys", ["", "a"])
def test_only_key_gets_the_whole_bound(keys: str) -> None:
    limiter, _ = limiter_of(keys)
    assert status(limiter, keys, QUEUE, [TOKENS // QUEUE] * QUEUE) == 200


def test_one_key_cannot_block_another() -> None:
    """Whatever one key requests, another can always get half of the bound."""
    limiter, _ = limiter_of("ab")
    draw, slots = random.Random(seed_of_run()), list[Slot]()
    for _ in range(2000):
        lengths = [draw.randint(1, draw.choice([9, 60, 300])) for _ in range(draw.randint(1, 5))]
        samples = draw.randint(1, 3)
        if status(limiter, "a", len(lengths) * samples, lengths) == 200:
            slots += [limiter.take("a", samples, length) for length in lengths]
        if slots and draw.random() < 0.4:
            slot = slots.pop(draw.randrange(len(slots)))
            slot.begin()
            slot.release()
        assert status(limiter, "b", QUEUE // 2, [TOKENS // QUEUE] * (QUEUE // 2)) == 200


LONG = "hello " * 800
TEXTS = {
    "/v1/completions": {"prompt": LONG},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/messages": CHAT | {"messages": [{"role": "user", "content": LONG}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/responses": {"input": LONG},
    "/tokenize": {"prompt": LONG},
    "/v1/tokenize": {"messages": [{"role": "user", "content": LONG}]},
    "/detokenize": {"tokens": [5] * 5000},
    "/v1/embeddings": {"input": LONG},
    "/v1/score": {"text_1": "a", "text_2": LONG},
    "/v1/rerank": {"query": "a", "documents": [LONG]},
}


@pytest.mark.parametrize("path", TEXTS)
async def test_tokenizer_waits_count_toward_api_key(path: str, tmp_path: Path) -> None:
    kind = Kind(path, TEXTS[path], {"x-api-key": "a"}, embeds=path in ("/v1/embeddings", "/v1/score", "/v1/rerank"))
    owners: list[str] = []

    @contextlib.contextmanager
    def waiting(owner: str) -> Iterator[None]:
        owners.append(owner)
        yield

    async with serving(kind, tmp_path, [hashlib.sha256(b"a").digest()]) as (service, requests):
        service.texts._waiting = waiting
        await requests.ask()
    assert owners and set(owners) == {hashlib.sha256(b"a").hexdigest()}
