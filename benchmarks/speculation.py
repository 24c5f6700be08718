"""Compare speculation with plain decoding: milliseconds a token, tokens a step and the formula's, equal bytes.

    python -m benchmarks.speculation --commit $(git rev-parse --short HEAD) [--layers 36] [--small]

On a GPU the target is Qwen3-8B's shape and the draft Qwen3-0.6B's, random weights in bf16; ``--small`` takes the
embedded model and a draft of one layer. Greedy, end tokens ignored; all engines share the compiled model.

model    the draft model runs and its time counts; each proposed token is then replaced by the right one with
         probability --rate, otherwise by a wrong one.
n-gram   proposals of the same rate that cost nothing.
tree     a tree of 16 nodes, all wrong, in every step, in turns with plain steps.
mirror   like "model", with the draft on the second GPU if there is one: without and with MirrorDrafter around it, at
         rates of --rate and 1.

"always" drafts in every step, "automatic" where it was measured to be faster; "wrong" proposes only wrong tokens, under
the automatic switch. Each engine runs a workload twice to warm up and then --repeats times; medians count. A
difference from the plain tokens ends the program. Writes benchmarks/results/speculation-<device>-<commit>.json.
"""

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import detcompile
from benchmarks.cpu import cpu_name
from benchmarks.model import QWEN3_8B, build
from detcompile import CompiledModel, MirrorDrafter, Numerics
from detcompile.runtime.engine import Engine
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.requests.outputs import RequestOutput
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.speculation.draft_tree import DraftTree
from detcompile.runtime.speculation.draft_tree import Path as NodePath
from detcompile.runtime.speculation.drafter import Drafter
from detcompile.runtime.speculation.model_drafter import ModelDrafter
from detcompile.runtime.speculation.speculator import SpeculationConfig
from detcompile.runtime.speculation.statistics import expected_tokens

QWEN3_0_6B = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "tie_word_embeddings": True}
KINDS = ("tree", "n-gram", "model", "mirror")
PROMPT_LENGTH = 16
TURNS = 7
MAX_CONTEXT = 1024  # of the draft
DRAFT_NUMERICS = Numerics()
TREE: tuple[NodePath, ...] = (
    (0,), (1,), (2,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 0, 0), (0, 0, 0, 0, 1),
)  # fmt: skip


class Steered(Drafter):
    """Proposes chains of ``num_tokens``, right with probability ``rate`` a token; a draft model, if any, runs first.

    Args:
        truth: what each prompt is continued with.
    """

    def __init__(
        self, truth: dict[tuple[int, ...], list[int]], rate: float, num_tokens: int, model: ModelDrafter | None = None
    ) -> None:
        self.truth, self.rate, self.num_tokens = truth, rate, num_tokens
        self.model = model
        if model is not None:
            self.device = model.device
        self.random = random.Random(0)

    def propose(self, sequences: SequenceOf[Sequence], max_depth: SequenceOf[int]) -> list[DraftTree]:
        """Propose a chain for each sequence."""
        if self.model is None:
            return [self._chain(sequence, min(depth, self.num_tokens)) for sequence, depth in zip(sequences, max_depth)]
        trees = []
        for sequence, tree in zip(sequences, self.model.propose(sequences, max_depth)):
            steered = self._chain(sequence, tree.depth)
            if steered.depth:  # the draft takes the right tokens for its guesses, as if it had made them
                shadow = self.model._shadows[sequence]
                shadow.token_ids[len(sequence.token_ids) :] = steered.along((0,) * steered.depth)
            trees.append(steered)
        return trees

    def forget(self, sequence: Sequence) -> None:
        """Do nothing: no state is kept."""
        if self.model is not None:
            self.model.forget(sequence)

    def _chain(self, sequence: Sequence, depth: int) -> DraftTree:
        rest = self.truth[tuple(sequence.token_ids[: sequence.num_prompt_tokens])][sequence.num_generated :]
        right = True
        tokens = []
        for token in rest[:depth]:
            right = right and self.random.random() < self.rate
            tokens.append(token if right else token ^ 1)
        return DraftTree.chain(tokens)


class WrongTrees(Drafter):
    """Proposes one tree of the shape TREE for each sequence, all tokens wrong."""

    def __init__(self, truth: dict[tuple[int, ...], list[int]]) -> None:
        right = {token for tokens in truth.values() for token in tokens}
        wrong = [token for token in range(len(right) + len(TREE)) if token not in right]
        self.tree = DraftTree(dict(zip(TREE, wrong)))

    def propose(self, sequences: SequenceOf[Sequence], max_depth: SequenceOf[int]) -> list[DraftTree]:
        """Propose one tree for all; the engine cuts it where a sequence ends sooner."""
        return [self.tree] * len(sequences)

    def forget(self, sequence: Sequence) -> None:
        """Do nothing: no state is kept."""


class Workload:
    """Prompts of random tokens, and how many tokens continue each."""

    def __init__(self, batch: int, num_tokens: int, vocab_size: int) -> None:
        rng = random.Random(batch)
        self.prompts = [[rng.randrange(vocab_size) for _ in range(PROMPT_LENGTH)] for _ in range(batch)]
        self.params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)

    def run(self, engine: Engine, repeats: int) -> tuple[float, list[RequestOutput]]:
        """Return milliseconds a token of one sequence, from all first tokens to the last one, and the answers."""
        taken = []
        for _ in range(repeats + 2):  # mixed steps are captured at second sight
            outputs = engine.generate(self.prompts, self.params, progress=False)
            metrics = [output.metrics for output in outputs if output.metrics is not None]
            first = max(metric.token_times[0] for metric in metrics)
            last = max(metric.token_times[-1] for metric in metrics)
            taken.append(1e3 * (last - first) / ((self.params.max_tokens or 2) - 1))
        return statistics.median(taken[2:]), outputs


def free() -> None:
    """Release the memory of engines that are no longer referenced."""
    gc.collect()
    torch.cuda.empty_cache()


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


class Comparison:
    """One target with several drafters."""

    def __init__(
        self,
        target: CompiledModel,
        compile_draft: Callable[[torch.device], CompiledModel],
        arguments: argparse.Namespace,
    ) -> None:
        self.target, self.compile_draft = target, compile_draft
        self.rate, self.num_tokens, self.repeats = arguments.rate, arguments.k, arguments.repeats
        self.kinds = arguments.kinds
        batches = [int(batch) for batch in arguments.batches.split(",")]
        self.works = {batch: Workload(batch, arguments.tokens, target.vocab_size) for batch in batches}
        self.config = EngineConfig(
            prefix_caching=False,
            max_num_seqs=256,  # also the rows of logits whose graphs are captured beforehand
            max_num_batched_tokens=2048,
            num_blocks=8 * max(batches) + 256,
        )
        self.plain: dict[int, float] = {}
        self.expected: dict[int, list[list[int]]] = {}

    @property
    def truth(self) -> dict[tuple[int, ...], list[int]]:
        """Return the right continuation of every prompt."""
        return {
            tuple(prompt): tokens
            for batch, work in self.works.items()
            for prompt, tokens in zip(work.prompts, self.expected[batch])
        }

    def rows(self) -> Iterator[dict[str, object]]:
        """Yield a row for plain decoding, then one for each kind of drafts."""
        engine = self.target.engine(self.config)
        for batch, work in self.works.items():
            self.plain[batch], outputs = work.run(engine, self.repeats)
            self.expected[batch] = tokens_of(outputs)
            yield {"drafts": "none", "batch": batch, "ms a token": self.plain[batch]}
        if "tree" in self.kinds and 1 in self.works:
            yield self._tree(engine)
        del engine
        free()
        if "n-gram" in self.kinds:
            yield from self._drafted("n-gram", lambda rate: Steered(self.truth, rate, self.num_tokens))
        if "model" in self.kinds:
            small = self._small(self.target.device)
            yield from self._drafted("model", lambda rate: Steered(self.truth, rate, self.num_tokens, small))
            del small
        if "mirror" in self.kinds:
            other = torch.device("cuda", 1) if torch.cuda.device_count() > 1 else self.target.device
            ahead = self._small(other)
            runs = (("always", self.rate), ("always", 1.0))
            yield from self._drafted(f"on {other}", lambda rate: self._mirrored(rate, ahead).inner, runs)
            yield from self._drafted(f"mirrored on {other}", lambda rate: self._mirrored(rate, ahead), runs)

    def _small(self, device: torch.device) -> ModelDrafter:
        return self.compile_draft(device).drafter(self.num_tokens, num_sequences=max(self.works))

    def _mirrored(self, rate: float, model: ModelDrafter) -> MirrorDrafter:
        return MirrorDrafter(Steered(self.truth, rate, self.num_tokens, model))

    def _drafted(
        self,
        name: str,
        drafter: Callable[[float], Drafter],
        runs: SequenceOf[tuple[str, float]] | None = None,
    ) -> Iterator[dict[str, object]]:
        for switch, rate in runs or (("always", self.rate), ("automatic", self.rate), ("automatic", 0.0)):
            speculation = SpeculationConfig(drafter=drafter(rate), switch=switch)  # type: ignore[arg-type]
            engine = self.target.engine(self.config, speculation=speculation)
            for batch in self.works:
                yield {"drafts": name, "switch": switch, "rate": rate} | self._run(engine, batch, rate)
            del engine
            free()

    def _run(self, engine: Engine, batch: int, rate: float) -> dict[str, object]:
        speculator = engine.speculator
        assert speculator is not None
        before = speculator.statistics.num_trees, speculator.statistics.num_accepted, speculator.draft_seconds
        taken, outputs = self.works[batch].run(engine, self.repeats)
        assert tokens_of(outputs) == self.expected[batch], "speculation changed tokens"
        assert speculator.error is None, speculator.error
        trees = speculator.statistics.num_trees - before[0]
        row: dict[str, object] = {"batch": batch, "ms a token": taken, "speedup": self.plain[batch] / taken}
        row["trees"] = trees
        if trees:
            accepted = speculator.statistics.num_accepted - before[1]
            row["tokens a step"] = 1 + accepted / trees
            row["by the formula"] = expected_tokens(rate, self.num_tokens)
            row["draft ms a step"] = 1e3 * (speculator.draft_seconds - before[2]) * batch / trees
        return row

    def _tree(self, plain: Engine) -> dict[str, object]:
        """Return milliseconds of a step that verifies TREE for one sequence, alternating with one of ``plain``."""
        speculation = SpeculationConfig(drafter=WrongTrees(self.truth), max_nodes=len(TREE), switch="always")
        engine = self.target.engine(self.config, speculation=speculation)
        turns = []
        for _ in range(TURNS):
            plain_taken, _ = self.works[1].run(plain, self.repeats)
            taken, outputs = self.works[1].run(engine, self.repeats)
            assert tokens_of(outputs) == self.expected[1], "speculation changed tokens"
            turns.append((plain_taken, taken))
        return {
            "drafts": f"tree of {len(TREE)}",
            "batch": 1,
            "rows": 1 + len(TREE),
            "ms a step": statistics.median(taken for _, taken in turns),
            "of a plain step": statistics.median(taken / plain_taken for plain_taken, taken in turns),
            "plain, tree": turns,
        }


def models(arguments: argparse.Namespace) -> tuple[CompiledModel, Callable[[torch.device], CompiledModel], str]:
    """Return the target, a function that makes the draft, and their description."""
    if arguments.small:
        target = detcompile.compile(detcompile.load_model("tiny", dtype=torch.float32, device="cpu"))
        changes = {"num_hidden_layers": 1, "layer_types": None}
        config = AutoConfig.for_model(**(target.model.config.to_dict() | changes))
        name = "embedded model, draft of one layer, fp32"
    else:
        target = detcompile.compile(build(arguments.layers), numerics=Numerics(tp_sizes=(1,)))
        config = AutoConfig.for_model("qwen3", num_hidden_layers=28, **(QWEN3_8B | QWEN3_0_6B))
        name = f"Qwen3-8B shape, {arguments.layers} layers, draft of Qwen3-0.6B's shape, bf16, random"

    def compile_draft(device: torch.device) -> CompiledModel:
        with device:
            draft = AutoModelForCausalLM.from_config(config, dtype=target.dtype).eval()
        # Sums of eight leaves are faster for few tokens, and a draft may have its own order.
        return detcompile.compile(draft, numerics=DRAFT_NUMERICS, max_context=MAX_CONTEXT)

    return target, compile_draft, name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--small", action="store_true", help="the embedded model on a CPU")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="kinds of drafts to measure")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rate", type=float, default=0.8)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    started = time.monotonic()
    target, compile_draft, name = models(arguments)
    hardware = cpu_name() if arguments.small else torch.cuda.get_device_name()
    path = arguments.out / f"speculation-{hardware.replace(' ', '-').lower()}-{arguments.commit}.json"
    report = {"commit": arguments.commit, "hardware": hardware, "torch": torch.__version__, "model": name}
    report |= {"numerics": str(target.numerics), "draft's numerics": str(DRAFT_NUMERICS)}
    report |= {"k": arguments.k, "tokens": arguments.tokens, "compile seconds": time.monotonic() - started, "rows": []}
    print(f"[{time.monotonic() - started:5.0f} s] compiled", flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for row in Comparison(target, compile_draft, arguments).rows():
        report["rows"].append(row)
        path.write_text(json.dumps(report, indent=1))
        shown = ", ".join(f"{key} {f'{v:.3g}' if isinstance(v, float) else v}" for key, v in row.items())
        print(f"[{time.monotonic() - started:5.0f} s] {shown}", flush=True)


if __name__ == "__main__":
    main()
