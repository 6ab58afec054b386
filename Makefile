# SluiceMQ. `make help` lists the targets; each one does its own set-up on a machine that has only
# Python 3.11+ (with venv), make and a package index.
#
#   PYTHON=python3.12    the interpreter for the virtual environment
#   VENV=.venv           where the virtual environment lives
#   WORKERS=4            processes that run the tests: many of them wait for servers to start
#   ORDER=1              another number is another random order of the tests
#   ARGS="-k filter"     passed on to pytest, the demo or the benchmark
#   SHORT=1 / QUICK=1    a shorter demo / benchmark

SHELL := /bin/sh
.DEFAULT_GOAL := help
.SUFFIXES:

VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.sluicemq-dev
ARGS ?=
WORKERS ?= 4
ORDER ?= 1

# The first interpreter that really starts, is new enough and can make a virtual environment:
# a pyenv shim on the PATH may exist for a version that is not installed.
PYTHON ?= $(shell for candidate in python3.13 python3.12 python3.11 python3; do \
	$$candidate -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
	>/dev/null 2>&1 && { echo $$candidate; break; }; done)

# One source package among the dependencies is several hundred megabytes: wait long, try often.
export PIP_DEFAULT_TIMEOUT ?= 180
export PIP_RETRIES ?= 10
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1
# Tests start hundreds of Pythons: none of them compiles what another has compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## what can be asked of this Makefile
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' Makefile

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer with venv on the PATH: install one, or say make PYTHON=/path/to/python3"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $(STAMP)

# What the compiled engine takes over, and the golden bytes that both engines have to make.
HOT := $(addprefix tests/unit/broker/test_,send.py send_batch.py pull.py longpoll.py group_commit.py pacing.py) \
	$(addprefix tests/unit/store/test_,store_append.py store_read.py store_keys.py tagscan.py columns.py) \
	$(addprefix tests/property/test_,index_columns.py columns_read.py record_roundtrip.py arrow_decode.py) \
	tests/unit/record/test_arrow.py tests/unit/spark/test_spark_typed.py \
	tests/unit/net/test_dispatch.py tests/golden/test_traffic_broker.py

NATIVE := .native-tried
$(NATIVE): $(STAMP) tools/native.py $(wildcard src/sluicemq/engine/*.p[yx][xd])
	@$(BIN)/python tools/native.py --quietly
	@touch $(NATIVE)

.PHONY: native
native: $(STAMP) ## the compiled engine, built in place; says what is missing when it cannot be (the other targets try it once, quietly)
	$(BIN)/python tools/native.py

.PHONY: dist
dist: ## the source distribution and the wheels made of it, pure and for this platform, into dist/; each is installed and used in an environment of its own
	$(PYTHON) tools/dist.py $(ARGS)

.PHONY: first-message
first-message: ## seconds from clone to first message, by the commands of docs/first-message.md (ARGS="--limit 120")
	$(PYTHON) tools/strangers_path.py $(ARGS)

.PHONY: setup
setup: $(STAMP) ## the virtual environment with everything in it (the other targets do this themselves)

.PHONY: docs
docs: $(STAMP) ## the site made of docs/, into build/site: open build/site/index.html, no server or network needed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

.PHONY: demo
demo: $(NATIVE) ## 336,776 flights through broker, filters and Spark, checked against the CSV (SHORT=1: a part)
	$(BIN)/python examples/flights/demo.py $(if $(SHORT),--short) $(ARGS)

.PHONY: test
test: $(NATIVE) ## all tests; those that need Java or Go are skipped without them, never when CI=true (WORKERS=n processes, 4)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --randomly-seed=$(ORDER) $(ARGS)

.PHONY: thorough
thorough: ## `make test` with what it leaves out: other releases and clients of a kind, planted bugs that simulations have to find, long histories; more than an hour
	SLUICEMQ_TESTS=all $(MAKE) test

.PHONY: pure
pure: $(STAMP) ## the tests of the hot path without the compiled engine
	SLUICE_PURE=1 SLUICEMQ_EXAMPLES=50 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile $(HOT) $(ARGS)

.PHONY: bytecode
bytecode: $(NATIVE) ## what Python makes of modules and tests: processes that begin side by side would each make all of it
	$(BIN)/python -m compileall -q src
	for tests in tests/unit "tests --ignore tests/unit"; do $(BIN)/python -m pytest -q --collect-only $$tests >/dev/null & done; wait

.PHONY: quick
quick: $(NATIVE) ## the fast tests: no server, JVM or network, fewer random examples; in less than 90 seconds on two cores (make check has the house rules)
	SLUICEMQ_EXAMPLES=20 $(BIN)/python -m pytest -q -n 3 --dist loadfile -m "not spark and not compatibility and not slow" tests/unit tests/golden tests/property $(ARGS)

.PHONY: lint
lint: $(STAMP) ## ruff, mypy --strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: check
check: lint ## lint and the house rules
	$(BIN)/python -m pytest -q -m "not spark" tests/house

.PHONY: format
format: $(STAMP) ## let ruff lay out the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: compat
compat: $(NATIVE) ## only the tests with the real Java and Go clients and the real Java broker (SLUICEMQ_TESTS=all: with the pairs that CI leaves out)
	$(BIN)/python -m pytest tests/compatibility -v $(ARGS)

.PHONY: official
official: $(NATIVE) ## the official gRPC clients (Java, Go, Python, Node, Rust) before our proxy or the real one, and our broker or the real one; what CI leaves out of popping, of replicas and of our proxy before the real broker
	SLUICEMQ_TESTS=all $(BIN)/python -m pytest tests/compatibility -k "official or popping or proxy_java or replicas" -v $(ARGS)

.PHONY: acceptance
acceptance: $(NATIVE) ## RocketMQ's own test suites before our servers, into docs/reports/acceptance.md (E2E=DIR: a checkout of apache/rocketmq-e2e, without which two of them are left out; ARGS="--only remoting")
	PYTHONPATH=tests/lib:tests/compatibility $(BIN)/python -m acceptance $(if $(E2E),--e2e $(E2E)) --report docs/reports/acceptance.md $(ARGS)

.PHONY: simulate
simulate: $(NATIVE) ## 2,000 seeds (SEEDS=n) of crashes and of replicas, 1,000 (CLUSTER_SEEDS=n) of a whole cluster, 500 of timed messages in replicas and in pairs, 500 of a consensus service that loses its data, 500 of filters that roll, more examples of crash and property tests, 200 kills during changes of topics, 100 of a broker that is popped from, 200 of recreated topics under each kind of consumer
	PYTHONPATH=tests/lib $(BIN)/python -m simulation.crashes --seeds $(or $(SEEDS),2000)
	PYTHONPATH=tests/lib $(BIN)/python -m simulation.cluster --seeds $(or $(CLUSTER_SEEDS),1000)
	PYTHONPATH=tests/lib $(BIN)/python -m simulation.cluster --kind split --seeds $(or $(CLUSTER_SEEDS),300)
	PYTHONPATH=tests/lib $(BIN)/python -m simulation.cluster --kind replicas --seeds $(or $(SEEDS),2000)
	PYTHONPATH=tests/lib $(BIN)/python -m simulation.cluster --kind timed --seeds $(or $(CLUSTER_SEEDS),500)
	PYTHONPATH=tests/lib $(BIN)/python -m simulation.cluster --kind losses --seeds $(or $(CLUSTER_SEEDS),500)
	PYTHONPATH=tests/lib $(BIN)/python -m simulation.cluster --kind pairs --seeds $(or $(CLUSTER_SEEDS),500)
	SLUICEMQ_SEEDS=11250 $(BIN)/python -m pytest -o timeout=0 tests/unit/broker/test_lane_simulation.py -k roll $(ARGS)
	SLUICEMQ_EXAMPLES=20000 $(BIN)/python -m pytest tests/property/test_vectorised.py $(ARGS)
	SLUICEMQ_EXAMPLES=500 $(BIN)/python -m pytest -n auto tests/crash tests/property --deselect tests/property/test_vectorised.py $(ARGS)
	SLUICEMQ_EXAMPLES=1 $(BIN)/python -m pytest -o timeout=0 tests/unit/client/test_cancelled.py $(ARGS)
	SLUICEMQ_SEEDS=200 $(BIN)/python -m pytest tests/integration/test_changes_killed.py $(ARGS)
	SLUICEMQ_SEEDS=100 $(BIN)/python -m pytest -o timeout=0 tests/integration/test_pops_killed.py $(ARGS)
	SLUICEMQ_SEEDS=2000 $(BIN)/python -m pytest -o timeout=0 tests/property/test_mutants.py $(ARGS)
	SLUICEMQ_SEEDS=200 $(BIN)/python -m pytest -o timeout=0 tests/property/test_recreated_topics.py $(ARGS)

.PHONY: mutants
mutants: $(NATIVE) ## small wrong patches of the product, each of which a test has to catch within a minute (ARGS="--only timers"); the report is docs/reports/mutants.md
	PYTHONPATH=tests/lib $(BIN)/python -m mutants $(if $(ARGS),,--report docs/reports/mutants.md) $(ARGS)

.PHONY: mutants-sample
mutants-sample: $(NATIVE) ## 40 random mutations of each of five areas, made by cosmic-ray (ARGS="--area pop --count 100 --seed 2"); prints those that no test catches
	$(BIN)/pip install -q cosmic-ray==8.7.0
	PYTHONPATH=tests/lib $(BIN)/python -m mutants.sampling $(ARGS)

.PHONY: histories
histories: $(NATIVE) ## 100 fault histories of two real replicas and 300 of three (HISTORIES=n), PARALLEL=4 clusters at a time: timed messages, returning masters, exactly-once sinks; Linux and root; the report is docs/reports/histories.json
	PYTHONPATH=tests/lib $(BIN)/python -m histories.processes --replicas 2 --histories $(or $(HISTORIES),100) $(HISTORY) $(ARGS)
	PYTHONPATH=tests/lib $(BIN)/python -m histories.processes --replicas 3 --histories $(or $(HISTORIES),300) $(HISTORY) $(ARGS)
HISTORY = --seconds 20 --parallel $(or $(PARALLEL),4) $(if $(HISTORIES),,--report docs/reports/histories.json)

.PHONY: soak
soak: $(NATIVE) ## an hour (MINUTES=n) of mixed load with restarts, retention and a pipeline: what grows of memory, descriptors, latency
	PYTHONPATH=tests/compatibility $(BIN)/python -m benchmarks.soak --minutes $(or $(MINUTES),60) $(ARGS)

.PHONY: simulate-spark
simulate-spark: $(STAMP) ## kills and restarts of Spark jobs: 100 histories of epochs, 50 restarts of streams and 50 of brokers, 8 killed drivers for each kind of job
	SLUICEMQ_SEEDS=100 $(BIN)/python -m pytest tests/crash/test_crash_epochs.py $(ARGS)
	SLUICEMQ_SEEDS=50 $(BIN)/python -m pytest tests/integration/test_spark_restarts.py tests/integration/test_spark_outage.py $(ARGS)
	SLUICEMQ_SEEDS=8 $(BIN)/python -m pytest tests/integration/spark/test_spark_exactly_once.py tests/integration/spark/test_spark_no_java.py tests/integration/spark/pipelines -k "kill or driver or java" $(ARGS)

.PHONY: fuzz
fuzz: $(NATIVE) ## a million malformed inputs (INPUTS=n, SEED=n) against a running broker, with a bystander watched; the same with access control; the same over gRPC
	PYTHONPATH=tests/lib $(BIN)/python -m fuzz --inputs $(or $(INPUTS),1000000) --seed $(or $(SEED),1) --corpus tests/golden/traffic $(ARGS)
	PYTHONPATH=tests/lib $(BIN)/python -m fuzz --inputs $(or $(INPUTS),1000000) --seed $(or $(SEED),1) --corpus tests/golden/traffic --guarded $(ARGS)
	PYTHONPATH=tests/lib $(BIN)/python -m fuzz --inputs $(or $(INPUTS),1000000) --seed $(or $(SEED),1) --grpc tests/golden/traffic/grpc/grpcio.jsonl.gz $(ARGS)

.PHONY: bench
bench: $(NATIVE) ## the figures, pure and compiled, beside the Java broker where Java is there and the Rust one where it is installed; twenty minutes (QUICK=1: four)
	$(BIN)/python -m benchmarks $(if $(QUICK),--quick) $(ARGS)

.PHONY: bench-rust
bench-rust: $(NATIVE) ## the same; installs the Rust broker first, which cargo compiles for twenty minutes, into SLUICEMQ_CACHE
	$(BIN)/python -m benchmarks --rust $(if $(QUICK),--quick) $(ARGS)

.PHONY: bench-store
bench-store: $(NATIVE) ## SYNC_FLUSH with 64 senders, beside the real broker; memory with a large store (ARGS="--only large")
	$(BIN)/python -m benchmarks.stores $(ARGS)

.PHONY: bench-spark
bench-spark: $(NATIVE) ## Spark: source, stream, sinks, beside the ceiling of a Python source (ARGS=--kafka: and Kafka)
	$(BIN)/python benchmarks/spark_bench.py $(ARGS)

.PHONY: bench-proxy
bench-proxy: $(NATIVE) ## proxy and broker together: CPU a message beside RocketMQ 5.5.0 with the official client, 1,000 consumers that wait, bursts of calls (QUICK=1: coarser)
	$(BIN)/python -m benchmarks.proxies $(if $(QUICK),--quick) $(ARGS)
	$(BIN)/python -m benchmarks.consumers $(if $(QUICK),--seconds 8)

.PHONY: bench-replicas
bench-replicas: $(NATIVE) ## a master with its slave beside the real pair: CPU a message, and how far the slave is behind (QUICK=1: coarser)
	$(BIN)/python -m benchmarks.replicas $(if $(QUICK),--quick) $(ARGS)

.PHONY: bench-catch-up
bench-catch-up: $(NATIVE) ## an empty slave behind a full master, indexes included, beside a plain copy with fsync (ARGS="--gib 2": a smaller one)
	$(BIN)/python -m benchmarks.catchup $(ARGS)

.PHONY: bench-failover
bench-failover: $(NATIVE) ## 50 kills of the master of two replicas (ARGS="--kills 5"): how long our client and the Java client cannot send; planned switches and silent replicas; nothing acknowledged is lost
	$(BIN)/python -m benchmarks.failover $(ARGS)

.PHONY: bench-backlog
bench-backlog: $(NATIVE) ## five million messages of 1 KiB drained through filters, without and with columns, beside the real broker (QUICK=1: a part)
	$(BIN)/python -m benchmarks.backlog $(if $(QUICK),--quick) $(ARGS)

.PHONY: spark-matrix
spark-matrix: $(STAMP) ## the main path on Spark 4.1, 4.2 and the newest, each in an environment of its own
	$(BIN)/python tools/spark_matrix.py $(ARGS)

.PHONY: lower-bounds
lower-bounds: $(STAMP) ## the lowest version of each dependency that pyproject.toml allows, each extra in an environment of its own: installed and imported; ARGS="--extras mcp" for a part; needs the oldest Python
	$(BIN)/python tools/lower_bounds.py $(ARGS)

.PHONY: constraints
constraints: $(STAMP) ## deploy/constraints*.txt: the versions and hashes of all that an image installs, the newest ones of today
	$(BIN)/python tools/constraints.py $(ARGS)

.PHONY: clean
clean: ## remove what the targets made, but not the virtual environment
	rm -rf $(NATIVE) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .demo build dist
