"""
Tasks by name.

    make_task("ARC-Easy", "test") -> Task; eval_task("arc_easy") -> test split to score a model on

Data is downloaded on first use.
"""

import re

from nanochat.common import MissingInput
from nanochat.sandbox import SandboxUnavailable
from tasks import korean
from tasks.aqua import AQuA, AQuALetter
from tasks.arc import ARCChallenge, ARCEasy
from tasks.augment import ARCChallengeTen, ARCEasyTen
from tasks.base import Task, plain_name
from tasks.chats import JSONL, HubChats, OpenThoughts3, RStarCoder, SmolTalk, YiSang
from tasks.gsm8k import GSM8K
from tasks.humaneval import CodeTask, HumanEval
from tasks.identity import Identity
from tasks.livecodebench import LiveCodeBench
from tasks.mmlu import KMMLU, MMLU
from tasks.spelling import SimpleSpelling, SpellingBee
from tasks.world.task import WorldChat, WorldChoice, WorldFacts, WorldProblems, WorldSpelling

TASKS: dict[str, type[Task]] = {
    "arc_easy": ARCEasy,
    "arc_challenge": ARCChallenge,
    "arc_easy_10": ARCEasyTen,
    "arc_challenge_10": ARCChallengeTen,
    "mmlu": MMLU,
    "kmmlu": KMMLU,
    "gsm8k": GSM8K,
    "aqua": AQuA,
    "aqua_letter": AQuALetter,
    "humaneval": HumanEval,
    "smoltalk": SmolTalk,
    "hub": HubChats,
    "openthoughts3": OpenThoughts3,
    "rstar_coder": RStarCoder,
    "yisang": YiSang,
    "spelling": SpellingBee,
    "simple_spelling": SimpleSpelling,
    "identity": Identity,
    "jsonl": JSONL,
    "kmmlu_redux": korean.KMMLURedux,
    "kmmlu_redux_10": korean.KMMLUReduxTen,
    "kmmlu_pro": korean.KMMLUPro,
    "hae_rae": korean.HAERAE,
    "clinical_qa": korean.ClinicalQA,
    "click": korean.CLIcK,
    "kobalt": korean.KoBALT,
    "gpqa": korean.GPQA,
    "mclm_ko": korean.MCLMKorean,
    "hrm8k": korean.HRM8K,
    "livecodebench": LiveCodeBench,
    "world_chat": WorldChat,
    "world_facts": WorldFacts,
    "world_choice": WorldChoice,
    "world_problems": WorldProblems,
    "world_spelling": WorldSpelling,
}
# Overlap with these is checked by default; the others download much, are gated, have the same
# questions, or are invented here
BENCHMARKS = ("arc_easy", "arc_challenge", "mmlu", "kmmlu", "gsm8k", "aqua", "humaneval")


def key_of(name: str) -> str:
    """The key in TASKS for a key or report name. Raises ValueError for an unknown task."""
    known = {plain_name(word): key for key, task in TASKS.items() for word in (task.name, key)}
    if plain_name(name) not in known:
        raise ValueError(f"unknown task {name!r}; use one of {', '.join(TASKS)}")
    return known[plain_name(name)]


def make_task(name: str, split: str, source: str | None = None) -> Task:
    """One split of a task. Raises ValueError for an unknown name or split."""
    return TASKS[key_of(name)](split, source)


def scored_task(name: str) -> type[Task]:
    """The class of a task. Raises ValueError if it is training-only."""
    kind = TASKS[key_of(name)]
    if kind.kind == "talk":
        raise ValueError(f"{kind.name} is training-only: it has no reference answers to score")
    return kind


def eval_task(name: str, unsafe: bool = False) -> Task:
    """
    The test split of a task, to score a model on. `unsafe`: run generated code unsandboxed, with
    your permissions, if this machine has no sandbox. Raises ValueError for a training-only task.
    """
    task = scored_task(name)("test")
    if isinstance(task, CodeTask):
        task.unsafe = unsafe
    return task


def why_unavailable(name: str, unsafe: bool = False) -> str | None:
    """
    Why a task cannot be scored here; None if it can. Generated code needs a sandbox, spelling a
    word list.
    """
    try:
        eval_task(name, unsafe).require_input()
    except (SandboxUnavailable, MissingInput) as error:
        return " ".join(str(error).split())
    return None


def overlapping_tasks(key: str) -> list[str]:
    """Keys of the tasks with the same questions in any form, including the task itself."""
    same = re.sub("(_redux)?(_10|_letter)?$", "", key) + "(_redux)?(_10|_letter)?"
    return [other for other in TASKS if re.fullmatch(same, other)]
