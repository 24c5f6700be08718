"""Record an agent's turns with their seeds, then replay them in another process and another batch: equal to the byte.

    python examples/replay_agent.py smollm2        # records, replays in another process, and compares
    python examples/replay_agent.py                # the same with the embedded model: no download
    python examples/replay_agent.py replay FILE    # replays a transcript; exit 1 if a byte of it differs

The agent writes Python: it drafts a few tokens, a tool says whether the code parses so far, and the next turn has that
in its prompt, so one changed token would change everything after it. Needs no GPU; smollm2 is there after
`detcompile fetch smollm2`.
"""

import ast
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import detcompile
from detcompile import Engine, EngineConfig, SamplingParams

TASK = 'import json\nfrom pathlib import Path\n\n\ndef read_settings(path: Path) -> dict:\n    """Read a file."""\n'
NEIGHBORS = ["def mean(values):\n", "class Point:\n", "x = 1\n" * 40]  # requests of others in the replay's batches
NUM_TURNS = 4


def tool(code: str) -> str:
    """Return the tool's message about the agent's code."""
    try:
        ast.parse(code)
    except SyntaxError as error:
        return f"# line {error.lineno}: {error.msg}\n"
    return "# parses\n"


def run_agent(engine: Engine, seeds: list[int | None], neighbors: list[str]) -> list[dict]:
    """Run the agent's loop: a turn's prompt is the text of all earlier turns and tool messages."""
    turns, prompt = [], TASK
    for seed in seeds:
        params = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=24, logprobs=2, seed=seed)
        others = [SamplingParams(max_tokens=8, seed=number) for number, _ in enumerate(neighbors)]
        output = engine.generate([prompt, *neighbors], [params, *others], progress=False)[0]
        answer = output.outputs[0]
        message = tool(prompt + answer.text)
        turn = {"prompt": prompt, "seed": output.seed, "token_ids": answer.token_ids, "text": answer.text}
        turns.append({**turn, "logprobs": [[one.token_id, one.logprob] for one in answer.logprobs], "tool": message})
        prompt += f"{answer.text}\n{message}"
    return turns


def record(name: str, path: Path) -> None:
    """Run the agent with fresh seeds, and save all that is needed to repeat the run."""
    model = detcompile.compile(name)
    engine = model.engine(EngineConfig(num_blocks=64))
    turns = run_agent(engine, [None] * NUM_TURNS, [])
    # `detcompile diff` reads the parts.
    transcript = {"model": name, "fingerprint_parts": model.fingerprint_parts, "turns": turns}
    path.write_text(json.dumps(transcript, indent=1))


def replay(path: Path) -> None:
    """Repeat the run with the recorded seeds, among other requests, in small steps and with other KV blocks."""
    recorded = json.loads(path.read_text())
    model = detcompile.compile(recorded["model"])
    parts = recorded["fingerprint_parts"]
    changed = [name for name, part in model.fingerprint_parts.items() if parts.get(name) != part]
    if changed:
        sys.exit(f"recorded with another {', '.join(changed)}: the bits are not promised to be equal")
    config = EngineConfig(scheduler="simple_chunking", max_num_batched_tokens=24, block_size=16, num_blocks=256)
    again = run_agent(model.engine(config), [turn["seed"] for turn in recorded["turns"]], NEIGHBORS)
    for number, (old, new) in enumerate(zip(recorded["turns"], again), 1):
        if json.dumps(old) != json.dumps(new):  # a float is written with all its bits
            names = [name for name in old if json.dumps(old[name]) != json.dumps(new.get(name))]
            sys.exit(f"turn {number} differs in {', '.join(names)}")
    print(f"--- {len(again)} turns replayed, equal to the byte; fingerprint {model.fingerprint}")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "transcript.json"
        record(sys.argv[1] if len(sys.argv) > 1 else "tiny", path)  # or any Hugging Face model
        for turn in json.loads(path.read_text())["turns"]:
            print(f"--- seed {turn['seed']}, {len(turn['token_ids'])} tokens\n{turn['text']}\n{turn['tool']}", end="")
        sys.exit(subprocess.run([sys.executable, __file__, "replay", str(path)], check=False).returncode)


if __name__ == "__main__":
    replay(Path(sys.argv[2])) if sys.argv[1:2] == ["replay"] else main()
