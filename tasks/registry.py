"""
Tasks by name.

    TASKS["arc_easy"]("train") -> Task; eval_task("ARC-Easy") -> test split to score a model on

To add a task, write a subclass of `Task` (`tasks/base.py`) and name it in TASKS. Data is downloaded
on first use.
"""

from tasks import chats, code, questions, spelling
from tasks.base import Task, plain_name
from tasks.world import task as world

TASKS: dict[str, type[Task]] = {
    "arc_easy": questions.ARCEasy,
    "arc_challenge": questions.ARCChallenge,
    "arc_easy_10": questions.ARCEasyTen,
    "arc_challenge_10": questions.ARCChallengeTen,
    "mmlu": questions.MMLU,
    "kmmlu": questions.KMMLU,
    "gsm8k": questions.GSM8K,
    "aqua": questions.AQuA,
    "aqua_letter": questions.AQuALetter,
    "humaneval": code.HumanEval,
    "smoltalk": chats.SmolTalk,
    "hub": chats.Chats,
    "openthoughts3": chats.OpenThoughts3,
    "rstar_coder": chats.RStarCoder,
    "yisang": chats.YiSang,
    "spelling": spelling.SpellingBee,
    "simple_spelling": spelling.SimpleSpelling,
    "identity": chats.Identity,
    "jsonl": chats.JSONL,
    "kmmlu_redux": questions.KMMLURedux,
    "kmmlu_redux_10": questions.KMMLUReduxTen,
    "kmmlu_pro": questions.KMMLUPro,
    "hae_rae": questions.HAERAE,
    "clinical_qa": questions.ClinicalQA,
    "click": questions.CLIcK,
    "kobalt": questions.KoBALT,
    "gpqa": questions.GPQA,
    "mclm_ko": questions.MCLMKorean,
    "hrm8k": questions.HRM8K,
    "livecodebench": code.LiveCodeBench,
    "world_chat": world.WorldChat,
    "world_facts": world.WorldFacts,
    "world_choice": world.WorldChoice,
    "world_problems": world.WorldProblems,
    "world_spelling": world.WorldSpelling,
}


def key_of(name: str) -> str:
    """The key in TASKS for a key or report name. Raises ValueError for an unknown task."""
    known = {plain_name(word): key for key, task in TASKS.items() for word in (task.name, key)}
    if plain_name(name) not in known:
        raise ValueError(f"unknown task {name!r}; use one of {', '.join(TASKS)}")
    return known[plain_name(name)]


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
    task.unsafe = unsafe
    return task
