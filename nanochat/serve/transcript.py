"""
Fits a conversation into the context; decodes generated tokens into text incrementally.

    messages -> render_fitting -> prompt ids;  generated ids -> Transcript.add -> pieces of text

A character that spans several tokens is emitted with its last token.
"""

import codecs
from bisect import bisect_left
from collections.abc import Sequence

from nanochat.chat_format import PARTS, Message, merge_turns, render_prompt
from nanochat.tokenizer import Tokenizer


def render_fitting(tokenizer: Tokenizer, messages: Sequence[Message], max_tokens: int) -> list[int]:
    """
    Return the prompt ids of a conversation, dropping the oldest turns to fit `max_tokens`. A final
    assistant message is left open to be continued.

    Leading system messages and the last user turn are always kept. Raises ValueError for messages
    that cannot be rendered.
    """
    merge_turns(messages)  # only for its errors, which give message numbers
    num_opening = next((i for i, m in enumerate(messages) if m["role"] != "system"), 0)
    opening, spoken = messages[:num_opening], merge_turns(messages[num_opening:])

    def prompt(first: int) -> list[int]:
        kept = [{"role": turn.speaker, "content": turn.parts} for turn in spoken[first:]]
        return render_prompt(tokenizer, [*opening, *kept], continue_last=True)

    starts = [i for i, turn in enumerate(spoken) if i == 0 or turn.speaker == "user"]
    fits = bisect_left(starts, True, key=lambda first: len(prompt(first)) <= max_tokens)
    return prompt(starts[min(fits, len(starts) - 1)])


class Transcript:
    """Incrementally decoded text of one assistant turn."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.kinds = {tokenizer.special(first): kind for kind, (first, _, _) in PARTS.items()}
        self.kinds |= {tokenizer.special(last): "text" for _, last, _ in PARTS.values()}
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.parts: list[dict[str, str]] = []
        self.kind = "text"

    def add(self, token: int) -> list[tuple[str, str]]:
        """Add a token; returns the new text as at most two (kind, text) pieces."""
        if token not in self.kinds:
            return self.show(self.decoder.decode(self.tokenizer.decode_bytes([token])))
        shown = self.close()
        self.kind = self.kinds[token]
        if self.kind != "text":
            self.parts.append({"type": self.kind, "text": ""})
        return shown

    def is_text(self, token: int) -> bool:
        """Whether the token just added belongs to the text."""
        return self.kind == "text" and token not in self.kinds

    def close(self) -> list[tuple[str, str]]:
        """Flush an incomplete character at the end of a part or of the turn."""
        rest = self.decoder.decode(b"", final=True)
        self.decoder.reset()
        return self.show(rest)

    def show(self, text: str) -> list[tuple[str, str]]:
        """Append text to the last part or a new one."""
        if not text:
            return []
        if not self.parts or self.parts[-1]["type"] != self.kind:
            self.parts.append({"type": self.kind, "text": ""})
        self.parts[-1]["text"] += text
        return [(self.kind, text)]
