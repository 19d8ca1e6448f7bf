"""
Registers our checkpoints as the model `nanochat` in EleutherAI's lm-evaluation-harness.

    lm-eval requests -> Question -> score_options;  prompts -> Engine -> text up to a stop string

Uses the same scorer (eval_core.py) and engine as our own evaluations. Every text begins with BOS.
Requires the packages of the `interop` group.
"""

import itertools
import uuid
from collections.abc import Sequence
from typing import Any

import lm_eval.models  # noqa: F401  (the harness adds its own only to an empty registry)
import torch
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from nanochat.chat_format import render, render_prompt
from nanochat.checkpoint import CheckpointChoice, Stage, load_inference
from nanochat.dist import DistConfig, init_dist
from nanochat.engine import Engine, Sampling, choose_engine_compile
from nanochat.eval_chat import longest_prompt, trim
from nanochat.eval_core import Question, score_options, truncate_options
from nanochat.sandbox import Tools
from nanochat.serve.openai_api import ChatRequest
from nanochat.serve.scheduler import Answer

MAX_GEN_TOKS = 256  # default limit on generated tokens
HARNESS_ARGUMENTS = {"batch_size", "max_batch_size"}  # that it adds itself, unused here

LogLikelihood = tuple[float, bool]  # log-likelihood (nats), whether every token is the argmax


@register_model("nanochat")
class NanochatLM(LM):
    """
    model_args: source (base, mid, sft, dpo or rl; default: the latest stage with a checkpoint),
    tag, step, dtype. Raises MissingInput if there is no such checkpoint.
    """

    def __init__(
        self,
        source: Stage | None = None,
        tag: str | None = None,
        step: int | None = None,
        dtype: Any = None,
        device: str | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        if unknown := others.keys() - HARNESS_ARGUMENTS:
            known = "source, tag, step, dtype and device"
            raise ValueError(f"unknown model_args: {', '.join(unknown)}; use {known}")
        kind: Any = (device or "").split(":")[0] or None
        if kind == "cuda" and not torch.cuda.is_available():
            kind = None  # the harness defaults to a GPU
        self.dist = init_dist(DistConfig(kind, dtype))
        tag = None if tag is None else str(tag)  # the harness parses digits as a number
        _, checkpoint = CheckpointChoice(source, tag, step).find()
        self.model, self.own_tokenizer = load_inference(checkpoint, self.dist)
        self.rendered: dict[str, list[int]] = {}  # token ids of rendered conversations

    # ---- likelihoods -------------------------------------------------------------------------

    def loglikelihood(self, requests: Sequence[Any], **options: Any) -> list[LogLikelihood]:
        """Score (context, continuation) pairs; the options of an item share a prefill."""
        questions, first = [], 0
        items = itertools.groupby(requests, key=lambda r: (r.task_name, r.doc_id, r.args[0]))
        for _, group in items:
            pairs = [self.split(*r.args) for r in group]
            ids, starts = zip(*pairs, strict=True)
            questions.append(truncate_options(first, ids, starts, self.model.cfg.max_seq_len))
            first += len(pairs)
        return self.score(questions, first)

    def split(self, context: str, continuation: str) -> tuple[list[int], int]:
        """Ids of context + continuation, and where the continuation (with its spaces) begins."""
        if context in self.rendered:
            before = self.rendered[context]
            return before + self.own_tokenizer.encode(continuation), len(before)
        ids = self.encode(context + continuation)  # the last token is always scored
        return ids, min(len(self.encode(context.rstrip())), len(ids) - 1)

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered conversation, or of a text with BOS."""
        known = self.rendered.get(text)
        return known or [self.own_tokenizer.bos_id, *self.own_tokenizer.encode(text)]

    def score(self, questions: Sequence[Question], count: int) -> list[LogLikelihood]:
        """Scores of all options, in order; a question's `number` is that of its first option."""
        found: dict[int, LogLikelihood] = {}
        for q, options in score_options(self.model, questions):
            for n, score in enumerate(options):
                num_tokens = len(q.options[n]) - q.starts[n]
                found[q.number + n] = (-score.nats * num_tokens, score.is_greedy)
        return [found[n] for n in range(count)]

    def loglikelihood_rolling(self, requests: Sequence[Any], **options: Any) -> list[float]:
        """Log-likelihood (nats) of whole texts, scored in windows, each token once."""
        bos, context = self.own_tokenizer.bos_id, self.model.cfg.max_seq_len
        questions, owners = [], []
        for number, request in enumerate(requests):
            ids = self.own_tokenizer.encode(request.args[0])
            for window in get_rolling_token_windows(ids, bos, context, context_len=1):
                before, after = make_disjoint_window(window)
                option = [*before, *after]
                questions.append(Question(len(owners), [option], [len(before)]))
                owners.append(number)
        sums = [0.0] * len(requests)
        for owner, (nats, _) in zip(owners, self.score(questions, len(owners)), strict=True):
            sums[owner] += nats
        return sums

    # ---- generation --------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], **options: Any) -> list[str]:
        """Generate a completion of each prompt, without tool calls, up to the first stop string."""
        compiled = choose_engine_compile(self.dist.device, MAX_GEN_TOKS * len(requests))
        engine = Engine(self.model, self.own_tokenizer, tool=Tools(), compiled=compiled)
        answers, texts = {}, [""] * len(requests)
        for number, (context, wanted) in enumerate(request.args for request in requests):
            until = wanted.get("until") or []
            stop = [until] if isinstance(until, str) else list(until)
            settings = sampling(wanted, number)  # repeated requests get different samples
            room = longest_prompt(engine, settings.max_new_tokens)
            prompt = trim(self.encode(context), room)
            asked = ChatRequest.model_construct(stop=stop)  # whose deltas keep tool calls apart
            (completion,) = engine.submit(prompt, settings)
            answers[completion] = Answer(completion, self.own_tokenizer, asked, number)
        while engine.busy:
            for completion in engine.step():
                answer = answers[completion]
                deltas = answer.advance()
                texts[answer.index] += "".join(d.text for d in deltas if d.kind == "text")
                if answer.finish:
                    engine.cancel(completion)
        return texts

    # ---- conversations -----------------------------------------------------------------------

    @property
    def tokenizer_name(self) -> str:
        """
        Key of lm-eval's cache of rendered conversations. Never the same, because cached texts would
        have no ids in `rendered`.
        """
        return f"nanochat-{uuid.uuid4().hex}"

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Name of the chat template; there is only one."""
        return "nanochat"

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render a conversation and store its ids, so that no text can forge special tokens."""
        if add_generation_prompt:
            ids = render_prompt(self.own_tokenizer, chat_history)
        else:  # leave the last turn open for the model to continue
            ids = render(self.own_tokenizer, chat_history)[0][:-1]
        text = self.own_tokenizer.decode(ids)
        self.rendered[text] = ids
        return text


def sampling(wanted: dict[str, Any], number: int) -> Sampling:
    """Convert lm-eval's generation settings of request `number` to ours; greedy by default."""
    most = wanted.get("max_gen_toks") or wanted.get("max_new_tokens") or MAX_GEN_TOKS
    temperature = wanted.get("temperature") or 0.0
    if not wanted.get("do_sample", temperature > 0):
        temperature = 0.0
    return Sampling(
        max_new_tokens=int(most),
        temperature=float(temperature),
        top_k=wanted.get("top_k") or None,
        top_p=wanted.get("top_p") or 1.0,
        seed=int(wanted.get("seed") or 0) + number,
    )
