# `make run` and `make test` do everything on a fresh machine. The rest is for those who work on Caisson.
RUN ?= examples/clinical_records/run.json
SCENARIO ?= examples/clinical_records/scenario.yaml

.PHONY: run test check soak conformance format dev clean

run: ## start the dev stack, do one run (RUN=file.json), show it live, stop the stack
	@scripts/setup.sh run
	@.venv/bin/caisson dev --run "$(RUN)" --scenario "$(SCENARIO)"

test: ## everything that must hold: format, lint, types, tests
	@scripts/setup.sh dev
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy .
	.venv/bin/pytest -n 3 --dist loadfile

dev: ## start the dev stack and leave it running
	@scripts/setup.sh run
	@.venv/bin/caisson dev

check: ## the quick half of `make test`
	@scripts/setup.sh dev
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy .
	.venv/bin/pytest tests/unit

soak: ## a 2,000-step run, chaos, runs that move between providers, killed fetches; many minutes
	@scripts/setup.sh dev
	.venv/bin/pytest -m soak -o timeout=1800 tests

conformance: ## every check with one provider (PROVIDER=local, docker, e2b-live, ...); hosted ones cost money
	@scripts/setup.sh dev
	@test -n "$(PROVIDER)" || { echo "say which: make conformance PROVIDER=name"; exit 2; }
	@case "$(PROVIDER)" in *-live) test "$(CONFIRM)" = yes || { \
	    echo "$(PROVIDER) makes real sandboxes with the credentials in your environment, and that costs money."; \
	    echo "If that is what you want: make conformance PROVIDER=$(PROVIDER) CONFIRM=yes"; exit 2; } ;; esac
	CONFORMANCE_SUBJECTS="$(PROVIDER)" .venv/bin/pytest tests/conformance -o timeout=900

format:
	@scripts/setup.sh dev
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

clean: ## remove the virtual environment and the dev stack's state
	rm -rf .venv .caisson build *.egg-info
