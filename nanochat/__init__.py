"""
Train a chat model end to end: text -> tokenizer -> base -> mid -> SFT -> RL -> chat.

Core modules; each imports only from modules above it. To read how a model is trained, start with
scripts/base_train.py, then run, train, gpt, attention, loss, optim and scaling.

    common          files, locks, digests, stop signals
    recipe          what determines a result: flags, inputs, digests of the code
    config          command-line flags from config dataclasses
    dist            ranks, devices, dtypes, collectives, peak FLOPs and MFU
    stats           means, standard errors, paired tests
    sandbox_child   the sandboxed child process
    sandbox         untrusted Python execution; calculator and Python tools
    tokenizer       byte-pair encoding with special tokens
    chat_format     conversations as tokens, with the loss mask
    fp8             matmuls in fp8
    loss            cross-entropy without materialized logits
    hub             downloads from the Hugging Face Hub
    dataset         text from the Hub, a folder, or the built-in dataset
    rows            documents, conversations -> packed rows -> batches by (rows, seed, step)
    attention       rotary embedding, masks, kernels, variable-length batches, the KV cache
    gpt             the transformer: layers, initialization, forward pass
    optim           schedules, update rules, Muon + AdamW
    scaling         hyperparameters derived from depth
    engine          generation: sampling, decode step, tool calls in the text
    records         one JSON record per section of the report; the log of a run
    eval_bpb        bits per byte
    eval_core       few-shot tasks and the CORE metric
    eval_chat       tasks in chat format
    report          scores, differences and verdict of a run; report.md from the records
    plots           figures of the report
    checkpoint      saved steps: write, verify, find, load
    train           one training step: batches, gradients, updates
    run             the run around a training loop: resume, save, log, stop, record
    finetune        what midtraining and SFT share
    rl              rollouts, advantages, policy-gradient batches

Tracks extend the core: nanochat.serve (chat page and API; request checks in serve/security.py), hf
(Hugging Face), golf (a 16 MB artifact), recursion, lab (experiments), bench (benchmarks).
"""
