"""The command line as a user runs it: results, logs and exit codes."""

import json
import subprocess
import sys
import time

import pytest

from detcompile.axes import AXES

FULL_AXES = {*AXES, "restart"} - {"cuda_graphs"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "detcompile.cli", *arguments], capture_output=True, text=True, check=False
    )


def test_verify_prints_one_json_object_and_every_axis_holds() -> None:
    done = run("verify", "tiny", "--json", "--configurations", "3", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["fingerprint"]) == 64
    assert set(found["axes"]) == FULL_AXES
    for axis, measured in found["axes"].items():
        assert measured["configurations"] >= 4, axis
        assert measured["unique_logits"] == measured["unique_outputs"] == 1, axis
        assert measured["max_probability_divergence"] == 0.0, axis


def test_check_prints_the_certificate_of_random_weights() -> None:
    done = run("check", "tiny", "--random", "--dtype", "float32", "--tp-sizes", "1,2", "--json", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["counts"]["attention"] == 6
    assert "Tree(768, 2, Blocked(384, block=128))" in " ".join(found["orders"]) or any(
        order.startswith("Tree(768, 2") for order in found["orders"]
    )


def test_the_demo_compares_with_torch_within_its_time() -> None:
    start = time.monotonic()
    done = run("demo", "--device", "cpu")
    seconds = time.monotonic() - start
    assert done.returncode == 0, done.stderr
    for axis in FULL_AXES - {"restart"}:
        assert axis in done.stdout
    assert "def mean" in done.stdout
    # 90 s on two idle cores; the machine that runs the suite is not idle
    assert seconds < 240


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("verify", "no/such/model"), "no such folder"),
        (("verify", "tiny", "--axes", "nonsense"), "no axis 'nonsense'"),
        (("check", "tiny", "--tp-sizes", "1,5"), "does not split into 5 equal leaves"),
        (("check", "tiny", "--dtype", "int7"), "no dtype of a model"),
    ],
)
def test_bad_input_ends_with_a_message_and_code_2(arguments: tuple[str, ...], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not done.stdout.strip()
