# Every target sets up what it needs: a virtual environment in .venv, with the versions that constraints.txt pins.
# Needed: Linux, Python >= 3.11 with venv, make, and g++ (or CXX) for the CPU kernels. No GPU.
#
# torch 2.13.0 from the default package index carries CUDA (several GB). For the CPU build, give pip the CPU index
# that PyTorch's installation page names; its 2.13.0+cpu satisfies the same pin:
#     make test PIP_EXTRA_ARGS="--extra-index-url <the CPU index>"

PYTHON ?= python3
PIP_EXTRA_ARGS ?=
PYTEST_WORKERS ?= 3
PYTEST_ARGS ?=
MODELS_ARGS ?=

# The tests start many processes: none compiles our sources again.
export PYTHONDONTWRITEBYTECODE :=

VENV := .venv
VENV_PYTHON := $(VENV)/bin/python
PIP_INSTALL := $(VENV_PYTHON) -m pip install --quiet --quiet --disable-pip-version-check $(PIP_EXTRA_ARGS) -c constraints.txt
LINTED := detcompile tests benchmarks examples tools

.PHONY: demo rl test test-all test-rotation sanitize web-test check docs gpu-test bench models canary clean help

help:
	@echo "make demo      plain transformers beside detcompile, on a chat model of 98 MB if pip can download it"
	@echo "make rl        reinforcement learning, plain and on policy to the bit, minutes"
	@echo "make test      the tests that need no GPU"
	@echo "make test-all  these, more cases of what they test, and clients of other projects"
	@echo "make test-rotation  a sixteenth of what test-all has besides test; PART=0 to 15 chooses it"
	@echo "make sanitize  the CPU kernels under ASan and UBSan, 270 CPU seconds, also in test-all and test-rotation"
	@echo "make web-test  the tests of the server's page, which need Chromium (apt-get install chromium)"
	@echo "make check     ruff, mypy, and the site"
	@echo "make docs      the site, into build/site"
	@echo "make gpu-test  the tests that need a CUDA GPU, under $(PYTHON) and its own packages"
	@echo "make bench     benchmarks, under $(PYTHON) and its own packages; BENCHMARKS='templates model' for some"
	@echo "make models    examine every architecture (hours on two cores) and regenerate docs/models.md; MODELS_ARGS=-h"
	@echo "make canary    a short set of tests under other releases, in $(CANARY); TORCH=2.15.0 TRANSFORMERS=5.24.0, or the newest"
	@echo "make clean     remove caches and .venv"

demo: $(VENV)/.stamp-run
	@$(VENV)/bin/detcompile fetch smollm2 >/dev/null || true
	@$(VENV)/bin/detcompile demo

rl: $(VENV)/.stamp-run
	@$(VENV_PYTHON) -m examples.rl

# One OpenMP thread a worker: the tests of thread counts ask for theirs explicitly. Generated code asserts layouts
# here; elsewhere it does so on request. One worker more than cores: some tests sleep.
PYTEST := OMP_NUM_THREADS=1 TORCHINDUCTOR_SIZE_ASSERTS=1 $(VENV_PYTHON) -m pytest -q -r fEs -n $(PYTEST_WORKERS) \
  --dist worksteal

test: $(VENV)/.stamp-test
	@$(PYTEST) $(if $(PYTEST_ARGS),$(PYTEST_ARGS),--budget)

test-all: $(VENV)/.stamp-test-all
	@$(PYTEST) -m "" $(PYTEST_ARGS)

# A sixteenth of what test-all has besides test. The first digit of the commit's hash chooses it: a shallow clone has
# no count of commits.
test-rotation: PART ?= $(shell echo $$((0x$$(git rev-parse HEAD | cut -c 1))))
test-rotation: $(VENV)/.stamp-test-all
	@$(PYTEST) -m exhaustive --part $(PART)/16 $(PYTEST_ARGS)

sanitize: $(VENV)/.stamp-test
	@$(VENV_PYTHON) -m pytest -q -r fEs -m exhaustive $(PYTEST_ARGS) tests/templates/test_sanitizers.py

web-test: $(VENV)/.stamp-web
	@{ command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null || \
	  { echo "make web-test: no Chromium here: apt-get install chromium"; exit 1; }
	@OMP_NUM_THREADS=1 $(VENV_PYTHON) -m pytest -q -r fEs -m web $(PYTEST_ARGS) tests/web

check: $(VENV)/.stamp-dev docs
	@$(VENV_PYTHON) -m ruff check $(LINTED)
	@$(VENV_PYTHON) -m mypy

# The variable has mkdocs-material say nothing of mkdocs 2 (mkdocs.yml is for mkdocs 1). With --quiet mkdocs would not
# count the warnings that --strict fails at.
docs: $(VENV)/.stamp-dev
	@NO_MKDOCS_2_WARNING=1 $(VENV_PYTHON) -m mkdocs build --strict

# GPU machines bring a torch that matches their driver, so these two take the machine's own Python.
HAS_TORCH := import importlib.util, sys; importlib.util.find_spec("torch") or sys.exit("this Python has no torch: make PYTHON=...")

gpu-test:
	@$(PYTHON) -c '$(HAS_TORCH)'
	@$(PYTHON) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("make gpu-test: no CUDA GPU here")'
	@PYTHONPATH=$(CURDIR):$(PYTHONPATH) OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 TORCHINDUCTOR_SIZE_ASSERTS=1 \
	  PYTORCH_NVML_BASED_CUDA_CHECK=1 $(PYTHON) -m pytest -q -r fE -p no:xdist -p tests.forks --forks auto \
	  -m "gpu and not exhaustive" $(PYTEST_ARGS)

bench:
	@$(PYTHON) -c '$(HAS_TORCH)'
	@PYTHONPATH=$(CURDIR):$(PYTHONPATH) $(PYTHON) -m benchmarks $(BENCHMARKS)

models: $(VENV)/.stamp-test
	@OMP_NUM_THREADS=1 $(VENV_PYTHON) -m tools.generate_models $(MODELS_ARGS)

# Releases beyond those that pyproject.toml names are installed too: what they are asked for is whether they work.
CANARY ?= build/canary
CANARY_PIP := $(CANARY)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_EXTRA_ARGS)
canary:
	@test -x $(CANARY)/bin/python || $(PYTHON) -m venv $(CANARY)
	@$(PYTHON) -m tools.canary --requirements > $(CANARY)/requirements.txt
	@$(CANARY_PIP) --upgrade -r $(CANARY)/requirements.txt \
	  torch$(if $(TORCH),==$(TORCH)) transformers$(if $(TRANSFORMERS),==$(TRANSFORMERS)) triton huggingface-hub
	@$(CANARY)/bin/python -m tools.canary

clean:
	rm -rf $(VENV) .cache build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find detcompile tests benchmarks examples tools -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.stamp-python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("detcompile needs Python >= 3.11: make PYTHON=...")'
	@$(VENV_PYTHON) -m pip --version >/dev/null 2>&1 || \
	  { echo "Creating $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	@touch $@

$(VENV)/.stamp-run: $(VENV)/.stamp-python pyproject.toml constraints.txt
	@echo "Installing detcompile and its pinned dependencies into $(VENV) (minutes the first time)"
	@$(PIP_INSTALL) -e '.[gguf,serve]'
	@touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-run
	@echo "Installing what the tests need"
	@$(PIP_INSTALL) -e '.[test]'
	@touch $@

$(VENV)/.stamp-test-all: $(VENV)/.stamp-test
	@echo "Installing clients and trainers of other projects, which make test-all runs (0.6 GB)"
	@$(PIP_INSTALL) -e '.[test-all]'
	@touch $@

$(VENV)/.stamp-web: $(VENV)/.stamp-test
	@$(PIP_INSTALL) -e '.[test,web]'
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-test-all
	@$(PIP_INSTALL) -e '.[test-all,dev]'
	@touch $@
