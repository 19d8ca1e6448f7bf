"""
Chat format: render conversations as token ids, with a mask of the tokens that carry loss.

    messages -> merge_turns -> render -> (ids, mask)
                      -> render_prompt -> ids up to the next answer

    <|bos|> <|user_start|> text <|user_end|> <|assistant_start|> text <|assistant_end|> ...
    mask 0          0       0         0              0             1         1

A message is {"role": "system", "user" or "assistant", "content": text or a list of parts}; the
role "developer" is the same as "system". A part is {"type", "text"} with type `text` or, in
assistant messages, `python` (a tool call, with loss) or `python_output` (its result, no loss). A
message with "weight" 0 has no loss.
System messages become user text. Consecutive messages of one speaker form one turn, with a blank
line in between; consecutive text parts are concatenated. Text never encodes to special tokens,
whatever a user types.
"""

import codecs
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple

from nanochat.tokenizer import Tokenizer

PARTS = {  # type of a part -> start token, end token, 1 = trained on
    "python": ("<|python_start|>", "<|python_end|>", 1),
    "python_output": ("<|output_start|>", "<|output_end|>", 0),
}
Message = Mapping[str, Any]
Trained = Literal["assistant", "user", "all"]  # speakers whose tokens have loss
SPEAKERS = {"system": "user", "developer": "user", "user": "user", "assistant": "assistant"}
SEPARATOR = {"type": "text", "text": "\n\n"}  # between consecutive messages of one speaker


class Turn(NamedTuple):
    """Consecutive messages of one speaker, merged."""

    speaker: str
    """user or assistant."""
    parts: list[Message]
    """No text part is empty, and no two text parts are adjacent."""


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    max_tokens: int | None = None,
    trained: Trained = "assistant",
) -> tuple[list[int], list[int]]:
    """
    Return the ids and loss mask (0 or 1) of a conversation, truncated to `max_tokens`. trained:
    whose turns have loss.

    Raises ValueError naming a message with an invalid role or content.
    """
    ids, mask = [tokenizer.bos_id], [0]
    for turn in merge_turns(messages):
        turn_ids, turn_mask = render_turn(tokenizer, turn, trained)
        ids += turn_ids
        mask += turn_mask
    return ids[:max_tokens], mask[:max_tokens]


def render_turn(
    tokenizer: Tokenizer, turn: Turn, trained: Trained = "assistant"
) -> tuple[list[int], list[int]]:
    """Return the ids and loss mask of one turn, including its start and end tokens."""
    has_loss = int(trained in (turn.speaker, "all"))
    ids, mask = [tokenizer.special(f"<|{turn.speaker}_start|>")], [0]
    for part in turn.parts:
        part_ids, part_has_loss = tokenizer.encode(part["text"]), has_loss * weight_of(part)
        if part["type"] != "text":  # only in assistant turns
            first, last, can_have_loss = PARTS[part["type"]]
            part_ids = [tokenizer.special(first), *part_ids, tokenizer.special(last)]
            part_has_loss *= can_have_loss
        ids += part_ids
        mask += [part_has_loss] * len(part_ids)
    ends_with_loss = has_loss * weight_of(turn.parts[-1]) if turn.parts else has_loss
    return [*ids, tokenizer.special(f"<|{turn.speaker}_end|>")], [*mask, ends_with_loss]


def render_prompt(
    tokenizer: Tokenizer, messages: Sequence[Message], continue_last: bool = False
) -> list[int]:
    """
    Return the ids of a conversation up to the start of the next assistant turn.

    A final assistant turn is dropped, unless it is the only turn. With `continue_last` it is kept
    without its end token, so that the model continues it. Raises ValueError as `render` does.
    """
    spoken = merge_turns(messages)
    answered = spoken[-1].speaker == "assistant" and (continue_last or len(spoken) > 1)
    ids = [tokenizer.bos_id]
    for turn in spoken[:-1] if answered else spoken:
        ids += render_turn(tokenizer, turn)[0]
    if answered and continue_last:
        return ids + render_turn(tokenizer, spoken[-1])[0][:-1]
    return [*ids, tokenizer.special("<|assistant_start|>")]


def merge_turns(messages: Sequence[Message]) -> list[Turn]:
    """Merge messages into turns. Raises ValueError naming an invalid message."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise ValueError(f"conversation must be a list of messages, got {type(messages).__name__}")
    if not messages:
        raise ValueError("conversation needs at least one message")
    found: list[Turn] = []
    for i, message in enumerate(messages):
        speaker, parts = validate_message(i, message)
        if not found or found[-1].speaker != speaker:
            found.append(Turn(speaker, []))
        elif found[-1].parts and parts:
            parts = [SEPARATOR, *parts]
        found[-1].parts.extend(parts)
    return [Turn(speaker, join_texts(parts)) for speaker, parts in found]


def join_texts(parts: Sequence[Message]) -> list[Message]:
    """Join adjacent parts of text."""
    joined: list[Message] = []
    for (kind, weight), group in groupby(parts, key=lambda part: (part["type"], weight_of(part))):
        found = list(group)
        text = "".join(part["text"] for part in found)
        mark = {} if weight else {"weight": 0}
        joined += [{"type": "text", "text": text, **mark}] if kind == "text" else found
    return joined


def weight_of(part: Message) -> int:
    """0 for a part of a message that is not trained on, else 1."""
    return part.get("weight", 1)


def validate_message(i: int, message: Message) -> tuple[str, list[Message]]:
    """Return the speaker and non-empty parts of message `i`. Raises ValueError if invalid."""
    if not isinstance(message, Mapping):
        raise ValueError(f"message {i} is not an object with role and content: {message!r:.80}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in SPEAKERS:
        raise ValueError(f"message {i} has role {role!r:.80}; use {', '.join(SPEAKERS)}")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        kind = type(content).__name__
        raise ValueError(f"message {i}: content must be a string or a list of parts, got {kind}")
    known = ("text", *PARTS) if role == "assistant" else ("text",)
    for part in content:
        is_known = isinstance(part, Mapping) and part.get("type") in known
        if not is_known or not isinstance(part.get("text"), str):
            raise ValueError(
                f"message {i} has invalid part {part!r:.80}; {role} parts are {', '.join(known)}"
            )
    kept = [part for part in content if part["type"] != "text" or part["text"]]
    parts: list[Message] = [{"type": part["type"], "text": part["text"]} for part in kept]
    if message.get("weight", 1) == 0:
        parts = [{**part, "weight": 0} for part in parts]
    return SPEAKERS[role], parts


# ---- Conversations at inference ------------------------------------------------------------------


def render_fitting(tokenizer: Tokenizer, messages: Sequence[Message], max_tokens: int) -> list[int]:
    """
    Return the prompt ids of a conversation, dropping the oldest turns to fit `max_tokens`. A final
    assistant message is left open to be continued.

    Leading system messages and the last user turn are always kept. Raises ValueError for messages
    that cannot be rendered.
    """
    merge_turns(messages)  # only for its errors, which give message numbers
    num_opening = next((i for i, m in enumerate(messages) if m["role"] in ("user", "assistant")), 0)
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
        """
        Add a token; returns the new text as (kind, text) pieces. That of a tool's call or result
        begins with an empty one.
        """
        if token < self.tokenizer.bos_id:
            return self.show(self.decoder.decode(self.tokenizer.decode_bytes([token])))
        shown = self.close()
        if token not in self.kinds:  # of turns: no text
            return shown
        self.kind = self.kinds[token]
        if self.kind == "text":
            return shown
        self.parts.append({"type": self.kind, "text": ""})
        return [*shown, (self.kind, "")]

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
