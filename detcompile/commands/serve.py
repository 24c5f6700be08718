"""`detcompile serve`: an OpenAI-compatible server with reproducible answers."""

import asyncio
import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import typer

from detcompile import __version__
from detcompile.commands.loading_options import LoadingOptions, Random, sizes
from detcompile.commands.text_files import read_text_file
from detcompile.config import engine_secret
from detcompile.errors import InvalidInput
from detcompile.reasoning.formats import ParserName

MAX_LORA_RANK = 16  # vLLM's default
NEEDED = ("fastapi", "uvicorn", "msgspec", "jinja2", "prometheus_client", "cryptography")
missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
if missing:
    raise InvalidInput(f"{', '.join(missing)} is not installed: pip install '.[serve]' in a checkout of detcompile")

import uvicorn  # noqa: E402 - after the check above
from starlette.types import ASGIApp  # noqa: E402

from detcompile.serving.access import KeyFile  # noqa: E402
from detcompile.serving.app import new_app  # noqa: E402
from detcompile.serving.bodies import MAX_BODY  # noqa: E402
from detcompile.serving.engines.answers import Answer  # noqa: E402
from detcompile.serving.engines.fleet import Fleet  # noqa: E402
from detcompile.serving.engines.handshake import SECRET_BYTES  # noqa: E402
from detcompile.serving.engines.launchers import DialIn, Launcher  # noqa: E402
from detcompile.serving.engines.protocol import AdapterFile, Delta, EngineSpec  # noqa: E402
from detcompile.serving.engines.ray_actors import RayActors  # noqa: E402
from detcompile.serving.journal.journal import Journal  # noqa: E402
from detcompile.serving.logs import write_logs  # noqa: E402
from detcompile.serving.receipts.issuer import Issuer, ReceiptLevel  # noqa: E402
from detcompile.serving.receipts.keys import read_signing_key  # noqa: E402
from detcompile.serving.receipts.log import ReceiptLog  # noqa: E402
from detcompile.serving.server import STALL_SECONDS, is_loopback, listen, serve  # noqa: E402
from detcompile.serving.service import Service  # noqa: E402
from detcompile.serving.weight_store import FIRST, WeightStore  # noqa: E402


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Options for limits and timeouts."""

    max_queue: Annotated[int, typer.Option(min=1, help="Samples open at a time; beyond: 429.")] = 512
    max_queued_tokens: Annotated[int, typer.Option(min=1, help="Prompt tokens that wait; beyond: 429.")] = 262144
    max_body: Annotated[int, typer.Option(min=1024, help="Bytes of a request's body.")] = MAX_BODY
    drain: Annotated[float, typer.Option(min=0, help="Seconds for open requests after SIGTERM.")] = 60.0
    queue_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for a first token; beyond: 503.")] = 60.0
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for a whole answer; beyond: 504.")] = 600.0
    stall: Annotated[float, typer.Option(min=0.1, help="Seconds that a connection may stand still.")] = STALL_SECONDS

    def of_service(self) -> dict[str, Any]:
        """Return the limits that Service takes as keyword arguments."""
        names = ("max_queue", "max_queued_tokens", "max_body", "queue_timeout", "timeout")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class Web:
    """Options for access and logging, named as in new_app."""

    cors: Annotated[list[str] | None, typer.Option(help="Site whose pages may use the server; repeat it.")] = None
    request_log: Annotated[Path | None, typer.Option(help="File with a JSON line per request, without texts.")] = None
    log_format: Annotated[
        Literal["text", "json"], typer.Option(help="The front end's messages on standard error: text, or JSON lines.")
    ] = "text"
    demo: Annotated[bool, typer.Option("--demo", help="Let the page kill engines, to show that answers go on.")] = False
    root_path: Annotated[str, typer.Option(help="Path under which a proxy serves this server, such as /ai.")] = ""
    admin_key: Annotated[
        str | None,
        typer.Option(help="File of keys, as --api-keys, for routes that pause and change the model; none: no key."),
    ] = None

    weights: Annotated[
        Path | None,
        typer.Option(help="Folder that stores weights from clients, for engines and servers that start later."),
    ] = None

    def store(self) -> WeightStore | None:
        """Open the folder of weights."""
        if self.weights is not None and self.admin_key is None:
            raise InvalidInput("--weights: only routes of --admin-key receive weights: add it")
        return None if self.weights is None else WeightStore(self.weights)

    def admin_keys(self) -> KeyFile | None:
        """Read the admin keys; None without control routes."""
        if self.admin_key is None:
            return None
        return KeyFile(None if self.admin_key == "none" else Path(self.admin_key), "--admin-key")

    def options(self) -> dict[str, Any]:
        """Return keyword arguments for new_app; open the request log."""
        log = None if self.request_log is None else _log(self.request_log)
        return {"origins": self.cors or (), "request_log": log, "demo": self.demo, "root_path": self.root_path}


@dataclass(frozen=True, kw_only=True)
class Receipts:
    """Options of receipts."""

    receipts: Annotated[
        ReceiptLevel, typer.Option(help="What answers' receipts hold: tokens, salted hashes of them, or off.")
    ] = "tokens"
    sign: Annotated[Path | None, typer.Option(help="Key that signs receipts; `detcompile keygen` makes one.")] = None
    receipt_log: Annotated[Path | None, typer.Option(help="File that every receipt is appended to, chained.")] = None

    def issuer(self) -> Issuer:
        """Create the issuer of receipts."""
        key = None if self.sign is None else read_signing_key(self.sign)
        log = None if self.receipt_log is None else ReceiptLog(self.receipt_log)
        return Issuer(self.receipts, key, log, __version__)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Options of requests that outlive the server."""

    journal: Annotated[
        Path | None, typer.Option(help="File of requests with an Idempotency-Key, texts and all: nothing is lost.")
    ] = None
    journal_bytes: Annotated[int, typer.Option(min=1 << 20, help="Bytes that the journal may have.")] = 1 << 30
    journal_hours: Annotated[float, typer.Option(min=0.01, help="Hours that a request is kept for.")] = 24.0

    def opened(self) -> Journal | None:
        """Open the journal."""
        return None if self.journal is None else Journal(self.journal, self.journal_bytes, 3600 * self.journal_hours)


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Options of the engine processes."""

    replicas: Annotated[int, typer.Option(min=1, help="Engines, each with the whole model.")] = 1
    spare: Annotated[bool, typer.Option(help="Keep a process without a model ready to replace a lost one.")] = True
    dial_in: Annotated[
        str | None,
        typer.Option(help="HOST:PORT for engines that are started elsewhere, instead of processes here."),
    ] = None
    backend: Annotated[Literal["local", "ray"], typer.Option(help="Where engines run: here, or in a Ray cluster.")] = (
        "local"
    )
    ray_address: Annotated[str | None, typer.Option(help="HOST:PORT of the cluster; default: this machine's.")] = None
    ray_gpus: Annotated[
        int | None, typer.Option(min=0, help="GPUs of an engine there; default: one a rank, 0 for --device cpu.")
    ] = None
    max_restarts: Annotated[int, typer.Option(min=0, help="Engines started again in a minute; beyond: exit 70.")] = 5

    def fleet(self, on_delta: Callable[[Answer, Delta], None], *, loading: "Loading") -> Fleet:
        """Create the fleet of engines, which call ``on_delta`` with generated tokens.

        Args:
            loading: how engines load the model.
        """
        launcher: Launcher | None = None
        if self.backend == "ray":
            if self.dial_in is not None:
                raise InvalidInput("--dial-in: with --backend ray the actors connect by themselves: leave it out")
            ranks = loading.tp * loading.pp
            needed = 0 if loading.device == "cpu" else ranks
            gpus = needed if self.ray_gpus is None else self.ray_gpus
            launcher = RayActors(self.ray_address, gpus=gpus, cpus=ranks)
        elif self.dial_in is not None:
            launcher = _dial_in(self.dial_in)
        spare = self.spare and launcher is None  # with --dial-in, surplus engines wait as spares
        return Fleet(on_delta, launcher, replicas=self.replicas, spare=spare, most_restarts=self.max_restarts)


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Options for chats, named as in Service."""

    chat_template: Annotated[Path | None, typer.Option(help="A Jinja file that replaces the tokenizer's.")] = None
    tool_parser: Annotated[
        Literal["hermes", "llama3", "mistral", "openai"] | None,
        typer.Option(help="How the model writes calls of functions; default: as its chat template says."),
    ] = None
    reasoning_parser: Annotated[
        ParserName | None,
        typer.Option(help="How the model marks its reasoning; default: as its chat template says."),
    ] = None

    def options(self) -> dict[str, Any]:
        """Return keyword arguments for Service; read the template file."""
        template = None if self.chat_template is None else read_text_file(self.chat_template)
        names = {"tool_parser": self.tool_parser, "reasoning_parser": self.reasoning_parser}
        return {"chat_template": template, **names}


@dataclass(frozen=True, kw_only=True)
class Loading(LoadingOptions):
    """Options for loading MODEL in the engine process, named as in EngineSpec."""

    random: Random = False
    tp: Annotated[int, typer.Option(min=1, help="Ranks, each in a process.")] = 1
    pp: Annotated[int, typer.Option(min=1, help="Stages of the layers, each of --tp ranks.")] = 1
    task: Annotated[
        Literal["generate", "classify", "embed"] | None,
        typer.Option(help="Class to load a checkpoint as; default: the one it was saved as."),
    ] = None
    generation_config: Annotated[
        Literal["auto", "vllm"],
        typer.Option(help="Sampling defaults: auto, the model's generation_config; vllm, vLLM's."),
    ] = "auto"
    max_lora_rank: Annotated[
        int | None, typer.Option(help="Room for LoRA adapters of up to this rank; 16 with --lora-modules, else none.")
    ] = None
    lora_modules: Annotated[
        list[str] | None, typer.Option(help="NAME=FOLDER of an adapter; requests name it as their model. Repeat it.")
    ] = None
    speculation: Annotated[
        Literal["off", "automatic", "always"],
        typer.Option(help="Draft what followed the same tokens earlier in the text; automatic: if that is faster."),
    ] = "off"


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of the engine, named as in EngineConfig."""

    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences that run at a time.")] = None
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Token budget of a step.")] = None
    block_size: Annotated[int | None, typer.Option(help="Tokens per KV block.")] = None
    num_blocks: Annotated[int | None, typer.Option(help="Of the KV cache; default: as memory allows.")] = None
    tbt_slo: Annotated[
        float | None,
        typer.Option(help="Milliseconds between two tokens of an answer, met by 99 of 100 steps."),
    ] = None


def command(
    model: Annotated[str, typer.Argument(help="A model folder or .gguf file, an id on the Hub, 'tiny', or a .pt2.")],
    host: Annotated[str, typer.Option(help="Address to bind; addresses that others reach need keys.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="What clients call the model; default: MODEL.")] = None,
    api_keys: Annotated[Path | None, typer.Option(help="File of keys, name:sha256 per line, for all routes.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen to other machines without keys.")] = False,
    *,
    chat: Chat,
    bounds: Bounds,
    web: Web,
    receipts: Receipts,
    kept: Kept,
    processes: Processes,
    loading: Loading,
    engine: EngineOptions,
) -> None:
    """Serve a model over OpenAI's API; the seed and fingerprint of an answer repeat it bit for bit."""
    write_logs(as_json=web.log_format == "json")
    keys, admin = KeyFile(api_keys), web.admin_keys()
    if admin is not None and keys.digests and not admin.digests:
        raise InvalidInput("--admin-key none: with --api-keys, give a file of admin keys, too")
    if not keys.digests and not insecure and not is_loopback(host):
        raise InvalidInput(f"--host {host} is reachable from other machines: add --api-keys FILE, or --insecure")
    store = web.store()
    kept_weights = None if store is None else store.kept
    config = {key: value for key, value in asdict(engine).items() if value is not None}
    options = asdict(loading) | {"tp_sizes": loading.tp_sizes and [*sizes(loading.tp_sizes)]}
    adapters = options["adapters"] = _adapters(options.pop("lora_modules") or ())
    if adapters and loading.max_lora_rank is None:
        options["max_lora_rank"] = MAX_LORA_RANK
    folder = None if store is None or kept_weights is None else str(store.folder)
    spec = EngineSpec(model=model, config=config, weights=folder, **options)
    names = {"name": name, "journal": kept.opened(), "keys": keys.digests, **chat.options(), **bounds.of_service()}
    if admin is not None:
        names["first_weights"] = FIRST if kept_weights is None else kept_weights.weights
    fleet = functools.partial(processes.fleet, loading=loading)
    service = functools.partial(Service, **names, receipts=receipts.issuer(), fleet=fleet)
    shown = {"version": __version__, "digests": keys.digests, **web.options()}
    shown |= {"admin": admin and admin.digests, "store": store}
    app = functools.partial(new_app, **shown)
    loop = uvicorn.Config("", log_config=None).get_loop_factory()  # uvloop's if it is installed
    with asyncio.Runner(loop_factory=loop) as runner:
        files = [keys] if admin is None else [keys, admin]
        sys.exit(runner.run(_served(spec, (host, port), bounds, service, app, files)))


async def _served(
    spec: EngineSpec,
    address: tuple[str, int],
    bounds: Bounds,
    make_service: Callable[[], Service],
    make_app: Callable[[Service], ASGIApp],
    keys: Sequence[KeyFile],
) -> int:
    with listen(*address) as sock:
        service = make_service()  # needs the running event loop

        def read_keys() -> None:
            for file in keys:
                file.read_again()

        return await serve(service, make_app(service), spec, sock, bounds.drain, bounds.stall, read_keys)


def _log(path: Path) -> IO[str]:
    try:
        return path.open("a")
    except OSError as error:
        raise InvalidInput(f"--request-log {path}: {error.strerror}") from error


def _dial_in(address: str) -> DialIn:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise InvalidInput(f"--dial-in {address!r}: give HOST:PORT")
    secret = engine_secret()
    if len(secret) < SECRET_BYTES:
        raise InvalidInput(
            f"--dial-in: set DETCOMPILE_ENGINE_SECRET, here and for the engines, to {SECRET_BYTES} bytes at least"
        )
    return DialIn(host.strip("[]"), int(port), secret)


def _adapters(modules: Sequence[str]) -> dict[str, AdapterFile]:
    """Return adapters by name, given as NAME=FOLDER."""
    adapters: dict[str, AdapterFile] = {}
    for module in modules:
        name, _, path = module.partition("=")
        if not name or not path or name in adapters:
            raise InvalidInput(f"--lora-modules {module!r}: give NAME=FOLDER, each name once")
        adapters[name] = AdapterFile(path)
    return adapters
