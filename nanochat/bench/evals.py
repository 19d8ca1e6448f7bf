"""
Benchmark few-shot evaluation: items scored per second.

    shape -> untrained model, items of the built-in suite -> same token ids for us and a peer

Timing does not depend on the weights, so this needs no checkpoint.
"""

import itertools
import time
from collections.abc import Sequence
from functools import partial
from types import ModuleType

from nanochat.bench.table import alternate, compare, print_table
from nanochat.checkpoint import build_model
from nanochat.dist import DistContext
from nanochat.eval_core import FewShotTask, Question, score_options, tokenize
from nanochat.gpt import GPT, GPTConfig, inference_copy
from nanochat.tokenizer import Tokenizer
from tasks.world.corpus import documents
from tasks.world.suite import suite

NOTE = """\
Built-in few-shot tasks, untrained model. Peer: EleutherAI's lm-evaluation-harness, with the same
token ids and weights."""
ITEMS = 200


def bench_evaluation(
    cfg: GPTConfig, dist: DistContext, repeats: int, peers: ModuleType | None
) -> None:
    """Time the largest task of each kind."""
    texts = list(itertools.islice(documents(0, "train"), 2000))
    tokenizer = Tokenizer.train(texts, min(cfg.vocab_size, 2048))
    plain = build_model(cfg, dist.device, dist.dtype, seed=0)
    model = inference_copy(plain)
    scorer = peers and peers.make_scorer(plain, dist)
    rows = []
    tasks = sorted((FewShotTask(**task) for task in suite()), key=lambda task: len(task.items))
    for task in {task.kind: task for task in tasks}.values():
        task = task.shuffled(ITEMS)
        questions = [tokenize(task, n, tokenizer, cfg.max_seq_len) for n in range(len(task.items))]

        theirs = partial(scorer, questions) if scorer else None
        seconds = alternate(repeats, partial(score, model, questions), theirs)
        ours, others = ([len(questions) / x for x in each] for each in seconds)
        tokens = sum(len(ids) for q in questions for ids in q.options)
        options = len(questions[0].options)
        case = (
            f"{task.kind}, {task.num_fewshot} shots, {options} option{'s' * (options > 1)}, "
            f"{tokens / len(questions):,.0f} tokens per item"
        )
        rows.append(compare(case, "items/s", ours, "lm-eval", others))
    print_table("Few-shot evaluation", NOTE, rows)


def score(model: GPT, questions: Sequence[Question]) -> float:
    """Seconds to score all options."""
    started = time.perf_counter()
    list(score_options(model, questions))
    return time.perf_counter() - started
