"""
Conversations and preference pairs in the forms in which people keep them -> messages.

    row of a file or of the Hub -> read_conversation -> [{"role", "content"}, ...], checked
                                -> read_pair -> one with the chosen, one with the rejected answer

A row is a list of messages, or an object with one, or with a prompt and an answer. What is no
conversation raises ValueError with the fields that were found and the forms that are read.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.base import Conversation, assistant, check_conversation, user

CHATS = ("messages", "conversations", "conversation")
PROMPTS = ("prompt", "instruction", "question")
ANSWERS = ("completion", "response", "output", "answer")
CONTEXTS = ("input", "context")  # continue the prompt
SYSTEMS = ("system", "system_prompt")
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}
READ = (
    f"read are a list of messages ({', '.join(CHATS)}; each {{role, content}} or {{from, value}}), "
    f"or a prompt ({', '.join(PROMPTS)}) with an answer ({', '.join(ANSWERS)}); other fields are "
    "named in braces: {messages: <field>} or {prompt: <field>, answer: <field>}"
)


def read_conversation(
    row: Any, names: Mapping[str, str] = {}, is_answered: bool = True
) -> Conversation:
    """
    The conversation of a row. names: what the source calls its fields, by messages, prompt, answer.
    is_answered: it must end with an answer.

    A field `system` or `system_prompt` is the system message, `input` or `context` continues the
    prompt, and a message with `weight` 0 is not trained on. Raises ValueError if the row is none.
    """
    row = as_object(row)
    if row.get("weight") == 0:
        raise ValueError(
            "the row has a weight of 0; a weight is of a message, or leave the row out"
        )
    if (found := first_field(row, fields(names, "messages", CHATS))) is not None:
        return check_conversation(with_system(row, rename(found)), is_answered)
    prompt = read_prompt(row, names)
    answer = first_field(row, fields(names, "answer", ANSWERS))
    if prompt is None or (answer is None and is_answered):
        raise unknown_fields(row)
    answers = [] if answer is None else as_messages(answer, assistant)
    return check_conversation(with_system(row, prompt + answers), is_answered)


def read_pair(row: Any, names: Mapping[str, str] = {}) -> list[Conversation]:
    """
    The conversations of a preference pair, chosen and rejected, which differ in the last answer.

    A row is {chosen, rejected}, each a whole conversation, or an answer after the prompt of the
    row; or a list of two conversations. Raises ValueError if it is none.
    """
    if isinstance(row, list) and len(row) == 2 and not is_message(row[0]):
        row = dict(zip(("chosen", "rejected"), row, strict=True))
    row = as_object(row)
    if missing := [name for name in ("chosen", "rejected") if row.get(name) is None]:
        found = ", ".join(map(str, row)) or "none"
        raise ValueError(
            f"no {' and '.join(missing)} among the fields {found}; a pair is {{chosen, rejected}}, "
            f"whole conversations or answers to a prompt ({', '.join(PROMPTS)})"
        )
    prompt, pair = read_prompt(row, names), []
    opening = [m for m in prompt or () if m["role"] in ("system", "developer")]
    for name in ("chosen", "rejected"):
        answer = row[name]
        if isinstance(answer, dict) and not is_message(answer):  # an object with messages
            answer = first_field(answer, CHATS)
        messages = as_messages(answer, assistant)
        if len(messages) == 1:  # the answer alone
            if prompt is None:
                raise unknown_fields(row)
            messages = prompt + messages
        elif messages[0]["role"] not in ("system", "developer"):
            messages = opening + messages
        pair.append(check_conversation(with_system(row, messages)))
    chosen, rejected = pair
    if chosen[:-1] != rejected[:-1]:
        raise ValueError("chosen and rejected have different prompts")
    if chosen == rejected:
        raise ValueError("chosen and rejected are equal")
    return pair


# ---- Parts of a row ------------------------------------------------------------------------------


def as_object(row: Any) -> dict[str, Any]:
    """A row as an object; a list is its messages."""
    if isinstance(row, list):
        return {"messages": row}
    if not isinstance(row, dict):
        raise ValueError(f"{row!r:.60} is no conversation; {READ}")
    return row


def unknown_fields(row: Mapping[str, Any]) -> ValueError:
    """The error for a row without a conversation."""
    listed = [f"{name}{'' if value is not None else ' (null)'}" for name, value in row.items()]
    return ValueError(f"no conversation in the fields {', '.join(listed) or 'none'}; {READ}")


def unread_fields(row: Any, names: Mapping[str, str] = {}) -> set[str]:
    """Fields of a row that no conversation or pair is made of, such as notes."""
    named = {value.partition("=")[0] for value in names.values()}  # also of `where`
    known = {*CHATS, *PROMPTS, *ANSWERS, *CONTEXTS, *SYSTEMS, *named, "chosen", "rejected"}
    return {str(name) for name in row if name not in known} if isinstance(row, dict) else set()


def fields(names: Mapping[str, str], key: str, known: Sequence[str]) -> Sequence[str]:
    """Fields to look for: the one that `names` has for a key; the known ones if it has none."""
    if key in names:
        return (names[key],)
    named = "prompt" if key == "messages" else "messages"
    return () if named in names else known


def first_field(row: Mapping[str, Any], wanted: Sequence[str]) -> Any:
    """The first of the wanted fields that has a value."""
    return next((row[name] for name in wanted if row.get(name) is not None), None)


def read_prompt(row: Mapping[str, Any], names: Mapping[str, str]) -> list[Any] | None:
    """The messages before the answer, if there are any."""
    prompt = first_field(row, fields(names, "prompt", PROMPTS))
    more = "" if "prompt" in names else text_field(row, CONTEXTS)
    if isinstance(prompt, str):
        prompt = "\n\n".join(filter(None, (prompt, more)))
    return None if prompt is None else as_messages(prompt, user)


def as_messages(value: Any, speaker: Any) -> list[Any]:
    """Messages: a text as one of the speaker, a list of messages, or one message."""
    if isinstance(value, str):
        return [speaker(value)]
    if not isinstance(value, list | dict):
        raise ValueError(f"a prompt or an answer is {value!r:.60}; it must be text or messages")
    return rename([value] if isinstance(value, dict) else value)


def with_system(row: Mapping[str, Any], messages: list[Any]) -> list[Any]:
    """The messages after the system message of the row, if it has one and they do not."""
    system = text_field(row, SYSTEMS)
    begun = messages and messages[0]["role"] in ("system", "developer")
    if not system.strip():
        return messages
    if begun and messages[0]["content"] != system:
        raise ValueError("there are two system messages, a field and the first message; remove one")
    return messages if begun else [{"role": "system", "content": system}, *messages]


def text_field(row: Mapping[str, Any], wanted: Sequence[str]) -> str:
    """The first of the wanted fields, which must be text; empty without one."""
    found = first_field(row, wanted)
    if not isinstance(found, str | None):
        names = " or ".join(wanted)
        raise ValueError(f"the field {names} must be text, got {found!r:.60}")
    return found or ""


def is_message(value: Any) -> bool:
    """Whether a value is a message, not a row."""
    return isinstance(value, dict) and bool(value.keys() & {"role", "from"})


def rename(messages: Any) -> list[Any]:
    """
    Messages with the keys role and content, and weight if it is 0; also if they are called from and
    value. Raises ValueError if they are no list of objects, or a weight is not 0 or 1.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{messages!r:.60} is no list of messages; {READ}")
    renamed = []
    for message in messages:
        if not isinstance(message, dict):
            raise ValueError(f"the message {message!r:.60} is no object with role and content")
        named = ("from", "value") if "from" in message else ("role", "content")
        if missing := [name for name in named if message.get(name) is None]:
            found = ", ".join(message)
            raise ValueError(f"a message has no {' and no '.join(missing)}, but the keys {found}")
        if message.get("tool_calls"):
            raise ValueError("a message has tool_calls; write them as parts of type python")
        role, content = map(message.get, named)
        role = ROLES.get(role, role) if isinstance(role, str) else role
        found = {"role": role, "content": content}
        weight = message.get("weight")
        if weight not in (None, 0, 1):
            raise ValueError(f"a message has the weight {weight!r}; use 0 (not trained on) or 1")
        renamed.append({**found, "weight": 0} if weight == 0 else found)
    return renamed
