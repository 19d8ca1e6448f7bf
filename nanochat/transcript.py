"""
What a model is saying, token by token, as pieces a reader can be shown.

    token -> Transcript.add -> [("text" | "python" | "python_output", new text), ...]

A character that spans several tokens comes when it is whole. The parts so far make the content of
an assistant's message, as chat_format.py takes it back. Knows nothing of engines or screens.
"""

import codecs

from nanochat.tokenizer import Tokenizer

OPENING = {"<|python_start|>": "python", "<|output_start|>": "python_output"}
CLOSING = ("<|python_end|>", "<|output_end|>")


class Transcript:
    """The growing answer of one assistant's turn."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.kinds = {tokenizer.special(name): kind for name, kind in OPENING.items()}
        self.kinds |= {tokenizer.special(name): "text" for name in CLOSING}
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.parts: list[dict[str, str]] = []
        self.kind = "text"

    def add(self, token: int) -> list[tuple[str, str]]:
        """Take the next token; returns what there is to show of it, nothing to two pieces."""
        if token not in self.kinds:
            return self.show(self.decoder.decode(self.tokenizer.decode_bytes([token])))
        shown = self.close()
        self.kind = self.kinds[token]
        if self.kind != "text":
            self.parts.append({"type": self.kind, "text": ""})
        return shown

    def is_text(self, token: int) -> bool:
        """Whether the token that was just added belongs to the text."""
        return self.kind == "text" and token not in self.kinds

    def close(self) -> list[tuple[str, str]]:
        """What is left of an unfinished character, at the end of a part or of the answer."""
        rest = self.decoder.decode(b"", final=True)
        self.decoder.reset()
        return self.show(rest)

    def show(self, text: str) -> list[tuple[str, str]]:
        """Add text to the last part, or begin one."""
        if not text:
            return []
        if not self.parts or self.parts[-1]["type"] != self.kind:
            self.parts.append({"type": self.kind, "text": ""})
        self.parts[-1]["text"] += text
        return [(self.kind, text)]

    @property
    def text(self) -> str:
        """The text parts, joined."""
        return "".join(part["text"] for part in self.parts if part["type"] == "text")
