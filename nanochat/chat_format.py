"""
Conversations as tokens: which ids a model sees, and which of them it is trained to produce.

    messages -> turns -> render -> (ids, mask)
                      -> render_prompt -> ids up to the next answer

    <|bos|> <|user_start|> text <|user_end|> <|assistant_start|> text <|assistant_end|> ...
    mask 0          0       0         0              0             1         1

A message is {"role": "system", "user" or "assistant", "content": text or a list of parts}. A part
is {"type", "text"}: `text`, and in an assistant's message also `python` (a tool call, trained) and
`python_output` (its result, not trained). System text is read as the user's. Neighboring messages
of one speaker are one turn, with a blank line between them; neighboring text parts are one text.
Text is only ever encoded as text: no message can contain a special token, whatever is typed in it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nanochat.tokenizer import Tokenizer

PARTS = {  # type of a part -> its first and last token, is it trained?
    "python": ("<|python_start|>", "<|python_end|>", 1),
    "python_output": ("<|output_start|>", "<|output_end|>", 0),
}
Message = Mapping[str, Any]
SPEAKERS = {"system": "user", "user": "user", "assistant": "assistant"}
SEPARATOR = {"type": "text", "text": "\n\n"}  # between neighboring messages of one speaker


class Turn(NamedTuple):
    """What one speaker says until the other one does."""

    speaker: str
    """user or assistant."""
    parts: list[Message]
    """No text part is empty, and no two text parts stand side by side."""


def render(
    tokenizer: Tokenizer, messages: Sequence[Message], max_tokens: int | None = None
) -> tuple[list[int], list[int]]:
    """
    A whole conversation: ids, and for each 1 where it is trained, else 0; cut at `max_tokens`.

    Raises ValueError, naming the message, where roles or contents are not as described above.
    """
    ids, mask = [tokenizer.bos_id], [0]
    for turn in turns(messages):
        turn_ids, turn_mask = render_turn(tokenizer, turn)
        ids += turn_ids
        mask += turn_mask
    return ids[:max_tokens], mask[:max_tokens]


def render_turn(tokenizer: Tokenizer, turn: Turn) -> tuple[list[int], list[int]]:
    """One turn with its first and last token: ids, and for each 1 where it is trained."""
    trained = int(turn.speaker == "assistant")
    ids, mask = [tokenizer.special(f"<|{turn.speaker}_start|>")], [0]
    for part in turn.parts:
        part_ids, part_trained = tokenizer.encode(part["text"]), trained
        if part["type"] != "text":  # only an assistant has such parts
            first, last, part_trained = PARTS[part["type"]]
            part_ids = [tokenizer.special(first), *part_ids, tokenizer.special(last)]
        ids += part_ids
        mask += [part_trained] * len(part_ids)
    return [*ids, tokenizer.special(f"<|{turn.speaker}_end|>")], [*mask, trained]


def render_prompt(
    tokenizer: Tokenizer, messages: Sequence[Message], continue_last: bool = False
) -> list[int]:
    """
    The conversation up to where the assistant speaks next. An answer at the end is left out; with
    `continue_last` it stays, without its end, so that the model goes on with it.

    Raises ValueError as `render` does.
    """
    spoken = turns(messages)
    answered = spoken[-1].speaker == "assistant" and (continue_last or len(spoken) > 1)
    ids = [tokenizer.bos_id]
    for turn in spoken[:-1] if answered else spoken:
        ids += render_turn(tokenizer, turn)[0]
    if answered and continue_last:
        return ids + render_turn(tokenizer, spoken[-1])[0][:-1]
    return [*ids, tokenizer.special("<|assistant_start|>")]


def turns(messages: Sequence[Message]) -> list[Turn]:
    """Who speaks in turn. Raises ValueError naming a message that is not as described above."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise ValueError(f"a conversation is a list of messages, got {type(messages).__name__}")
    if not messages:
        raise ValueError("a conversation needs at least one message")
    found: list[Turn] = []
    for i, message in enumerate(messages):
        speaker, parts = check(i, message)
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


def check(i: int, message: Message) -> tuple[str, list[Message]]:
    """Who speaks in message `i`, and its parts that are not empty. Raises ValueError naming it."""
    if not isinstance(message, Mapping):
        raise ValueError(f"message {i} is not an object with a role and a content: {message!r:.80}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in SPEAKERS:
        raise ValueError(f"message {i} has role {role!r:.80}, not system, user or assistant")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        kind = type(content).__name__
        raise ValueError(f"message {i}: content is text or a list of parts, got {kind}")
    known = ("text", *PARTS) if role == "assistant" else ("text",)
    for part in content:
        is_known = isinstance(part, Mapping) and part.get("type") in known
        if not is_known or not isinstance(part.get("text"), str):
            raise ValueError(
                f"message {i} has a part {part!r:.80}; parts of the {role} are {', '.join(known)}"
            )
    return SPEAKERS[role], [part for part in content if part["type"] != "text" or part["text"]]
