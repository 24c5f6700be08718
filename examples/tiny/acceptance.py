"""Measure how often drafts for the embedded model are right, on its held-out prompts.

    python examples/tiny/acceptance.py

Continues detcompile/tiny/prompts.txt, greedy and at temperature 0.8, with each drafter. α is the rate of right drafts
on the first branch as far as it was right: of the drafts that stood behind right ones only, how many were right
themselves. Nothing here depends on the machine but its bits.
"""

import argparse
import json

import detcompile
from detcompile import Drafter, DraftTree, EngineConfig, MirrorDrafter, NGramDrafter, SamplingParams, SpeculationConfig
from detcompile.models.hub import TINY_FOLDER


class Counted(Drafter):
    """A drafter that compares each guess with the token drawn, once that is known."""

    def __init__(self, inner) -> None:
        self.inner = inner
        self.proposals: list[tuple[object, int, DraftTree]] = []
        self.vocab_size, self.reads_states, self.hidden_size = inner.vocab_size, inner.reads_states, inner.hidden_size
        self.draft_ahead, self.observe = inner.draft_ahead, inner.observe

    def propose(self, sequences, max_depth):
        trees = self.inner.propose(sequences, max_depth)
        self.proposals += [(s, len(s.token_ids), tree) for s, tree in zip(sequences, trees)]
        return trees

    def forget(self, sequence):
        self.inner.forget(sequence)

    def rates(self) -> tuple[float, float]:
        """Return α of the first branch, and right tokens of the tree per proposal."""
        tried = right = along = 0
        for sequence, length, tree in self.proposals:
            path, truth = (), sequence.token_ids[length:]
            for token in truth:
                if (*path, 0) not in tree.tokens or any(path):
                    break
                tried, right = tried + 1, right + (tree.tokens[*path, 0] == token)
                if tree.tokens[*path, 0] != token:
                    break
                path = (*path, 0)
            path = ()
            for token in truth:
                child = tree.child(path, token)
                if child is None:
                    break
                path = child
            along += len(path)
        return right / max(1, tried), along / max(1, len(self.proposals))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, default=200, help="length to which each prompt is cut")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    model, draft = detcompile.compile("tiny"), detcompile.compile("tiny-draft")
    text = (TINY_FOLDER / "prompts.txt").read_text()
    prompts = [model.tokenizer(prompt).input_ids[: args.prompt_tokens] for prompt in split_prompts(text)]
    drafters = {
        "n-gram": lambda: NGramDrafter(5),
        "draft model": lambda: draft.drafter(5),
        "draft model, 2 siblings": lambda: draft.drafter(5, siblings=2),
        "draft model, mirrored": lambda: MirrorDrafter(draft.drafter(5)),
        "Medusa heads, 8 nodes": lambda: model.medusa_drafter("tiny", num_nodes=8),
        "Medusa heads, chain": lambda: model.medusa_drafter("tiny", paths=[(0,) * k for k in range(1, 5)]),
        "early exit, 3 of 6 layers": lambda: model.drafter(5, layers=3),
        "layer skip, 0 1 2 5": lambda: model.drafter(5, layers=(0, 1, 2, 5)),
        "layer skip, 0 1 3 4 5": lambda: model.drafter(5, layers=(0, 1, 3, 4, 5)),
    }
    config = EngineConfig(num_blocks=600, max_num_seqs=len(prompts))
    for name, make in drafters.items():
        for temperature in (0.0, 0.8):
            counted = Counted(make())
            engine = model.engine(config, speculation=SpeculationConfig(drafter=counted, switch="always"))
            params = [
                SamplingParams(max_tokens=args.max_tokens, temperature=temperature, seed=seed, ignore_eos=True)
                for seed in range(len(prompts))
            ]
            outputs = engine.generate(prompts, params, progress=False)
            tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            alpha, along = counted.rates()
            row = {"drafter": name, "temperature": temperature, "alpha": round(alpha, 3)}
            row |= {"tokens_a_step": round(1 + along, 2), "proposals": len(counted.proposals), "tokens": tokens}
            print(json.dumps(row) if args.json else "  ".join(f"{k} {v}" for k, v in row.items()), flush=True)


def split_prompts(text: str) -> list[str]:
    """Return the prompts of the file."""
    return text.split("\n---\n")


if __name__ == "__main__":
    main()
