"""The chat page in a real browser: Chromium of the system, driven by Playwright."""

import json
import shutil

import pytest

from tests.test_server import slow_down, until, words
from tests.web_server import product, says, serving, write_model

sync_api = pytest.importorskip("playwright.sync_api")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
STORY = "Once upon a time there was a very small model that liked to talk."
EVIL = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>\n\n"
    "[here](javascript:window.hacked=3) [there](https://example.org/a) **bold** and `co<b>de`\n\n"
    "```html\n<iframe srcdoc='<script>parent.hacked = 4</script>'></iframe>\n```\n"
    "- one\n- <svg onload=window.hacked=5>\n\n# <u>title</u>\n"
)


@pytest.fixture(scope="module")
def browser():
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser is installed: {', '.join(BROWSERS)}")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def site(base, monkeypatch):
    write_model("sft:tiny", context=1024)
    write_model("base:tiny")
    with serving() as found:
        tell(found, monkeypatch, STORY)
        yield found


def tell(site, monkeypatch, text):
    """Let every answer of the model be this one."""
    says(monkeypatch, site, words(site, text))
    site.engine.ends = {site.tokenizer.special("<|assistant_end|>")}


@pytest.fixture
def page(browser, site):
    """A page whose errors fail the test."""
    context = browser.new_context(viewport={"width": 900, "height": 700})
    found = context.new_page()
    errors = []
    found.on("pageerror", lambda error: errors.append(str(error)))
    found.on("console", lambda told: errors.append(told.text) if told.type == "error" else None)
    found.goto(site.url)
    found.wait_for_selector("#model option", state="attached")
    yield found
    context.close()
    assert not [error for error in errors if "TrustedHTML" not in error]


def send(page, text, wait=True):
    page.fill("#question", text)
    page.press("#question", "Enter")
    if wait:
        page.wait_for_selector("#send", state="visible")


def said(page):
    """(role, text) of every message on the page."""
    found = page.query_selector_all("#log article")
    return [(a.get_attribute("class"), a.query_selector(".body").inner_text()) for a in found]


def test_an_answer_is_shown_as_it_comes_and_can_be_stopped(page, site, monkeypatch):
    slow_down(monkeypatch, site, 0.02)
    assert page.evaluate("document.activeElement.id") == "question"
    send(page, "Hello", wait=False)
    page.wait_for_selector("#stop", state="visible")
    lengths = []
    while page.is_visible("#stop"):
        lengths.append(len(said(page)[-1][1]))
    assert len(set(lengths)) > 5 and lengths == sorted(lengths)
    assert said(page) == [("user", "Hello"), ("assistant", STORY)]
    assert f"{len(STORY)} tokens" in page.inner_text("article.assistant .stats")
    assert "tokens/s" in page.inner_text("article.assistant .stats")
    for stop in (lambda: page.click("#stop"), lambda: page.keyboard.press("Escape")):
        send(page, "Again", wait=False)
        until(lambda: 9 < len(said(page)[-1][1]))
        stop()
        page.wait_for_selector("#send", state="visible")
        (_, text) = said(page)[-1]
        assert STORY.startswith(text.strip()) and len(text) < len(STORY)
        assert "stopped" in page.inner_text("article.assistant >> nth=-1")
        site.seconds_until_idle()


def test_an_answer_can_be_had_again_and_a_question_changed(page, site, monkeypatch):
    send(page, "First")
    send(page, "Second")
    tell(site, monkeypatch, "Another answer")
    page.click("article.assistant >> nth=0 >> text=Retry")
    page.wait_for_selector("#send", state="visible")
    assert said(page) == [("user", "First"), ("assistant", "Another answer")]
    send(page, "Second")
    tell(site, monkeypatch, "A third")
    page.press("#question", "ArrowUp")  # edits the last question
    area = page.locator("#log textarea")
    assert area.input_value() == "Second"
    area.press("Escape")
    assert page.locator("#log textarea").count() == 0 and len(said(page)) == 4
    page.click("article.user >> nth=0 >> text=Edit")
    page.locator("#log textarea").fill("Changed")
    page.locator("#log textarea").press("Enter")
    page.wait_for_selector("#send", state="visible")
    assert said(page) == [("user", "Changed"), ("assistant", "A third")]


def test_the_conversation_outlives_a_reload_and_a_new_one_can_be_undone(page, site):
    send(page, "Remember me")
    page.reload()
    page.wait_for_selector("#model option", state="attached")
    kept = [("user", "Remember me"), ("assistant", STORY)]
    assert said(page) == kept
    page.click("#new")
    assert said(page) == [] and page.is_visible("#empty")
    page.click("#toast >> text=Undo")
    assert said(page) == kept
    page.click("#new")
    page.reload()
    assert said(page) == []
    page.evaluate("localStorage.setItem('nanochat', '{\"messages\": [{\"role\": 1}]}')")
    page.goto(site.url)
    assert said(page) == []


def test_a_reload_in_the_middle_keeps_what_was_there(page, site, monkeypatch):
    slow_down(monkeypatch, site, 0.03)
    send(page, "Hello", wait=False)
    until(lambda: 15 < len(said(page)[-1][1]))
    page.reload()
    page.wait_for_selector("article.assistant")
    (_, text) = said(page)[-1]
    assert len(text) > 5 and STORY.startswith(text.strip())
    assert "stopped" in page.inner_text("article.assistant")
    site.seconds_until_idle()


def test_V9_what_models_and_users_write_never_runs(page, site, monkeypatch):
    tell(site, monkeypatch, EVIL)
    send(page, EVIL)
    page.wait_for_timeout(200)
    assert page.evaluate("window.hacked") is None
    log = page.locator("#log")
    assert log.locator("script, img, iframe, svg, u, b").count() == 0
    assert "<script>window.hacked = 1</script>" in said(page)[1][1]
    assert said(page)[0][1].strip() == EVIL.strip()
    links = log.locator("a")
    assert [link.get_attribute("href") for link in links.all()] == ["https://example.org/a"]
    assert "noopener" in links.first.get_attribute("rel")
    assert log.locator("strong").inner_text() == "bold"
    assert log.locator("article.assistant p code").inner_text() == "co<b>de"
    assert log.locator("article.assistant li").count() == 2
    assert "<iframe srcdoc" in log.locator("figure pre").inner_text()
    assert log.locator("article.assistant h2").inner_text() == "<u>title</u>"
    with pytest.raises(sync_api.Error, match="TrustedHTML"):
        page.evaluate("document.body.innerHTML = '<b>x</b>'")
    page.reload()
    page.wait_for_selector("article.assistant")
    assert page.evaluate("window.hacked") is None


def test_calls_of_the_tool_are_shown(page, site, monkeypatch):
    script = [*site.tokenizer.encode("It is "), *product(site), *words(site, "indeed.")]
    says(monkeypatch, site, script)
    send(page, "6 times 7?")
    assert page.inner_text(".tool pre >> nth=0") == "6*7"
    assert page.inner_text(".tool pre >> nth=1") == "42"
    asked = []
    page.on("request", lambda request: asked.append(request.post_data))
    send(page, "And?")
    sent = json.loads(asked[0])["messages"]
    kinds = [part["type"] for part in sent[1]["content"]]
    assert kinds == ["text", "python", "python_output", "text"]


def test_settings_are_used_and_kept(page, site):
    page.click("#open-settings")
    page.fill("[name=temperature]", "0.25")
    page.fill("[name=seed]", "7")
    page.fill("[name=system]", "Be brief.")
    page.select_option("[name=theme]", "dark")
    page.click("#settings >> text=Done")
    scheme = "getComputedStyle(document.documentElement).colorScheme"
    until(lambda: page.evaluate(scheme) == "dark")
    asked = []
    page.on("request", lambda request: asked.append(request))
    send(page, "Hello")
    body = json.loads(asked[0].post_data)
    assert asked[0].url.endswith("/v1/chat/completions")
    assert (body["temperature"], body["seed"], body["model"]) == (0.25, 7, "sft:tiny")
    assert [m["role"] for m in body["messages"]] == ["system", "user"]
    page.reload()
    page.wait_for_selector("#model option", state="attached")
    page.click("#open-settings")
    assert page.input_value("[name=temperature]") == "0.25"
    page.click("#defaults")
    page.click("#settings >> text=Done")
    page.select_option("#model", "base:tiny")
    del asked[:]
    send(page, "Continue")
    assert asked[0].url.endswith("/v1/completions")
    assert json.loads(asked[0].post_data)["prompt"] == "Continue"
    assert json.loads(asked[0].post_data)["temperature"] == 1.0
    with page.expect_download() as download:
        page.click("#open-settings")
        page.click("#save-chat")
    saved = [json.loads(line) for line in open(download.value.path()).read().splitlines()]
    assert [m["role"] for m in saved[0]][:2] == ["system", "user"]


def test_an_open_edit_survives_another_question_and_starts_nothing_meanwhile(
    page, site, monkeypatch
):
    send(page, "First")
    send(page, "Second")
    page.click("article.user >> nth=0 >> text=Edit")
    area = page.locator("#log textarea")
    area.fill("First, changed")
    page.select_option("#model", "base:tiny")  # whatever else is done
    page.select_option("#model", "sft:tiny")
    assert area.input_value() == "First, changed"
    slow_down(monkeypatch, site, 0.01)
    send(page, "Third", wait=False)
    page.wait_for_selector("#stop", state="visible")
    assert area.count() == 0
    page.wait_for_selector("#send", state="visible")
    assert [text for role, text in said(page) if role == "user"] == ["First", "Second", "Third"]
    page.click("article.user >> nth=1 >> text=Edit")
    area.fill("Second, changed")
    area.press("Enter")
    page.wait_for_selector("#send", state="visible")
    assert [text for role, text in said(page) if role == "user"] == ["First", "Second, changed"]
    page.click("#toast >> text=Undo")
    assert [text for role, text in said(page) if role == "user"] == ["First", "Second", "Third"]


def test_two_tabs_do_not_destroy_what_the_other_keeps(page, site):
    other = page.context.new_page()
    other.goto(site.url)
    other.wait_for_selector("#model option", state="attached")
    send(other, "In the second tab")
    until(lambda: len(said(page)) == 2)  # the first follows
    page.reload()
    other.reload()
    assert said(other) == [("user", "In the second tab"), ("assistant", STORY)]
    other.close()
    page.reload()
    assert len(said(page)) == 2


def test_by_keyboard_one_is_never_left_without_a_place(page, site):
    send(page, "Hello")
    page.focus("article.assistant >> text=Retry")
    page.keyboard.press("Enter")
    page.wait_for_selector("#send", state="visible")
    assert page.evaluate("document.activeElement.id") in ("question", "stop")
    page.focus("#send")
    page.fill("#question", "Again")
    page.focus("#send")
    page.keyboard.press("Enter")
    page.wait_for_selector("#send", state="visible")
    until(lambda: page.evaluate("document.activeElement.id") in ("question", "send"))


def test_a_question_without_an_answer_is_not_told_to_the_model(page, site):
    send(page, "First")
    page.evaluate("state.messages.push({role: 'user', parts: [{type: 'text', text: 'x'}]})")
    page.evaluate("state.messages.push({role: 'assistant', parts: [], error: 'no'})")
    asked = []
    page.on("request", lambda request: asked.append(request.post_data))
    send(page, "Second")
    sent = [m["role"] for m in json.loads(asked[0])["messages"]]
    assert sent == ["user", "assistant", "user"]


def test_a_page_that_was_opened_too_early_finds_the_server_later(browser, site):
    context = browser.new_context()
    page = context.new_page()
    page.route("**/v1/models", lambda route: route.abort())
    page.goto(site.url)
    page.wait_for_selector("#toast", state="visible")
    send(page, "Hello", wait=False)
    page.unroute("**/v1/models")
    page.press("#question", "Enter")
    page.wait_for_selector("article.assistant")
    page.wait_for_selector("#send", state="visible")
    assert said(page) == [("user", "Hello"), ("assistant", STORY)]
    context.close()


def test_errors_are_shown_and_the_question_can_be_asked_again(browser, site, monkeypatch):
    context = browser.new_context()
    page = context.new_page()
    page.goto(site.url)
    page.wait_for_selector("#model option", state="attached")
    plain = site.engine.model.logits
    monkeypatch.setattr(site.engine.model, "logits", lambda hidden: 1 / 0)
    send(page, "Hello")
    assert "division" in page.inner_text(".error")
    monkeypatch.setattr(site.engine.model, "logits", plain)
    page.click("text=Retry")
    page.wait_for_selector("#send", state="visible")
    assert page.locator(".error").count() == 0 and said(page)[-1][1] == STORY
    long = "x" * 1200
    send(page, long)
    assert "context" in page.inner_text(".error") and said(page)[-2][1] == long
    context.close()


def test_a_key_is_asked_for_where_the_server_wants_one(browser, base, tmp_path, monkeypatch):
    write_model("sft:tiny")
    (tmp_path / "key").write_text("sesame")
    with serving(api_key_file=str(tmp_path / "key")) as site:
        tell(site, monkeypatch, STORY)
        context = browser.new_context()
        page = context.new_page()
        page.goto(site.url)
        page.wait_for_selector("#settings", state="visible")
        assert page.evaluate("document.activeElement.name") == "key"
        page.keyboard.type("sesame")
        page.keyboard.press("Enter")
        page.wait_for_selector("#model option", state="attached")
        send(page, "Hello")
        assert said(page)[-1][1] == STORY
        context.close()


def test_everything_can_be_reached_by_keyboard_and_nothing_overflows_a_phone(browser, site):
    context = browser.new_context(viewport={"width": 360, "height": 640}, has_touch=True)
    page = context.new_page()
    page.goto(site.url)
    page.wait_for_selector("#model option", state="attached")
    send(page, "A word so long that it must be broken: " + "abcdefghij" * 12)
    send(page, "Second")
    wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    assert not page.evaluate(wide)
    reached = set()
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate("document.activeElement.id || document.activeElement.textContent")
        )
    assert {"model", "new", "open-settings", "question", "send", "Copy", "Edit", "Retry"} <= reached
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, select, textarea')].filter((e) => !e.ariaLabel && "
        "!e.textContent.trim() && !e.labels?.length).map((e) => e.outerHTML)"
    )
    assert unnamed == []
    context.close()
