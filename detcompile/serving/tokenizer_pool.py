"""The front end's tokenizer: prompts to token ids, tokens to text and to the bytes of OpenAI's logprobs."""

import asyncio
import functools
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from tokenizers import Tokenizer, decoders, pre_tokenizers

from detcompile.errors import InvalidInput
from detcompile.reasoning.formats import Vocabulary
from detcompile.runtime.requests.detokenizer import Detokenizer
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.serving.engines.answers import AnswerSample
from detcompile.serving.engines.protocol import Hello
from detcompile.serving.http_errors import HTTPError, too_long
from detcompile.serving.plain_tokenizer import longest_token

SHORT = 4096  # characters or tokens; longer inputs run in a thread, so that the event loop stays free
LONG = 1 << 16  # characters or tokens; longer inputs have separate threads, so that shorter ones do not wait
THREADS = 4
LONG_THREADS = 2
LONE_SURROGATE = "the tokenizer cannot read the text: it contains a lone surrogate"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
Result = TypeVar("Result")


class TokenizerPool:
    """Encodes and decodes with the engine's tokenizer.

    Also implements what Detokenizer needs of a transformers tokenizer.

    Args:
        hello: the engine's description of its tokenizer.
        waiting: counts a long text while it is encoded, given the owner of its API key; may refuse it.

    Attributes:
        present: whether there is a tokenizer. Without one, prompts are token ids and answers have no text.
        vocabulary: ids of markers.
    """

    def __init__(self, hello: Hello, waiting: Callable[[str], AbstractContextManager[Any]] = nullcontext) -> None:
        self.present = hello.tokenizer is not None
        self.all_special_ids = frozenset(hello.special_ids)  # shared by all detokenizers
        self.backend_tokenizer = None if hello.tokenizer is None else Tokenizer.from_str(hello.tokenizer)
        if self.backend_tokenizer is not None:
            self.backend_tokenizer.encode_special_tokens = hello.split_special_tokens
        joins_bytes = self.present and isinstance(self._backend.decoder, decoders.ByteLevel)
        self._byte_of = _byte_letters() if joins_bytes else None
        self.vocabulary = Vocabulary(self.backend_tokenizer)
        self._max_context = hello.max_context
        self._vocab_size = hello.vocab_size
        longest = None if hello.tokenizer is None else longest_token(hello.tokenizer)
        self._most_bytes = None if longest is None else longest * hello.max_context
        self._waiting = waiting
        self._threads = ThreadPoolExecutor(THREADS, "tokenizer"), ThreadPoolExecutor(LONG_THREADS, "long-tokenizer")

    def stop(self) -> None:
        """Cancel queued work."""
        for threads in self._threads:
            threads.shutdown(wait=False, cancel_futures=True)

    @property
    def _backend(self) -> Tokenizer:
        if self.backend_tokenizer is None:
            raise InvalidInput("this model has no tokenizer: give token ids instead of text")
        return self.backend_tokenizer

    async def encode(self, text: str, *, add_special_tokens: bool = True, owner: str = "") -> list[int]:
        """Return the token ids of a text.

        Args:
            owner: sha256 of the request's API key.

        Raises:
            InvalidInput: there is no tokenizer, or it cannot read the text.
            HTTPError: too many long texts are waiting.
        """
        if len(text) > SHORT:
            return await self._in_thread(owner, len(text), self._encode, text, add_special_tokens)
        return self._encode(text, add_special_tokens)

    def require_fit(self, *parts: str, param: str) -> None:
        """Reject a prompt with more tokens than the context before tokenizing it, by its size in bytes.

        Args:
            param: the request field.

        Raises:
            HTTPError: states the prompt's length.
        """
        if self._most_bytes is None or 4 * sum(map(len, parts)) <= self._most_bytes:  # at most 4 bytes per character
            return
        size = sum(len(part.encode(errors="surrogatepass")) for part in parts)
        if size > self._most_bytes:
            raise too_long(f"{size} bytes, which are more tokens", self._max_context, param)

    async def ids_of(
        self, prompts: Sequence[str | list[int]], add_special_tokens: bool = True, *, param: str, owner: str = ""
    ) -> list[list[int]]:
        """Return the token ids of prompts, each a text or token ids already. Yields to the event loop between prompts.

        Raises:
            InvalidInput, HTTPError: see ``encode`` and ``require_fit``.
        """
        for prompt in prompts:
            if isinstance(prompt, str):
                self.require_fit(prompt, param=param)
        encoded: list[list[int]] = []
        for prompt in prompts:
            if encoded:
                await asyncio.sleep(0)
            if isinstance(prompt, str):
                prompt = await self.encode(prompt, add_special_tokens=add_special_tokens, owner=owner)
            encoded.append(prompt)
        return encoded

    def require_answer(self, token_ids: Sequence[int], param: str) -> None:
        """Reject a prompt that leaves no room for an answer token.

        Raises:
            HTTPError: states the prompt's length.
        """
        if len(token_ids) >= self._max_context:
            raise too_long(f"{len(token_ids)} tokens", self._max_context, param)

    async def encode_pair(self, first: str, second: str, *, param: str, owner: str = "") -> tuple[list[int], list[int]]:
        """Return the token ids of two texts encoded as a pair, and each token's segment.

        Raises:
            InvalidInput, HTTPError: see ``encode`` and ``require_fit``.
        """
        self.require_fit(first, second, param=param)
        if len(first) + len(second) > SHORT:
            return await self._in_thread(owner, len(first) + len(second), self._encode_pair, first, second)
        await asyncio.sleep(0)  # there may be many
        return self._encode_pair(first, second)

    async def text_of(self, token_ids: list[int], *, owner: str = "") -> str:
        """Return the text of tokens, including special ones.

        Raises:
            InvalidInput: there is no tokenizer.
            HTTPError: too many long inputs are waiting.
        """
        if len(token_ids) > SHORT:
            decode = functools.partial(self.decode, skip_special_tokens=False)
            return await self._in_thread(owner, len(token_ids), decode, token_ids)
        return self.decode(token_ids, skip_special_tokens=False)

    async def tokens_of(self, token_ids: list[int], *, owner: str = "") -> list[str | None]:
        """Return tokens as they stand in the vocabulary.

        Raises:
            InvalidInput, HTTPError: as of ``text_of``.
        """
        if len(token_ids) > SHORT:
            return await self._in_thread(owner, len(token_ids), self._tokens_of, token_ids)
        return self._tokens_of(token_ids)

    def require_known(self, token_ids: Sequence[int], param: str) -> None:
        """Reject ids outside of the vocabulary: their text would be empty.

        Raises:
            HTTPError: the first of them.
        """
        size = max(self._vocab_size, self._backend.get_vocab_size())
        if token_ids and max(token_ids) >= size:
            place, token = next((place, token) for place, token in enumerate(token_ids) if token >= size)
            message = f"{param}[{place}] is {token}, and the vocabulary has {size} tokens"
            raise HTTPError(400, message, param=f"{param}[{place}]")

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True, **_options: bool) -> str:
        """Return the text of tokens."""
        if len(token_ids) > SHORT:
            return str(self._backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0])
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        """Return a token's vocabulary entry."""
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text, as far as they are known without its neighbors."""
        if not self.present:
            return b""
        token = self.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if token_id not in self.vocabulary.added:
            if self._byte_of is not None and all(letter in self._byte_of for letter in token):
                return bytes(self._byte_of[letter] for letter in token)
            if match := BYTE_TOKEN.fullmatch(token):
                return bytes.fromhex(match[1])
        return self.decode([token_id], skip_special_tokens=False).encode()

    def name_of(self, token_id: int) -> str:
        """Return a token's name in OpenAI's logprobs: its text, or its bytes if they are not valid UTF-8."""
        if not self.present:
            return f"token_id:{token_id}"
        data = self.bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    async def _in_thread(self, owner: str, size: int, work: Callable[..., Result], *arguments: Any) -> Result:
        with self._waiting(owner):
            threads = self._threads[size > LONG]
            return await asyncio.get_running_loop().run_in_executor(threads, work, *arguments)

    def _tokens_of(self, token_ids: list[int]) -> list[str | None]:
        return [self.convert_ids_to_tokens(token) for token in token_ids]

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            ids: list[int] = _encoded(self._backend, text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidInput(LONE_SURROGATE) from error
        return ids

    def _encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        try:
            encoding = _encoded(self._backend, (first, second))
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidInput(LONE_SURROGATE) from error
        return encoding.ids, encoding.type_ids


def _encoded(backend: Tokenizer, text: str | tuple[str, str], **options: bool) -> Any:
    """Tokenize a text or a pair. Long inputs use ``encode_batch``, which releases the GIL; ``encode`` does not."""
    first, second = (text, None) if isinstance(text, str) else text
    if len(first) + len(second or "") > SHORT:
        return backend.encode_batch([text], **options)[0]
    return backend.encode(first, second, **options)


class SampleText:
    """The text of one sample as its tokens arrive, cut at stop strings as the engine does."""

    def __init__(self, texts: TokenizerPool, params: SamplingParams, sample: AnswerSample) -> None:
        self._detokenizer: Any = Detokenizer(texts, params) if texts.present else None
        self._sample = sample
        self._finished = False
        self.num_read = 0  # tokens

    async def rest(self) -> tuple[str, slice]:
        """Like ``take`` for a finished sample, but yields to the event loop because the text may be long."""
        if len(self._sample.token_ids) - self.num_read > SHORT:
            return await asyncio.to_thread(self.take)
        await asyncio.sleep(0)
        return self.take()

    def take(self, end: int | None = None) -> tuple[str, slice]:
        """Return the new text and the slice of its tokens; after the sample's end, the rest.

        Args:
            end: number of the sample's tokens to read up to; None for all.
        """
        sample, start = self._sample, self.num_read
        self.num_read = len(sample.token_ids) if end is None else end
        read = slice(start, self.num_read)
        if self._finished or self._detokenizer is None:
            return "", read
        ended = sample.finish_reason is not None and end is None
        silent = ended and isinstance(sample.stop_reason, int)  # the stop token is not part of the text
        new = sample.token_ids[start : self.num_read - silent]
        self._finished = ended
        if not ended:
            return self._detokenizer.append(new), read
        if start > 0:  # a stream: do not keep the text
            return self._detokenizer.finish(new), read
        if sample.text is None:
            sample.text = self._detokenizer.finish(new)
        return sample.text, read


@functools.cache
def _byte_letters() -> dict[str, int]:
    """Return the byte of each character of the byte-level alphabet: printable bytes map to themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(rest)}
    assert letters.keys() == set(pre_tokenizers.ByteLevel.alphabet())
    return letters
