"""
Tasks by name.

    make_task("ARC-Easy", "test") -> Task; eval_task("arc_easy") -> test split to score a model on

Data is downloaded on first use.
"""

import difflib
from typing import NamedTuple

from nanochat.common import MissingInput
from nanochat.sandbox import SandboxUnavailable, choose_layer
from tasks.aqua import AQuA, AQuALetter
from tasks.arc import ARCChallenge, ARCEasy
from tasks.augment import ARCChallengeTen, ARCEasyTen
from tasks.base import Task, plain_name
from tasks.gsm8k import GSM8K
from tasks.hub_chats import HubChats, OpenThoughts3, RStarCoder, YiSang
from tasks.humaneval import CodeTask, HumanEval
from tasks.identity import Identity
from tasks.jsonl import JSONL
from tasks.kmmlu import KMMLU
from tasks.korean import (
    GPQA,
    HAERAE,
    HRM8K,
    CLIcK,
    ClinicalQA,
    KMMLUPro,
    KMMLURedux,
    KMMLUReduxTen,
    KoBALT,
    MCLMKorean,
)
from tasks.livecodebench import LiveCodeBench
from tasks.mmlu import MMLU
from tasks.smoltalk import SmolTalk
from tasks.spelling import SimpleSpelling, SpellingBee, WordTask, english_words, word_file
from tasks.world.task import WorldChat, WorldChoice, WorldFacts, WorldProblems, WorldSpelling


class Entry(NamedTuple):
    """A task; see `TASKS`."""

    task: type[Task]
    source: str | None = None
    """Name of its data source option, if it has one."""


TASKS = {
    "arc_easy": Entry(ARCEasy),
    "arc_challenge": Entry(ARCChallenge),
    "arc_easy_10": Entry(ARCEasyTen),
    "arc_challenge_10": Entry(ARCChallengeTen),
    "mmlu": Entry(MMLU),
    "kmmlu": Entry(KMMLU),
    "gsm8k": Entry(GSM8K),
    "aqua": Entry(AQuA),
    "aqua_letter": Entry(AQuALetter),
    "humaneval": Entry(HumanEval),
    "smoltalk": Entry(SmolTalk, "source"),
    "hub": Entry(HubChats, "source"),
    "openthoughts3": Entry(OpenThoughts3, "source"),
    "rstar_coder": Entry(RStarCoder, "source"),
    "yisang": Entry(YiSang, "source"),
    "spelling": Entry(SpellingBee, "words"),
    "simple_spelling": Entry(SimpleSpelling, "words"),
    "identity": Entry(Identity),
    "jsonl": Entry(JSONL, "path"),
    "kmmlu_redux": Entry(KMMLURedux),
    "kmmlu_redux_10": Entry(KMMLUReduxTen),
    "kmmlu_pro": Entry(KMMLUPro),
    "hae_rae": Entry(HAERAE),
    "clinical_qa": Entry(ClinicalQA),
    "click": Entry(CLIcK),
    "kobalt": Entry(KoBALT),
    "gpqa": Entry(GPQA),
    "mclm_ko": Entry(MCLMKorean),
    "hrm8k": Entry(HRM8K),
    "livecodebench": Entry(LiveCodeBench),
    "world_chat": Entry(WorldChat),
    "world_facts": Entry(WorldFacts),
    "world_choice": Entry(WorldChoice),
    "world_problems": Entry(WorldProblems),
    "world_spelling": Entry(WorldSpelling),
}
# Overlap with these is checked by default; the others download much, are gated, have the same
# questions, or are invented here
BENCHMARKS = ("arc_easy", "arc_challenge", "mmlu", "kmmlu", "gsm8k", "aqua", "humaneval")


def key_of(name: str) -> str:
    """The key in TASKS for a key or report name. Raises ValueError for an unknown task."""
    known = {plain_name(entry.task.name): key for key, entry in TASKS.items()}
    known |= {plain_name(key): key for key in TASKS}
    if plain_name(name) not in known:
        near = difflib.get_close_matches(plain_name(name), known, n=1, cutoff=0.0)
        raise ValueError(
            f"unknown task {name!r}; did you mean {known[near[0]]}? Available: {', '.join(TASKS)}"
        )
    return known[plain_name(name)]


def make_task(name: str, split: str, **options) -> Task:
    """One split of a task. Raises ValueError for an unknown name or split."""
    return TASKS[key_of(name)].task(split, **options)


def eval_task(name: str, unsafe: bool = False) -> Task:
    """
    The test split of a task, to score a model on. `unsafe`: run generated code unsandboxed, with
    your permissions, if this machine has no sandbox. Raises ValueError for a training-only task.
    """
    runs_code = issubclass(TASKS[key_of(name)].task, CodeTask)
    task = make_task(name, "test", **({"unsafe": unsafe} if runs_code else {}))
    if task.kind == "talk":
        raise ValueError(f"{task.name} is training-only: it has no reference answers to score")
    return task


def why_unavailable(name: str, unsafe: bool = False) -> str | None:
    """
    Why a task cannot be scored here; None if it can. Generated code needs a sandbox, spelling a
    word list.
    """
    key = key_of(name)
    try:
        if issubclass(TASKS[key].task, CodeTask):
            choose_layer(unsafe)
        elif issubclass(TASKS[key].task, WordTask):
            english_words(word_file(), "test")
    except (SandboxUnavailable, MissingInput, ValueError) as error:
        return " ".join(str(error).split())
    return None


def overlapping_tasks(key: str) -> list[str]:
    """Keys of the tasks with the same questions in any form, including the task itself."""
    first = question_source(key)
    return [other for other in TASKS if question_source(other) == first]


def question_source(key: str) -> str:
    """Key of the task that provides the questions."""
    return key.removesuffix("_10").removesuffix("_letter").removesuffix("_redux")
