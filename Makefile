# `make test` and `make demo` set a fresh machine up by themselves: they need Python >= 3.11 and pip's package index.
#   make test       lint, types and tests               make goldens    every recorded case, compiled as users compile
#   make demo       an embedded model at work           make parity     compare with transformers (fetches PyTorch)
#   make slow       the tests that take long            make compile-check    what XLA makes of it for a TPU (fetches libtpu)
#   make slow PART=1/2    half of them; goldens too     make docs       the site, into site/
#   make format     rewrite the code in ruff's style    make package    wheel and source, tried where nothing else is installed
#   make lowest     the least versions that are allowed make lock       take the newest versions, if they pass the tests
#   make newest     kernels with the newest JAX         make clean      remove everything that make made
#   make PYTHON=... the Python to build .venv with      make goldens GOLDENS=DIR    those of another folder
#   make LOCKED=0 ...  build .venv of the newest versions, not of those in requirements.lock

VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.installed
HARNESS := $(VENV)/.harness
SITE := $(VENV)/.site
PYTHON ?= python3.12 python3.13 python3.11 python3
USABLE := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))

# requirements.lock has the versions that were tested: no more than pins, of what would be installed anyway.
LOCKED ?= 1
PINS := $(if $(filter 0,$(LOCKED)),,-c requirements.lock)
PYTHONS := python3.11 python3.12 python3.13

# The folders that hold Python of ours: mypy refuses the name of one that is empty or missing.
PACKAGES := $(patsubst %/,%,$(sort $(dir $(wildcard $(addsuffix /*.py,dllm_jax convert samplers train evals benchmarks docs/tools)))))

# PyTorch lies next to the environment, not in it: the tests must show that the library works without. On Linux x86-64
# the index's own wheels bring several GB of CUDA; where pip knows a place with a +cpu build, this version takes it.
TORCH ?= torch==2.13.0
PARITY := .parity

GOLDENS ?= tests/goldens

# The compilers for absent devices, each in an environment of its own: TARGET=h100 needs other packages than a TPU.
TARGET ?= v5e:2x2
GPU := $(filter h100 t4,$(TARGET))
MESH ?= $(if $(GPU),tensor=1,tensor=4)
AOT := .aot/$(firstword $(subst :, ,$(TARGET)))
# TPUs treat buffers with one key head a chip, and with more than 32 rows, otherwise.
ONE_HEAD_A_CHIP = --target $(notdir $(AOT)):2x4 --mesh tensor=8 --model sdar-8b-chat --layers 2 --batch 40 \
	--sampler threshold:cache=exact --block-length 4
AOT_PACKAGES = $(if $(GPU),'jax[cuda12-local]'==$$jax nvidia-cuda-nvcc-cu12,'jax[tpu]'==$$jax)

.PHONY: test lint format typecheck pytest slow slow-list goldens parity package lowest newest lock compile-check docs demo clean

test: lint typecheck pytest

lint: $(READY)
	$(PY) -m ruff check
	$(PY) -m ruff format --check

format: $(READY)
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

typecheck: $(HARNESS)
	$(PY) -m mypy $(PACKAGES)

pytest: $(HARNESS)
	$(PY) -m pytest -q --durations=10 -n auto --dist worksteal -m 'not slow'

slow: $(HARNESS)
	$(PY) -m pytest -q --durations=10 -n auto --dist worksteal -m slow $(SLOW_BUT) $(addprefix --part=,$(PART))

# What make goldens runs anyway.
SLOW_BUT := --ignore=tests/test_goldens.py --ignore=tests/test_combinations.py

# Finds out which tests take long, by running all of them; with a cold cache, and nothing else to do for the machine.
slow-list: $(HARNESS)
	rm -rf .jax_cache
	$(PY) -m pytest -q -n auto --dist worksteal --list-slow 3

goldens: $(READY)
	DLLM_JAX_AS_USERS=1 $(PY) -m pytest -q -n auto --dist worksteal tests/test_goldens.py tests/test_combinations.py --goldens=$(GOLDENS) $(addprefix --part=,$(PART))

parity: $(READY) $(PARITY)/.installed
	PYTHONPATH=$(PARITY) $(PY) -c 'import torch'
	PYTHONPATH=$(PARITY) $(PY) -m pytest -q $(wildcard tests/test_parity_*.py)

# Source and wheel, the wheel made of the source, and what it does in environments that have nothing else but the newest
# of what it needs: one of every Python that is here, of .venv's where none of these is.
package: $(READY)
	rm -rf dist .package
	$(PY) -m build --outdir dist .
	tar -tf dist/*.tar.gz | grep -q '/NOTICE$$'
	@set -e; tried=; \
	for python in $(PYTHONS) $(abspath $(PY)); do \
		if ! $$python -c '$(USABLE)' 2>/dev/null; then echo "skipped: there is no $$python"; continue; fi; \
		if [ "$$python" = $(abspath $(PY)) ] && [ -n "$$tried" ]; then continue; fi; \
		tried="$$tried $$python"; rm -rf .package; echo "the package with $$python"; \
		$$python -m venv .package; .package/bin/python -m pip install -q dist/*.whl; tests/installed.sh .package; \
	done; echo "tried:$$tried"

# The least Python, the least version of all that pyproject.toml asks for, and a part of the tests.
lowest:
	@if ! $(firstword $(PYTHONS)) -c '$(USABLE)' 2>/dev/null; then \
		echo "skipped: there is no $(firstword $(PYTHONS)), and others lack wheels of the least versions"; exit 0; \
	fi; \
	set -e; rm -rf .lowest; $(firstword $(PYTHONS)) -m venv .lowest; \
	.lowest/bin/python tests/lowest.py > .lowest/pins.txt; \
	.lowest/bin/python -m pip install -q -c .lowest/pins.txt -e . pytest pytest-xdist hypothesis; \
	tests/installed.sh .lowest; \
	.lowest/bin/python -m pytest -q -n auto -m 'not slow' tests/test_load.py tests/test_explain.py

# Kernels and one forward of each family with the newest JAX, which needs Python 3.12; NPROC: tests/test_interpreted.py.
NEWER := python3.13 python3.12 python3 $(wildcard $(HOME)/.pyenv/versions/3.1[2-9].*/bin/python)
newest:
	@found=; \
	for python in $(NEWER); do \
		if $$python -c '$(subst 11,12,$(USABLE))' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then echo "skipped: there is no python3.12 or newer"; exit 0; fi; \
	set -e; rm -rf .newest; $$found -m venv .newest; \
	.newest/bin/python -m pip install -q -e '.[kernels]' pytest pytest-xdist hypothesis; \
	NPROC=32 .newest/bin/python -m pytest -q -n auto --dist worksteal -m 'not slow' -k 'not test_goldens or forward' \
		tests/test_interpreted.py tests/test_attention.py tests/test_experts.py tests/test_goldens.py

# The newest versions become those of requirements.lock when they have passed the tests.
lock:
	rm -rf $(VENV)
	$(MAKE) test docs LOCKED=0
	{ head -n 1 requirements.lock; $(PY) -m pip freeze --exclude-editable; } > .lock && mv .lock requirements.lock

compile-check: $(READY) $(AOT)/.installed
	$(AOT)/bin/python -m benchmarks.compile --target $(TARGET) --mesh $(MESH) --batch 8 --check
	$(if $(GPU),,$(AOT)/bin/python -m benchmarks.compile $(ONE_HEAD_A_CHIP) --check)

# Warnings end it: a link to nothing, a page that the map does not name, a name in the reference that is none.
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(SITE)
	$(PY) -m mkdocs build -q --strict
	@echo 'site/index.html is there; with its search: $(PY) -m http.server --directory site'

demo: export DLLM_JAX_HOME := $(CURDIR)/.demo
demo: $(READY)
	$(PY) -m convert embedded word-problems
	$(PY) -m samplers "$$(printf 'Q: Eve has 12 pears. Eve finds 9. Eve shares equally among 3. Eve gets 4 times as many. Eve loses 11.\nA: ')" \
		--model word-problems --rule topk
	$(PY) -m evals compare --model word-problems --task word-problems --index 0

# The embedded models, made anew by the commands that made them: make embedded-word-problems; an hour each on two cores.
TASK_word-problems := word-problems
TASK_long-problems := word-problems:difficulty=long
TASK_sudoku := sudoku:box_rows=2,box_columns=3
TASK_maze := maze:size=4
TASK_chains := chains:length=64

embedded-chains: | runs/chains-short/model
runs/chains-short/model: $(READY)
	$(PY) -m train masked-diffusion --config train/configs/chains-short.toml

embedded-%: export DLLM_JAX_HOME := $(CURDIR)/.demo
embedded-%: $(READY)
	$(PY) -m convert embedded word-problems
	$(PY) -m train masked-diffusion --config train/configs/$*.toml out=runs/$*
	$(PY) -m convert export --checkpoint runs/$*/model --out convert/embedded/$* --overwrite
	cp train/configs/$*.toml convert/embedded/$*/recipe.toml
	cp runs/$*/metrics.jsonl convert/embedded/$*/
	$(PY) -m convert embedded $*
	$(PY) -m evals run --model $* --task $(TASK_$*) --sampler topk --n 2000 --json > convert/embedded/$*/scores.json

clean:
	rm -rf $(VENV) $(PARITY) .aot .package .lowest .newest .demo .jax_cache .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist site *.egg-info

# An environment that does not run (its Python is gone) is made anew, one that runs is kept.
ifneq ($(shell $(PY) -c '$(USABLE)' 2>/dev/null && echo runs),runs)
.PHONY: $(READY)
endif

# A name in PYTHON may exist and not run (a pyenv shim without a version), so each is tried by running it.
$(READY): pyproject.toml requirements.lock
	@if ! $(PY) -c '$(USABLE)' 2>/dev/null; then \
		found=; \
		for python in $(PYTHON); do \
			if $$python -c '$(USABLE)' 2>/dev/null; then found=$$python; break; fi; \
		done; \
		if [ -z "$$found" ]; then \
			echo "none of '$(PYTHON)' is a Python >= 3.11 with venv; name one: make test PYTHON=..." >&2; exit 1; \
		fi; \
		echo "making $(VENV) with $$found"; \
		$$found -m venv --clear $(VENV) || exit 1; \
	fi
	$(PY) -m pip install -q $(PINS) -e '.[test]'
	touch $@

# lm-evaluation-harness brings as much as all the rest; only tests need that, and what reads data.
$(HARNESS): $(READY)
	$(PY) -m pip install -q $(PINS) -e '.[data,lm-eval]'
	touch $@

$(SITE): $(READY)
	$(PY) -m pip install -q $(PINS) -e '.[docs]'
	touch $@

$(PARITY)/.installed: | $(READY)
	rm -rf $(PARITY)
	$(PY) -m pip install -q --target $(PARITY) '$(TORCH)'
	touch $@

$(AOT)/.installed: | $(READY)
	rm -rf $(AOT)
	$(PY) -m venv $(AOT)
	jax=$$($(PY) -c 'import jax; print(jax.__version__)'); $(AOT)/bin/python -m pip install -q -e '.$(if $(GPU),[kernels])' $(AOT_PACKAGES)
	touch $@
