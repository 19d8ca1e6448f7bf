"""
Multiple-choice datasets: ARC (easy and challenge), MMLU, KMMLU and AQuA.

    row -> parse -> MCQuestion -> conversation, answered by the letter; AQuA also with its reasoning

Benchmarks in Korean and GPQA are in korean.py, ARC with ten options in augment.py.

Sources: Clark et al., "Think you have Solved Question Answering? Try ARC", arXiv:1803.05457;
Hendrycks et al., "Measuring Massive Multitask Language Understanding", arXiv:2009.03300;
Son et al., "KMMLU: Measuring Massive Multitask Language Understanding in Korean", arXiv:2402.11548;
Ling et al., "Program Induction by Rationale Generation", arXiv:1705.04146.
"""

import re
from dataclasses import replace

from tasks.base import LETTERS, Conversation, MCQuestion, Tags, assistant, user
from tasks.hub import HubQuestions, TaskRow, make_question

REASON = "Reason step by step, then end with a line that says Answer: and the letter."
MARKER = re.compile(r"Answer: ([A-E])\b")


class ARCEasy(HubQuestions):
    """
    Grade-school science questions that simple methods can answer, three to five options; lettered
    by position, also if a row has numbers.
    """

    name, baseline = "ARC-Easy", 0.25
    tags = Tags("science", "en", "native", "CC BY-SA 4.0", "letter", "arc")
    repo = "allenai/ai2_arc"
    splits = {"train": "ARC-Easy/train", "val": "ARC-Easy/validation", "test": "ARC-Easy/test"}

    def parse(self, row: TaskRow) -> MCQuestion:
        choices = row["choices"]
        right = choices["label"].index(row["answerKey"])
        return make_question(row["question"], choices["text"], right)


class ARCChallenge(ARCEasy):
    """Questions that both a retrieval and a co-occurrence method answered incorrectly."""

    name = "ARC-Challenge"
    splits = {split: stem.replace("Easy", "Challenge") for split, stem in ARCEasy.splits.items()}


class MMLU(HubQuestions):
    """
    Exams in 57 subjects, four options. Train split: `auxiliary_train`, questions from other
    datasets.
    """

    name, baseline = "MMLU", 0.25
    tags = Tags("exams", "en", "native", "MIT", "letter", "mmlu")
    repo = "cais/mmlu"
    splits = {"train": "all/auxiliary_train", "val": "all/validation", "test": "all/test"}
    columns, labels = ("question", "choices", "answer"), "0123"


class KMMLU(HubQuestions):
    """Korean exams in 45 subjects, four options; a file per subject and split."""

    name, baseline = "KMMLU", 0.25
    # KMMLU-Pro has other questions than KMMLU, but in the style of the same exams
    tags = Tags("exams", "ko", "native", "CC BY-ND 4.0", "letter", "kmmlu+kmmlu-pro")
    repo = "HAERAE-HUB/KMMLU"
    splits = {"train": "data/*-train", "val": "data/*-dev", "test": "data/*-test"}
    columns = "question", tuple("ABCD"), "answer"


class AQuALetter(HubQuestions):
    """Algebraic word problems with five options, answered with the letter only."""

    name, baseline = "AQUA-Letter", 0.2
    tags = Tags("math", "en", "native", "Apache-2.0", "letter", "aqua")
    repo = "deepmind/aqua_rat"
    splits = {"train": "raw/train", "val": "raw/validation", "test": "raw/test"}

    def parse(self, row: TaskRow) -> MCQuestion:
        options = [option.partition(")")[2] for option in row["options"]]  # without `A)`
        right = LETTERS.index(row["correct"])
        return make_question(row["question"], options, right, row["rationale"])


class AQuA(AQuALetter):
    """
    Generative form: a rationale, then `Answer: X`. Scored by the last one (case-sensitive); a bare
    letter is wrong. `letters` are those that may follow `Answer: `.
    """

    name, kind = "AQUA", "generate"
    tags = replace(AQuALetter.tags, answer_format="marker")

    def conversation(self, i: int) -> Conversation:
        asked = self.question(i)
        answer = f"{asked.rationale}\nAnswer: {LETTERS[asked.right]}"
        return [user(asked.ask(REASON)), assistant(answer)]

    def extract(self, answer: str) -> str | None:
        return (MARKER.findall(answer) or [None])[-1]
