# `make help` lists the targets.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo test engines chaos soak check types lint yaml documents cubins fmt bench release up

VENV := .venv
BIN := $(VENV)/bin
# While these files are newer than their prerequisites, nothing has to be installed: the first stands for
# what serving needs, which is all that the demo waits for, the second for everything.
SERVING := $(VENV)/.serving
STAMP := $(VENV)/.installed
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip --disable-pip-version-check --quiet install \
	--constraint constraints.txt
# Images with Python often set it. The tests start hundreds of processes, and each would compile all modules.
unexport PYTHONDONTWRITEBYTECODE
# `make test BROKER=4` uses RabbitMQ 4; so do chaos and soak.
BROKER :=
WITH_RABBITMQ := infra/rabbitmq/with_rabbitmq$(BROKER).sh
# The servers of `make engines`, by default those in PATH.
LLAMA_SERVER := $(shell command -v llama-server)
VLLM := $(shell command -v vllm)
# The duration of `make soak`.
MINUTES := 30
QUESTION := What is the capital of France?
# Of tests. Many wait for processes and brokers, so six keep two cores busy.
NUM_PROCESSES := 6
YAML_RULES := {extends: default, rules: {document-start: disable, line-length: {max: 120}, \
	indentation: {indent-sequences: whatever}}, ignore: [infra/helm/warren/templates]}

help: ## Show these targets
	@sed -nE 's/^([a-z]+):[^#]*## (.+)/\1\t\2/p' $(MAKEFILE_LIST) \
	| while IFS=$$'\t' read -r target text; do printf '  make %-7s %s\n' "$$target" "$$text"; done

setup: $(STAMP) ## Create .venv with everything that development needs

demo: $(SERVING) ## Serve SmolLM2 at http://127.0.0.1:8000 and watch it answer (ONCE=1: end then)
	$(BIN)/warren pull smollm2
	$(BIN)/warren serve --model smollm2 --log-level warning \
	    --ask "$(QUESTION)" $(if $(ONCE),--once --port 0)

test: setup ## Run all tests that need no GPU, with their own RabbitMQ (BROKER=4: with RabbitMQ 4)
	$(BIN)/warren pull smollm2
	$(WITH_RABBITMQ) $(BIN)/pytest -m "not gpu and not cubins" -n $(NUM_PROCESSES) --dist loadfile --no-loadscope-reorder

engines: setup ## Test the workers' engines with the real servers in PATH (LLAMA_SERVER=, VLLM=)
	@[[ -n '$(LLAMA_SERVER)$(VLLM)' ]] || { \
	    echo "make engines needs llama-server or vllm in PATH; bench/README.md says how to get them" >&2; exit 1; }
	$(BIN)/warren pull smollm2
	WARREN_TEST_LLAMA_SERVER='$(LLAMA_SERVER)' WARREN_TEST_VLLM='$(VLLM)' \
	    $(BIN)/pytest -m engines tests/worker/engines

chaos: setup ## Kill, pause and disconnect every process again and again, for hours
	WARREN_TEST_SCHEDULES=20000 $(BIN)/pytest tests/shared/log/test_simulation.py
	$(WITH_RABBITMQ) $(BIN)/python -m tests.system.chaos --out bench/results/chaos.md

soak: setup ## Send hostile traffic for half an hour (MINUTES=4: four minutes), and look for leaks
	$(WITH_RABBITMQ) $(BIN)/python -m tests.system.soak --minutes $(MINUTES) \
	    --out bench/results/soak.md

check: setup ## Check format, lint, types, imports, duplicates, YAML, the Helm chart, documentation and GPU kernels
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target types lint yaml documents
	@$(MAKE) --no-print-directory cubins

types:
	$(BIN)/mypy
	$(BIN)/lint-imports

lint:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pylint cli shared gateway worker kernels warren.py tests bench infra docs examples

yaml:
	$(BIN)/yamllint --strict -d '$(YAML_RULES)' docker-compose.yml infra docs

documents:
	$(BIN)/pytest -q tests/infra/test_helm.py tests/test_ground.py -k "helm or noun"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file docs/site/mkdocs.yml

# Triton keeps what it has compiled in ~/.triton, so only the first run takes minutes.
cubins:
	$(BIN)/pytest -q -m cubins tests/kernels/triton/test_cubins.py

fmt: setup ## Format the code and fix lint errors
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup ## Measure Warren beside the peers found in PATH, and the cost of the queue
	$(WITH_RABBITMQ) $(BIN)/python -m bench.serving
	$(WITH_RABBITMQ) $(BIN)/python -m bench.queue

release: setup ## Build the release of the tag of HEAD into dist: wheel, sdist, images' sources, Helm chart
	$(BIN)/python -m infra.release

up: .env ## Start RabbitMQ, a gateway and a worker in Docker
	@docker compose version >/dev/null 2>&1 || { \
	    echo "make up needs Docker with the Compose plugin (docker compose, version 2)" >&2; exit 1; }
	docker compose up --build --detach

.env: | .env.example
	@umask 077 && while IFS= read -r line; do \
	    [[ $$line != *= ]] || line+=$$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n'); \
	    printf '%s\n' "$$line"; \
	done <.env.example >$@

$(SERVING): pyproject.toml constraints.txt
	@python=$$(infra/find_python.sh) && "$$python" -m venv $(VENV)
	@echo "Installing what serving needs into $(VENV); this takes some minutes."
	@$(PIP) pip setuptools setuptools-scm
	@$(PIP) --no-build-isolation --editable '.[gateway,worker]'
	@$(BIN)/python -m kernels.native
	@touch $@

$(STAMP): $(SERVING)
	@echo "Installing the tools for development into $(VENV); this takes some minutes."
	@$(PIP) --no-build-isolation --editable '.[gateway,worker,bench,dev]'
	@touch $@
