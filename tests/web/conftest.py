"""A browser, and servers for it. Without Chromium, or without Playwright, these tests are skipped (make web-test)."""

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "build" / "web"
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def _missing() -> str | None:
    if importlib.util.find_spec("playwright") is None:
        return "needs Playwright: pip install playwright"
    return None if CHROMIUM else "needs Chromium: apt-get install chromium"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here, reason = Path(__file__).parent, _missing()
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.web)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        actual = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield actual
        actual.close()


@pytest.fixture(scope="session")
def serve() -> Iterator[Callable[..., str]]:
    """Return a function that starts a server over the scripted engine with options and returns its address."""
    processes = []

    def started(*options: str) -> str:
        command = [sys.executable, "-m", "tests.web.web_server", *options]
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("serving "):
                return line.split()[3].rstrip(";")
        raise AssertionError("the server did not start")

    yield started
    for process in processes:
        process.terminate()
        process.communicate(timeout=30)


@pytest.fixture(scope="session")
def url(serve: Callable[..., str]) -> str:
    """Return the address of a server that tests share."""
    return serve()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Return a function that opens a page in a new context with options.

    Pages must send all requests to their server, and end without errors in scripts or in the console.
    """
    contexts, actual, requests = [], [], []

    def heard(message: Any) -> None:
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            actual.append(message.text)  # the console also reports answers with 401 or 404

    def visited(url: str, *, part: str = "", **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", heard)
        page.on("pageerror", lambda error: actual.append(str(error)))
        page.on("request", lambda request: requests.append((url, request.url)))
        page.goto(f"{url}/{part}")
        return page

    yield visited
    for context in contexts:
        context.close()
    assert actual == []
    assert requests
    assert [there for url, there in requests if not there.startswith((url + "/", "data:", f"blob:{url}"))] == []


@pytest.fixture
def picture(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return a function that saves a screenshot under build/web."""

    def taken(page: Any, name: str) -> None:
        PICTURES.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=PICTURES / f"{name}.png", full_page=True)

    return taken
