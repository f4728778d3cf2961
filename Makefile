# Every target does its own set-up: .venv and .venv-guest, from pinned locks, built once, repaired when they are not whole.
# ARGS goes to the program: make quickstart ARGS="steps=10 algorithm=grpo", make test ARGS="-k parser".

python := .venv/bin/python
quick := not (real or hostile or slow) or smoke
rest := not ($(quick)) and not campaign
by_two := -n 2 --dist loadfile
SEED := $(shell date +%s)
benches := quickstart roc sandbox fleet sim_fleet rollout loop gateway streaming learner long_rows step recording weights mismatch nodes sim_nodes

node_modules := requirements/node_modules/.package-lock.json

.PHONY: help venv serve-env quickstart test test-all campaigns lint lint-page format bench clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | expand -t 14

venv: ## build or repair .venv and .venv-guest
	@requirements/install.sh

serve-env: ## build or repair .venv-serve, for vLLM's own server
	@requirements/install.sh serve

quickstart: venv ## train the tiny agent end to end on the CPU
	@$(python) recipes/quickstart.py $(ARGS)

test: venv ## the tests to run before a commit: all but real, hostile and slow ones, and a smoke test of every seam
	@$(python) -m pytest -m "$(quick)" $(by_two) $(ARGS)

# Tests that look at the whole machine come last, one at a time, also where others failed (1). pytest ends with 5 where
# ARGS selects none.
test-all: serve-env ## the tests that `make test` leaves out: real engines, jails and ranks, attacks
	@failed=0; $(python) -m pytest -m "$(rest) and not alone" $(by_two) $(ARGS); \
	case $$? in 0|5) ;; 1) failed=1 ;; *) exit 1 ;; esac; \
	$(python) -m pytest -m "$(rest) and alone" $(ARGS); \
	case $$? in 0|5) exit $$failed ;; *) exit 1 ;; esac

campaigns: serve-env ## many faults, kills and damages, and a search with new examples; SEED=... repeats a search
	@echo "examples of hypothesis are drawn from SEED=$(SEED)"
	@$(python) -m pytest -m "campaign or hypothesis" --hypothesis-profile=search --hypothesis-seed=$(SEED) $(ARGS)

lint: venv ## ruff and mypy; prettier and tsc for the JavaScript of a run's page
	@$(python) -m ruff check . && $(python) -m ruff format --check . && $(python) -m mypy
	@if command -v npm >/dev/null; then $(MAKE) --no-print-directory lint-page; \
	else echo "the page's JavaScript is not checked: npm is not installed"; fi

lint-page: $(node_modules)
	@npm run --silent --prefix requirements check

format: venv $(node_modules) ## ruff format and prettier, in place; engine/api.md, and the tables of recipes/runs.md
	@$(python) -m ruff format . && npm run --silent --prefix requirements format
	@$(python) -m tests.support.api_index && $(python) -m tests.support.metric_tables

$(node_modules): requirements/package-lock.json
	@npm ci --silent --prefix requirements

bench: venv ## every bench in its quick form
	@set -e; for name in $(benches); do echo "== $$name"; .venv/bin/rocstar bench $$name quick=true $(ARGS); done

clean: ## remove what was built; keeps runs/
	rm -rf .venv .venv-guest .venv-serve sandbox/inside/_native*.so* .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info requirements/node_modules
	find . -name __pycache__ -prune -exec rm -rf {} +
