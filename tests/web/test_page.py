"""The page in a browser over the scripted engine: what it shows, and that no input becomes markup."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from tests.serving.scripted_engine import FICKLE, POISON, TOKENIZER

MARKUP = """<img src=x onerror="document.title='broken'"><b>bold</b>"""
Visit = Callable[..., Any]
WORDS = Tokenizer.from_file(str(TOKENIZER))


def run(page: Any, prompt: str | None = None, **parameters: Any) -> None:
    """Fill the form and have it answered to the end."""
    begin(page, prompt, **parameters)
    page.wait_for_selector("#again:not([disabled])")


def begin(page: Any, prompt: str | None = None, **parameters: Any) -> None:
    page.wait_for_selector("#run:not([disabled])")
    if prompt is not None:
        page.fill("#prompt", prompt)
    page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
    for name, value in parameters.items():
        if isinstance(value, bool):
            page.set_checked(f"#p-{name}", value)
        else:
            page.fill(f"#p-{name}", str(value))
    page.click("#run")


def prompt_of(token: int) -> str:
    """A text that is this one token."""
    text = WORDS.decode([token])
    assert WORDS.encode(text).ids == [token]
    return text


def shown(page: Any) -> str:
    return page.locator(".answer").first.text_content()


def expected(num_tokens: int) -> str:
    return WORDS.decode(list(range(40, 40 + num_tokens)))


@pytest.mark.parametrize("logprobs", ["", "0", "3"])
@pytest.mark.parametrize("mode", ["completion", "chat"])
def test_an_answer_and_its_second_run(url: str, visit: Visit, mode: str, logprobs: str) -> None:
    page = visit(url)
    page.wait_for_selector("#run:not([disabled])")
    page.check(f"input[value={mode}]")
    length = {"completion": "max_tokens", "chat": "max_completion_tokens"}[mode]
    run(page, "hello", n=2, logprobs=logprobs, **{length: 30})
    assert page.locator(".answer").count() == 2 and shown(page) == expected(30)
    seed = page.locator("#facts").text_content().split("seed ")[1].split(";")[0]
    assert int(seed) >= 0 and "60 tokens, ended by length" in page.locator("#facts").text_content()
    page.click("#again")
    page.wait_for_selector("#verdict.good")
    message = page.locator("#verdict").text_content()
    assert "60 of 60 tokens, text and end" in message and "other requests ran beside it" in message
    assert page.locator(".answer span:not(.met)").count() == 0 and page.locator(".answer span.met").count() >= 2
    assert seed in page.locator("#curl").text_content() and seed in page.locator("#python").text_content()


def test_a_difference_is_shown(url: str, visit: Visit, picture: Visit) -> None:
    """The scripted engine draws the fourth token of this prompt anew each time."""
    page = visit(url)
    run(page, prompt_of(FICKLE), max_tokens=8)
    page.click("#again")
    page.wait_for_selector("#verdict.bad")
    assert page.locator(".answer span.broken").count() == 1 and page.locator(".answer span.met").count() == 7
    calls = page.locator("#difference li").all_text_contents()
    assert calls[0].startswith("token 4: id ") and len(calls) == 2  # the text differs, too
    picture(page, "difference")


def test_a_number_of_64_bits_stays_one(url: str, visit: Visit) -> None:
    page = visit(url)
    seed = str((1 << 63) - 1)
    run(page, seed=seed, max_tokens=2)
    assert f"seed {seed}" in page.locator("#facts").text_content()
    page.click("#again")
    page.wait_for_selector("#verdict.good")
    page.click("#tab-engine")
    page.wait_for_selector(f"td:text-is('{seed}')")


def test_the_page_works_under_the_path_of_a_proxy(url: str, visit: Visit) -> None:
    page = visit(f"{url}/ai")
    run(page, max_tokens=3, seed=5)
    assert shown(page) == expected(3) and f"{url}/ai/v1/completions" in page.locator("#curl").text_content()


def test_what_is_asked_wrongly_is_told(url: str, visit: Visit) -> None:
    page = visit(url)
    for parameters, message in (
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1, "seed": "x"}, "seed: give an integer"),
        ({"seed": "", "logit_bias": "{"}, "logit_bias: "),
        ({"logit_bias": "", "stop_token_ids": "a"}, "stop_token_ids: give token ids"),
    ):
        begin(page, **parameters)
        page.wait_for_selector(f"#facts:has-text('{message}')")
        assert page.locator("#again").is_disabled()


def test_markup_stays_text(url: str, visit: Visit, tmp_path: Path) -> None:
    page = visit(url)
    run(page, MARKUP, max_tokens=3, echo=True, seed=5)
    assert shown(page) == MARKUP + expected(3)
    page.locator(".answer span").first.hover()
    page.click("#tab-receipts")
    page.fill("#receipt-id", MARKUP)
    page.click("#receipt-form button")
    page.wait_for_selector("#receipt-verdict.bad")
    payload = base64.b64encode(json.dumps({"id": MARKUP, "created": 0, MARKUP: [MARKUP, 1]}).encode()).decode()
    file = tmp_path / "receipt.json"
    file.write_text(json.dumps({"payloadType": MARKUP, "payload": payload, "signatures": [{"keyid": MARKUP}]}))
    page.set_input_files("#receipt-file", file)
    page.wait_for_selector("#receipt dl")
    assert page.locator("#receipt").text_content().count(MARKUP) == 4
    page.click("#verify")
    page.wait_for_selector("#receipt-verdict.bad")
    page.reload()
    page.click("#tab-playground")
    page.wait_for_selector(".answer span")
    assert shown(page) == MARKUP + expected(3)
    assert page.locator("img, .answer b, #receipt b").count() == 0 and page.title() == "detcompile"


def test_scripts_that_get_into_the_page_do_not_run(url: str, browser: Any) -> None:
    page = browser.new_page()
    page.goto(url)
    for attack in (
        "document.body.innerHTML = '<img src=x onerror=\"window.broken = 1\">'",
        "const s = document.createElement('script'); s.textContent = 'window.broken = 1'; document.body.append(s)",
        "setTimeout('window.broken = 1')",
        "document.body.setAttribute('onclick', 'window.broken = 1'); document.body.click()",
    ):
        page.evaluate(f"() => {{ try {{ {attack} }} catch {{}} }}")
    page.wait_for_timeout(200)
    assert page.evaluate("window.broken") is None
    page.close()


def test_a_reload_keeps_the_answer_and_goes_on_with_one_that_it_cut(url: str, visit: Visit) -> None:
    page = visit(url)
    begin(page, "some text", max_tokens=120, temperature=0.5)
    page.wait_for_selector(".answer span:nth-child(10)")
    seed = json.loads(page.evaluate("sessionStorage.getItem('last')"))["asked"]["seed"]
    page.reload()
    page.wait_for_selector("#again:not([disabled])")
    assert shown(page) == expected(120) and f"seed {seed}" in page.locator("#facts").text_content()
    page.reload()
    page.wait_for_selector("#again:not([disabled])")
    assert shown(page) == expected(120)
    assert (page.input_value("#prompt"), page.input_value("#p-temperature")) == ("some text", "0.5")
    page.click("#again")
    page.wait_for_selector("#verdict.good")


def test_what_was_stopped_is_compared_as_far_as_it_came(url: str, visit: Visit) -> None:
    page = visit(url)
    begin(page, max_tokens=400)
    page.wait_for_selector(".answer span:nth-child(10)")
    page.click("#stop")
    page.wait_for_selector("#again:not([disabled])")
    num = page.locator(".answer span").count()
    assert num < 300
    page.click("#again")
    page.wait_for_selector("#verdict.good")
    assert f"{num} of {num} tokens so far" in page.locator("#verdict").text_content()


def test_by_keyboard_alone(url: str, visit: Visit) -> None:
    page = visit(url)
    page.wait_for_selector("#run:not([disabled])")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "tab-playground"
    for name in ("engine", "receipts", "certificate", "playground"):
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.activeElement.id") == f"tab-{name}" and page.locator(f"#{name}").is_visible()
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#again:not([disabled])")
    page.focus("#tab-playground")
    reached = []
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
        if reached[-1] != "":
            assert page.evaluate("document.activeElement.matches(':focus-visible')"), reached[-1]
        if reached[-1] == "answer":
            page.keyboard.press("ArrowRight")
            page.keyboard.press("ArrowRight")
            assert page.locator("#detail").text_content().count("token 2, id 41") == 1
            break
        if reached[-1] == "again":
            page.keyboard.press("Enter")
            page.wait_for_selector("#verdict.good")
    assert {"prompt", "run", "p-max_tokens", "p-seed", "answer", "again"} <= set(reached)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_it_fits_and_can_be_read(url: str, visit: Visit, picture: Visit, width: int, scheme: str) -> None:
    page = visit(url, color_scheme=scheme, viewport={"width": width, "height": 800})
    run(page, max_tokens=24, n=2)
    page.click("#again")
    page.wait_for_selector("#verdict.good")
    for name in ("playground", "engine", "receipts", "certificate"):
        if name == "receipts":
            page.wait_for_selector("#rows button")
            page.locator("#rows button").first.click()
            page.wait_for_selector("#receipt dl")
        page.click(f"#tab-{name}")
        page.wait_for_timeout(400)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        picture(page, f"{name}-{width}-{scheme}")
    luminances = page.evaluate(LUMINANCES)
    assert (luminances["page"] < 0.05) == (scheme == "dark")
    for name in ("text", "muted", "accent", "good", "bad"):
        for ground in ("page", "soft"):
            lighter, darker = sorted((luminances[name], luminances[ground]), reverse=True)
            assert (lighter + 0.05) / (darker + 0.05) >= 4.5, f"{name} on {ground}"  # WCAG 2, level AA


LUMINANCES = """() => {
  const probe = document.body.appendChild(document.createElement("i"));
  const found = {};
  for (const name of ["text", "muted", "accent", "good", "bad", "page", "soft"]) {
    probe.style.color = `var(--${name})`;
    const [r, g, b] = getComputedStyle(probe).color.match(/[\\d.]+/g).map((part) => {
      const share = part / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    found[name] = 0.2126 * r + 0.7152 * g + 0.0722 * b;
  }
  probe.remove();
  return found;
}"""


def test_a_server_with_keys_is_asked_with_one(serve: Visit, visit: Visit) -> None:
    page = visit(serve("secret key"))
    page.wait_for_selector("#key-dialog[open]")
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    page.wait_for_selector("#key-said:has-text('not known')")
    page.fill("#key", "secret key")
    page.keyboard.press("Enter")
    run(page, max_tokens=4)
    assert shown(page) == expected(4) and "secret" not in page.url
    page.reload()
    page.wait_for_selector("#status.good")
    assert not page.locator("#key-dialog").is_visible()


def test_the_engine_live(serve: Visit, visit: Visit, picture: Visit) -> None:
    url = serve()
    page = visit(url, part="#engine")
    page.wait_for_selector("#status.good")
    with httpx.Client(base_url=url, timeout=30) as client:
        answer = client.post("/v1/completions", json={"prompt": [[5]] * 300, "max_tokens": 3}).json()
        page.wait_for_selector("#rows button")
        assert page.locator("#rows tr").count() == 100
        assert page.locator("#rows tr").first.locator("td").first.text_content() == answer["id"]
        assert "900 values since the start" not in page.locator("#between").text_content()
        assert "300 values since the start" in page.locator("#first").text_content()
        client.post("/v1/completions", json={"prompt": [POISON], "max_tokens": 9})
    page.wait_for_selector("#losses td.wrap")
    assert "SIGABRT" in page.locator("#losses").text_content()
    page.wait_for_selector("#rows td.bad")
    picture(page, "losses")
    page.locator("#rows button").first.click()
    page.wait_for_selector("#receipt dl")
    assert answer["id"] in page.locator("#receipt").text_content()
    page.click("#verify")
    page.wait_for_selector("#receipt-verdict.bad")  # the scripted engine's fingerprint has no parts
    assert "fingerprint" in page.locator("#receipt-verdict").text_content()
    with page.expect_download() as download:
        page.click("#download")
    assert httpx.get(f"{url}/v1/receipts/{answer['id']}").json() == json.loads(Path(download.value.path()).read_text())


def test_an_engine_that_is_killed_costs_no_token(serve: Visit, visit: Visit, picture: Visit) -> None:
    page = visit(serve())
    begin(page, max_tokens=120)
    page.wait_for_selector(".answer span:nth-child(5)")
    page.click("#kill")
    page.wait_for_selector("#again:not([disabled])")
    message = page.locator("#killed").text_content()
    assert "Engine 0, process " in message and "the answer went on after " in message
    assert shown(page) == expected(120)
    page.wait_for_selector("#status.good")
    page.click("#kill")  # nothing runs: one is begun, and killed
    page.wait_for_selector("#killed.good")
    page.wait_for_selector("#again:not([disabled])")
    assert shown(page) == expected(120)
    page.click("#again")
    page.wait_for_selector("#verdict.good")
    picture(page, "killed")
    page.click("#tab-engine")
    page.wait_for_selector("#losses tbody tr:nth-child(2)")
    assert "SIGKILL" in page.locator("#losses").text_content()


def test_without_demo_the_page_has_no_kill_switch(serve: Visit, visit: Visit) -> None:
    page = visit(serve("--no-demo"))
    run(page, max_tokens=4)
    assert not page.locator("#kill").is_visible() and page.input_value("#p-max_tokens") == "4"
