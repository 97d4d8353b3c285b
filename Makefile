# The two commands: `make demo` runs a real model through the cache, `make test` checks everything.
# Both make .venv and install into it what they need; a repeat finds it there.
# Needed beforehand: Python >= 3.11 (with venv), Rust >= 1.95, a C++ compiler, make.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Without make's flags: they name a job server that is not for cargo, which says so each time.
CARGO  := env -u MAKEFLAGS cargo
HOST    = $(shell rustc -vV | sed -n 's/^host: //p')

# Involuntary switches of thread that loom tries in one execution; empty: as each model states.
LOOM_MAX_PREEMPTIONS ?=

SOURCES := Cargo.toml Cargo.lock pyproject.toml $(shell find src -name '*.rs')

.DELETE_ON_ERROR:
# Only `test` knows what may run side by side.
ifeq ($(MAKELEVEL),0)
.NOTPARALLEL:
endif
.PHONY: help demo test fmt lint lint-rust lint-python test-rust test-python loom loom-quick asan neon avx512 stress mutants bench ascend-cost stubs docs wheel clean

help: ## say what there is
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(VENV)/.extension ## answer several prompts at once with a real model on one shared cache
	$(BIN)/paged-kv demo

# Two at a time, as compiling the last crate and Python's tests keep one core busy each; what pip installs
# comes first, since it must not run twice at once.
test: $(VENV)/.tools $(VENV)/.docs ## everything that must hold before a change lands
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint test-python test-rust loom-quick docs

fmt: $(VENV)/.tools ## format Rust and Python
	$(CARGO) fmt
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

lint: lint-rust lint-python ## formatting, clippy, rustdoc, ruff, mypy, the stub

lint-rust:
	$(CARGO) fmt --check
	$(CARGO) clippy --locked -- -D warnings
	$(CARGO) clippy --locked --all-targets --all-features -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --no-deps --quiet

lint-python: stubs
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

test-rust:
	$(CARGO) test --locked --features bench

# OpenBLAS's threads wait by spinning: on a machine with other work they take more than they give.
test-python: export OPENBLAS_NUM_THREADS ?= 1
test-python: $(VENV)/.tools $(VENV)/.extension
	$(BIN)/pytest

# --cfg loom swaps the atomics, so these builds live in a folder of their own.
loom: export RUSTFLAGS += --cfg loom
loom: ## explore the interleavings of the lock-free protocols
	$(if $(LOOM_MAX_PREEMPTIONS),LOOM_MAX_PREEMPTIONS=$(LOOM_MAX_PREEMPTIONS)) \
		$(CARGO) test --locked --profile loom --target-dir target/loom --test 'loom_*'

loom-quick:
	$(MAKE) --no-print-directory loom LOOM_MAX_PREEMPTIONS=2

# The standard library stays uninstrumented; what this library reads and writes is checked.
# Left out: what stops a thread anywhere (the sanitizer's allocator has locks inside the program), and
# what another test starts with an environment of its own.
asan: export RUSTC_BOOTSTRAP = 1
asan: export RUSTFLAGS += -Zsanitizer=address
asan: ## unit, property and stress tests under AddressSanitizer
	$(CARGO) test --locked --target $(HOST) --target-dir target/asan --lib \
		$(foreach test,attention cache field_cases pool property stress table,--test $(test)) \
		-- --include-ignored --skip stopped:: --skip the_environment_chose

# Left out: what asks for huge pages or starts itself again, which the emulator refuses.
neon: ## compile for 64-bit Arm and run its tests, under emulation where need be (tests/aarch64.sh says what that takes)
	tests/aarch64.sh --locked --no-fail-fast --lib $(foreach test,attention cache field_cases pool property table,--test $(test)) \
		-- --skip a_huge_page_is_taken --skip memory_starts_as_zeros --skip the_environment_chooses

# Left out: what takes minutes under emulation.
avx512: ## run the kernels' tests with AVX-512, emulated where the CPU lacks it, and BF16 (tests/avx512.sh says what that takes)
	tests/avx512.sh --locked --lib kernels::
	tests/avx512.sh --locked --test attention -- --skip a_million_keys --skip threads_placement \
		--skip attention_is_near_what_it_was

stress: $(VENV)/.tools $(VENV)/.extension ## minutes of hammering from many threads, Rust and Python
	$(CARGO) test --locked --release --test property --test stress -- --include-ignored
	$(BIN)/pytest -m stress --timeout 1200

# One of so many shares of all mutants; 0/12 ends within two hours on two cores.
MUTANTS ?= 0/12
mutants: export PATH := $(CURDIR)/target/tools/bin:$(PATH)
mutants: target/tools/bin/cargo-mutants ## break pool, tables and batches on purpose, and see whether a test notices
	$(CARGO) mutants --shard $(MUTANTS) --sharding round-robin --output target

target/tools/bin/cargo-mutants:
	$(CARGO) install --locked --quiet --root target/tools cargo-mutants@27.1.0

bench: $(VENV)/.tools $(VENV)/.extension ## measure, each figure beside the machine's limit
	$(CARGO) bench --locked --features bench
	$(BIN)/pytest benches/python --benchmark-enable --benchmark-only --timeout 1200
	$(BIN)/paged-kv bench attention
	$(BIN)/paged-kv bench pool
	$(BIN)/paged-kv bench cache

ascend-cost: $(VENV)/.tools $(VENV)/.extension ## count what the Ascend kernels take per token and head
	$(BIN)/python tests/python/ascend_cost.py

stubs: $(VENV)/.tools $(VENV)/.extension ## compare the hand-written stub with the extension
	$(BIN)/python -m mypy.stubtest paged_kv._core --mypy-config-file pyproject.toml

docs: $(VENV)/.docs $(VENV)/.extension ## build the documentation in target/docs; warnings are errors
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --fresh-env --doctree-dir target/doctrees docs target/docs

wheel: $(VENV)/.pip ## one wheel for every CPython from 3.11 on
	$(BIN)/maturin build --release --locked --out dist

clean: ## remove all that was built
	rm -rf $(VENV) target dist python/paged_kv/*.so

$(VENV)/.pip:
	@$(PYTHON) -c 'import sys; sys.exit(f"Python 3.11 or newer is needed, {sys.executable} is {sys.version}; set PYTHON" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip 'maturin>=1.16,<2'
	@touch $@

$(VENV)/.tools: pyproject.toml | $(VENV)/.pip
	$(BIN)/pip install --quiet --group tools
	@touch $@

$(VENV)/.docs: pyproject.toml | $(VENV)/.pip
	$(BIN)/pip install --quiet --group docs
	@touch $@

# An editable install: the Python files are used where they are.
$(VENV)/.extension: $(SOURCES) | $(VENV)/.pip
	PIP_QUIET=1 env -u MAKEFLAGS $(BIN)/maturin develop --release --locked --extras llm,cli
	@touch $@
