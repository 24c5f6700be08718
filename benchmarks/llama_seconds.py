"""Time llama.cpp on a batch of greedy answers; benchmarks/real_model.py runs this under another Python.

Reads a JSON object from standard input: model (a GGUF file), prompts (token ids), counts, tokens, threads, repeats.
Prints an object: the version, and by count the seconds of the clock and of the CPU of each repeat. It uses llama.cpp's
own batches, one sequence a request.
"""

import ctypes
import json
import sys
import time

import llama_cpp


def answer(context, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Return greedy answers to all prompts, decoded together."""
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    batch = llama_cpp.llama_batch_init(sum(map(len, prompts)), 0, 1)
    fed, lengths, answers = [list(prompt) for prompt in prompts], [0] * len(prompts), [[] for _ in prompts]
    while len(answers[0]) < num_tokens:
        batch.n_tokens, last = 0, []
        for sequence, tokens in enumerate(fed):
            for place, token in enumerate(tokens):
                at = batch.n_tokens
                batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, lengths[sequence] + place, 1
                batch.seq_id[at][0], batch.logits[at] = sequence, place == len(tokens) - 1
                batch.n_tokens += 1
            lengths[sequence] += len(tokens)
            last.append(batch.n_tokens - 1)
        if llama_cpp.llama_decode(context, batch) != 0:
            sys.exit("llama_decode failed")
        for sequence, at in enumerate(last):
            token = llama_cpp.llama_sampler_sample(SAMPLER, context, at)
            answers[sequence].append(token)
            fed[sequence] = [token]
    llama_cpp.llama_batch_free(batch)
    return answers


given = json.load(sys.stdin)
silent = llama_cpp.llama_log_callback(lambda level, text, user: None)  # held: llama.cpp keeps a pointer to it
llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
llama_cpp.llama_backend_init()
model = llama_cpp.llama_model_load_from_file(given["model"].encode(), llama_cpp.llama_model_default_params())
params = llama_cpp.llama_context_default_params()
params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 8192, 2048, 512, max(given["counts"])
params.n_threads = params.n_threads_batch = given["threads"]
context = llama_cpp.llama_init_from_model(model, params)
SAMPLER = llama_cpp.llama_sampler_init_greedy()
seconds = {}
for count in given["counts"]:
    answer(context, given["prompts"][:count], given["tokens"])
    seconds[count] = []
    for _ in range(given["repeats"]):
        clock, cpu = time.perf_counter(), time.process_time()
        answer(context, given["prompts"][:count], given["tokens"])
        seconds[count].append((time.perf_counter() - clock, time.process_time() - cpu))
print(json.dumps({"version": llama_cpp.__version__, "seconds": seconds}))
