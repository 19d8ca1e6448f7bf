"""
Run a training script with an injected bug.

    python -m tests.lab.planted_bug template scripts.chat_sft --source=mid

Reads and writes the script's files; rows with an injected bug have their own folder.
"""

import runpy
import sys
from collections.abc import Callable, Sequence

from nanochat import rows
from nanochat.chat_format import Message, merge_turns
from nanochat.tokenizer import Tokenizer


def template() -> None:
    """Bug: conversations are rendered as plain `Name: text` lines, without chat tokens."""

    def render(
        tokenizer: Tokenizer, messages: Sequence[Message], max_tokens: int | None = None
    ) -> tuple[list[int], list[int]]:
        ids, mask = [tokenizer.bos_id], [0]
        for role, parts in merge_turns(messages):
            content = "".join(part["text"] for part in parts)
            name, text = tokenizer.encode(f"{role.title()}:"), tokenizer.encode(f" {content}\n")
            ids += name + text
            mask += [0] * len(name) + [int(role == "assistant")] * len(text)
        return ids[:max_tokens], mask[:max_tokens]

    rows.render = render
    rows.PACKING_RULE = -1  # part of the fingerprint of the packed rows


def mask() -> None:
    """Bug: the loss covers questions instead of answers."""
    signed_ids = rows.signed_ids
    rows.signed_ids = lambda ids, own: signed_ids(ids, [0, *(not x for x in own[1:])])
    rows.PACKING_RULE = -2  # part of the fingerprint of the packed rows


PLANTS: dict[str, Callable[[], None]] = {"template": template, "mask": mask}


if __name__ == "__main__":
    name, module = sys.argv[1:3]
    PLANTS[name]()
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
