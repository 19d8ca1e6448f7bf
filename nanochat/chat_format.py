"""
Chat format: render conversations as token ids, with a mask of the tokens that carry loss.

    messages -> merge_turns -> render -> (ids, mask)
                      -> render_prompt -> ids up to the next answer

    <|bos|> <|user_start|> text <|user_end|> <|assistant_start|> text <|assistant_end|> ...
    mask 0          0       0         0              0             1         1

A message is {"role": "system", "user" or "assistant", "content": text or a list of parts}. A part
is {"type", "text"} with type `text` or, in assistant messages, `python` (a tool call, with loss) or
`python_output` (its result, no loss). System messages become user text. Consecutive messages of one
speaker form one turn, with a blank line in between; consecutive text parts are concatenated. Text
never encodes to special tokens, whatever a user types.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nanochat.tokenizer import Tokenizer

PARTS = {  # type of a part -> start token, end token, 1 = trained on
    "python": ("<|python_start|>", "<|python_end|>", 1),
    "python_output": ("<|output_start|>", "<|output_end|>", 0),
}
Message = Mapping[str, Any]
SPEAKERS = {"system": "user", "user": "user", "assistant": "assistant"}
SEPARATOR = {"type": "text", "text": "\n\n"}  # between consecutive messages of one speaker


class Turn(NamedTuple):
    """Consecutive messages of one speaker, merged."""

    speaker: str
    """user or assistant."""
    parts: list[Message]
    """No text part is empty, and no two text parts are adjacent."""


def render(
    tokenizer: Tokenizer, messages: Sequence[Message], max_tokens: int | None = None
) -> tuple[list[int], list[int]]:
    """
    Return the ids and loss mask (0 or 1) of a conversation, truncated to `max_tokens`.

    Raises ValueError naming a message with an invalid role or content.
    """
    ids, mask = [tokenizer.bos_id], [0]
    for turn in merge_turns(messages):
        turn_ids, turn_mask = render_turn(tokenizer, turn)
        ids += turn_ids
        mask += turn_mask
    return ids[:max_tokens], mask[:max_tokens]


def render_turn(tokenizer: Tokenizer, turn: Turn) -> tuple[list[int], list[int]]:
    """Return the ids and loss mask of one turn, including its start and end tokens."""
    trained = int(turn.speaker == "assistant")
    ids, mask = [tokenizer.special(f"<|{turn.speaker}_start|>")], [0]
    for part in turn.parts:
        part_ids, part_trained = tokenizer.encode(part["text"]), trained
        if part["type"] != "text":  # only in assistant turns
            first, last, part_trained = PARTS[part["type"]]
            part_ids = [tokenizer.special(first), *part_ids, tokenizer.special(last)]
        ids += part_ids
        mask += [part_trained] * len(part_ids)
    return [*ids, tokenizer.special(f"<|{turn.speaker}_end|>")], [*mask, trained]


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
        kept = found[-1].parts
        for part in parts:
            if kept and kept[-1]["type"] == part["type"] == "text":
                kept[-1] = {"type": "text", "text": kept[-1]["text"] + part["text"]}
            else:
                kept.append(part)
    return found


def validate_message(i: int, message: Message) -> tuple[str, list[Message]]:
    """Return the speaker and non-empty parts of message `i`. Raises ValueError if invalid."""
    if not isinstance(message, Mapping):
        raise ValueError(f"message {i} is not an object with role and content: {message!r:.80}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in SPEAKERS:
        raise ValueError(f"message {i} has role {role!r:.80}; use system, user or assistant")
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
    return SPEAKERS[role], [part for part in content if part["type"] != "text" or part["text"]]
