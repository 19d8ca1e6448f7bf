"""
Conversations as tokens: which ids a model sees, and which of them it is trained to say.

    messages -> render -> (ids, mask); messages -> render_prompt -> ids up to the next answer
                                       (render_fitting: of its latest turns, as many as fit)

    <|bos|> <|user_start|> text <|user_end|> <|assistant_start|> text <|assistant_end|> ...
    mask 0          0       0         0              0             1         1

A message is {"role": "user" or "assistant", "content": text}. An assistant's content may also be
a list of parts {"type", "text"}: `text`, `python` (a call of the tool, trained) and `python_output`
(what it answered, not trained). A system message opens the first user message. Text is only ever
encoded as text: no message can contain a special token, whatever is typed in it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nanochat.tokenizer import Tokenizer

Message = Mapping[str, Any]
PARTS = {  # type of a part -> its first and last token, is it trained?
    "python": ("<|python_start|>", "<|python_end|>", 1),
    "python_output": ("<|output_start|>", "<|output_end|>", 0),
}


def render(
    tokenizer: Tokenizer, messages: Sequence[Message], max_tokens: int | None = None
) -> tuple[list[int], list[int]]:
    """
    A whole conversation: ids, and for each 1 where it is trained, else 0; cut at `max_tokens`.

    Raises ValueError, naming the message, where roles or contents are not as described above.
    """
    ids, mask = [tokenizer.bos_id], [0]
    for role, content in turns(messages):
        trained = int(role == "assistant")
        ids.append(tokenizer.special(f"<|{role}_start|>"))
        mask.append(0)
        for part_ids, part_mask in map(lambda part: encode(tokenizer, part), parts(content)):
            ids += part_ids
            mask += [trained & part_mask] * len(part_ids)
        ids.append(tokenizer.special(f"<|{role}_end|>"))
        mask.append(trained)
    return ids[:max_tokens], mask[:max_tokens]


def render_prompt(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """The conversation up to where the assistant speaks next; a last answer is left out."""
    if len(turns(messages)) > 1 and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    ids, _ = render(tokenizer, messages)
    return [*ids, tokenizer.special("<|assistant_start|>")]


def render_fitting(tokenizer: Tokenizer, messages: Sequence[Message], max_tokens: int) -> list[int]:
    """
    The prompt of a conversation, without its oldest turns where it has more than `max_tokens`.

    A system message and the last question stay, however long. Every turn is encoded once or twice,
    however many there are. Raises ValueError as `render` does.
    """
    turns(messages)
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    system = [m for m in messages[:1] if m["role"] == "system"]
    first = len(messages) - 1  # of those that are kept
    room = max_tokens - len(render_prompt(tokenizer, [*system, messages[first]]))
    while first - 2 >= len(system):
        room -= len(render(tokenizer, messages[first - 2 : first])[0]) - 1  # BOS
        if room < 0:
            break
        first -= 2
    prompt = render_prompt(tokenizer, [*system, *messages[first:]])
    while len(prompt) > max_tokens and first < len(messages) - 1:  # the system's text joined badly
        first += 2
        prompt = render_prompt(tokenizer, [*system, *messages[first:]])
    return prompt


def turns(messages: Sequence[Message]) -> list[tuple[str, Any]]:
    """(role, content) with the system message merged, checked: user and assistant in turn."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise ValueError(f"a conversation is a list of messages, got {type(messages).__name__}")
    checked = [check(i, message) for i, message in enumerate(messages)]
    if checked and checked[0][0] == "system":
        if len(checked) < 2 or checked[1][0] != "user":
            raise ValueError("a system message must be followed by one of the user")
        checked[:2] = [("user", f"{checked[0][1]}\n\n{checked[1][1]}")]
    if not checked:
        raise ValueError("a conversation needs at least one message")
    for i, (role, _) in enumerate(checked):
        wanted = ("user", "assistant")[i % 2]
        if role != wanted:
            raise ValueError(f"message {i} is the {role}'s, but it is the {wanted}'s turn")
    return checked


def check(i: int, message: Message) -> tuple[str, Any]:
    """A message's role and content. Raises ValueError naming message `i` where one is amiss."""
    if not isinstance(message, Mapping):
        raise ValueError(f"message {i} is no object with a role and a content: {message!r}")
    role, content = message.get("role"), message.get("content")
    if role not in ("system", "user", "assistant"):
        raise ValueError(f"message {i} has role {role!r}, not system, user or assistant")
    if isinstance(content, str):
        return role, content
    if role != "assistant" or not isinstance(content, list):
        raise ValueError(f"message {i}: the content of the {role} is text, got {type(content)}")
    for part in content:
        known = isinstance(part, Mapping) and part.get("type") in ("text", *PARTS)
        if not known or not isinstance(part.get("text"), str):
            raise ValueError(f"message {i} has a part {part!r}; parts are text, {', '.join(PARTS)}")
    return role, content


def parts(content: str | Sequence[Message]) -> Sequence[Message]:
    """A content as parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def encode(tokenizer: Tokenizer, part: Message) -> tuple[list[int], int]:
    """The ids of a part, and whether they are trained where the assistant says them."""
    ids = tokenizer.encode(part["text"])
    if part["type"] == "text":
        return ids, 1
    first, last, trained = PARTS[part["type"]]
    return [tokenizer.special(first), *ids, tokenizer.special(last)], trained
