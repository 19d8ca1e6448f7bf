"""
Take the pictures of the chat page that stand in dev/chat_page/.

    uv sync --inexact --group browser
    python -m scripts.chat_web --temperature=0 &
    python dev/screenshots.py http://127.0.0.1:8000

Asks the questions that the page suggests, so it wants a model of the embedded world.
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

FOLDER = Path(__file__).parent / "chat_page"
VIEWS = {
    "light": {"color_scheme": "light", "viewport": {"width": 1000, "height": 760}},
    "dark": {"color_scheme": "dark", "viewport": {"width": 1000, "height": 760}},
    "phone": {"color_scheme": "light", "viewport": {"width": 390, "height": 780}},
}


def picture(browser: Browser, url: str, name: str) -> None:
    """A conversation as it looks in one of the views."""
    page = browser.new_context(**VIEWS[name]).new_page()
    page.goto(url)
    page.wait_for_selector("#ideas button")
    ideas = [idea.inner_text() for idea in page.query_selector_all("#ideas button")]
    for idea in ideas:
        page.fill("#question", idea)
        page.press("#question", "Enter")
        page.wait_for_selector("#send", state="visible")
    page.screenshot(path=str(FOLDER / f"{name}.png"))


def main(url: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    path = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for name in VIEWS:
            picture(browser, url, name)


if __name__ == "__main__":
    main(sys.argv[1])
