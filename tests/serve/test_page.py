"""The chat page in a real browser (the system's Chromium, driven by Playwright)."""

import json
from pathlib import Path

import pytest

from tests.serve.test_server import slow_down, until, words
from tests.web_server import product, says, serving, write_model

sync_api = pytest.importorskip("playwright.sync_api")
STORY = "Once upon a time there was a very small model that liked to talk."
EVIL = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>\n\n"
    "[here](javascript:window.hacked=3) [there](https://example.org/a) **bold** and `co<b>de`\n\n"
    "```html\n<iframe srcdoc='<script>parent.hacked = 4</script>'></iframe>\n```\n"
    "- one\n- <svg onload=window.hacked=5>\n\n# <u>title</u>\n"
)


@pytest.fixture
def site(base, monkeypatch):
    write_model("sft:tiny", context=1024)
    write_model("base:tiny")
    with serving() as found:
        tell(found, monkeypatch, STORY)
        yield found


def tell(site, monkeypatch, text):
    """Make the model answer everything with this text."""
    says(monkeypatch, site, words(site, text))
    site.engine.ends = {site.tokenizer.special("<|assistant_end|>")}


@pytest.fixture
def page(browser, site):
    """The chat page; JavaScript and console errors fail the test."""
    context = browser.new_context(viewport={"width": 900, "height": 700})
    found = context.new_page()
    errors = []
    found.on("pageerror", lambda error: errors.append(str(error)))
    found.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    found.goto(site.url)
    found.wait_for_selector("#model option", state="attached")
    yield found
    context.close()
    expected = ("TrustedHTML", "503", "ERR_")
    assert not [error for error in errors if not any(word in error for word in expected)]


def open_page(context, url):
    """Open another tab."""
    found = context.new_page()
    found.goto(url)
    found.wait_for_selector("#model option", state="attached")
    return found


def act(page, role, name):
    """Click a button on the last message with this role."""
    page.locator(f"article.{role}").last.get_by_role("button", name=name, exact=True).click()


def press(page, role, nth, name):
    """Click a message's button, which appears on hover."""
    article = page.locator(f"article.{role}").nth(nth)
    article.hover()
    article.get_by_role("button", name=name, exact=True).click()


def titles(page):
    """Titles in the chat list."""
    return page.locator("#chats .title").all_inner_texts()


def choose(page, title, entry):
    """Click an entry in a chat's menu."""
    item = page.locator("#chats li", has_text=title)
    item.hover()
    item.get_by_role("button").click()
    page.get_by_role("menuitem", name=entry, exact=True).click()


def stored(page):
    """Message texts in each stored chat, keyed by its first message."""
    return page.evaluate(
        "Object.fromEntries(Object.keys(localStorage).filter((k) => k.startsWith('nanochat:chat:'))"
        ".map((k) => Object.values(JSON.parse(localStorage[k]).nodes)).map((nodes) => "
        "[nodes[0].parts[0].text, nodes.map((n) => n.parts.map((p) => p.text).join(''))]))"
    )


def import_text(page, name, text):
    """Import a file with this text."""
    file = {"name": name, "mimeType": "application/json", "buffer": text.encode()}
    page.set_input_files("#file", files=[file])


def send(page, text, wait=True):
    page.fill("#question", text)
    page.press("#question", "Enter")
    if wait:
        page.wait_for_selector("#send", state="visible")


def said(page):
    """(role, text) of each message on the page."""
    found = page.query_selector_all("#log article")
    return [(a.get_attribute("class"), a.query_selector(".body").inner_text()) for a in found]


def json_lines(text: str) -> list[str]:
    """Lines of a JSONL file; an answer may contain other line separators, which JSON keeps."""
    return text.removesuffix("\n").split("\n")


def test_answer_streams_and_can_be_stopped(page, site, monkeypatch):
    slow_down(monkeypatch, site, 0.02)
    assert page.evaluate("document.activeElement.id") == "question"
    send(page, "Hello", wait=False)
    page.wait_for_selector("#stop", state="visible")
    lengths = []
    while page.is_visible("#stop"):
        lengths.append(len(said(page)[-1][1]))
    assert len(set(lengths)) > 2 and lengths == sorted(lengths)
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


def test_retry_and_edit_keep_earlier_versions(page, site, monkeypatch):
    send(page, "First")
    send(page, "Second")
    tell(site, monkeypatch, "Another answer")
    press(page, "assistant", 0, "Retry")
    page.wait_for_selector("#send", state="visible")
    assert said(page) == [("user", "First"), ("assistant", "Another answer")]
    assert page.inner_text(".versions") == "2 / 2"
    assert page.get_by_role("button", name="Next version").is_disabled()
    page.get_by_role("button", name="Previous version").focus()
    page.keyboard.press("Enter")
    assert [text for _, text in said(page)] == ["First", STORY, "Second", STORY]
    assert page.evaluate("document.activeElement.ariaLabel") == "Next version"
    page.keyboard.press("Enter")
    assert len(said(page)) == 2 and page.inner_text(".versions") == "2 / 2"
    tell(site, monkeypatch, "A third")
    page.press("#question", "ArrowUp")  # edits the last question
    area = page.locator("#log textarea")
    assert area.input_value() == "First"
    area.press("Escape")
    assert page.locator("#log textarea").count() == 0 and len(said(page)) == 2
    act(page, "user", "Edit")
    area.fill("Changed")
    area.press("Enter")
    page.wait_for_selector("#send", state="visible")
    assert said(page) == [("user", "Changed"), ("assistant", "A third")]
    assert page.inner_text("article.user .versions") == "2 / 2"
    page.reload()
    page.get_by_role("button", name="Previous version").first.click()
    assert said(page)[0] == ("user", "First") and said(page)[1][1] in (STORY, "Another answer")


def test_conversation_survives_reload(page, site):
    send(page, "Remember me")
    kept = [("user", "Remember me"), ("assistant", STORY)]
    address = page.url
    page.reload()
    assert said(page) == kept and page.url == address
    page.click("#new")
    assert said(page) == [] and page.is_visible("#empty")
    page.reload()
    assert said(page) == [] and titles(page) == ["Remember me"]
    page.go_back()
    assert said(page) == kept
    page.go_forward()
    assert said(page) == []
    page.goto(address)
    assert said(page) == kept
    page.goto(site.url + "/#none")
    page.reload()
    page.wait_for_selector("#toast >> text=not found in this browser")
    assert said(page) == [] and titles(page) == ["Remember me"]


def test_damaged_stored_chats_are_left_untouched(page, site):
    page.evaluate('localStorage.setItem(\'nanochat:chat:bad\', \'{"id": "bad", "nodes": [1]}\')')
    page.reload()
    assert "nanochat:chat:bad" in page.inner_text("#trouble")
    send(page, "Hello")
    assert page.evaluate("localStorage['nanochat:chat:bad']") == '{"id": "bad", "nodes": [1]}'


def test_V15_reload_while_generating_keeps_partial_answer(page, site, monkeypatch):
    slow_down(monkeypatch, site, 0.03)
    send(page, "Hello", wait=False)
    until(lambda: 15 < len(said(page)[-1][1]))
    page.reload()
    page.wait_for_selector("article.assistant")
    (_, text) = said(page)[-1]
    assert len(text) > 5 and STORY.startswith(text.strip())
    assert "stopped" in page.inner_text("article.assistant")
    assert page.get_by_role("button", name="Continue").is_visible()
    site.seconds_until_idle()
    tell(site, monkeypatch, "Another answer")
    act(page, "assistant", "Retry")
    page.wait_for_selector("#send", state="visible")
    assert said(page)[-1][1] == "Another answer"
    page.get_by_role("button", name="Previous version").click()
    assert said(page)[-1][1] == text


def test_V9_messages_never_run_as_code(page, site, monkeypatch):
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


def test_tool_calls_are_rendered_inline(page, site, monkeypatch):
    script = [*site.tokenizer.encode("It is "), *product(site), *words(site, "**indeed**.")]
    says(monkeypatch, site, script)
    send(page, "6 times 7?")
    paragraph = page.locator("article.assistant .body > *")
    assert paragraph.count() == 1 and paragraph.inner_text() == "It is 6*7 = 42indeed."
    assert paragraph.locator("strong").inner_text() == "indeed"
    chip, details = page.locator(".chip"), page.locator(".details")
    assert chip.get_attribute("aria-expanded") == "false" and details.is_hidden()
    chip.focus()
    page.keyboard.press("Enter")
    assert chip.get_attribute("aria-expanded") == "true"
    assert details.locator("code").all_inner_texts() == ["6*7", "42"]
    chip.click()
    assert details.is_hidden()
    posts = []
    page.on("request", lambda request: posts.append(request.post_data))
    send(page, "And?")
    sent = json.loads(posts[0])["messages"]
    kinds = [part["type"] for part in sent[1]["content"]]
    assert kinds == ["text", "python", "python_output", "text"]


def test_gsm8k_answer_line_is_not_a_heading(page, site, monkeypatch):
    tell(site, monkeypatch, "#### 12\n4 * 11 = 44 plums.\n#### 44")
    send(page, "How many?")
    assert page.inner_text(".answer") == "Answer: 44"
    assert page.locator(".body h5").all_inner_texts() == ["12"]


def test_text_after_an_answer_line_is_kept(page, site, monkeypatch):
    tell(site, monkeypatch, "#### 44" + "\n" * 10 + "**Done.**")
    send(page, "How many?")
    assert page.inner_text(".answer") == "Answer: 44"
    assert page.locator(".body strong").last.inner_text() == "Done."


def test_settings_are_sent_and_saved(page, site):
    page.click("#open-settings")
    page.fill("[name=temperature]", "0.25")
    page.fill("[name=seed]", "7")
    page.fill("[name=system]", "Be brief.")
    page.select_option("[name=theme]", "dark")
    page.click("#settings >> text=Done")
    scheme = "getComputedStyle(document.documentElement).colorScheme"
    until(lambda: page.evaluate(scheme) == "dark")
    posts = []
    page.on("request", lambda request: posts.append(request))
    send(page, "Hello")
    body = json.loads(posts[0].post_data)
    assert posts[0].url.endswith("/v1/chat/completions")
    assert (body["temperature"], body["seed"], body["model"]) == (0.25, 7, "sft:tiny")
    assert [m["role"] for m in body["messages"]] == ["system", "user"]
    page.reload()
    page.wait_for_selector("#model option", state="attached")
    page.click("#open-settings")
    assert page.input_value("[name=temperature]") == "0.25"
    page.click("#defaults")
    page.fill("[name=seed]", "7")  # other seeds may give an empty answer, which is not exported
    page.click("#settings >> text=Done")
    page.select_option("#model", "base:tiny")
    del posts[:]
    send(page, "Continue")
    assert posts[0].url.endswith("/v1/completions")
    assert json.loads(posts[0].post_data)["prompt"] == "Continue"
    assert json.loads(posts[0].post_data)["temperature"] == 1.0
    with page.expect_download() as download:
        choose(page, "Hello", "Export as JSONL")
    saved = [json.loads(line) for line in json_lines(Path(download.value.path()).read_text())]
    assert saved == [
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": STORY},
            {"role": "user", "content": "Continue"},
            {"role": "assistant", "content": saved[0][-1]["content"]},
        ]
    ]


def test_open_editor_survives_updates_and_submits_later(page, site, monkeypatch):
    send(page, "First")
    send(page, "Second")
    press(page, "user", 0, "Edit")
    area = page.locator("#log textarea")
    area.fill("First, changed")
    page.select_option("#model", "base:tiny")  # rerenders the page
    page.select_option("#model", "sft:tiny")
    assert area.input_value() == "First, changed"
    slow_down(monkeypatch, site, 0.01)
    send(page, "Third", wait=False)
    page.wait_for_selector("#stop", state="visible")
    assert area.count() == 0
    page.wait_for_selector("#send", state="visible")
    assert [text for role, text in said(page) if role == "user"] == ["First", "Second", "Third"]
    press(page, "user", 1, "Edit")
    area.fill("Second, changed")
    area.press("Enter")
    page.wait_for_selector("#send", state="visible")
    assert [text for role, text in said(page) if role == "user"] == ["First", "Second, changed"]
    page.get_by_role("button", name="Previous version").click()
    assert [text for role, text in said(page) if role == "user"] == ["First", "Second", "Third"]


def test_keyboard_focus_is_never_lost(page, site):
    send(page, "Hello")
    page.get_by_role("button", name="Retry").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#send", state="visible")
    assert page.evaluate("document.activeElement.id") in ("question", "stop")
    page.focus("#send")
    page.fill("#question", "Again")
    page.focus("#send")
    page.keyboard.press("Enter")
    page.wait_for_selector("#send", state="visible")
    until(lambda: page.evaluate("document.activeElement.id") in ("question", "send"))


def test_unanswered_question_is_not_sent_to_the_model(page, site):
    send(page, "First")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=503, body="{}"))
    send(page, "Unanswered")
    assert "503" in page.inner_text(".error")
    page.unroute("**/v1/chat/completions")
    posts = []
    page.on("request", lambda request: posts.append(request.post_data))
    send(page, "Second")
    sent = [m["content"] for m in json.loads(posts[0])["messages"]]
    assert sent == ["First", STORY, "Second"]


def test_page_connects_after_the_server_comes_up(browser, site):
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


def test_errors_are_shown_and_retry_works(browser, site, monkeypatch):
    context = browser.new_context()
    page = context.new_page()
    page.goto(site.url)
    page.wait_for_selector("#model option", state="attached")
    plain = site.engine.model.logits
    monkeypatch.setattr(site.engine.model, "logits", lambda hidden: 1 / 0)
    send(page, "Hello")
    assert "division" in page.inner_text(".error")
    monkeypatch.setattr(site.engine.model, "logits", plain)
    act(page, "assistant", "Retry")
    page.wait_for_selector("#send", state="visible")
    assert page.locator(".error").count() == 0 and said(page)[-1][1] == STORY
    long = "x" * 1200
    send(page, long)
    assert "context" in page.inner_text(".error") and said(page)[-2][1] == long
    context.close()


def test_settings_open_if_the_server_requires_a_key(browser, base, tmp_path, monkeypatch):
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


# ---- chat list


def test_chats_are_listed_renamed_and_searched(page, site, monkeypatch):
    send(page, "About plums and pears")
    page.click("#new")
    tell(site, monkeypatch, "A hidden word: zebra.")
    send(page, "A question " + "that is long " * 10)
    assert len(titles(page)) == 2 and titles(page)[0].startswith("A question that is long")
    assert titles(page)[1] == "About plums and pears"
    choose(page, "plums", "Rename")
    page.keyboard.type("Fruit")
    page.keyboard.press("Enter")
    assert titles(page)[1] == "Fruit"
    choose(page, "Fruit", "Rename")
    page.keyboard.type("Not kept")
    page.keyboard.press("Escape")
    assert titles(page)[1] == "Fruit"
    for query, count in (("ZEBRA", 1), ("fruit", 1), ("plums", 1), ("unknown", 0), ("", 2)):
        page.fill("#search", query)
        assert len(titles(page)) == count, query
    page.fill("#search", "zebra")
    assert "zebra" in page.inner_text("#chats small")
    page.fill("#search", "fruit")
    page.press("#search", "Enter")
    assert said(page)[0][1] == "About plums and pears" and page.title() == "Fruit - nanochat"
    page.reload()
    assert titles(page)[1] == "Fruit"


def test_deleted_chats_can_be_restored(page, site):
    send(page, "Keep me")
    kept = said(page)
    choose(page, "Keep me", "Delete")
    assert titles(page) == [] and said(page) == []
    page.click("#toast >> text=Undo")
    assert titles(page) == ["Keep me"] and said(page) == kept
    choose(page, "Keep me", "Delete")
    page.reload()
    assert titles(page) == []
    page.click("#open-trash")
    page.get_by_role("button", name="Restore Keep me").click()
    assert page.is_visible("#trash-none")
    page.keyboard.press("Escape")
    page.click("#chats a")
    assert said(page) == kept
    choose(page, "Keep me", "Delete")
    page.go_back()  # the URL of a deleted chat still shows it
    assert said(page) == kept and page.is_visible("#trashed")
    page.click("#restore")
    assert titles(page) == ["Keep me"]
    choose(page, "Keep me", "Delete")
    page.click("#open-trash")
    page.click("#empty-trash")
    assert page.locator("#trash-list li").count() == 1, "needs a second click"
    page.click("#empty-trash")
    assert page.locator("#trash-list li").count() == 0 and stored(page) == {}


def test_chat_deleted_while_generating_stays_deleted(page, site, monkeypatch):
    slow_down(monkeypatch, site, 0.1)
    send(page, "Delete me", wait=False)
    until(lambda: len(said(page)[-1][1]) > 3)
    other = open_page(page.context, site.url)
    choose(other, "Delete me", "Delete")
    other.click("#open-trash")
    other.click("#empty-trash")
    other.click("#empty-trash")
    until(lambda: said(page) == [])
    page.click("#new")
    site.seconds_until_idle()
    page.wait_for_timeout(1500)  # a running answer is saved every second
    assert stored(page) == {} and titles(page) == titles(other) == []


def test_trash_is_emptied_after_thirty_days(page, site):
    for name in ("old", "new"):
        page.click("#new")
        send(page, name)
        choose(page, name, "Delete")
    page.evaluate(
        """() => {
          const key = Object.keys(localStorage).find((k) => localStorage[k].includes('"old"'));
          const chat = JSON.parse(localStorage[key]);
          chat.trash.at -= 30 * 24 * 3600 * 1000;
          localStorage[key] = JSON.stringify(chat);
        }"""
    )
    page.reload()
    page.click("#open-trash")
    assert page.locator("#trash-list .title").all_inner_texts() == ["new"]
    assert list(stored(page)) == ["new"]


def test_export_and_import_keep_all_versions(page, site, monkeypatch):
    send(page, "First")
    tell(site, monkeypatch, "Another answer")
    act(page, "assistant", "Retry")
    page.wait_for_selector("#send", state="visible")
    page.click("#new")
    send(page, "Second chat")
    files = {}
    for kind in ("JSON", "JSONL"):
        with page.expect_download() as download:
            page.click("#export")
            page.get_by_role("menuitem", name=f"All chats as {kind},").click()
        files[kind] = Path(download.value.path()).read_text()
    before = stored(page)
    lines = [json.loads(line) for line in json_lines(files["JSONL"])]
    assert [[m["content"] for m in line] for line in lines] == [
        ["Second chat", "Another answer"],
        ["First", "Another answer"],
    ]
    page.evaluate("localStorage.clear()")
    page.goto(site.url)
    page.reload()
    assert titles(page) == []
    import_text(page, "chats.json", files["JSON"])
    page.wait_for_selector("#toast >> text=2 chats imported")
    assert stored(page) == before and len(before["First"]) == 3
    import_text(page, "again.json", files["JSON"])  # existing chats stay
    page.wait_for_timeout(100)
    assert stored(page) == before
    page.evaluate("localStorage.clear()")
    page.goto(site.url)
    page.reload()
    import_text(page, "chats.jsonl", files["JSONL"])
    page.wait_for_selector("#toast >> text=2 chats imported")
    assert sorted(titles(page)) == ["First", "Second chat"]
    assert said(page)[-1] == ("assistant", "Another answer")


def test_fine_tuning_jsonl_with_tool_calls_can_be_imported(page, site):
    parts = [{"type": "text", "text": "It is "}, {"type": "python", "text": "6*7"}]
    parts += [{"type": "python_output", "text": "42"}, {"type": "text", "text": "."}]
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "6*7?"},
        {"role": "assistant", "content": parts},
    ]
    import_text(page, "one.jsonl", json.dumps(chat) + "\n" + json.dumps({"messages": chat}) + "\n")
    page.wait_for_selector("#toast >> text=2 chats imported")
    assert page.inner_text("article.assistant .body") == "It is 6*7 = 42."
    with page.expect_download() as download:
        page.click("#export")
        page.get_by_role("menuitem", name="JSONL").click()
    saved = json_lines(Path(download.value.path()).read_text())
    assert [json.loads(line) for line in saved] == [chat, chat]
    before = stored(page)
    for bad in ("", "{}", "[]", "nonsense", '[{"role": "robot", "content": "x"}]', '[{"role": 1}]'):
        import_text(page, "bad.json", bad)
        page.wait_for_selector("#toast >> text=Failed to import bad.json")
        page.click("#toast [aria-label=Dismiss]")
    assert stored(page) == before


def test_imported_system_prompt_is_sent_and_exported(page, site):
    chat = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "system",
            "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}],
        },
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
    ]
    import_text(page, "one.json", json.dumps(chat, indent=2))
    page.wait_for_selector("#toast >> text=1 chat imported")
    posts = []
    page.on("request", lambda request: posts.append(request.post_data))
    send(page, "And?")
    system = {"role": "system", "content": "Be brief.\n\nBe kind."}
    assert json.loads(posts[0])["messages"][0] == system
    page.reload()
    with page.expect_download() as download:
        choose(page, "Hello", "Export as JSONL")
    saved = json.loads(Path(download.value.path()).read_text())
    assert saved[0] == system and [m["role"] for m in saved[1:]] == ["user", "assistant"] * 2
    chat[1]["content"] = [{"type": "python", "text": "1"}]
    import_text(page, "bad.json", json.dumps(chat))
    page.wait_for_selector("#toast >> text=a system message must be text")


def test_full_storage_is_reported_and_loses_nothing(page, site):
    send(page, "Before")
    page.evaluate(
        """() => {
          for (let size = 2 ** 22; size >= 1; size /= 2) {
            const add = () => {
              localStorage.setItem(`filler${size}-${localStorage.length}`, "x".repeat(size));
            };
            try { for (;;) add(); }
            catch (error) { continue; }
          }
        }"""
    )
    page.click("#new")
    send(page, "While it is full")
    assert "full" in page.inner_text("#trouble")
    page.click("#chats a >> text=Before")
    page.click("#chats a >> text=While it is full")
    assert said(page) == [("user", "While it is full"), ("assistant", STORY)]
    assert list(stored(page)) == ["Before"]
    page.evaluate(
        "Object.keys(localStorage).filter((k) => k.startsWith('filler'))"
        ".forEach((k) => localStorage.removeItem(k))"
    )
    send(page, "Again")
    assert sorted(stored(page)) == ["Before", "While it is full"]


def test_blocked_site_data_shows_a_warning(browser, site):
    context = browser.new_context()
    context.add_init_script(
        "Object.defineProperty(window, 'localStorage', "
        "{ get() { throw new DOMException('blocked', 'SecurityError'); } })"
    )
    page = open_page(context, site.url)
    assert "blocks site data" in page.inner_text("#trouble")
    send(page, "Hello")
    page.click("#new")
    page.click("#chats a")
    assert said(page) == [("user", "Hello"), ("assistant", STORY)]
    context.close()


# ---- several tabs, reloads, restarts


def test_V15_answer_continues_in_its_own_chat(page, site, monkeypatch):
    slow_down(monkeypatch, site, 0.02)
    send(page, "First chat", wait=False)
    page.wait_for_selector("#stop", state="visible")
    page.click("#new")
    assert page.is_visible("#send") and page.locator("#chats .dot.busy").count() == 1
    send(page, "Second chat", wait=False)
    until(lambda: page.locator("#chats .dot.busy").count() == 2)
    page.wait_for_selector("#chats [aria-label='New answer']", state="attached")
    page.wait_for_selector("#send", state="visible")
    assert said(page) == [("user", "Second chat"), ("assistant", STORY)]
    page.click("#chats a >> text=First chat")
    assert said(page) == [("user", "First chat"), ("assistant", STORY)]
    assert page.locator("#chats .dot").count() == 0


def test_V15_two_tabs_generate_in_two_chats_at_once(page, site, monkeypatch):
    slow_down(monkeypatch, site, 0.02)
    other = open_page(page.context, site.url)
    send(page, "In the first tab", wait=False)
    send(other, "In the second tab", wait=False)
    assert page.is_visible("#stop") and other.is_visible("#stop")
    for tab in (page, other):
        tab.wait_for_selector("#send", state="visible")
        until(lambda tab=tab: len(titles(tab)) == 2)
    assert said(page)[0][1] == "In the first tab" and said(other)[0][1] == "In the second tab"
    both = ["In the first tab", "In the second tab"]
    until(lambda: stored(page) == {text: [text, STORY] for text in both})
    page.click("#chats a >> text=In the second tab")
    assert said(page) == [("user", "In the second tab"), ("assistant", STORY)]


def test_V15_two_tabs_generate_in_one_chat_at_once(page, site, monkeypatch):
    send(page, "First")
    other = open_page(page.context, page.url)
    slow_down(monkeypatch, site, 0.02)
    page.fill("#question", "From tab one")
    other.fill("#question", "From tab two")
    page.press("#question", "Enter")
    other.press("#question", "Enter")
    assert page.is_visible("#stop") and other.is_visible("#stop")
    for tab in (page, other):
        tab.wait_for_selector("#send", state="visible")
    wanted = sorted(["First", STORY, "From tab one", STORY, "From tab two", STORY])
    until(lambda: sorted(stored(page)["First"]) == wanted)
    for tab in (page, other):
        until(lambda tab=tab: "/ 2" in tab.inner_text("article.user >> nth=1"))
        tab.reload()
        assert len(said(tab)) == 4 and said(tab)[-1] == ("assistant", STORY)
        assert "/ 2" in tab.inner_text("article.user >> nth=1")


def test_V15_second_tab_follows_a_chat(page, site, monkeypatch):
    send(page, "First")
    other = open_page(page.context, page.url)
    slow_down(monkeypatch, site, 0.02)
    send(page, "Second", wait=False)
    until(lambda: len(said(other)) == 4)
    send(other, "Too early", wait=False)
    assert "Another tab" in other.inner_text("#toast")
    assert other.input_value("#question") == "Too early"
    other.fill("#question", "")
    page.wait_for_selector("#send", state="visible")
    until(lambda: said(other) == said(page))
    other.locator("article.assistant").last.hover()
    until(lambda: other.get_by_role("button", name="Retry").count() == 2)


def test_draft_belongs_to_its_chat(page, site):
    def suggest(route):
        found = route.fetch()
        route.fulfill(response=found, json=found.json() | {"suggestions": ["A suggestion"]})

    page.route("**/v1/models", suggest)
    page.reload()
    page.fill("#question", "Typed before")
    page.locator("#ideas button").first.click()  # sends the suggestion, not the draft
    page.wait_for_selector("#send", state="visible")
    assert page.input_value("#question") == "Typed before"
    page.click("#new")
    assert page.input_value("#question") == ""
    page.fill("#question", "For a new chat")
    page.click("#chats a")
    assert page.input_value("#question") == "Typed before"
    page.click("#new")
    assert page.input_value("#question") == "For a new chat"


def test_typed_text_survives_changes_from_another_tab(page, site, monkeypatch):
    send(page, "First")
    other = open_page(page.context, page.url)
    press(other, "user", 0, "Edit")
    other.fill("#log textarea", "Half typed")
    act(page, "assistant", "Retry")
    page.wait_for_selector("#send", state="visible")
    send(page, "Second")
    until(lambda: other.locator(".versions").count() == 1)  # the answer below the editor updates
    assert other.input_value("#log textarea") == "Half typed"
    other.keyboard.press("Escape")
    other.hover("#chats li")
    other.locator("#chats li").get_by_role("button").click()
    other.get_by_role("menuitem", name="Rename").click()
    other.keyboard.type("My title")
    send(page, "Third")
    until(lambda: len(stored(other)["First"]) == 7)
    other.keyboard.press("Enter")
    assert titles(other) == ["My title"]
    until(lambda: titles(page) == ["My title"])


def test_V15_merging_copies_does_not_depend_on_order(page):
    page.evaluate(
        """async () => {
          const { addMessage, checkedChat, merge, newChat, textPart } =
            await import("/page/chat.js");
          const copy = (chat) => checkedChat(JSON.parse(JSON.stringify(chat)));
          const base = newChat();
          const first = addMessage(base, null, "user", [textPart("q")]);
          const tabs = [0, 1, 2].map(() => copy(base));
          tabs.forEach((chat, i) => {
            const node = addMessage(chat, first.id, "assistant", [textPart(`answer ${i}`)]);
            node.rev += i;
            chat.title = { text: `title ${i}`, at: 5 };
          });
          const early = copy(tabs[2]);
          Object.values(tabs[2].nodes).at(-1).parts[0].text += " goes on";
          Object.values(tabs[2].nodes).at(-1).rev += 1;
          const orders = [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1, 2, 0]];
          const all = [...tabs, early];
          const results = orders.map((order) => {
            const chat = copy(base);
            order.forEach((i) => merge(chat, copy(all[i])));
            const nodes = Object.values(chat.nodes).sort((a, b) => (a.id < b.id ? -1 : 1));
            return JSON.stringify([nodes, chat.title, chat.head, chat.updated]);
          });
          if (new Set(results).size !== 1) throw new Error(results.join("\\n"));
          const [nodes] = JSON.parse(results[0]);
          if (nodes.length !== 4 || !results[0].includes("goes on")) throw new Error(results[0]);
        }"""
    )


def test_V15_chat_overwritten_by_another_tab_is_repaired(page, site):
    send(page, "First")
    raw = "localStorage[Object.keys(localStorage).find((k) => k.startsWith('nanochat:chat:'))]"
    early = page.evaluate(raw)
    send(page, "Second")
    other = page.context.new_page()
    other.goto(site.url + "/page/icon.svg")  # same origin, without the page's script
    other.evaluate(f"(text) => {{ {raw} = text }}", early)
    # seen from the other tab, whose own text is the first one without "Second"
    until(lambda: "Second" in other.evaluate(raw))
    assert len(stored(page)["First"]) == 4


def test_V15_chat_continues_after_a_server_restart(browser, base, monkeypatch):
    write_model("sft:tiny", context=1024)
    context = browser.new_context()
    monkeypatch.setattr("nanochat.serve.server.DRAIN_SECONDS", 0.2)
    with serving() as site:
        tell(site, monkeypatch, STORY)
        page = open_page(context, site.url)
        send(page, "Before")
        slow_down(monkeypatch, site, 0.05)
        send(page, "Interrupted", wait=False)
        until(lambda: len(said(page)[-1][1]) > 8)
        port = int(site.url.rsplit(":", 1)[1])
    page.wait_for_selector("#send", state="visible")
    (_, text) = said(page)[-1]
    assert STORY.startswith(text) and len(text) > 5
    assert page.inner_text(".error")
    send(page, "While it is down")
    assert "cannot be reached" in page.inner_text(".error >> nth=-1")
    assert [role for role, _ in said(page)] == ["user", "assistant"] * 3
    with serving(port=port) as site:
        tell(site, monkeypatch, STORY)
        page.reload()
        page.wait_for_selector("#model option", state="attached")
        act(page, "assistant", "Retry")
        page.wait_for_selector("#send", state="visible")
        assert said(page)[-1][1] == STORY and said(page)[3][1] == text
    context.close()


def streamed(route, texts, finish):
    """Fulfill a request with a stream of texts; returns the request body."""
    body = json.loads(route.request.post_data)
    chat = "messages" in body
    pieces = [{"delta": {"content": text}} if chat else {"text": text} for text in texts]
    pieces += [
        {"delta": {}, "finish_reason": finish} if chat else {"text": "", "finish_reason": finish}
    ]
    usage = {"completion_tokens": len(texts)}
    events = [f"data: {json.dumps({'choices': [p], 'usage': usage})}\n\n" for p in pieces]
    route.fulfill(content_type="text/event-stream", body="".join(events) + "data: [DONE]\n\n")
    return body


def test_continue_button_extends_a_truncated_answer(page, site):
    posts, answers = [], [(["One ", "two "], "length"), (["three."], "stop")]
    page.route(
        "**/v1/*completions", lambda route: posts.append(streamed(route, *answers[len(posts) % 2]))
    )
    page.route(
        "**/v1/chat/*", lambda route: posts.append(streamed(route, *answers[len(posts) % 2]))
    )
    for model in ("sft:tiny", "base:tiny"):
        page.click("#new")
        page.select_option("#model", model)
        send(page, "Count")
        assert said(page)[-1][1].strip() == "One two" and "limit" in page.inner_text(
            ".stats >> nth=-1"
        )
        page.get_by_role("button", name="Continue").click()
        page.wait_for_selector("#send", state="visible")
        assert said(page)[-1][1] == "One two three."
        assert page.locator(".versions").count() == 0, "it includes the first part"
        assert page.get_by_role("button", name="Continue").count() == 0
        assert "3 tokens" in page.inner_text(".stats >> nth=-1")
    chat = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "One two "}]
    assert posts[0]["messages"] == chat[:1] and posts[1]["messages"] == chat
    assert posts[2]["prompt"] == "Count" and posts[3]["prompt"] == "CountOne two "


# ---- phone, keyboard


def test_phone_layout_has_large_touch_targets(browser, site, monkeypatch):
    context = browser.new_context(
        viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True
    )
    page = open_page(context, site.url)
    table = "| " + "column | " * 9 + "\n" + "|-" * 9 + "|\n" + "| cell " * 9 + "|"
    script = [
        *site.tokenizer.encode(f"{table}\n\n- a\n  - b\n\n```\n{'x' * 90}\n```\n\n"),
        *product(site),
    ]
    says(monkeypatch, site, [*script, *words(site, "indeed.")])
    send(page, "A word so long that it must be broken: " + "abcdefghij" * 12)
    send(page, "Second")
    wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    small = """(root) => [...document.querySelectorAll(root + " *")]
      .filter((e) => e.matches("button, select, input, textarea, a") && e.checkVisibility())
      .filter((e) => !e.matches(".chip"))
      .map((e) => [e.id || e.ariaLabel || e.textContent, e.getBoundingClientRect()])
      .filter(([, box]) => box.width && (box.height < 40 || box.width < 40))
      .map(([name]) => name)"""
    assert not page.evaluate(wide)
    assert page.evaluate(small, "#column") == []
    hit = """(chip) => { const box = chip.getBoundingClientRect(), y = box.y + box.height / 2;
      return [-19, 19].every((d) => document.elementFromPoint(box.x + 5, y + d) === chip); }"""
    assert page.locator(".chip").last.evaluate(hit)
    left = page.evaluate(
        "document.querySelector('article.assistant .body').getBoundingClientRect().left"
    )
    assert left >= 12
    for name in ("Copy", "Edit", "Retry"):
        assert page.get_by_role("button", name=name, exact=True).first.is_visible()
    assert not page.is_visible("#sidebar #search")
    page.click("#toggle")
    assert page.is_visible("#search") and page.evaluate(small, "#sidebar") == []
    page.keyboard.press("Escape")
    assert not page.is_visible("#search")
    assert page.evaluate("document.activeElement.id") == "toggle"
    page.click("#toggle")
    page.click("#backdrop", position={"x": 350, "y": 300})
    assert not page.is_visible("#search")
    page.click("#toggle")
    page.click("#chats a")
    assert not page.is_visible("#search") and len(said(page)) == 4
    page.click("#open-settings")
    assert page.evaluate(small, "#settings") == [] and not page.evaluate(wide)
    context.close()


def test_all_actions_work_by_keyboard(page, site, monkeypatch):
    send(page, "Hello")
    act(page, "assistant", "Retry")
    page.wait_for_selector("#send", state="visible")
    reached = []
    page.focus("#search")
    for _ in range(40):
        reached.append(
            page.evaluate(
                "document.activeElement.id || document.activeElement.ariaLabel || "
                "document.activeElement.textContent"
            )
        )
        page.keyboard.press("Tab")
    order = [
        "search",
        "import",
        "export",
        "open-trash",
        "open-help",
        "model",
        "new",
        "open-settings",
    ]
    order += ["Edit", "Previous version", "Copy", "Retry", "question", "send"]
    assert [name for name in reached if name in order][: len(order) + 1].count("Retry") == 1
    assert set(order) <= set(reached)
    positions = [reached.index(name) for name in order if name != "Copy"]
    assert positions == sorted(positions)
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, select, textarea, input, a')].filter((e) => "
        "!e.ariaLabel && !e.textContent.trim() && !e.labels?.length).map((e) => e.outerHTML)"
    )
    assert unnamed == []
    page.keyboard.press("Control+k")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("F2")
    page.keyboard.type("By keyboard")
    page.keyboard.press("Enter")
    assert titles(page) == ["By keyboard"]
    page.keyboard.press("Enter")  # focus is on the chat's menu button
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Escape")
    assert not page.is_visible("#menu")
    assert page.evaluate("document.activeElement.ariaLabel") == "Options for By keyboard"
    page.keyboard.press("Control+Shift+O")
    assert said(page) == [] and page.evaluate("document.activeElement.id") == "question"
    page.keyboard.press("Control+Shift+S")
    assert not page.is_visible("#search")
    page.keyboard.press("Control+k")
    assert page.evaluate("document.activeElement.id") == "search"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Delete")
    assert titles(page) == [] and page.evaluate("document.activeElement.id") == "search"
    for name in ("One", "Two", "Three"):
        page.click("#new")
        send(page, name)
    page.locator("#chats a").nth(1).focus()
    for left in (["Three", "One"], ["Three"]):
        page.keyboard.press("Delete")
        assert titles(page) == left
        assert page.evaluate("document.activeElement.textContent") == left[-1]
    for keys, dialog in (("Control+,", "#settings"), ("Control+/", "#help")):
        page.keyboard.press(keys)
        assert page.is_visible(dialog)
        page.keyboard.press("Escape")
        assert not page.is_visible(dialog)


def test_scroll_position_is_kept_while_streaming(page, site, monkeypatch):
    tell(site, monkeypatch, "line\n\n" * 60)
    send(page, "Long")
    slow_down(monkeypatch, site, 0.01)
    send(page, "Again", wait=False)
    until(lambda: len(said(page)[-1][1]) > 100)
    page.evaluate("document.getElementById('scroll').scrollTop = 100")
    length = len(said(page)[-1][1])
    until(lambda: len(said(page)[-1][1]) > length + 50)
    assert page.evaluate("document.getElementById('scroll').scrollTop") == 100
    page.click("#latest")
    page.wait_for_selector("#latest", state="hidden")
    page.wait_for_selector("#send", state="visible")
    rest = "(e) => e.scrollHeight - e.scrollTop - e.clientHeight"
    assert page.locator("#scroll").evaluate(rest) < 60
