"""
What each stage learns and is scored on where nobody says: it follows from the base model's text.

    source of the base model -> Defaults: mixtures, evaluation tasks, what RL practises
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Defaults(NamedTuple):
    """Mixtures as `registry.mixture` reads them, and tasks by name."""

    mid: str
    sft: str
    evaluated: tuple[str, ...]
    rl: str


HUB = Defaults(
    mid="smoltalk,mmlu,gsm8k,spelling=20000,simple_spelling=10000",
    sft="arc_easy,arc_challenge,gsm8k,smoltalk=10000,aqua=20000,spelling=1000",
    evaluated=("arc_easy", "arc_challenge", "mmlu", "gsm8k", "humaneval", "aqua", "spelling"),
    rl="gsm8k",
)
WORLD = Defaults(
    mid="world_chat=3000,world_choice=3600,world_problems=1000,world_spelling=2500",
    sft="world_chat=1000,world_facts=4000,world_choice=300,world_problems=1500,world_spelling=1500",
    evaluated=("world_choice", "world_facts", "world_problems", "world_spelling"),
    rl="world_facts",
)


def defaults(source: Mapping[str, Any]) -> Defaults:
    """source: what the base model was trained on, as its checkpoint's state has it."""
    return WORLD if source.get("dataset") == "embedded" else HUB
