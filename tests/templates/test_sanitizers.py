"""Every CPU kernel under AddressSanitizer and UndefinedBehaviorSanitizer, with right and with odd operands.

Budget: 270 CPU seconds, of which 230 build the kernels of one instruction set; 40 where `.cache/tests` has them.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CALLS = Path(__file__).with_name("test_directed_calls.py")
COMPILER = "g++ -g1 -fsanitize=address,undefined -fno-sanitize-recover=all"
RUNTIMES = ("libasan.so", "libstdc++.so")  # ASan intercepts what the second throws with
WITHOUT_TORCH = "not directly"  # the others are compiled against torch, which is built without sanitizers


@pytest.mark.exhaustive
def test_sanitizers_find_nothing_in_the_kernels() -> None:
    libraries = (subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip() for name in RUNTIMES)
    given = {"CXX": COMPILER, "LD_PRELOAD": " ".join(libraries), "OMP_NUM_THREADS": "2"}
    given["ASAN_OPTIONS"] = "detect_leaks=0:allocator_may_return_null=1"
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-k", WITHOUT_TORCH, str(CALLS)]
    done = subprocess.run(command, env=os.environ | given, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
