# SPDX-License-Identifier: Apache-2.0
"""Runs batches on transformers, for the benchmark to compare with. In an environment of its own:

    python3 -m venv PEER && PEER/bin/pip install torch==2.13.0 transformers==5.24.0
    python -m scripts.benchmark --suite=peers --peer_python=PEER/bin/python --peer_model=FOLDER

It loads a Hugging Face folder in float32; scripts/benchmarks/peer_server.py has what it answers.
"""

import argparse

import torch
import transformers

from scripts.benchmarks.peer_server import answer_batches


def run_steps(model, prompts, steps):
    """Yields when ready, then after each greedy step of one static batch, past any end token.

    Prompts of different lengths are padded on the left, and masked.
    """
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    cache = transformers.DynamicCache(config=model.config)
    # Logits of the last position alone, as its own `generate` asks for.
    options = {"cache": cache, "use_cache": True, "logits_to_keep": 1}
    ragged = any(len(prompt) < longest for prompt in prompts)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    yield
    for _ in range(steps):
        if ragged:
            options |= {"attention_mask": mask, "position_ids": positions}
        with torch.inference_mode():
            logits = model(ids, **options).logits
            ids = logits[:, -1].argmax(-1, keepdim=True)
        mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=-1)
        positions = positions[:, -1:] + 1
        yield


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    folder = parser.parse_args().model
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(folder, dtype=torch.float32).eval()
    about = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    about = {"engine": "transformers", "version": transformers.__version__, **about}
    answer_batches(about, lambda prompts, steps: run_steps(model, prompts, steps))


if __name__ == "__main__":
    main()
