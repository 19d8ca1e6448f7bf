"""
Benchmarks in Korean, and GPQA: multiple choice, and math problems with a final answer.

    row -> parse -> MCQuestion; row -> problem and final answer

All are for evaluation only. Some are gated: the error says where to request access.
"""

import ast
import random
import re

from tasks.augment import TenOptions, shuffle_options
from tasks.base import LETTERS, Conversation, MCQuestion, answer_text, assistant, user, visible
from tasks.hub import AS_PARQUET, HubQuestions, HubTask, TaskRow
from tasks.kmmlu import KMMLU

INSTRUCTION = "Solve this problem step by step, then write #### and the final answer."
NUMBER_AND_UNIT = re.compile(  # 12 x and 12ab have no unit: that is a symbol below or three letters
    r"""(-?[\d,]*\.?\d+) \s*
    (?: \\?% | (?: ° | \^?\{?\\circ\}? ) [CF]? | ℃
      | (?: \\(?:text|mathrm)\{[^{}\d]*\} | [mck]?m | [mk]?g | m?[lL] | s | h | km/h | m/s
          | [a-zA-Z]{3,} ) (?: \^\{?[23]\}? | [²³] )?
    )? \s* \(? \s* (?: (?![십백천만억조]) [가-힣.\s]+ )? \)? \.?""",
    re.VERBOSE,
)


class KMMLURedux(HubQuestions):
    """
    Questions of KMMLU from technical qualification exams, with errors removed. Gated.

    Source: Hong et al., "From KMMLU-Redux to KMMLU-Pro", arXiv:2507.08924.
    """

    name = "KMMLU-Redux"
    baseline = 0.25
    repo, revision = "LGAI-EXAONE/KMMLU-Redux", AS_PARQUET
    stems = {"test": "*/test/*"}
    columns = ("question", "options", "solution")

    def parse(self, row: TaskRow) -> MCQuestion:
        options = tuple(option.strip() for option in row["options"])
        return MCQuestion(row["question"].strip(), options, int(row["solution"]) - 1)


class KMMLUReduxTen(TenOptions):
    """KMMLU-Redux with ten options, the further ones from training questions of KMMLU."""

    name, of, pool = "KMMLU-Redux-10", KMMLURedux, KMMLU
    splits = ("test",)


class KMMLUPro(KMMLURedux):
    """Professional licensure exams with five options. Gated. Source: arXiv:2507.08924."""

    name = "KMMLU-Pro"
    baseline = 0.2
    repo = "LGAI-EXAONE/KMMLU-Pro"


class HAERAE(HubQuestions):
    """
    HAE-RAE Bench 1.0: Korean vocabulary, history, general knowledge and reading, five options.

    Source: Son et al., "HAE-RAE Bench", arXiv:2309.02706.
    """

    name = "HAE-RAE"
    baseline = 0.2
    repo = "HAERAE-HUB/HAE_RAE_BENCH_1.0"
    stems = {"test": "data/HAERAE-Bench-v1-*"}
    columns = ("question", "a", "b", "c", "d", "e", "answer")

    def parse(self, row: TaskRow) -> MCQuestion:
        options = tuple(row[letter].strip() for letter in "abcde")
        right = "abcde".index(row["answer"].strip().lower())
        return MCQuestion(row["question"].strip(), options, right)


class ClinicalQA(HubQuestions):
    """Questions in the form of the Korean medical licensing exam (Seoul National University)."""

    name = "Clinical-QA"
    baseline = 0.2
    repo = "snuh/ClinicalQA"
    stems = {"test": "data/train"}  # the only split
    columns = ("question", "exam", "options", "answer")

    def parse(self, row: TaskRow) -> MCQuestion:
        listed = row["options"]  # option_A to option_E, the last one may be missing
        listed = ast.literal_eval(listed) if isinstance(listed, str) else listed
        options = {key[-1]: option for key, option in listed.items() if option}
        text = f"{row['question']}\n\n{row['exam'] or ''}".strip()
        return MCQuestion(text, tuple(options.values()), list(options).index(row["answer"].strip()))


class CLIcK(HubQuestions):
    """
    Korean culture and language, four or five options, some with a paragraph to read.

    Source: Kim et al., "CLIcK", arXiv:2403.06412.
    """

    name = "CLIcK"
    baseline = 0.25
    repo, revision = "EunsuKim/CLIcK", AS_PARQUET
    stems = {"test": "default/train/*"}  # the only split
    columns = ("paragraph", "question", "choices", "answer")

    def parse(self, row: TaskRow) -> MCQuestion:
        parts = [(row["paragraph"] or "").strip(), row["question"].strip()]
        text = "\n\n".join(filter(None, parts))
        options = [option.strip() for option in row["choices"]]
        return MCQuestion(text, tuple(options), options.index(row["answer"].strip()))


class KoBALT(HubQuestions):
    """
    Korean linguistics with ten options, which the question lists as lines from A: to J:.

    Source: Shin et al., "KoBALT", arXiv:2505.16125.
    """

    name = "KoBALT"
    baseline = 0.1
    repo, revision = "snunlp/KoBALT-700", AS_PARQUET
    stems = {"test": "kobalt_v1/raw/*"}
    columns = ("Question", "Answer")

    def parse(self, row: TaskRow) -> MCQuestion:
        text, first, rest = row["Question"].rpartition("\nA:")  # a dialogue may have an earlier A:
        options = re.split(r"^[B-J]:", rest, flags=re.MULTILINE) if first else []
        right = LETTERS.index(row["Answer"].strip())
        return MCQuestion(text.strip(), tuple(option.strip() for option in options), right)


class GPQA(HubQuestions):
    """
    Graduate-level questions of science, the 198 of the diamond set, options shuffled. Gated.

    Source: Rein et al., "GPQA: A Graduate-Level Google-Proof Q&A Benchmark", arXiv:2311.12022.
    """

    name = "GPQA"
    baseline = 0.25
    repo = "Idavidrein/gpqa"
    stems = {"test": "gpqa_diamond"}
    columns = ("Question", "Correct Answer", *(f"Incorrect Answer {n}" for n in (1, 2, 3)))

    def parse(self, row: TaskRow) -> MCQuestion:
        text, *answers = (row[column].strip() for column in self.columns)
        return shuffle_options(MCQuestion(text, tuple(answers), 0), random.Random(text))


class MCLMKorean(HubTask):
    """
    MT-MATH100 of MCLM: problems of MATH-500, translated into Korean.

    An answer is right if what follows its last `####` is the same number, with or without a unit,
    or the same formula but for spaces. Source: Son et al., "Linguistic Generalizability of
    Test-Time Scaling", arXiv:2502.17407.
    """

    name = "MCLM-Ko"
    kind = "generate"
    repo = "amphora/MCLM"
    stems = {"test": "mt-math100"}
    columns = ("ko", "answer")

    def find_problem(self, row: TaskRow) -> str | None:
        return None if all(row[column] for column in self.columns) else "no question or no answer"

    def conversation(self, i: int) -> Conversation:
        question, answer = (row := self.row(i))[self.columns[0]], row["answer"]
        return [user(f"{question.strip()}\n\n{INSTRUCTION}"), assistant(f"#### {answer}")]

    def material(self, i: int) -> str:
        return self.row(i)[self.columns[0]]

    def score(self, conversation: Conversation, answer: str) -> float:
        right, found = final_value(answer_text(conversation[-1])), final_value(answer)
        return float(self.answered(answer) and found == right)

    def answered(self, answer: str) -> bool:
        return "####" in visible(answer)


def final_value(answer: str) -> float | str:
    """What follows the last ####: a number without unit, or a formula without spaces and $."""
    line = visible(answer).rpartition("####")[2].strip().partition("\n")[0]
    line = re.sub(r"₩|\\?\$", "", re.sub(r"\\boxed\{(.*)\}", r"\1", line)).strip()
    if amount := NUMBER_AND_UNIT.fullmatch(line):
        return to_number(amount[1])
    said = re.sub(r"\s|\\[!,;]|\\(left|right)", "", line)
    return to_number(re.sub(r"\\[dt]frac", r"\\frac", said.rstrip(".")))


def to_number(text: str) -> float | str:
    """The number that a text is; else the text."""
    try:
        return float(re.sub(r"(?<=\d),(?=\d{3})", "", text))
    except ValueError:
        return text


class HRM8K(MCLMKorean):
    """
    Korean math: GSM8K, MATH, Omni-MATH and MMMLU in translation, and KSM, Korean competitions.

    Source: Ko et al., "Understand, Solve and Translate", arXiv:2501.02448.
    """

    name = "HRM8K"
    repo = "HAERAE-HUB/HRM8K"
    stems = {"test": "HRM8K/*_test"}
    columns = ("question", "answer")
