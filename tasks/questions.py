"""
Multiple-choice datasets: ARC, MMLU, AQuA, GPQA and Korean benchmarks.

    row -> parse -> MCQuestion -> conversation, answered by the letter; AQuA also with its reasoning

Those without a "train" split are for evaluation only. Some are gated: the error says where to
request access.
"""

import ast
import re
from dataclasses import replace
from decimal import Decimal
from itertools import cycle

from tasks.augment import TenOptions, shuffle_options
from tasks.base import (
    LETTERS,
    Conversation,
    MCQuestion,
    NumberTask,
    Tags,
    assistant,
    final_value,
    user,
)
from tasks.hub import AS_PARQUET, HubQuestions, HubTask, TaskRow, make_question

REASON = "Reason step by step, then end with a line that says Answer: and the letter."
MARKER = re.compile(r"Answer: ([A-E])\b")


class ARCEasy(HubQuestions):
    """
    Grade-school science questions that simple methods can answer, three to five options; lettered
    by position, also if a row has numbers.

    Source: Clark et al., "Think you have Solved Question Answering? Try ARC", arXiv:1803.05457.
    """

    name, baseline = "ARC-Easy", 0.25
    tags = Tags("science", "en", "native", "CC BY-SA 4.0", "arc")
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


class ARCEasyTen(TenOptions, ARCEasy):
    """ARC-Easy with ten options."""

    name, pool = "ARC-Easy-10", ARCEasy


class ARCChallengeTen(TenOptions, ARCChallenge):
    """ARC-Challenge with ten options."""

    name, pool = "ARC-Challenge-10", ARCChallenge


class MMLU(HubQuestions):
    """
    Exams in 57 subjects, four options. Train split: `auxiliary_train`, questions from other
    datasets.

    Source: Hendrycks et al., "Measuring Massive Multitask Language Understanding",
    arXiv:2009.03300.
    """

    name, baseline = "MMLU", 0.25
    tags = Tags("exams", "en", "native", "MIT", "mmlu")
    repo = "cais/mmlu"
    splits = {"train": "all/auxiliary_train", "val": "all/validation", "test": "all/test"}
    columns, labels = ("choices", "answer"), "0123"


class KMMLU(HubQuestions):
    """
    Korean exams in 45 subjects, four options; a file per subject and split.

    Source: Son et al., "KMMLU", arXiv:2402.11548.
    """

    name, baseline = "KMMLU", 0.25
    # KMMLU-Pro has other questions than KMMLU, but in the style of the same exams
    tags = Tags("exams", "ko", "native", "CC BY-ND 4.0", "kmmlu+kmmlu-pro")
    repo = "HAERAE-HUB/KMMLU"
    splits = {"train": "data/*-train", "val": "data/*-dev", "test": "data/*-test"}
    columns = tuple("ABCD"), "answer"


class AQuALetter(HubQuestions):
    """
    Algebraic word problems with five options, answered with the letter only.

    Source: Ling et al., "Program Induction by Rationale Generation", arXiv:1705.04146.
    """

    name, baseline = "AQUA-Letter", 0.2
    tags = Tags("math", "en", "native", "Apache-2.0", "aqua")
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

    name, kind, answer_format = "AQUA", "generate", "marker"

    def __getitem__(self, i: int) -> Conversation:
        asked = self.question(i)
        answer = f"{asked.rationale}\nAnswer: {LETTERS[asked.right]}"
        return [user(asked.ask(REASON)), assistant(answer)]

    def extract(self, answer: str) -> str | None:
        return (MARKER.findall(answer) or [None])[-1]


# ---- Benchmarks in Korean, and GPQA --------------------------------------------------------------


class KMMLURedux(HubQuestions):
    """
    Questions of KMMLU from technical qualification exams, with errors removed. Gated.

    Source: Hong et al., "From KMMLU-Redux to KMMLU-Pro", arXiv:2507.08924.
    """

    name, baseline = "KMMLU-Redux", 0.25
    tags = Tags("exams", "ko", "native", "CC BY-NC-ND 4.0", "kmmlu")
    repo, revision = "LGAI-EXAONE/KMMLU-Redux", AS_PARQUET
    splits, columns = {"test": "*/test/*"}, ("options", "solution")


class KMMLUReduxTen(TenOptions, KMMLURedux):
    """KMMLU-Redux with ten options, the further ones from training questions of KMMLU."""

    name, pool = "KMMLU-Redux-10", KMMLU


class KMMLUPro(KMMLURedux):
    """Professional licensure exams with five options. Gated. Source: arXiv:2507.08924."""

    name, baseline = "KMMLU-Pro", 0.2
    tags = replace(KMMLURedux.tags, parent="kmmlu-pro")
    repo = "LGAI-EXAONE/KMMLU-Pro"


class HAERAE(HubQuestions):
    """
    HAE-RAE Bench 1.0: Korean vocabulary, history, general knowledge and reading, five options.

    Source: Son et al., "HAE-RAE Bench", arXiv:2309.02706.
    """

    name, baseline = "HAE-RAE", 0.2
    tags = Tags("culture", "ko", "native", "CC BY-NC-ND 4.0", "hae-rae")
    repo = "HAERAE-HUB/HAE_RAE_BENCH_1.0"
    splits = {"test": "data/HAERAE-Bench-v1-*"}
    columns, labels = (tuple("abcde"), "answer"), "abcde"


class ClinicalQA(HubQuestions):
    """Questions in the form of the Korean medical licensing exam (Seoul National University)."""

    name, baseline = "Clinical-QA", 0.2
    tags = Tags("medicine", "ko", "synthetic", "", "clinical-qa")
    repo = "snuh/ClinicalQA"
    splits = {"test": "data/train"}  # the only split

    def parse(self, row: TaskRow) -> MCQuestion:
        listed = row["options"]  # option_A to option_E, the last one may be missing
        listed = ast.literal_eval(listed) if isinstance(listed, str) else listed
        options = {key[-1]: option for key, option in listed.items() if option}
        right = list(options).index(row["answer"].strip())
        return make_question(f"{row['question']}\n\n{row['exam'] or ''}", options.values(), right)


class CLIcK(HubQuestions):
    """
    Korean culture and language, four or five options, some with a paragraph to read.

    Source: Kim et al., "CLIcK", arXiv:2403.06412.
    """

    name, baseline = "CLIcK", 0.25
    tags = Tags("culture", "ko", "native", "", "click")
    repo, revision = "EunsuKim/CLIcK", AS_PARQUET
    splits = {"test": "default/train/*"}  # the only split

    def parse(self, row: TaskRow) -> MCQuestion:
        text = f"{row['paragraph'] or ''}\n\n{row['question']}"
        options = [option.strip() for option in row["choices"]]
        return make_question(text, options, options.index(row["answer"].strip()))


class KoBALT(HubQuestions):
    """
    Korean linguistics with ten options, which the question lists as lines from A: to J:.

    Source: Shin et al., "KoBALT", arXiv:2505.16125.
    """

    name, baseline = "KoBALT", 0.1
    tags = Tags("language", "ko", "native", "CC BY-NC 4.0", "kobalt")
    repo, revision = "snunlp/KoBALT-700", AS_PARQUET
    splits = {"test": "kobalt_v1/raw/*"}

    def parse(self, row: TaskRow) -> MCQuestion:
        text, _, rest = row["Question"].rpartition("\nA:")  # a dialogue may have an earlier A:
        options = re.split(r"^[B-J]:", rest, flags=re.MULTILINE)
        return make_question(text, options, LETTERS.index(row["Answer"].strip()))


class GPQA(HubQuestions):
    """
    Graduate-level questions of science, the 198 of the diamond set, options shuffled. Gated.

    Source: Rein et al., "GPQA: A Graduate-Level Google-Proof Q&A Benchmark", arXiv:2311.12022.
    """

    name, baseline = "GPQA", 0.25
    tags = Tags("science", "en", "native", "CC BY 4.0", "gpqa")
    repo, splits = "Idavidrein/gpqa", {"test": "gpqa_diamond"}

    def parse(self, row: TaskRow) -> MCQuestion:
        wrong = [row[f"Incorrect Answer {n}"] for n in (1, 2, 3)]
        asked = make_question(row["Question"], [row["Correct Answer"], *wrong], 0)
        return shuffle_options(asked, asked.text)


# ---- Math problems with a final answer -----------------------------------------------------------

SOLVE = "Solve this problem step by step, then write #### and the final answer."
PART_TYPES = ("text", "python", "python_output")
CALCULATION = re.compile(r"<<([^<>=]*)=([^<>=]*)>>")


class GSM8K(HubTask, NumberTask):
    """
    Grade-school word problems; a calculation `<<3*4=12>>` of an answer becomes a tool call.

    Source: Cobbe et al., "Training Verifiers to Solve Math Word Problems", arXiv:2110.14168.
    """

    name = "GSM8K"
    tags = Tags("math", "en", "native", "MIT", "gsm8k")
    repo = "openai/gsm8k"
    splits = {"train": "main/train", "test": "main/test"}

    def parse(self, row: TaskRow) -> Conversation:
        pieces = zip(cycle(PART_TYPES), CALCULATION.split(row["answer"]), strict=False)
        parts = [{"type": kind, "text": piece} for kind, piece in pieces if piece]
        return [user(row["question"]), assistant(parts)]


class HRM8K(HubTask, NumberTask):
    """
    Korean math: GSM8K, MATH, Omni-MATH and MMMLU in translation, and KSM, Korean competitions.

    An answer is right if what follows its last `####` is the same number, with or without a unit,
    or the same formula but for spaces.
    Source: Ko et al., "Understand, Solve and Translate", arXiv:2501.02448.
    """

    name = "HRM8K"
    tags = Tags("math", "ko", "translated", "MIT", "gsm8k+math+omni-math+mmlu+ksm")
    repo = "HAERAE-HUB/HRM8K"
    splits, column = {"test": "HRM8K/*_test"}, "question"

    def parse(self, row: TaskRow) -> Conversation:
        if row["answer"] is None:
            raise ValueError("no answer")
        asked = f"{row[self.column].strip()}\n\n{SOLVE}"
        return [user(asked), assistant(f"#### {row['answer']}")]

    def extract(self, answer: str) -> Decimal | str | None:
        return final_value(answer)


class MCLMKorean(HRM8K):
    """
    MT-MATH100 of MCLM: problems of MATH-500, translated into Korean.

    Source: Son et al., "Linguistic Generalizability of Test-Time Scaling", arXiv:2502.17407.
    """

    name = "MCLM-Ko"
    tags = replace(HRM8K.tags, parent="math")
    repo = "amphora/MCLM"
    splits, column = {"test": "mt-math100"}, "ko"
