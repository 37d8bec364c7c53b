# make demo    builds the CPU trainer, makes its text, trains about two minutes, prints samples   (installs what is missing)
# make test    every test; ends with "N passed, N failed"                                        (installs what is missing)
# make         builds train_moe_cpu and says what it found        make help   lists the rest

CC ?= cc
CFLAGS ?= -O3 $(NATIVE)
BUILD := build
PYTHON := $(BUILD)/venv/bin/python

# What is on this machine? Each probe compiles a line of C. NO_OPENMP=1 NO_DNNL=1 NO_CBLAS=1 leave something out.
probe = $(shell printf '$(1)\n' | $(CC) $(CPPFLAGS) -x c - -o /dev/null $(2) $(LDFLAGS) 2>/dev/null && echo yes)
UNAME := $(shell uname -s 2>/dev/null)
ifeq ($(UNAME),)
$(error this Makefile needs a Unix shell: Linux, WSL or macOS)
endif

# these probes must not run where nothing is built
ifneq ($(filter-out clean deps test-deps help $(PYTHON) $(BUILD)/cuda-wheels/done,$(or $(MAKECMDGOALS),all)),)
NATIVE := $(firstword $(foreach flag,-march=native -mcpu=native,$(if $(call probe,int main(void) { return 0; },$(flag)),$(flag))))
ifndef NO_OPENMP
  OPENMP := $(if $(call probe,int main(void) { return 0; },-fopenmp),-fopenmp)
  ifeq ($(OPENMP)$(UNAME),Darwin)
    BREW_OMP := $(shell brew --prefix libomp 2>/dev/null)
    OPENMP_MAC := -Xpreprocessor -fopenmp -I$(BREW_OMP)/include -L$(BREW_OMP)/lib -lomp
    OPENMP := $(if $(call probe,#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; },$(OPENMP_MAC)),$(OPENMP_MAC))
  endif
endif
ifndef NO_DNNL
  DNNL := $(call probe,#include <oneapi/dnnl/dnnl.h>\nint main(void) { return dnnl_sgemm == 0; },-ldnnl)
endif
ifndef NO_CBLAS
  ifeq ($(UNAME),Darwin)
    ACCELERATE := $(call probe,#include <Accelerate/Accelerate.h>\nint main(void) { return cblas_sgemm == 0; },-framework Accelerate)
  endif
  BLAS := $(firstword $(foreach lib,-lopenblas -lblis -lcblas,$(if $(call probe,#include <cblas.h>\nint main(void) { return cblas_sgemm == 0; },$(lib)),$(lib))))
endif
CJSON := $(call probe,#include <cjson/cJSON.h>\nint main(void) { return cJSON_Parse == 0; },-lcjson)
endif

ifneq ($(DNNL),)
  GEMM_NAME := oneDNN
  GEMM_FLAGS := -DUSE_DNNL
  GEMM_LIBS := -ldnnl
else ifneq ($(ACCELERATE),)
  GEMM_NAME := Accelerate
  GEMM_FLAGS := -DUSE_ACCELERATE
  GEMM_LIBS := -framework Accelerate
else ifneq ($(BLAS),)
  GEMM_NAME := CBLAS ($(BLAS))
  GEMM_FLAGS := -DUSE_CBLAS
  GEMM_LIBS := $(BLAS)
endif

# -fno-math-errno lets sqrt be one instruction. No -ffast-math: it would assume that there are no NaNs.
# (clang says where it could not vectorise a loop that asks for it: true, and no fault)
WARN := -Wall -Wextra -Wno-pass-failed
OPENMP_FLAGS := $(or $(OPENMP),-Wno-unknown-pragmas)
C_FLAGS := -std=c11 $(WARN) -I. -fno-math-errno $(OPENMP_FLAGS)
LIBS := -lcjson -lm -lpthread
HEADERS := $(wildcard llmc/*.h)

.PHONY: all demo test test-deps test-long test-hf bench-cpu deps found clean help train-demo test-run

all: found train_moe_cpu

found:
	@echo "$(if $(OPENMP),✓ OpenMP,✗ OpenMP: no (single thread))"
	@echo "$(if $(GEMM_NAME),✓ matrix products by $(GEMM_NAME),✗ BLAS: no (own loop, many times slower; make deps installs oneDNN))"
	@echo "$(if $(CJSON),✓ cJSON,✗ cJSON: no (needed; make deps installs it))"

# another compiler or library than last time builds everything anew
FLAGS_NOW := $(CC) $(CFLAGS) $(C_FLAGS) $(GEMM_FLAGS) $(GEMM_LIBS) $(LDFLAGS)
ifneq ($(strip $(FLAGS_NOW)),$(shell cat $(BUILD)/flags 2>/dev/null))
.PHONY: $(BUILD)/flags
endif
$(BUILD)/flags:
	@mkdir -p $(BUILD)
	@echo '$(strip $(FLAGS_NOW))' >$@

train_moe_cpu: train_moe_cpu.c $(HEADERS) $(BUILD)/flags
	$(CC) $(CFLAGS) $(C_FLAGS) $(GEMM_FLAGS) $< -o $@ $(GEMM_LIBS) $(LIBS) $(LDFLAGS)

# ----------------------------------------------------------------------------
# the main job

demo: deps
	@$(MAKE) --no-print-directory train-demo

train-demo: all
	@dev/demo.sh

# ----------------------------------------------------------------------------
# tests: dev/test/README.md says what each of them proves

test: test-deps
	@$(MAKE) --no-print-directory test-run

# the test programs' Python packages, and where there is no CUDA Toolkit its headers and compiler
test-deps:
	@dev/deps.sh test
	@$(MAKE) --no-print-directory $(PYTHON)
	@command -v nvcc >/dev/null 2>&1 || [ -x /usr/local/cuda/bin/nvcc ] || $(MAKE) --no-print-directory $(BUILD)/cuda-wheels/done

$(BUILD)/cuda-wheels/done: dev/requirements-cuda.txt $(PYTHON)
	$(BUILD)/venv/bin/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(BUILD)/cuda-wheels -r $<
	@rm -f $(BUILD)/cuda-wheels/nvidia/*/lib/libcublas* $(BUILD)/cuda-wheels/nvidia/*/lib/libnccl* # only their headers are used
	@touch $@

test-run: all
	@CC="$(CC)" PYTHON=$(PYTHON) OPENMP="$(OPENMP_FLAGS)" GEMM_FLAGS="$(GEMM_FLAGS)" GEMM_LIBS="$(GEMM_LIBS)" dev/test/run.sh $(ONLY)

test-long: test-deps all
	@CC="$(CC)" PYTHON=$(PYTHON) OPENMP="$(OPENMP_FLAGS)" GEMM_FLAGS="$(GEMM_FLAGS)" GEMM_LIBS="$(GEMM_LIBS)" dev/test/run.sh --long $(ONLY)

test-hf: all
	@dev/test/hf/run.sh

bench-cpu: all $(BUILD)/bench_cpu
	@$(BUILD)/bench_cpu $(SIZES)

$(BUILD)/bench_cpu: dev/bench/bench_cpu.c train_moe_cpu.c $(HEADERS) $(BUILD)/flags
	@mkdir -p $(BUILD)
	$(CC) $(CFLAGS) $(C_FLAGS) $(GEMM_FLAGS) $< -o $@ $(GEMM_LIBS) $(LIBS) $(LDFLAGS)

# numpy, safetensors (tests) and matplotlib (plots), apart from the system's Python
$(PYTHON): dev/requirements.txt
	python3 -m venv $(BUILD)/venv
	$(BUILD)/venv/bin/pip install --quiet --disable-pip-version-check -r dev/requirements.txt
	@touch $@

deps:
	@dev/deps.sh

clean:
	rm -rf $(BUILD) train_moe_cpu

help:
	@grep -E '^# make' Makefile
	@echo "# make deps    installs the libraries (apt, as root or with sudo), or says which ones are missing"
	@echo "# make test-long, make test-hf (needs torch and transformers), make bench-cpu, make clean"
