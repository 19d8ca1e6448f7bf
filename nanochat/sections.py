"""
The form of the report card: its sections in order, the keys that open each, the summary's columns.

These names never change, so that report cards can be compared line by line. Data, no code.
"""

CHAT_TASKS = "ARC-Easy, ARC-Challenge, MMLU, GSM8K, HumanEval, AQUA, ChatCORE"
CHAT_KEYS = (
    "source, task_name, dtype, temperature, max_new_tokens, num_samples, top_k, batch_size, "
    f"model_tag, step, max_problems, device_type, {CHAT_TASKS}"
)
# The fixed sections in order, each with the keys that open it.
SECTIONS: dict[str, str] = {
    "Tokenizer training": "max_chars, doc_cap, vocab_size, train_time, num_special_tokens, "
    "token_bytes_min, token_bytes_max, token_bytes_mean, token_bytes_std",
    "Tokenizer evaluation": "",
    "Base model training": "run, device_type, depth, max_seq_len, num_iterations, target_flops, "
    "target_param_data_ratio, device_batch_size, total_batch_size, embedding_lr, "
    "unembedding_lr, weight_decay, matrix_lr, grad_clip, eval_every, eval_tokens, "
    "core_metric_every, core_metric_max_per_task, sample_every, model_tag, "
    "Number of parameters, Number of FLOPs per token, Calculated number of iterations, "
    "Number of training tokens, Tokens : Params ratio, DDP world size, warmup_ratio, "
    "warmdown_ratio, final_lr_frac, Minimum validation bpb, Final validation bpb, "
    "CORE metric estimate, MFU %, Total training flops, Total training time, Peak memory usage",
    "Base model loss": "train bpb, val bpb, sample 0, sample 1, sample 2, sample 3, sample 4, "
    "sample 5, sample 6",
    "Base model evaluation": "Model, CORE metric, hellaswag_zeroshot, jeopardy, "
    "bigbench_qa_wikidata, arc_easy, arc_challenge, copa, commonsense_qa, piqa, openbook_qa, "
    "lambada_openai, hellaswag, winograd, winogrande, bigbench_dyck_languages, "
    "agi_eval_lsat_ar, bigbench_cs_algorithms, bigbench_operators, "
    "bigbench_repeat_copy_logic, squad, coqa, boolq, bigbench_language_identification",
    "Midtraining": "run, device_type, dtype, num_iterations, max_seq_len, device_batch_size, "
    "unembedding_lr, embedding_lr, matrix_lr, init_lr_frac, weight_decay, eval_every, "
    "eval_tokens, total_batch_size, dry_run, Number of iterations, DDP world size, "
    "Minimum validation bpb",
    "Chat evaluation mid": CHAT_KEYS,
    "Chat SFT": "run, source, device_type, dtype, device_batch_size, num_epochs, "
    "num_iterations, target_examples_per_step, unembedding_lr, embedding_lr, matrix_lr, "
    "weight_decay, init_lr_frac, aqua_train_examples, aqua_val_examples, eval_every, "
    "eval_steps, eval_metrics_every, eval_metrics_max_problems, Training rows, "
    "Number of iterations, Training loss, Validation loss",
    "Chat evaluation sft": CHAT_KEYS,
    "Chat RL": "run, source, dtype, device_batch_size, examples_per_step, num_samples, "
    "max_new_tokens, temperature, top_k, unembedding_lr, embedding_lr, matrix_lr, "
    "weight_decay, init_lr_frac, num_epochs, save_every, eval_every, eval_examples",
    "Chat evaluation rl": CHAT_KEYS,
}
# Column of the summary -> the sections whose metrics it shows.
COLUMNS = {
    "BASE": ("Base model loss", "Base model evaluation", "Chat evaluation base"),
    "MID": ("Chat evaluation mid",),
    "SFT": ("Chat evaluation sft",),
    "RL": ("Chat evaluation rl",),
}
BASE_METRICS = {"CORE metric": "CORE", "val bpb": "val bpb"}
LOWER_IS_BETTER = frozenset({"val bpb"})
