"""
Markdown of the chat page, rendered as HTML that cannot run code.

    {"answers": [[{"type", "text"}, ...], ...]} -> render_answers -> HTML of each answer

HTML in a text is escaped, images become links, and only web and mail links are kept. There is no
inline style, which the page's policy would block.
"""

from html import escape
from typing import Annotated, Literal

from markdown_it import MarkdownIt
from pydantic import FailFast, ValidationError

from nanochat.serve.openai_api import ApiError, Strict

MOST_CHARACTERS = 20_000  # as in ui.html. That many "[" take 2 s, and twice as many 8 s
MARK = "\ufdd0{}\ufdd1"  # place of a tool's call or result while its answer is Markdown


class Part(Strict):
    type: Literal["text", "python", "python_output"]
    text: str

    def html(self) -> str:
        """A tool's call or result, which is no Markdown."""
        name = "call" if self.type == "python" else "result"
        return f'<code class="{name}" title="Tool {name}">{escape(self.text)}</code>'


class MarkdownRequest(Strict):
    answers: Annotated[list[Annotated[list[Part], FailFast()]], FailFast()]


def render_answers(body: bytes) -> list[str]:
    """
    Return the HTML of each answer of a request. Takes seconds at most; call it off the event loop.

    Raises ApiError for an invalid body, and for more than MOST_CHARACTERS in all.
    """
    try:
        answers = MarkdownRequest.model_validate_json(body).answers
    except ValidationError as error:
        message = "answers must be an array of arrays of parts with type and text"
        raise ApiError(400, message, param="answers") from error
    if (size := sum(len(part.text) for parts in answers for part in parts)) > MOST_CHARACTERS:
        raise ApiError(413, f"{size:,} characters; the limit is {MOST_CHARACTERS:,}", "too_large")
    return [render_answer(parts) for parts in answers]


def render_answer(parts: list[Part]) -> str:
    parser = MarkdownIt("js-default", {"breaks": True}).disable("image")
    parser.validateLink = lambda url: url.lower().startswith(("http://", "https://", "mailto:"))
    texts = (part.text.replace("\ufdd0", "\ufffd") for part in parts)
    marked = (
        text if part.type == "text" else MARK.format(i)
        for i, (part, text) in enumerate(zip(parts, texts, strict=True))
    )
    tokens = parser.parse("".join(marked))
    for token in tokens:
        if style := token.attrs.pop("style", None):  # text-align:right, of a table's cell
            token.attrs["class"] = str(style).partition(":")[2]
        for child in token.children or ():
            if child.type == "link_open":
                child.attrs |= {"target": "_blank", "rel": "noopener noreferrer"}
    html = parser.renderer.render(tokens, parser.options, {})
    for i, part in enumerate(parts):
        html = html.replace(MARK.format(i), part.html())
    return html
