"""Answer a few prompts twice, in two very different ways, and see that no byte of the answers changed.

    python examples/offline.py smollm2     # after `detcompile fetch smollm2`
    python examples/offline.py             # the embedded model: no download, and no chat model

Needs no GPU.
"""

import sys

import detcompile
from detcompile import EngineConfig, SamplingParams

QUESTIONS = [
    "What should I pack for a trip to Norway?",
    "Write a haiku about autumn.",
    "How does a bicycle stay upright?",
    "Write a Python function that returns the mean of a list.",
]


def main() -> None:
    model = detcompile.compile(sys.argv[1] if len(sys.argv) > 1 else "tiny")  # or any Hugging Face model
    prompts = [
        model.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        for question in QUESTIONS
    ]

    # Sampling, not greedy decoding. Each request has its own seed; without one it would draw a seed and
    # return it as output.seed.
    params = [SamplingParams(temperature=0.8, top_p=0.95, max_tokens=48, logprobs=3, seed=seed) for seed in range(4)]

    # All prompts in one batch.
    together = model.engine(EngineConfig(num_blocks=64)).generate(prompts, params, progress=False)

    # One by one: another scheduler, four tokens a step, so that prompts are cut into chunks, and other KV blocks.
    config = EngineConfig(scheduler="simple_chunking", max_num_batched_tokens=4, block_size=16, num_blocks=64)
    engine = model.engine(config)
    alone = [engine.generate(prompt, each, progress=False)[0] for prompt, each in zip(prompts, params)]

    for question, batched, single in zip(QUESTIONS, together, alone):
        a, b = batched.outputs[0], single.outputs[0]
        assert a.token_ids == b.token_ids and a.text == b.text
        assert a.logprobs == b.logprobs  # to the last bit
        print(f"--- seed {batched.seed}, {len(a.token_ids)} tokens, sum of logprobs {a.cumulative_logprob!r}")
        print(f"{question}\n{a.text}")
    print(f"--- equal, together and alone; fingerprint {model.fingerprint}")


if __name__ == "__main__":
    main()
