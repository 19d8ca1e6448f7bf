"""
Benchmark few-shot evaluation: items scored per second.

    shape -> untrained model, items of the built-in suite -> same token ids for us and a peer

Timing does not depend on the weights, so this needs no checkpoint.
"""

import itertools
import time
from collections.abc import Callable, Sequence

from nanochat.bench.table import BenchLog, TableLine, alternate
from nanochat.checkpoint import build_model
from nanochat.distributed import DistContext
from nanochat.eval_core import FewShotTask, Question, score_options, tokenize
from nanochat.gpt import GPT, GPTConfig, inference_copy
from nanochat.tokenizer import Tokenizer
from tasks.world.corpus import documents
from tasks.world.suite import suite

TABLE = "Few-shot evaluation"
NOTE = """\
Items per second on the built-in few-shot tasks with an untrained model. The peer, EleutherAI's
lm-evaluation-harness, scores the same token ids with the same weights in transformers."""
ITEMS = 200
BATCH = 32  # options per batch for the peer; fastest of 16 to 128

# Questions -> seconds, loss (nats) of every option
TimeFn = Callable[[Sequence[Question]], tuple[float, list[list[float]]]]
MakeScorer = Callable[[GPT, Tokenizer, DistContext], TimeFn]


def bench_evaluation(
    cfg: GPTConfig, machine: DistContext, repeats: int, found: BenchLog, peer: MakeScorer | None
) -> None:
    """Time the largest task of each kind; `peer` builds another library's scorer."""
    texts = list(itertools.islice(documents(0, 0, "train"), 2000))
    tokenizer = Tokenizer.train(texts, min(cfg.vocab_size, 2048))
    plain = build_model(cfg, machine.device, machine.dtype, seed=0)
    model = inference_copy(plain)
    theirs = peer(plain, tokenizer, machine) if peer else None
    found.note(TABLE, NOTE)
    tasks = sorted((FewShotTask(**task) for task in suite()), key=lambda task: len(task.items))
    for task in {task.kind: task for task in tasks}.values():
        task = task.shuffled(ITEMS)
        questions = [tokenize(task, n, tokenizer, cfg.max_seq_len) for n in range(len(task.items))]

        def score(questions: Sequence[Question] = questions) -> float:
            started = time.perf_counter()
            for _ in score_options(model, questions):
                pass
            return time.perf_counter() - started

        seconds = alternate(repeats, score, theirs and (lambda q=questions: theirs(q)[0]))
        ours, others = ([len(questions) / x for x in each] for each in seconds)
        tokens = sum(len(ids) for q in questions for ids in q.options)
        options = len(questions[0].options)
        label = (
            f"{task.kind}, {task.num_fewshot} shots, {options} option{'s' * (options > 1)}, "
            f"{tokens / len(questions):,.0f} tokens per item"
        )
        found.line(TableLine(TABLE, label, "items/s", ours, "lm-eval", others))
