"""TokenizerPool: the front's tokenizer: prompts to token ids, tokens to text and to the bytes of OpenAI's logprobs."""

import asyncio
import functools
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from tokenizers import Tokenizer, decoders, pre_tokenizers

from detcompile.errors import InvalidInput
from detcompile.runtime.requests.detokenizer import Detokenizer
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.serving.engines.answers import AnswerSample
from detcompile.serving.engines.protocol import Hello
from detcompile.serving.http_errors import too_long
from detcompile.serving.plain_tokenizer import longest_token

__all__ = ["SampleText", "TokenizerPool"]

SHORT = 4096  # letters, or tokens; what is longer is read in a thread, as others wait
LONG = 1 << 16  # letters, or tokens; what is longer is read in threads of its own, as others would wait behind it
THREADS = 4
LONG_THREADS = 2
HALF_PAIR = "the tokenizer cannot read the text: it holds half of a surrogate pair"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
Found = TypeVar("Found")


class TokenizerPool:
    """Reads and writes text with the engine's tokenizer. What Detokenizer asks of one of transformers is here, too.

    Args:
        hello: what the engine said of its tokenizer.
        waiting: counts a long text as long as it is read, given the owner of the API key that asks, or refuses it.

    Attributes:
        present: whether there is a tokenizer; without one prompts are token ids, and answers have no text.
    """

    def __init__(self, hello: Hello, waiting: Callable[[str], AbstractContextManager[Any]] = nullcontext) -> None:
        self.present = hello.tokenizer is not None
        self.all_special_ids = frozenset(hello.special_ids)  # shared by all detokenizers
        self.backend_tokenizer = None if hello.tokenizer is None else Tokenizer.from_str(hello.tokenizer)
        if self.backend_tokenizer is not None:
            self.backend_tokenizer.encode_special_tokens = hello.split_special_tokens
        joins_bytes = self.present and isinstance(self._backend.decoder, decoders.ByteLevel)
        self._byte_of = _byte_letters() if joins_bytes else None
        self._added = {} if self.backend_tokenizer is None else self.backend_tokenizer.get_added_tokens_decoder()
        self._max_context = hello.max_context
        longest = None if hello.tokenizer is None else longest_token(hello.tokenizer)
        self._most_bytes = None if longest is None else longest * hello.max_context
        self._waiting = waiting
        self._threads = ThreadPoolExecutor(THREADS, "tokenizer"), ThreadPoolExecutor(LONG_THREADS, "long-tokenizer")

    def stop(self) -> None:
        """Read no more long texts."""
        for threads in self._threads:
            threads.shutdown(wait=False, cancel_futures=True)

    @property
    def _backend(self) -> Tokenizer:
        if self.backend_tokenizer is None:
            raise InvalidInput("this model has no tokenizer: give token ids, and no text")
        return self.backend_tokenizer

    async def encode(self, text: str, *, add_special_tokens: bool = True, owner: str = "") -> list[int]:
        """Token ids of a text.

        Args:
            owner: sha256 of the API key that asks.

        Raises:
            InvalidInput: there is no tokenizer, or it cannot read the text. HTTPError: no room for a long one.
        """
        if len(text) > SHORT:
            return await self._in_thread(owner, len(text), self._encode, text, add_special_tokens)
        return self._encode(text, add_special_tokens)

    def require_fit(self, *parts: str, param: str) -> None:
        """Reject, before it is tokenized, a prompt that has more tokens than the context, whatever they are.

        Args:
            param: the field that it stands in.

        Raises:
            HTTPError: how long it is.
        """
        if self._most_bytes is None or 4 * sum(map(len, parts)) <= self._most_bytes:  # UTF-8 has 4 bytes a letter
            return
        size = sum(len(part.encode(errors="surrogatepass")) for part in parts)
        if size > self._most_bytes:
            raise too_long(f"{size} bytes, which are more tokens", self._max_context, param)

    async def ids_of(
        self, prompts: Sequence[str | list[int]], add_special_tokens: bool = True, *, param: str, owner: str = ""
    ) -> list[list[int]]:
        """Return the token ids of prompts that may be these already. Others are served between two of many.

        Raises:
            InvalidInput, HTTPError: as of ``encode`` and ``require_fit``.
        """
        for prompt in prompts:
            if isinstance(prompt, str):
                self.require_fit(prompt, param=param)
        found: list[list[int]] = []
        for prompt in prompts:
            if found:
                await asyncio.sleep(0)
            if isinstance(prompt, str):
                prompt = await self.encode(prompt, add_special_tokens=add_special_tokens, owner=owner)
            found.append(prompt)
        return found

    def require_answer(self, token_ids: Sequence[int], param: str) -> None:
        """Reject a prompt that leaves no room for a token of its answer.

        Raises:
            HTTPError: how long it is.
        """
        if len(token_ids) >= self._max_context:
            raise too_long(f"{len(token_ids)} tokens", self._max_context, param)

    async def encode_pair(self, first: str, second: str, *, param: str, owner: str = "") -> tuple[list[int], list[int]]:
        """Return the token ids of two texts that are read together, and to which of the two each belongs.

        Raises:
            InvalidInput, HTTPError: as of ``encode`` and ``require_fit``.
        """
        self.require_fit(first, second, param=param)
        if len(first) + len(second) > SHORT:
            return await self._in_thread(owner, len(first) + len(second), self._encode_pair, first, second)
        await asyncio.sleep(0)  # there may be many
        return self._encode_pair(first, second)

    async def text_of(self, token_ids: list[int], *, owner: str = "") -> str:
        """The text of tokens, special ones too.

        Raises:
            InvalidInput: there is no tokenizer. HTTPError: no room for many tokens.
        """
        if len(token_ids) > SHORT:
            read = functools.partial(self.decode, skip_special_tokens=False)
            return await self._in_thread(owner, len(token_ids), read, token_ids)
        return self.decode(token_ids, skip_special_tokens=False)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True, **_options: bool) -> str:
        """The text of tokens."""
        if len(token_ids) > SHORT:
            return str(self._backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0])
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        """A token as it stands in the vocabulary."""
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def special_id(self, text: str) -> int | None:
        """The id of a special token by its text; None where it is none."""
        found = None if self.backend_tokenizer is None else self.backend_tokenizer.token_to_id(text)
        return found if found is not None and found in self._added and self._added[found].special else None

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text, as far as it can be told without its neighbours."""
        if not self.present:
            return b""
        token = self.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if token_id not in self._added:
            if self._byte_of is not None and all(letter in self._byte_of for letter in token):
                return bytes(self._byte_of[letter] for letter in token)
            if match := BYTE_TOKEN.fullmatch(token):
                return bytes.fromhex(match[1])
        return self.decode([token_id], skip_special_tokens=False).encode()

    def name_of(self, token_id: int) -> str:
        """A token as OpenAI's logprobs name it: its text, or its bytes where they are no text of their own."""
        if not self.present:
            return f"token_id:{token_id}"
        found = self.bytes_of(token_id)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    async def _in_thread(self, owner: str, size: int, work: Callable[..., Found], *arguments: Any) -> Found:
        with self._waiting(owner):
            threads = self._threads[size > LONG]
            return await asyncio.get_running_loop().run_in_executor(threads, work, *arguments)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            ids: list[int] = _encoded(self._backend, text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidInput(HALF_PAIR) from error
        return ids

    def _encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        try:
            found = _encoded(self._backend, (first, second))
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidInput(HALF_PAIR) from error
        return found.ids, found.type_ids


def _encoded(backend: Tokenizer, text: str | tuple[str, str], **options: bool) -> Any:
    """A text or a pair, tokenized. ``encode`` would keep all other threads from running, as a batch does not."""
    first, second = (text, None) if isinstance(text, str) else text
    if len(first) + len(second or "") > SHORT:
        return backend.encode_batch([text], **options)[0]
    return backend.encode(first, second, **options)


class SampleText:
    """The text of one sample as its tokens come, cut at stop strings where the engine cuts them."""

    def __init__(self, texts: TokenizerPool, params: SamplingParams, sample: AnswerSample) -> None:
        self._detokenizer: Any = Detokenizer(texts, params) if texts.present else None
        self._sample = sample
        self._finished = False
        self.num_read = 0  # tokens taken so far

    async def rest(self) -> tuple[str, slice]:
        """What ``take`` gives of a sample that has ended. Others are served too: it may be long, or one of many."""
        if len(self._sample.token_ids) - self.num_read > SHORT:
            return await asyncio.to_thread(self.take)
        await asyncio.sleep(0)
        return self.take()

    def take(self, end: int | None = None) -> tuple[str, slice]:
        """Text that is new, and which tokens are; the rest of it once the sample has ended.

        Args:
            end: tokens of the sample to read, as if there were no more; None for all.
        """
        sample, start = self._sample, self.num_read
        self.num_read = len(sample.token_ids) if end is None else end
        read = slice(start, self.num_read)
        if self._finished or self._detokenizer is None:
            return "", read
        ended = sample.finish_reason is not None and end is None
        silent = ended and isinstance(sample.stop_reason, int)  # the token that ended it is not in the text
        new = sample.token_ids[start : self.num_read - silent]
        self._finished = ended
        if not ended:
            return self._detokenizer.append(new), read
        if start > 0:  # the parts of a stream are not kept
            return self._detokenizer.finish(new), read
        if sample.text is None:
            sample.text = self._detokenizer.finish(new)
        return sample.text, read


@functools.cache
def _byte_letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for: printable ones for themselves, then the rest."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(rest)}
    assert letters.keys() == set(pre_tokenizers.ByteLevel.alphabet())
    return letters
