"""
What canaries measure: pretraining text, the conversations being learned, answers to held-out ones.

    checkpoint -> pretraining_text; text, conversations -> Suite.measure -> figures by name

The suite renders its conversations itself, as the finished model will see them: a training on
anything else is found by comparing.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from nanochat.chat_format import render, render_prompt
from nanochat.checkpoint import Checkpoint
from nanochat.common import UsageError
from nanochat.dataloader import inputs_and_targets
from nanochat.dataset import DataConfig
from nanochat.distributed import DistContext
from nanochat.engine import Completion, Engine, Sampling
from nanochat.eval_bpb import Batch
from nanochat.gpt import GPT, for_inference
from nanochat.lab.row_bpb import bits_by_row
from nanochat.loss import IGNORE
from nanochat.mixture import open_corpus, open_texts
from nanochat.packing import ensure
from nanochat.tokenizer import Tokenizer
from tasks.base import Task
from tasks.builtin import ensure_written

TEXT_TOKENS = 4096  # of pretraining text
NUM_ANSWERS = 16  # to held-out conversations, all buckets together
MAX_ANSWER_TOKENS = 128
NGRAM = 4  # tokens whose repetition is counted
NUM_LOSSES = 64  # training conversations, all buckets together, whose loss is measured
ROWS_PER_PASS = 8
NUM_COMPARED = 64  # conversations of each bucket that are compared with packed rows


@dataclass
class Suite:
    """A fixed set of texts and conversations; by bucket, as the fields of `mixture` name them."""

    tokenizer: Tokenizer
    text: Sequence[Batch]
    chats: Mapping[str, Task]
    """Held-out conversations to answer."""
    taught: Mapping[str, Task] = field(default_factory=dict)
    """Conversations of the training."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Share of the training tokens."""

    def measure_parent(self, model: GPT) -> dict[str, float]:
        """As `measure`, and the bits per byte of the text if every token were as likely."""
        found = self.measure(model)
        if self.text:
            sizes = self.tokenizer.token_bytes()
            targets = np.concatenate([targets.ravel() for _, targets in self.text])
            lengths = np.where(targets == IGNORE, 0, sizes[targets])
            num_tokens, num_bytes = int((lengths > 0).sum()), int(lengths.sum())
            found["knowing_nothing"] = math.log2(len(sizes)) * num_tokens / num_bytes
        return found

    def measure(self, model: GPT) -> dict[str, float]:
        """
        All figures of the suite by name, of the inference copy of `model`: a compiled model would
        be compiled for each length of the conversations.
        """
        model, found = for_inference(model), {}
        if self.text:
            sizes = self.tokenizer.token_bytes()
            found["text_bpb"] = bits_by_row(model, self.text, sizes, model.device).value
        return {**found, **self.measure_losses(model), **self.measure_answers(model)}

    @torch.no_grad()
    def measure_losses(self, model: GPT) -> dict[str, float]:
        """Nats per target of the training conversations, buckets weighted as in the mixture."""
        nats, counted, tokens = Counter(), Counter(), Counter()
        T = model.cfg.max_seq_len
        some = [(name, self.render(name, i, T)) for name, i in select(self.taught, NUM_LOSSES)]
        for first in range(0, len(some), ROWS_PER_PASS):
            group = some[first : first + ROWS_PER_PASS]
            x = pad([ids for _, (ids, _) in group], self.tokenizer.bos_id, model.device)
            y = pad([targets for _, (_, targets) in group], IGNORE, model.device)
            sums = model.token_losses(x, y).double().sum(1).tolist()
            for (name, (ids, targets)), loss in zip(group, sums, strict=True):
                nats[name] += loss
                counted[name] += sum(target != IGNORE for target in targets)
                tokens[name] += len(ids)
        weights = {n: self.shares[n] * counted[n] / tokens[n] for n in nats if counted[n]}
        total = math.fsum(weights.values())
        loss = math.fsum(w * nats[n] / counted[n] for n, w in weights.items())
        return {"taught_loss": loss / total} if total else {}

    def compare_rows(self, tokens: np.ndarray, targets: np.ndarray) -> dict[str, float]:
        """
        Packed rows of the run, both (n, T), compared with its conversations: the ratio of the
        shares of tokens that carry loss (at least 1), and the total variation (0 to 1) of the
        tokens before answers. Empty without training conversations.
        """
        size = counted = 0.0
        leads = defaultdict[int, float](float)
        for name, bucket in self.taught.items():
            some = select({name: bucket}, NUM_COMPARED)
            pairs = [self.render(name, i, tokens.shape[1]) for name, i in some]
            length = sum(len(ids) - 1 for ids, _ in pairs)  # without BOS, which also pads rows
            weight = self.shares[name] / length
            for ids, row in pairs:
                counted += weight * sum(target != IGNORE for target in row)
                for lead in before_answers(np.array(ids), np.array(row)).tolist():
                    leads[lead] += weight
            size += self.shares[name]
        if not (size and counted):
            return {}
        share = (targets != IGNORE).sum() / (tokens != self.tokenizer.bos_id).sum()
        ratio = float(share) * size / counted
        return {
            "counted": max(ratio, 1 / ratio) if ratio else math.inf,
            "lead": total_variation(leads, Counter(before_answers(tokens, targets).tolist())),
        }

    def render(self, name: str, i: int, max_seq_len: int) -> tuple[list[int], list[int]]:
        """Tokens and targets of a training conversation, IGNORE where no loss is counted."""
        ids, mask = render(self.tokenizer, self.taught[name][i], max_seq_len + 1)
        targets = [token if own else IGNORE for token, own in zip(ids, mask, strict=True)]
        return ids[:-1], targets[1:]

    def measure_answers(self, model: GPT) -> dict[str, float]:
        """The form of greedy answers to held-out prompts; empty without such conversations."""
        T = model.cfg.max_seq_len
        longest = min(MAX_ANSWER_TOKENS, T // 2)
        asked, prompts, expected = [], [], 0
        for name, i in select(self.chats, NUM_ANSWERS):
            whole, _ = render(self.tokenizer, self.chats[name][i])
            prompt = render_prompt(self.tokenizer, self.chats[name][i])
            if len(whole) - len(prompt) <= longest / 2:  # a good answer can end in time
                asked.append((self.chats[name], i))
                prompts.append(prompt[longest - T :])  # the end of a long prompt
                expected += len(whole) - len(prompt)
        if not asked:
            return {}
        engine = Engine(model, self.tokenizer, len(asked))
        answers = [a for (a,) in engine.generate(prompts, Sampling(longest, 0.0, None))]
        texts = [self.tokenizer.decode(answer.ids) for answer in answers]
        pairs = list(zip(asked, texts, strict=True))
        choices = [text.strip() for (task, i), text in pairs if task.letters(i)]
        most = max(Counter(choices).values()) / len(choices) if len(choices) >= 4 else math.nan
        ratio = max(1, sum(len(answer.ids) for answer in answers)) / expected
        return {
            "length": max(ratio, 1 / ratio),
            "no_end": sum(answer.finish == "length" for answer in answers) / len(answers),
            "unreadable": 1 - sum(task.answered(text) for (task, _), text in pairs) / len(pairs),
            "repeated": sum(map(repeated_share, answers)) / len(answers),
            "one_letter": most,
        }


def select(buckets: Mapping[str, Task], num: int) -> list[tuple[str, int]]:
    """Bucket and index of `num` conversations: at least two of each bucket, evenly spread."""
    found = []
    for name, bucket in buckets.items():
        each = min(len(bucket), max(2, num // len(buckets)))
        found += [(name, i * len(bucket) // each) for i in range(each)]
    return found


def pad(rows: Sequence[Sequence[int]], filling: int, device: torch.device) -> torch.Tensor:
    """Rows of different lengths as one tensor, padded at their ends."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[filling] * (longest - len(row))] for row in rows], device=device)


def before_answers(tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The tokens, (T) or (n, T), after which a run of counted targets begins; flat."""
    counted = targets != IGNORE
    begins = counted.copy()
    begins[..., 1:] &= ~counted[..., :-1]
    return tokens[begins]


def total_variation(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Total variation of two distributions, given as weights (Counters): 0 equal, 1 disjoint."""
    first, second = math.fsum(one.values()), math.fsum(other.values())
    if not (first and second):
        return float(first != second)
    return sum(abs(one[x] / first - other[x] / second) for x in one.keys() | other.keys()) / 2


def repeated_share(answer: Completion) -> float:
    """Share of an answer's n-grams (n = NGRAM) that occurred in it before."""
    runs = [tuple(answer.ids[i : i + NGRAM]) for i in range(len(answer.ids) - NGRAM + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def pretraining_text(
    parent: Checkpoint, tokenizer: Tokenizer, max_seq_len: int, machine: DistContext
) -> list[Batch]:
    """
    Validation rows of the text that the base model was trained on, on the main rank, which alone
    measures. Empty, with a printed note, where the text cannot be opened.
    """
    if not (parent.state["source"] and machine.is_main):
        return []
    found = []
    try:
        with machine.working("opening the pretraining text"):  # the other ranks wait for it
            texts = open_texts(DataConfig(), None, parent.state["source"], ensure_written)
            corpus = open_corpus(texts, tokenizer, max_seq_len)
            for name, rows in corpus.rows.items():
                ensure(rows, texts.sources[name], tokenizer, 0)
            each = max(1, TEXT_TOKENS // max_seq_len // len(corpus.rows))
            for rows in corpus.rows.values():
                found += [inputs_and_targets(b, IGNORE) for b in rows.val_batches(8, each)]
    except (OSError, ValueError, UsageError) as error:
        machine.print0(f"canaries without pretraining text, which cannot be opened: {error}")
        return []
    return found
