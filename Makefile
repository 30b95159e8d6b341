.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow check fix docs lock faults bench-surgery bench-anchors bench-training bench-startup bench-growth bench-bf16 bench-full-size clean

BIN := .venv/bin
# Many container images forbid Python to keep what it compiled. To import lerobot then takes twice as long, in every process
# of every target, so here it is kept: in .venv and in __pycache__, both ignored by git.
unexport PYTHONDONTWRITEBYTECODE
# Two processes of one thread each: small policies gain nothing from a second thread, and lerobot's import is paid twice at most.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## make .venv with the locked dependencies (every target below does this itself)
	@scripts/bootstrap

demo: setup ## forgetting and its cure in a simulator, in under five minutes
	@$(BIN)/craft demo

test: check ## lint, types and the test suite
	$(PYTEST)

test-slow: check ## the same, with the tests marked slow
	$(PYTEST) -m "slow or not slow"

check: setup ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fix: setup ## mend what lint and formatting can mend themselves
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup ## the documentation as HTML, outputs/docs/index.html; a dead link is an error
	$(BIN)/sphinx-build -W --keep-going -q -c docs -d outputs/doctrees -b html . outputs/docs
	@echo outputs/docs/index.html

lock: setup ## resolve requirements.lock again (UPGRADE=1 takes the newest releases)
	$(BIN)/uv pip compile --quiet --universal --python-version 3.12 --all-extras --group dev \
		--no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock' \
		$(if $(UPGRADE),--upgrade) pyproject.toml --output-file requirements.lock

faults: setup ## kills, damage, full disks, dead ranks, NaN, forged files, random flags; counts for docs/reliability.md
	$(BIN)/python benchmarks/faults.py

bench-surgery: setup ## time and memory of the gradient surgery against its peers
	$(BIN)/python benchmarks/surgery.py

bench-anchors: setup ## size and speed of anchor caches, by kind
	$(BIN)/python benchmarks/anchors.py

bench-training: setup ## what a step of craft train costs, by mode and teacher, and with CRaFT off
	$(BIN)/python benchmarks/parity.py
	$(BIN)/python benchmarks/training.py

bench-startup: setup ## how long until the first step, against lerobot-train
	$(BIN)/python benchmarks/startup.py

bench-growth: setup ## how a step grows with anchors, old tasks, parameters and processes
	$(BIN)/python benchmarks/growth.py

bench-bf16: setup ## what becomes of small updates in bfloat16 weights
	$(BIN)/python benchmarks/bf16_weights.py

bench-full-size: setup ## SmolVLA and pi0_fast at full size, random weights: memory beside the estimate, cost of a step, start-up
	$(BIN)/python benchmarks/full_size.py

clean: ## remove the environment, caches and outputs
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist outputs
