"""
Train your own chat model: text -> tokenizer -> base -> mid -> SFT -> RL -> chat.

The core, in reading order; a module imports only from those above it:

    common          files, locks, stop signals
    config          command-line flags from dataclasses
    hardware        peak throughput and memory of devices
    distributed     ranks, devices, dtypes, collectives, heartbeats
    stats           means, standard errors, paired tests
    sandbox_child   the process inside the sandbox
    sandbox         run untrusted Python; the calculator and python tools of a model
    tokenizer       byte-pair encoding with special tokens
    chat_format     conversations as tokens, with the loss mask
    hub             files of data sets on the Hugging Face Hub
    dataset         text files; text from the hub, a folder, or the built-in data set
    dataloader      packed rows -> batches, a pure function of (rows, seed, step)
    packing         documents -> packed rows
    mixture         several data sets in proportion
    chat_packing    conversations -> packed rows
    attention       attention kernels, batches of sequences, the KV cache
    loss            cross-entropy without materialized logits
    gpt             the transformer
    optim           schedules, update rules, Muon + AdamW
    scaling         everything that follows from depth
    engine          generation: sampling, decode step, tools
    records         one JSON file for each section of the report
    logger          metrics of a run: screen, file, Weights & Biases
    preflight       kernels, memory, disk and time before a run
    eval_bpb        bits per byte
    eval_core       few-shot tasks and CORE
    eval_chat       tasks answered in chat
    plots           figures of the report
    report          summaries of the records, report.md
    anomaly         non-finite steps, spikes, ranks that differ
    checkpoint      checkpoints of a run
    train           the training loop of every stage
    evaluators      evaluation during pretraining
    finetune        mid training and SFT
    rl              reinforcement learning

Tracks plug into it: nanochat.serve (chat page and API), hf (Hugging Face), golf (a 16 MB artifact),
recursion, lab (experiments), bench (measurements).
"""
