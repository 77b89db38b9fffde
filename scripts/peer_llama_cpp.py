# SPDX-License-Identifier: Apache-2.0
"""Runs batches on llama.cpp, for the benchmark to compare with. In an environment of its own:

    PEER/bin/pip install --no-binary llama-cpp-python llama-cpp-python==0.3.36   # builds it
    python -m scripts.benchmark --suite=peers --peer_python=PEER/bin/python --peer_gguf=FILE

It computes on the processor, with as many threads as there are cores, and keeps a cache of its own
for each request; scripts/benchmarks/peer_server.py has what it answers.
"""

import argparse
import os
import sys

import llama_cpp
import numpy as np

from scripts.benchmarks.peer_server import answer_batches

BATCH_TOKENS = 2048  # most tokens of one call
ERROR_LEVEL = 4


@llama_cpp.llama_log_callback
def log_errors(level, text, _):
    if level == ERROR_LEVEL:
        sys.stderr.write(text.decode(errors="replace"))


class Contexts:
    """One context at a time: that of the last batch's shape, emptied between batches."""

    def __init__(self, model):
        self._model = model
        self._shape = self._context = None

    def get(self, rows, cells):
        """Returns an empty context of `rows` sequences of at least `cells` tokens each."""
        shape = (rows, -(-cells // 256) * 256)
        if shape != self._shape:
            if self._context is not None:
                llama_cpp.llama_free(self._context)
            params = llama_cpp.llama_context_default_params()
            params.n_seq_max, params.n_ctx = rows, rows * shape[1]
            params.n_batch = BATCH_TOKENS
            params.n_threads = params.n_threads_batch = os.cpu_count()
            params.kv_unified = False
            self._shape = shape
            self._context = llama_cpp.llama_init_from_model(self._model, params)
            if self._context is None:
                sys.exit(f"llama.cpp gives no context of {rows} sequences of {shape[1]} tokens")
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        return self._context


def decode(context, batch, tokens, vocabulary):
    """Runs `tokens` [(id, position, sequence, whether to draw)]; returns {sequence: next id}."""
    batch.n_tokens = len(tokens)
    for place, (token, position, sequence, draws) in enumerate(tokens):
        batch.token[place], batch.pos[place] = token, position
        batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
        batch.logits[place] = draws
    if code := llama_cpp.llama_decode(context, batch):
        sys.exit(f"llama_decode failed with code {code}")
    drawn = {}
    for place, (_, _, sequence, draws) in enumerate(tokens):
        if draws:
            logits = llama_cpp.llama_get_logits_ith(context, place)
            drawn[sequence] = int(np.ctypeslib.as_array(logits, (vocabulary,)).argmax())
    return drawn


def run_steps(context, batch, vocabulary, prompts, steps):
    """Yields when ready, then after each greedy step of one static batch, past any end token."""
    last: dict[int, int] = {}
    waiting = [
        (token, position, sequence, position == len(prompt) - 1)
        for sequence, prompt in enumerate(prompts)
        for position, token in enumerate(prompt)
    ]
    yield
    for first in range(0, len(waiting), BATCH_TOKENS):
        last |= decode(context, batch, waiting[first : first + BATCH_TOKENS], vocabulary)
    yield
    for step in range(steps - 1):
        tokens = [(last[i], len(prompt) + step, i, True) for i, prompt in enumerate(prompts)]
        last = decode(context, batch, tokens, vocabulary)
        yield


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a GGUF file")
    path = parser.parse_args().model
    llama_cpp.llama_log_set(log_errors, None)
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(path.encode(), params)
    if model is None:
        sys.exit(f"llama.cpp cannot load {path}")
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
    contexts = Contexts(model)

    def prepared(prompts, steps):
        context = contexts.get(len(prompts), max(map(len, prompts)) + steps)
        return run_steps(context, batch, vocabulary, prompts, steps)

    about = {"version": llama_cpp.__version__, "threads": os.cpu_count()}
    answer_batches({"engine": "llama.cpp", "model": os.path.basename(path), **about}, prepared)


if __name__ == "__main__":
    main()
