"""
Markdown of the chat page, rendered as HTML that cannot run code.

    {"answers": [[{"type", "text"}, ...], ...]} -> render_answers -> HTML of each answer

HTML in a text is escaped, images become links, and only web and mail links are kept. There is no
inline style, which the page's policy would block.
"""

import re
from collections.abc import Sequence
from html import escape
from typing import Annotated, Literal

from markdown_it import MarkdownIt
from pydantic import BaseModel, Field

from nanochat.serve.openai_api import ApiError, read_request

MOST_CHARACTERS = 20_000  # as in ui.html. That many "[" take 2 s, and twice as many 8 s
MOST_CELLS = 5_000  # of tables in an answer. The parser fills up short rows: 65,000 cells take 2 s
MARK = "\ufdd0{}\ufdd1"  # place of a tool's call or result while its answer is Markdown
STAR = re.compile(r"(?<=[0-9A-Za-z])\*(?=[0-9A-Za-z])")  # a product, as in 2*3*4; no emphasis


class Part(BaseModel):
    type: Literal["text", "python", "python_output"]
    text: str


class MarkdownRequest(BaseModel):
    """POST /v1/markdown: the parts of each answer."""

    answers: list[Annotated[list[Part], Field(fail_fast=True)]] = Field(
        max_length=256, fail_fast=True
    )


def render_answers(body: bytes) -> list[str]:
    """
    Return the HTML of each answer of a request. Takes seconds at most; call it off the event loop.

    Raises ApiError for an invalid body, and for more than MOST_CHARACTERS in all.
    """
    answers = read_request(MarkdownRequest, body).answers
    if (size := sum(len(part.text) for parts in answers for part in parts)) > MOST_CHARACTERS:
        raise ApiError(413, f"{size:,} characters; the limit is {MOST_CHARACTERS:,}", "too_large")
    return [render_answer(parts) for parts in answers]


def render_answer(parts: Sequence[Part]) -> str:
    """Return the HTML of one answer; a tool's call and result become code elements."""
    parser = MarkdownIt("js-default", {"breaks": True}).disable("image")
    parser.validateLink = lambda url: url.lower().startswith(("http://", "https://", "mailto:"))
    text, tools = "", {}
    for i, part in enumerate(parts):
        if part.type == "text":
            text += STAR.sub("\ufdd2", part.text.replace("\ufdd0", "\ufffd"))
        else:
            name = "call" if part.type == "python" else "result"
            code = f'<code class="{name}" title="Tool {name}">{escape(part.text)}</code>'
            text, tools[MARK.format(i)] = text + MARK.format(i), code
    pipes = [line.count("|") for line in text.splitlines() if "|" in line]
    if pipes and len(pipes) * max(pipes) > MOST_CELLS:
        parser.disable("table")
    tokens = parser.parse(text)
    if tokens and tokens[-1].markup == "####":  # the final answer, as in GSM8K: no headline
        for token in (tokens[-3], tokens[-1]):
            token.tag = "p"
        tokens[-3].attrs["class"] = "answer"
    for token in tokens:
        if style := token.attrs.pop("style", None):  # text-align:right, of a table's cell
            token.attrs["class"] = str(style).partition(":")[2]
        for child in token.children or ():
            if child.type == "link_open":
                child.attrs |= {"target": "_blank", "rel": "noopener noreferrer"}
    html = parser.renderer.render(tokens, parser.options, {})
    html = re.sub("\ufdd2|%EF%B7%92", "*", html)  # the latter in links
    # in one pass, because a tool's text may contain marks, and not in attributes, which have no ">"
    marks = f"<[^>]*>|{MARK.format(r'[0-9]+')}"
    return re.sub(marks, lambda x: x[0] if x[0][0] == "<" else tools.get(x[0], ""), html)
