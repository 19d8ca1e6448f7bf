"""The chat page in a real browser (the system's Chromium, driven by Playwright)."""

import json

import pytest

from tests.web_server import PRODUCT, says, serving, slow_down, until, write_model

STORY = "Once upon a time there was a very small model that liked to talk."
EVIL = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>\n\n"
    "[here](javascript:window.hacked=3) ![pic](https://example.org/a.png) **bold** `co<b>de`\n\n"
    "```html\n<iframe srcdoc='<script>parent.hacked = 4</script>'></iframe>\n```\n\n"
    "- one \u202e\n- <svg onload=window.hacked=5>\n\n"
    "| a | b |\n|---|---|\n| <a href='javascript:window.hacked=6'>x</a> | [y](data:text/html,x) |\n"
)


@pytest.fixture
def story(site, monkeypatch):
    """Make the model answer everything with STORY."""
    says(monkeypatch, site, STORY)


@pytest.fixture
def page(browser, site):
    """A tab with the page. Errors of its code, and requests to other servers, fail the test."""
    context = browser.new_context(viewport={"width": 900, "height": 700})
    errors, urls = [], []
    context.on("weberror", lambda error: errors.append(str(error.error)))
    context.on("request", lambda request: urls.append(request.url))
    yield open_page(context, site.url)
    context.close()
    assert errors == []
    assert [url for url in urls if not url.startswith((site.url, "data:", "blob:"))] == []


def open_page(context, url):
    """Open a tab and wait until it lists the models."""
    found = context.new_page()
    found.goto(url)
    found.wait_for_selector("select option", state="attached")
    return found


def messages(page):
    return page.get_by_role("log").get_by_role("article")


def said(page) -> list[str]:
    """Texts of the conversation, questions and answers in turn."""
    return [one.strip() for one in messages(page).locator(".body").all_inner_texts()]


def button(page, name: str):
    return page.get_by_role("button", name=name, exact=True)


def press(page, message: int, name: str) -> None:
    """Click a button of a message; some appear when the mouse is over it."""
    article = messages(page).nth(message)
    article.hover()
    button(article, name).click()


def send(page, text: str, wait: bool = True) -> None:
    page.get_by_role("textbox", name="Message").fill(text)
    page.keyboard.press("Enter")
    if wait:
        finish(page)


def finish(page) -> None:
    """Wait for the end of the answer."""
    button(page, "Send").wait_for()


def started(page) -> None:
    """Wait until a part of an answer is shown."""
    until(lambda: len(said(page)) % 2 == 0 and 8 < len(said(page)[-1]) < len(STORY))


# ---- V9, S13: text is text -----------------------------------------------------------------------


def test_V9_S13_messages_never_run_as_code(page, site, monkeypatch):
    says(monkeypatch, site, EVIL)
    send(page, EVIL)
    log = page.get_by_role("log")
    for _ in range(2):
        question, answer = said(page)
        assert question.split() == EVIL.split()
        for text in ("<script>window.hacked = 1</script>", "<iframe srcdoc=", "co<b>de", "<svg on"):
            assert text in answer
        page.wait_for_timeout(200)
        assert page.evaluate("window.hacked") is None
        assert log.locator("script, img[src^=http], iframe, svg[onload], u, b").count() == 0
        assert log.locator("a:not([href^='https:'])").count() == 0
        counts = [log.locator(tag).count() for tag in ("strong", "li", "table", "pre")]
        assert counts == [1, 2, 1, 1]
        page.reload()
        messages(page).last.wait_for()


def test_tool_calls_are_shown_and_sent_back(page, site, monkeypatch):
    says(monkeypatch, site, "It is ", *PRODUCT, "!")
    send(page, "6 times 7?")
    assert "6*7" in said(page)[1] and "42" in said(page)[1]
    with page.expect_request("**/v1/chat/completions") as request:
        send(page, "And?")
    answer = json.loads(request.value.post_data)["messages"][1]
    parts = answer.get("parts", answer["content"])
    assert [part["text"] for part in parts] == ["It is ", "6*7", "42", "!"]


# ---- conversations -------------------------------------------------------------------------------


def test_answer_streams_stops_and_continues(page, site, story, monkeypatch):
    slow_down(monkeypatch, 0.02)
    send(page, "Hello", wait=False)
    started(page)
    early = said(page)[1]
    finish(page)
    assert said(page) == ["Hello", STORY] and STORY.startswith(early)
    for stop in (button(page, "Stop").click, lambda: page.keyboard.press("Escape")):
        send(page, "Again", wait=False)
        started(page)
        stop()
        finish(page)
        part = said(page)[-1]
        assert STORY.startswith(part) and len(part) < len(STORY)
        site.wait_until_idle()
    button(page, "Continue").click()
    finish(page)
    assert said(page)[-1].replace(" ", "") == (part + STORY).replace(" ", "")


def test_regenerate_and_edit_keep_earlier_versions(page, site, story, monkeypatch):
    send(page, "First")
    send(page, "Second")
    says(monkeypatch, site, "Another answer")
    press(page, 1, "Retry")
    finish(page)
    assert said(page) == ["First", "Another answer"]
    press(page, 1, "Previous version")
    assert said(page) == ["First", STORY, "Second", STORY]
    press(page, 0, "Edit")
    assert page.get_by_role("textbox", name="Message").input_value() == "First"
    send(page, "Changed")
    assert said(page) == ["Changed", "Another answer"]
    page.reload()
    press(page, 0, "Previous version")
    assert said(page)[0] == "First" and said(page)[1] in (STORY, "Another answer")


def test_V15_chats_go_on_while_another_is_open(page, site, story, monkeypatch):
    slow_down(monkeypatch, 0.02)
    send(page, "First chat", wait=False)
    started(page)
    button(page, "New chat").click()
    assert said(page) == []
    send(page, "Second chat")
    page.reload()
    for title in ("First chat", "Second chat"):
        page.get_by_role("navigation").get_by_role("link", name=title).click()
        until(lambda title=title: said(page) == [title, STORY])


def test_settings_and_chosen_model_reach_the_server(page, site, story):
    button(page, "Settings").click()
    page.get_by_label("Temperature").fill("0.25")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Theme").select_option("Dark")
    button(page, "Done").click()
    with page.expect_request("**/v1/chat/completions") as request:
        send(page, "Hello")
    body = json.loads(request.value.post_data)
    assert (body["temperature"], body["model"]) == (0.25, "sft:tiny")
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    page.reload()
    scheme = "getComputedStyle(document.documentElement).colorScheme"
    until(lambda: page.evaluate(scheme) == "dark")
    page.get_by_role("combobox", name="Model").select_option("base:tiny")
    with page.expect_request("**/v1/completions") as request:
        send(page, "Continue this")
    assert json.loads(request.value.post_data)["prompt"].endswith("Continue this")


def test_V5_dropped_history_and_a_full_context_are_marked(page, site, story):
    send(page, "x" * 980)
    last = messages(page).last
    assert "context is full" in last.inner_text() and not button(page, "Continue").count()
    send(page, "Hello")
    assert "oldest" in last.inner_text() and said(page)[-1] == STORY


def test_draft_survives_a_reload(page, site, story):
    message = page.get_by_role("textbox", name="Message")
    message.fill("Half a ques")
    page.reload()
    assert message.input_value() == "Half a ques"
    send(page, "Hello")
    until(lambda: not message.input_value())


def test_chats_are_exported_imported_and_deleted(page, site, story):
    turns = [("user", "What is 6*7?"), ("assistant", [{"type": "python", "text": "6*7"}])]
    line = json.dumps([{"role": role, "content": content} for role, content in turns])
    file = {"name": "chats.jsonl", "mimeType": "", "buffer": line.encode()}
    page.set_input_files("#file", files=[file])
    until(lambda: said(page) == ["What is 6*7?", "6*7"])
    exported = {}
    for name in ("JSONL", "Export"):
        with page.expect_download() as download:
            button(page, name).click()
        exported[name] = download.value.path().read_text()
    assert json.loads(exported["JSONL"]) == json.loads(line)
    link = page.get_by_role("link", name="What is")
    other = open_page(page.context, page.url)
    button(page, "Delete What is 6*7?").click()
    for tab in (page, other):
        until(lambda tab=tab: not tab.get_by_role("link", name="What is").count())
    page.reload()
    assert not link.count()
    page.set_input_files("#file", files=[{**file, "buffer": exported["Export"].encode()}])
    link.wait_for()
    button(page, "Delete What is 6*7?").click()
    page.set_input_files("#file", files=[{**file, "buffer": b"{"}])  # another message
    page.get_by_text("Failed to import").wait_for()
    button(page, "Undo").click()
    until(lambda: said(page) == ["What is 6*7?", "6*7"])


def test_phone_needs_no_sideways_scrolling(browser, site, story):
    context = browser.new_context(viewport={"width": 360, "height": 640}, is_mobile=True)
    page = open_page(context, site.url)
    send(page, "A word so long that it must be broken: " + "abcdefghij" * 12)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert button(page, "Send").bounding_box()["height"] >= 40
    context.close()


# ---- V15: several tabs, reload, restart ----------------------------------------------------------


def test_V15_reload_while_generating_keeps_the_partial_answer(page, site, story, monkeypatch):
    slow_down(monkeypatch, 0.03)
    send(page, "Hello", wait=False)
    started(page)
    page.reload()
    messages(page).last.wait_for()
    part = said(page)[-1]
    assert len(part) > 5 and STORY.startswith(part)
    site.wait_until_idle()
    press(page, 1, "Retry")
    finish(page)
    assert said(page) == ["Hello", STORY]
    press(page, 1, "Previous version")
    assert said(page) == ["Hello", part]


def test_V15_two_tabs_asking_in_one_chat_lose_nothing(page, site, story, monkeypatch):
    send(page, "First")
    tabs = {"From tab one": page, "From tab two": open_page(page.context, page.url)}
    send(page, "Second")
    asked = ["First", STORY, "Second", STORY]
    until(lambda: said(tabs["From tab two"]) == asked)
    slow_down(monkeypatch, 0.02)
    for question, tab in tabs.items():
        tab.get_by_role("textbox", name="Message").fill(question)
    for tab in tabs.values():
        tab.keyboard.press("Enter")
    for tab in tabs.values():
        finish(tab)
        button(tab, "Next version").wait_for()
    for tab in tabs.values():
        tab.reload()
        other = button(tab, "Previous version").or_(button(tab, "Next version"))
        other.first.wait_for()
        first = said(tab)
        other.and_(tab.locator(":enabled")).click()
        second = said(tab)
        assert {first.pop(4), second.pop(4)} == set(tabs)
        assert first == second == [*asked, STORY]


def test_V15_chat_continues_after_a_server_restart(browser, base, monkeypatch):
    write_model("sft:restarted", context=1024)
    context = browser.new_context()
    monkeypatch.setattr("nanochat.serve.server.DRAIN_SECONDS", 0.2)
    with monkeypatch.context() as patch, serving("sft:restarted") as site:
        says(patch, site, STORY)
        page = open_page(context, site.url)
        send(page, "Before")
        slow_down(patch, 0.05)
        send(page, "Interrupted", wait=False)
        started(page)
        port = int(site.url.rsplit(":", 1)[1])
    finish(page)
    part = said(page)[3]
    send(page, "While it is down")
    assert messages(page).get_by_text("cannot be reached").is_visible()
    with monkeypatch.context() as patch, serving("sft:restarted", port=port) as site:
        says(patch, site, STORY)
        page.reload()
        page.wait_for_selector("select option", state="attached")
        press(page, -1, "Retry")
        finish(page)
        assert said(page) == ["Before", STORY, "Interrupted", part, "While it is down", STORY]
        assert STORY.startswith(part) and len(part) > 5
    context.close()
