"""
Tasks by name.

    make_task("ARC-Easy", "test") -> Task; eval_task("arc_easy") -> test split to score a model on

Data is downloaded on first use.
"""

from nanochat.common import MissingInput
from nanochat.sandbox import SandboxUnavailable
from tasks import augment, chats, code, gsm8k, korean, questions, spelling
from tasks.base import Task, plain_name
from tasks.world import task as world

TASKS: dict[str, type[Task]] = {
    "arc_easy": questions.ARCEasy,
    "arc_challenge": questions.ARCChallenge,
    "arc_easy_10": augment.ARCEasyTen,
    "arc_challenge_10": augment.ARCChallengeTen,
    "mmlu": questions.MMLU,
    "kmmlu": questions.KMMLU,
    "gsm8k": gsm8k.GSM8K,
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
    if isinstance(task, code.CodeTask):
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
