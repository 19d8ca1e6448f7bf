"""
A conversation in a window of limited length: the prompt that fits, the answer as it is generated.

    messages -> render_fitting -> prompt ids;  generated ids -> Transcript.add -> pieces of text

A character that spans several tokens is sent when it is complete.
"""

import codecs
from collections.abc import Sequence
from itertools import accumulate

from nanochat.chat_format import PARTS, Message, render_prompt, render_turn, turns
from nanochat.tokenizer import Tokenizer


def render_fitting(tokenizer: Tokenizer, messages: Sequence[Message], max_tokens: int) -> list[int]:
    """
    The prompt of a conversation, without its oldest turns where it has more than `max_tokens`. An
    answer at the end is continued.

    System messages at the start and the last question stay, however long. Raises ValueError as
    `render` does.
    """
    turns(messages)  # numbers the messages in its errors
    num_opening = next((i for i, m in enumerate(messages) if m["role"] != "system"), 0)
    opening, spoken = messages[:num_opening], turns(messages[num_opening:])

    def prompt(first: int) -> list[int]:
        kept = [{"role": turn.speaker, "content": turn.parts} for turn in spoken[first:]]
        return render_prompt(tokenizer, [*opening, *kept], continue_last=True)

    sizes = [len(render_turn(tokenizer, turn)[0]) for turn in spoken]
    left = list(accumulate(reversed(sizes)))[::-1]  # tokens from each turn on
    starts = [i for i, turn in enumerate(spoken) if i == 0 or turn.speaker == "user"]
    room = max_tokens - len(prompt(starts[-1])) + left[starts[-1]]  # beside the opening
    ids = []
    for first in [*(i for i in starts if left[i] <= room), starts[-1]]:
        ids = prompt(first)
        if len(ids) <= max_tokens:  # the opening may have merged with a turn into more
            break
    return ids


class Transcript:
    """The growing answer of one assistant's turn."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.kinds = {tokenizer.special(first): kind for kind, (first, _, _) in PARTS.items()}
        self.kinds |= {tokenizer.special(last): "text" for _, last, _ in PARTS.values()}
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
