# SPDX-License-Identifier: Apache-2.0
"""Runs the decode workload on transformers, to compare with. It needs an environment of its own:

    python3 -m venv PEER && PEER/bin/pip install torch==2.13.0 transformers==5.24.0
    PEER/bin/python -m scripts.peer_transformers --model=FOLDER --requests=1,8,32

loads a Hugging Face folder in float32 and prints one line of JSON a repetition. Without
--requests it answers lines "run N" from standard input, until their end.
"""

import argparse
import json
import sys
import time

import torch
import transformers

from scripts.benchmarks.workload import NEW_TOKENS, decode_figures, workload_prompts


def load(folder):
    """Returns the model, float32 and ready."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def run(model, count):
    """Returns the figures of `count` requests in one static batch, greedy, past any end token."""
    prompts = torch.tensor(workload_prompts(count, model.config.vocab_size))
    times = []
    with torch.inference_mode():
        start = time.perf_counter()
        step, cache = prompts, transformers.DynamicCache(config=model.config)
        for _ in range(NEW_TOKENS):
            # Logits of the last position alone, as its own `generate` asks for.
            logits = model(step, cache=cache, use_cache=True, logits_to_keep=1).logits
            step = logits[:, -1].argmax(-1, keepdim=True)
            times.append(time.perf_counter())
    return decode_figures(start, [times] * count)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--requests", help="batch sizes, such as 1,8,32")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    model = load(arguments.model)

    def say(figures):
        print(json.dumps(figures), flush=True)

    if arguments.requests is not None:
        for count in map(int, arguments.requests.split(",")):
            run(model, count)  # warms up
            for _ in range(arguments.repeats):
                say(run(model, count))
        return
    say({"engine": "transformers", "torch": torch.__version__, "threads": torch.get_num_threads()})
    for line in sys.stdin:
        say(run(model, int(line.removeprefix("run"))))


if __name__ == "__main__":
    main()
