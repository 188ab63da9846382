# Every target does all of its own set-up: Python >= 3.11 and make are enough. Nothing is installed twice.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# What the tests of several hosts, of mpirun and Slurm, and of the report in a browser need; without them these are skipped.
SYSTEM_PACKAGES := openssh-server openssh-client iproute2 nftables ethtool openmpi-bin slurm-wlm munge chromium strace procps

.PHONY: demo test test-fast test-gpu test-triton lint bench reproduce-glyphs docs soak clean system-packages

demo: $(VENV)/.demo-installed
	$(BIN)/megaclass demo
	@echo; echo "To use the command megaclass in this terminal: . $(BIN)/activate"

# Tests of `hosts` use daemons and networks, which a busy machine can upset: one that fails is run once more, and the reason is
# shown. All others run once; under CI=true every test gets the second try. Hundreds of processes are started, so byte code is kept.
# Coverage counts the lines that unit tests run: before Python 3.12, counting makes Python code up to four times slower.
test test-fast: export PYTHONDONTWRITEBYTECODE =
# Three workers on two cores, because tests of processes and hosts wait for about a third of their time.
WORKERS ?= 3
test: $(VENV)/.dev-installed system-packages
	$(BIN)/python -m pytest -m "not soak and not gpu" -n $(WORKERS) --dist worksteal --cov --cov-report=
	@echo "coverage of packages/ by the unit tests: $$($(BIN)/coverage report --format=total) %"

# Only the tests that start no process: a quick check while editing.
test-fast: $(VENV)/.dev-installed
	$(BIN)/python -m pytest -m unit -n 2 --dist worksteal

# On a machine with a CUDA GPU.
test-gpu: $(VENV)/.dev-installed
	$(BIN)/python -m pytest -m gpu

# Compiles all programs for GPUs, which need not be here, with the Triton that torch 2.11, 2.12, 2.13, 2.14 and 2.15 bring.
TRITONS ?= 3.6.0 3.7.0 3.7.1 3.8.0 3.9.0
test-triton: $(VENV)/.dev-installed
	@set -e; for version in $(TRITONS); do folder=$(VENV)/triton-$$version; echo "Triton $$version"; \
	test -d $$folder || $(PIP) --quiet --no-deps --target $$folder triton==$$version; \
	PYTHONPATH=$$folder $(BIN)/python -m pytest -q tests/megaclass/test_compiled_programs.py; done

# Each round of faults.py meets every kind of fault once. Needs root. fuzz.py reads 100,000 mutations of each kind of file.
ROUNDS ?= 6
MUTATIONS ?= 100000
soak: $(VENV)/.dev-installed system-packages
	$(BIN)/python -m pytest -m soak --timeout=3600
	$(BIN)/python tests/soak/fuzz.py --count $(MUTATIONS) --out benchmarks/fuzz.md
	$(BIN)/python tests/soak/faults.py --rounds $(ROUNDS) --out benchmarks/soak.md
	$(BIN)/python tests/soak/elastic.py --jobs 10 --events 20 --out benchmarks/elastic.md
	$(BIN)/python tests/soak/elastic.py --jobs 3 --events 20 --train --out benchmarks/elastic-train.md

lint: $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python tools/banned_phrases.py
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/hadolint Dockerfile
	$(MAKE) docs

# Installed as root under CI=true, or with SYSTEM=1.
system-packages:
	@if [ "$$CI" != true ] && [ "$(SYSTEM)" != 1 ]; then exit 0; fi; \
	if dpkg -s $(SYSTEM_PACKAGES) >/dev/null 2>&1; then exit 0; fi; \
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; \
	then echo "system packages are installed by root with apt-get only; tests that need them are skipped"; exit 0; fi; \
	apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(SYSTEM_PACKAGES) >/dev/null

bench: $(VENV)/.dev-installed
	$(BIN)/python benchmarks/head.py

# Draws the glyphs from the fonts in FONTS (a folder, by default the installed ones), trains, and measures with all baselines.
# Needs a GPU for the recipe glyphs; docs/tutorials/characters.md says where the fonts are.
reproduce-glyphs: $(VENV)/.dev-installed
	@$(PIP) --quiet onnxruntime && $(PIP) --quiet --no-deps rapidocr
	@test -d datasets/glyphs || $(BIN)/megaclass data glyphs $(if $(FONTS),--fonts $(FONTS)) --out datasets/glyphs
	$(BIN)/python benchmarks/glyphs.py --data datasets/glyphs --device cuda --out benchmarks/glyphs.md

# The site, in docs/_build/html. A broken link or reference is an error.
docs: $(VENV)/.dev-installed
	$(BIN)/python docs/generate.py
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -c docs . docs/_build/html
	@echo "the site: docs/_build/html/index.html"

# pip says what it downloads and installs; what is there already it need not list. sed keeps no exit code, so pip leaves a mark.
PIP = $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off
define install
	@echo "Installing $(1) into $(VENV), once. This takes a few minutes."
	@rm -f $(VENV)/.pip-failed
	@($(PIP) $(2) 2>&1 || touch $(VENV)/.pip-failed) | sed -u '/^Requirement already satisfied/d; /^  *Preparing\|^  *Getting\|^  *Installing build/d'
	@test ! -e $(VENV)/.pip-failed
endef

PROJECTS := $(wildcard packages/*/pyproject.toml)

# A torch that the given Python already has is used; otherwise the version this project is developed on is installed.
$(VENV)/.torch-installed:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || (echo "megaclass needs Python 3.11 or later, but $(PYTHON) is $$($(PYTHON) --version 2>&1): make $(MAKECMDGOALS) PYTHON=python3.12" && false)
	@if $(PYTHON) -c "import torch; v = torch.__version__.split('.'); exit((int(v[0]), int(v[1])) < (2, 11))" 2>/dev/null; \
	then echo "Making $(VENV), which uses the torch of $(PYTHON)." && $(PYTHON) -m venv --system-site-packages $(VENV); \
	else echo "Making $(VENV)." && $(PYTHON) -m venv $(VENV); fi
	@if $(BIN)/python -c "import torch" 2>/dev/null; then exit 0; fi; \
	echo "Installing torch 2.13.0 into $(VENV), once: several hundred megabytes."; $(PIP) torch==2.13.0
	@touch $@

$(VENV)/.demo-installed: $(VENV)/.torch-installed $(PROJECTS)
	$(call install,megaclass with its progress bar and ONNX exporter,--editable packages/launch --editable "packages/megaclass[ui$(COMMA)onnx]")
	@touch $@

# What some tests use, without their dependencies, and with what they import: trackio asks for Pillow below 13, the readers of face
# packs for other frameworks, and torchvision for a torch for CUDA (so these have a folder of their own: tests/timm_here.py).
TRACKIO := trackio gradio-client orjson python-multipart brotli websockets
FACES := insightface uniface deepface scikit-image lazy_loader pandas gdown
TIMM := timm torchvision peft transformers tokenizers regex
# A server of S3 buckets, and the client that fsspec uses.
BUCKETS := 'moto[s3]' flask flask-cors s3fs

$(VENV)/.dev-installed: $(VENV)/.torch-installed $(PROJECTS)
	$(call install,the three packages and the tools of their tests,--editable packages/launch --editable packages/horovod --editable "packages/megaclass[ui$(COMMA)onnx$(COMMA)dev]")
	@echo "Installing TensorFlow, trackio, timm, peft, insightface, moto and others, which are optional: without them their tests are skipped."
	@$(PIP) --quiet --editable "packages/horovod[tensorflow]" || echo "TensorFlow could not be installed."
	@$(PIP) --quiet --no-deps $(TRACKIO) || echo "trackio could not be installed."
	@$(PIP) --quiet --no-deps --upgrade --target $(VENV)/timm $(TIMM) || echo "timm and peft could not be installed."
	@$(PIP) --quiet --no-deps $(FACES) || echo "insightface, uniface and deepface could not be installed."
	@$(PIP) --quiet $(BUCKETS) || echo "moto and s3fs could not be installed."
	@touch $@ $(VENV)/.demo-installed

COMMA := ,

clean:
	rm -rf $(VENV) build dist runs datasets docs/_build
