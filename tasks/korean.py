"""
Benchmarks in Korean, and GPQA: multiple choice, and math problems with a final answer.

    row -> parse -> MCQuestion; row -> problem and final answer

All are for evaluation only. Some are gated: the error says where to request access.
"""

import ast
import re
from dataclasses import replace
from decimal import Decimal

from tasks.augment import TenOptions, shuffle_options
from tasks.base import LETTERS, Conversation, MCQuestion, Tags, assistant, final_value, user
from tasks.hub import AS_PARQUET, HubQuestions, HubTask, TaskRow, make_question
from tasks.questions import KMMLU

INSTRUCTION = "Solve this problem step by step, then write #### and the final answer."


class KMMLURedux(HubQuestions):
    """
    Questions of KMMLU from technical qualification exams, with errors removed. Gated.

    Source: Hong et al., "From KMMLU-Redux to KMMLU-Pro", arXiv:2507.08924.
    """

    name, baseline = "KMMLU-Redux", 0.25
    tags = Tags("exams", "ko", "native", "CC BY-NC-ND 4.0", "letter", "kmmlu")
    repo, revision = "LGAI-EXAONE/KMMLU-Redux", AS_PARQUET
    splits, columns = {"test": "*/test/*"}, ("question", "options", "solution")


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
    tags = Tags("culture", "ko", "native", "CC BY-NC-ND 4.0", "letter", "hae-rae")
    repo = "HAERAE-HUB/HAE_RAE_BENCH_1.0"
    splits = {"test": "data/HAERAE-Bench-v1-*"}
    columns, labels = ("question", tuple("abcde"), "answer"), "abcde"


class ClinicalQA(HubQuestions):
    """Questions in the form of the Korean medical licensing exam (Seoul National University)."""

    name, baseline = "Clinical-QA", 0.2
    tags = Tags("medicine", "ko", "synthetic", "", "letter", "clinical-qa")
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
    tags = Tags("culture", "ko", "native", "", "letter", "click")
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
    tags = Tags("language", "ko", "native", "CC BY-NC 4.0", "letter", "kobalt")
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
    tags = Tags("science", "en", "native", "CC BY 4.0", "letter", "gpqa")
    repo, splits = "Idavidrein/gpqa", {"test": "gpqa_diamond"}

    def parse(self, row: TaskRow) -> MCQuestion:
        wrong = [row[f"Incorrect Answer {n}"] for n in (1, 2, 3)]
        asked = make_question(row["Question"], [row["Correct Answer"], *wrong], 0)
        return shuffle_options(asked, asked.text)


class HRM8K(HubTask):
    """
    Korean math: GSM8K, MATH, Omni-MATH and MMMLU in translation, and KSM, Korean competitions.

    An answer is right if what follows its last `####` is the same number, with or without a unit,
    or the same formula but for spaces.
    Source: Ko et al., "Understand, Solve and Translate", arXiv:2501.02448.
    """

    name, kind = "HRM8K", "generate"
    tags = Tags("math", "ko", "translated", "MIT", "number", "gsm8k+math+omni-math+mmlu+ksm")
    repo = "HAERAE-HUB/HRM8K"
    splits, column = {"test": "HRM8K/*_test"}, "question"

    def parse(self, row: TaskRow) -> Conversation:
        if row["answer"] is None:
            raise ValueError("no answer")
        asked = f"{row[self.column].strip()}\n\n{INSTRUCTION}"
        return [user(asked), assistant(f"#### {row['answer']}")]

    def material(self, i: int) -> str:
        return self.items[i][0]["content"].removesuffix(f"\n\n{INSTRUCTION}")

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
