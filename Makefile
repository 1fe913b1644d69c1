# make bench   trains the three stages and draws the comparison
# make report  measures all that can be measured here within MINUTES; run it again to continue
# make test    runs the linters and the fast tests: at most 5 minutes on two cores
# make test-all  runs the slow ones, too: at most 20
# With PYTHON=... they use an environment that is already there.

ifeq ($(origin PYTHON), undefined)
PYTHON := .venv/bin/python
ENVIRONMENT := .venv/complete
TESTS := .venv/tests
endif
NPROC := "$(PYTHON)" -m bench.measure.hardware rank_count

MINUTES := 25
STUDIES :=
# Where it keeps what it measures: another machine, text or setting needs a folder of its own.
RESULTS := results

# Of the three scripts, for make bench: such as OPTIONS="--model gpt2-medium".
OPTIONS :=

# A script as it fits the GPU: its name, and a batch size where the published one doesn't fit.
FITS = "$(PYTHON)" measure.py fits

.PHONY: bench report test test-all lint attack .venv

# The next start finds what was compiled; the compiler takes no path with spaces.
ifeq ($(words $(CURDIR)),1)
bench: export TORCHINDUCTOR_CACHE_DIR ?= $(CURDIR)/build/compiler-cache/bench
endif
bench: $(ENVIRONMENT)
	"$(PYTHON)" $$($(FITS) 00 -- $(OPTIONS) || echo 00_orig.py) $(OPTIONS)
	"$(PYTHON)" $$($(FITS) 01 -- $(OPTIONS) || echo 01_opt_single_gpu.py) $(OPTIONS)
	OMP_NUM_THREADS=1 "$(PYTHON)" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc_per_node=$$($(NPROC)) $$($(FITS) 02 -- $(OPTIONS) || echo 02_opt_multi_gpu_ddp.py) $(OPTIONS)
	"$(PYTHON)" plot_results.py

report: $(ENVIRONMENT)
	"$(PYTHON)" measure.py report --minutes $(MINUTES) --studies "$(STUDIES)" --results-dir "$(RESULTS)"

PYTEST = "$(PYTHON)" -m pytest -q -n auto --maxprocesses 4 --dist worksteal

test: $(TESTS) lint
	$(PYTEST) -m "not slow"

# Three at once, since some of them wait.
test-all: test
	$(PYTEST) -n 3 -m slow

lint: $(TESTS)
	"$(PYTHON)" -m ruff check .
	"$(PYTHON)" -m ruff format --check .
	"$(PYTHON)" -m mypy
	"$(PYTHON)" -m codespell_lib *.py *.md Makefile bench data/prepare.py docs gpt_speed patches peers tests \
		results/reference/*/README.md

.venv: .venv/complete

# Where there is an NVIDIA GPU, the PyTorch for it takes the place of the other; with GPU=1 also on a
# cluster's login node, which has none.
GPU := $(shell command -v nvidia-smi)
PINNED := $(if $(GPU),sed '/^torch==/d; s/^\#gpu //',cat)

# The last step marks it complete, so that an interrupted installation isn't taken for one.
.venv/complete: requirements.txt
	rm -rf .venv
	python3 -m venv .venv
	@echo "Installing PyTorch and what it needs takes some minutes (5 GB with CUDA)"
	$(PINNED) requirements.txt > .venv/requirements.txt
	.venv/bin/python -m pip install -q -r .venv/requirements.txt
	touch .venv/complete

# What the tests need besides; the programs don't.
.venv/tests: .venv/complete requirements-dev.txt requirements-extras.txt
	.venv/bin/python -m pip install -q -r requirements-extras.txt -r requirements-dev.txt
	touch .venv/tests

# Generated bad input, kills, full disks: 200 of each; the tests run a few.
attack: $(TESTS)
	ATTACK_COUNT=200 "$(PYTHON)" -m pytest -q -n auto --maxprocesses 4 tests/test_attack.py
