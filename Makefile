PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Two workers on two cores: one thread each keeps them from fighting.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
WORKERS ?= 2
METHOD ?= all

.DEFAULT_GOAL := help
# The tests that need Ray, Chromium or torchao, which `make test` does without; the slow ones too.
REAL := tests/engines/test_ray_engine.py tests/test_working_folder.py tests/report/test_report_browser.py \
	tests/serve/test_page.py tests/backbones/test_quantised.py

.PHONY: help env demo smoke test test-all test-real test-kernels test-peft lint types docs docs-check notebooks site wheel probe clean

help:  ## Show what can be made
	@grep -hE '^[a-z-]+:.*?## ' $(MAKEFILE_LIST) | awk -F ':.*?## ' '{printf "  make %-12s %s\n", $$1, $$2}'

# As a variable the constraints also hold where pip builds the package itself.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet -e '.[dev]'
	@touch $@

env: $(VENV)/.installed  ## Create .venv with every version pinned

demo: env  ## Compare five ways to adapt the built-in vision transformer: a table, and a page to look at
	$(BIN)/inlay compare --model embedded:vit --task digits --methods linear-probe,bias,norm,lora,full \
		--shots 400 --epochs 5 --batch-size 16 --seeds 3 --baseline linear-probe --workers $(WORKERS) \
		--plot runs/demo/comparison.png --out runs/demo

smoke: env  ## The demo at its smallest: one seed, a handful of steps
	$(BIN)/inlay compare --model embedded:vit --task digits --methods linear-probe,bias --seeds 1 --max-steps 20 --out runs/smoke

lint: env  ## ruff: lint and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: env  ## mypy over src
	$(BIN)/mypy

docs: env  ## Regenerate what is generated: tables of methods, rooms, claims and costs, the method pages' headers
	$(BIN)/python scripts/document_methods.py --write
	$(BIN)/python scripts/document_fidelity.py --write
	$(BIN)/python scripts/document_rooms.py --write
	$(BIN)/python scripts/document_cost.py --write
	$(BIN)/python scripts/document_compress.py --write
	$(BIN)/python scripts/document_places.py --write

$(VENV)/.notebooks: $(VENV)/.installed
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet -e '.[notebooks]'
	@touch $@

notebooks: $(VENV)/.notebooks  ## Run the notebooks, and keep their outputs for `make site`: [NOTEBOOKS='NAME ...'] [INLAY_NOTEBOOKS=small]
	$(BIN)/python scripts/run_notebooks.py $(NOTEBOOKS)

$(VENV)/.site: $(VENV)/.installed
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet -e '.[site]'
	@touch $@

site: $(VENV)/.site  ## Build the site into site/ and fail on a broken link: open site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

wheel: env  ## Build wheel and sdist into dist/, check them, and try the wheel in a bare environment
	WHEELS=$(CURDIR)/dist scripts/check_wheel.sh $(BIN)/python

probe: env  ## Try every method on every architecture and record what works
	$(BIN)/python scripts/probe_methods.py

docs-check: env
	$(BIN)/python scripts/document_methods.py --check
	$(BIN)/python scripts/document_fidelity.py --check
	$(BIN)/python scripts/document_rooms.py --check
	$(BIN)/python scripts/document_cost.py --check
	$(BIN)/python scripts/document_compress.py --check
	$(BIN)/python scripts/document_places.py --check

test: lint types docs-check  ## Lint, types, docs, and the test suite; its last lines say what was skipped, and how to have it
	$(TEST_ENV) $(BIN)/pytest -n $(WORKERS) -m 'not slow'

test-all: lint types docs-check  ## The same and the long checks (inductor on every architecture, ...)
	$(TEST_ENV) $(BIN)/pytest -n $(WORKERS)

# timm needs torchvision, and MLflow an older Pillow: each lies in a folder of its own, which only its tests see.
$(VENV)/.real: $(VENV)/.installed Makefile constraints-boards.txt
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet -e '.[ray,quantize]'
	$(BIN)/pip install --quiet --no-deps --upgrade --target $(VENV)/timm 'timm==1.0.30' 'torchvision==0.28.0'
	PIP_CONSTRAINT=constraints-boards.txt $(BIN)/pip install --quiet --upgrade --target $(VENV)/boards mlflow trackio wandb
	@touch $@

test-real: $(VENV)/.real  ## What `make test` skips for want of Ray, Chromium, timm, torchao, W&B, MLflow or trackio
	INLAY_CI=test-real $(TEST_ENV) $(BIN)/pytest $(REAL)
	PYTHONPATH=tests:$(abspath $(VENV))/timm INLAY_CI=test-real $(TEST_ENV) $(BIN)/pytest -p torchvision_operators -k timm \
		tests/test_anatomy.py tests/backbones/test_backbones_loading.py tests/methods/test_ntk_attention.py
	PYTHONPATH=$(abspath $(VENV))/boards INLAY_CI=test-real $(TEST_ENV) $(BIN)/pytest tests/training/test_boards.py

test-kernels: env  ## The Triton kernels in Triton's interpreter, which needs no GPU
	$(BIN)/pip install --quiet --no-deps --upgrade --target $(VENV)/interpreter 'triton==3.6.0' 'numpy==2.3.5'
	PYTHONPATH=$(abspath $(VENV))/interpreter TRITON_INTERPRET=1 INLAY_CI=test-kernels $(TEST_ENV) $(BIN)/pytest -n $(WORKERS) \
		tests/attention/test_cuda.py tests/methods/test_low_rank.py tests/methods/test_column_sums.py

test-peft: env  ## PEFT's own tests with our methods: PEFT=<a checkout of PEFT> [METHOD=ssf] [RECORD=1] [ARGS='-k merge']
	@test -n "$(PEFT)" || { echo "make test-peft PEFT=<a checkout of PEFT>: see docs/peft-suite.md"; exit 2; }
	PYTHONPATH=tests $(TEST_ENV) $(BIN)/python -m peft_suite --peft '$(PEFT)' --method $(METHOD) $(if $(RECORD),--record) $(ARGS)

clean:  ## Remove the environment and build leftovers
	rm -rf $(VENV) build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
