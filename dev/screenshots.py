"""
Write screenshots of the chat page to dev/chat_page/.

    uv sync --inexact --group browser
    python -m scripts.chat_web &
    python dev/screenshots.py http://127.0.0.1:8000

Imports the conversations below, so any model works: none of its answers are shown.
"""

import json
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

FOLDER = Path(__file__).parent / "chat_page"
VIEWS = {
    "light": {"color_scheme": "light", "viewport": {"width": 900, "height": 900}},
    "dark": {"color_scheme": "dark", "viewport": {"width": 900, "height": 900}},
    "phone": {
        "color_scheme": "light",
        "viewport": {"width": 390, "height": 780},
        "is_mobile": True,
        "has_touch": True,
    },
}
PLUMS = [
    {"type": "text", "text": "In 4 days he sells 4 * 11 = "},
    {"type": "python", "text": "4*11"},
    {"type": "python_output", "text": "44"},
    {"type": "text", "text": " plums.\n\n#### 44"},
]
STAGES = """Training goes through **four stages**; each starts from the previous checkpoint:

| stage | data | learns |
|:--|:--|--:|
| base | plain text | language |
| mid | conversations, tool calls | the chat format |
| SFT | selected answers | to answer |
| RL | questions with a checker | to be correct |

1. Train the tokenizer
   - merges are learned from a sample
   - ids are those of `tiktoken`
2. Pretrain, with cross-entropy $L = -\\sum_t \\log p(x_t \\mid x_{<t})$
3. Fine-tune:

   ```python
   def loss(logits, targets, mask):  # only what the assistant says
       losses = F.cross_entropy(logits.mT, targets, reduction="none")
       return (losses * mask).sum() / mask.sum()
   ```
"""
CHATS = [
    ("Spell 'plum' backwards", "m-u-l-p"),
    ("Which planet is the largest?", "Jupiter."),
    (
        "A haiku about gradients",
        "Down the slope it goes,\nstep by step, a little less:\nthe loss finds its rest.",
    ),
]


def conversation(*turns: object) -> list[dict]:
    """Messages that alternate between user and assistant."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]


def import_chats(page: Page) -> None:
    """Import all conversations into the page, the displayed one last."""
    long = conversation(
        "What are the stages of training?",
        STAGES,
        "Nolan sells 11 plums every day. How many plums does he sell in 4 days?",
        PLUMS,
    )
    for chat in [*(conversation(*turns) for turns in CHATS), long]:
        text = json.dumps(chat).encode()
        file = {"name": "chat.jsonl", "mimeType": "application/jsonl", "buffer": text}
        count = page.locator("#chats a").count()
        page.set_input_files("#file", files=[file])
        page.wait_for_function("(n) => document.querySelectorAll('#chats a').length > n", arg=count)
    page.get_by_role("button", name="Dismiss").click()
    page.locator("#log pre, #log table").last.wait_for()  # the server rendered the Markdown


def take_picture(browser: Browser, url: str, name: str) -> None:
    """Take the screenshots of one view."""
    page = browser.new_context(**VIEWS[name]).new_page()
    page.goto(url)
    page.wait_for_selector("#model option", state="attached")
    import_chats(page)
    page.screenshot(path=str(FOLDER / f"{name}.png"))
    if name == "phone":
        page.click("#toggle")
        page.screenshot(path=str(FOLDER / "phone_list.png"))


def main(url: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    path = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for name in VIEWS:
            take_picture(browser, url, name)


if __name__ == "__main__":
    main(sys.argv[1])
