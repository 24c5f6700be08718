"""benchmarks/train_sharded.py over gloo: its digests are one value for all splits and ranks, and its sums are exact."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.exhaustive import EXHAUSTIVE

pytestmark = EXHAUSTIVE  # test_sharding.py compares the same digests without the processes of torchrun


def report(folder: Path, ranks: int, parts: str) -> dict[str, Any]:
    file = folder / f"{ranks}.json"
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    program += ["-m", "benchmarks.train_sharded", f"--json={file}", "--model-shape=nano", "--steps=2", "--length=40"]
    program += ["--sequences=8", f"--parts={parts}"]
    ended = subprocess.run(
        program, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600, check=False
    )
    assert not ended.returncode, ended.stdout.decode()[-4000:]
    return json.loads(file.read_text())


def digests(part: list[dict[str, Any]]) -> set[str]:
    assert [row["micro-batches a rank"] for row in part] == [1, 2, 4]
    return {row["sha256"] for row in part}


def test_two_ranks_give_equal_weights_for_any_split(tmp_path: Path):
    actual = report(tmp_path, 2, "ours,reduce")
    assert len(digests(actual["ours"])) == 1
    assert actual["reduce"] and all(row["exact"] for row in actual["reduce"])


def test_one_and_two_ranks_agree_unlike_plain_torch(tmp_path: Path):
    one, two = (report(tmp_path, ranks, "ours,plain") for ranks in (1, 2))
    assert digests(one["ours"]) == digests(two["ours"])
    assert len(digests(one["plain"]) | digests(two["plain"])) > 1
