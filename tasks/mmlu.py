"""
MMLU: questions with four options from exams in 57 subjects; KMMLU: from Korean exams in 45.

Sources: Hendrycks et al., "Measuring Massive Multitask Language Understanding", arXiv:2009.03300;
Son et al., "KMMLU: Measuring Massive Multitask Language Understanding in Korean", arXiv:2402.11548.
"""

from tasks.base import Tags
from tasks.hub import HubQuestions


class MMLU(HubQuestions):
    """Train split: `auxiliary_train`, questions from other datasets."""

    name, baseline = "MMLU", 0.25
    tags = Tags("exams", "en", "native", "MIT", "letter", "mmlu")
    repo = "cais/mmlu"
    splits = {"train": "all/auxiliary_train", "val": "all/validation", "test": "all/test"}
    columns, labels = ("question", "choices", "answer"), "0123"


class KMMLU(HubQuestions):
    """All subjects, each with one file per split."""

    name, baseline = "KMMLU", 0.25
    # KMMLU-Pro has other questions than KMMLU, but in the style of the same exams
    tags = Tags("exams", "ko", "native", "CC BY-ND 4.0", "letter", "kmmlu+kmmlu-pro")
    repo = "HAERAE-HUB/KMMLU"
    splits = {"train": "data/*-train", "val": "data/*-dev", "test": "data/*-test"}
    columns = "question", tuple("ABCD"), "answer"
