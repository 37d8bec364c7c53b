# make demo    builds the CPU trainer, makes its text, trains about two minutes, prints samples   (installs what is missing)
# make test    every test; ends with "N passed, N failed"                                        (installs what is missing)
# make         builds train_moe_cpu and says what it found        make help   lists the rest
# make train_moe         the trainer for NVIDIA GPUs (nvcc); NO_MPI=1 NO_NCCL=1: for one GPU only
# make train_moe_emu     the same program for dev/emu, the emulator: runs on any CPU, far slower than train_moe_cpu

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
ifneq ($(filter-out clean deps deps-cuda deps-cudnn test-deps help $(PYTHON) $(BUILD)/cuda-wheels/done,$(or $(MAKECMDGOALS),all)),)
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
ifndef NO_PCRE2
  PCRE2 := $(call probe,#define PCRE2_CODE_UNIT_WIDTH 8\n#include <pcre2.h>\nint main(void) { return pcre2_compile == 0; },-lpcre2-8)
endif
ifndef NO_UTF8PROC
  UTF8PROC := $(call probe,#include <utf8proc.h>\nint main(void) { return utf8proc_reencode == 0; },-lutf8proc)
endif
endif
# what encoding text takes; without, the trainers do all but that
TEXT_FLAGS := $(if $(PCRE2),-DUSE_PCRE2) $(if $(UTF8PROC),-DUSE_UTF8PROC)
TEXT_LIBS := $(if $(PCRE2),-lpcre2-8) $(if $(UTF8PROC),-lutf8proc)

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
C_FLAGS := -std=c11 $(WARN) -I. -fno-math-errno $(OPENMP_FLAGS) $(TEXT_FLAGS)
LIBS := -lcjson $(TEXT_LIBS) -lm -lpthread
HEADERS := $(wildcard llmc/*.h llmc/*.cuh)

.PHONY: all demo test test-deps test-long test-hf bench-cpu bench-cpu-ops ladder run-ladder deps found clean help train-demo test-run
.PHONY: test_moe test_moe_emu bench deps-cuda deps-cudnn found-gpu found-emu

all: found train_moe_cpu

found:
	@echo "$(if $(OPENMP),✓ OpenMP,✗ OpenMP: no (single thread))"
	@echo "$(if $(GEMM_NAME),✓ matrix products by $(GEMM_NAME),✗ BLAS: no (own loop, many times slower; make deps installs oneDNN))"
	@echo "$(if $(CJSON),✓ cJSON,✗ cJSON: no (needed; make deps installs it))"
	@echo "$(if $(and $(PCRE2),$(UTF8PROC)),✓ text by PCRE2 and utf8proc,✗ text: no $(if $(PCRE2),,PCRE2 )$(if $(UTF8PROC),,utf8proc )(prompts through a tokenizer.json need both; make deps installs them))"
	@echo "  $(if $(NVCC),for NVIDIA GPUs: make train_moe ($(NVCC) is there)$(comma) without one: make train_moe_emu,without nvcc: make train_moe_emu builds the GPU trainer for an emulator)"

comma := ,
# $(eval $(call stamp,NAME,FLAGS)): the file $(BUILD)/NAME is newer than what was built with other flags than these, so that
# another compiler or library than last time builds everything anew
define stamp
ifneq ($$(strip $(2)),$$(shell cat $(BUILD)/$(1) 2>/dev/null))
.PHONY: $(BUILD)/$(1)
endif
$(BUILD)/$(1):
	@mkdir -p $(BUILD)
	@echo '$$(strip $(2))' >$$@
endef
$(eval $(call stamp,flags,$(CC) $(CFLAGS) $(C_FLAGS) $(GEMM_FLAGS) $(GEMM_LIBS) $(LDFLAGS)))

train_moe_cpu: train_moe_cpu.c $(HEADERS) $(BUILD)/flags
	$(CC) $(CFLAGS) $(C_FLAGS) $(GEMM_FLAGS) $< -o $@ $(GEMM_LIBS) $(LIBS) $(LDFLAGS)

# ----------------------------------------------------------------------------
# the GPU trainer, and its kernels one by one in dev/cuda. Each is built by nvcc, or by dev/emu/emucc for the emulator.
#   GPU_ARCH="sm_90 sm_120"  architectures to build for [this machine's; without a GPU sm_80 sm_90 sm_120 and what is newer]
#   CUDA_HOME NCCL_HOME      where to look first            NO_MPI=1 NO_NCCL=1  a program for one GPU
#   USE_CUDNN=1              --attention cudnn, also in make bench (make deps-cudnn brings what it needs)

NVCC := $(firstword $(wildcard $(CUDA_HOME)/bin/nvcc) $(shell command -v nvcc 2>/dev/null) $(wildcard /usr/local/cuda/bin/nvcc \
    $(BUILD)/cuda-wheels/nvidia/cu*/bin/nvcc))
GPU_GOALS := $(filter train_moe test_moe train_moe_emu test_moe_emu bench found-gpu found-emu $(BUILD)/dev/% $(BUILD)/test_moe% $(BUILD)/peaks,$(MAKECMDGOALS))
ifneq ($(GPU_GOALS),)
CUDA := $(patsubst %/bin/,%,$(dir $(realpath $(NVCC))))
CUDA_HEADERS := $(patsubst %/,%,$(dir $(firstword $(wildcard $(CUDA)/include/cuda_runtime.h $(CUDA)/targets/*/include/cuda_runtime.h \
    /usr/local/cuda/include/cuda_runtime.h /usr/include/cuda_runtime.h))))
# the first of these files that is there; a library may lie there as libNAME.so.13 only, as in wheels, or as libNAME.a only
lib_dirs := $(CUDA)/lib64 $(CUDA)/lib $(CUDA)/targets/x86_64-linux/lib /usr/lib/x86_64-linux-gnu /usr/lib64 /usr/local/lib
find_lib = $(firstword $(wildcard $(foreach dir,$(2) $(lib_dirs),$(dir)/lib$(1).so $(dir)/lib$(1).so.*)))
link_lib = $(if $(1),-L$(abspath $(dir $(1))) -Xlinker -rpath=$(abspath $(dir $(1))) -Xlinker -l:$(notdir $(1)))
CUBLASLT := $(call find_lib,cublasLt,)
wheel_nccl := $(CURDIR)/$(BUILD)/cuda-wheels/nvidia/nccl
ifndef NO_NCCL
  NCCL_H := $(firstword $(wildcard $(NCCL_HOME)/include/nccl.h $(CUDA_HEADERS)/nccl.h /usr/include/nccl.h \
      /usr/local/include/nccl.h $(wheel_nccl)/include/nccl.h))
  NCCL := $(call find_lib,nccl,$(NCCL_HOME)/lib $(wheel_nccl)/lib)
endif
ifndef NO_MPI
  MPICXX := $(firstword $(shell command -v mpicxx 2>/dev/null) $(wildcard /usr/lib64/openmpi/bin/mpicxx))
endif
OPENBLAS := $(call probe,#include <cblas.h>\nint main(void) { return cblas_sgemm == 0; },-lopenblas)
ifdef USE_CUDNN
  wheel_cudnn := $(CURDIR)/$(BUILD)/cudnn-wheels
  CUDNN_H := $(firstword $(wildcard $(wheel_cudnn)/nvidia/cudnn/include/cudnn.h $(CUDA_HEADERS)/cudnn.h /usr/include/cudnn.h))
  CUDNN_FRONTEND_H := $(firstword $(wildcard $(CUDNN_FRONTEND)/include/cudnn_frontend.h $(wheel_cudnn)/include/cudnn_frontend.h \
      /usr/include/cudnn_frontend.h $(CUDA_HEADERS)/cudnn_frontend.h))
  CUDNN := $(call find_lib,cudnn,$(wheel_cudnn)/nvidia/cudnn/lib)
endif

# This machine's GPUs as sm_90. Where there is none, and for one that this nvcc does not know yet, the program also holds
# PTX, from which the driver compiles for GPUs that came later.
GPUS := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -E '^[0-9.]+$$' | tr -d . | sort -u | sed s/^/sm_/)
GPU_NAMES := $(if $(GPUS),$(shell nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | sort | uniq -c | sed 's/^ *//; s/ / x /'))
GPU_ARCH ?= $(or $(GPUS),sm_80 sm_90 sm_120)
ASKED_ARCHS := $(patsubst native,$(GPUS),$(GPU_ARCH))
KNOWN_ARCHS := $(if $(NVCC),$(shell $(NVCC) --list-gpu-code 2>/dev/null))
ARCHS := $(if $(KNOWN_ARCHS),$(filter $(KNOWN_ARCHS),$(ASKED_ARCHS)),$(ASKED_ARCHS))
UNKNOWN_ARCHS := $(filter-out $(ARCHS),$(ASKED_ARCHS))
PTX := $(if $(or $(UNKNOWN_ARCHS),$(if $(GPUS),,$(filter file,$(origin GPU_ARCH)))),$(lastword $(filter 80 90,$(patsubst sm_%,%,$(or $(KNOWN_ARCHS),sm_90)))))
GENCODE := $(foreach a,$(patsubst sm_%,%,$(ARCHS)),-gencode arch=compute_$(a),code=sm_$(a)) $(if $(PTX),-gencode arch=compute_$(PTX)$(comma)code=compute_$(PTX))
endif

RANKS := $(and $(NCCL_H),$(MPICXX),yes)
ONE_GPU := $(if $(and $(RANKS),$(NCCL)),,-DNO_MPI -DNO_NCCL)
NCCL_INCLUDE := $(if $(filter-out $(CUDA_HEADERS)/ /usr/include/,$(dir $(NCCL_H))),-I$(dir $(NCCL_H)))
# dev/bench/gpu_check.sh --carry puts a cJSON there for machines that have none
CJSON_FLAGS := $(if $(CJSON),-lcjson,$(if $(wildcard $(BUILD)/cjson),-I$(BUILD)/cjson -L$(BUILD)/cjson -lcjson))
CJSON_RPATH := $(if $(CJSON),,$(if $(CJSON_FLAGS),-Xlinker -rpath=$(CURDIR)/$(BUILD)/cjson))
HOST_FLAGS := -Wall,-Wextra,$(or $(OPENMP),-Wno-unknown-pragmas)
NVCC_FLAGS := -std=c++17 -O3 -lineinfo $(GENCODE) -I. $(TEXT_FLAGS) -DOMPI_SKIP_MPICXX -Xcompiler $(HOST_FLAGS) $(CUDA_FLAGS)
GPU_LIBS := $(call link_lib,$(CUBLASLT)) -L$(CUDA)/lib $(CJSON_FLAGS) $(CJSON_RPATH) $(TEXT_LIBS) -lm -lpthread
NVCC_RANKS := $(if $(ONE_GPU),$(ONE_GPU),-ccbin $(MPICXX) $(NCCL_INCLUDE)) # MPI's own compiler wrapper knows where MPI is
ifdef USE_CUDNN
  NVCC_FLAGS += -DUSE_CUDNN
  CUDNN_OBJECT := $(BUILD)/cudnn_attention.o
  CUDNN_LIBS := $(call link_lib,$(CUDNN)) $(call link_lib,$(call find_lib,nvrtc,$(wheel_cudnn)/nvidia/cu13/lib)) -ldl
endif
TRAINER_LIBS := $(if $(ONE_GPU),,$(call link_lib,$(NCCL))) $(CUDNN_LIBS) $(GPU_LIBS)
EMU := $(wildcard dev/emu/*.cpp dev/emu/*.h dev/emu/*.py dev/emu/emucc dev/emu/include/*)
EMU_HEADERS := $(if $(CUDA_HEADERS),,$(BUILD)/cuda-wheels/done)
EMU_RANKS := $(if $(or $(RANKS),$(and $(EMU_HEADERS),$(MPICXX))),$(NCCL_INCLUDE),-DNO_MPI -DNO_NCCL)
EMU_LIBS := $(CJSON_FLAGS) $(TEXT_FLAGS) $(TEXT_LIBS) $(EMU_FLAGS)
$(eval $(call stamp,flags_gpu,$(NVCC) $(NVCC_FLAGS) $(NVCC_RANKS) $(TRAINER_LIBS)))
$(eval $(call stamp,flags_emu,$(EMU_RANKS) $(EMU_LIBS)))

found-gpu:
	@echo "$(if $(NVCC),✓ $(NVCC),✗ nvcc: no (install the CUDA Toolkit$(comma) set CUDA_HOME$(comma) or make deps-cuda; without a GPU: make train_moe_emu))"
	@echo "$(if $(CUBLASLT),✓ cuBLASLt $(CUBLASLT),✗ cuBLASLt: no (part of the CUDA Toolkit; make deps-cuda brings it))"
	@echo "$(if $(NO_NCCL),- NCCL: left out (NO_NCCL),$(if $(and $(NCCL),$(NCCL_H)),✓ NCCL $(NCCL),✗ NCCL: no (one GPU only; make deps-cuda brings it)))"
	@echo "$(if $(NO_MPI),- MPI: left out (NO_MPI),$(if $(MPICXX),✓ MPI $(MPICXX),✗ MPI: no (one GPU only; make deps installs Open MPI)))"
	@echo "$(if $(USE_CUDNN),$(if $(and $(CUDNN),$(CUDNN_H),$(CUDNN_FRONTEND_H)),✓ cuDNN $(CUDNN),✗ cuDNN: its library or cudnn_frontend.h is missing (make deps-cudnn)),- cuDNN: not asked for (USE_CUDNN=1))"
	@echo "$(if $(CJSON_FLAGS),✓ cJSON,✗ cJSON: no (needed; make deps installs it))"
	@echo "$(if $(GPU_NAMES),✓ GPU: $(GPU_NAMES),✗ GPU: none here); building for $(ARCHS)$(if $(PTX), and PTX (compute_$(PTX)) for newer ones)"
	@$(if $(UNKNOWN_ARCHS),echo "  this nvcc does not know $(UNKNOWN_ARCHS): left to the PTX")
	@$(if $(and $(NVCC),$(CUBLASLT),$(CJSON_FLAGS),$(or $(if $(USE_CUDNN),,yes),$(and $(CUDNN),$(CUDNN_H),$(CUDNN_FRONTEND_H)))),true,echo "what has a ✗ and is needed is missing" >&2; exit 1)

found-emu:
	@echo "$(if $(CUDA_HEADERS),✓ CUDA's headers $(CUDA_HEADERS),- CUDA's headers: fetched from PyPI)"
	@echo "$(if $(OPENBLAS),✓ OpenBLAS (stands in for cuBLAS),✗ OpenBLAS: no (needed; make test-deps installs it))"
	@echo "$(if $(NO_MPI)$(NO_NCCL),- MPI: left out$(comma) one rank only,$(if $(filter -DNO_MPI,$(EMU_RANKS)),✗ NCCL's header or MPI: no (one rank only; make test-deps installs MPI),✓ MPI $(MPICXX) (stands in for NCCL)))"

train_moe: train_moe.cu $(HEADERS) $(CUDNN_OBJECT) $(BUILD)/flags_gpu | found-gpu
	$(NVCC) $(NVCC_FLAGS) $(NVCC_RANKS) $< $(CUDNN_OBJECT) -o $@ $(TRAINER_LIBS)

$(BUILD)/test_moe: test_moe.cu train_moe.cu train_moe_cpu.c $(HEADERS) $(CUDNN_OBJECT) $(BUILD)/flags_gpu | found-gpu
	$(NVCC) $(NVCC_FLAGS) $(NVCC_RANKS) $< $(CUDNN_OBJECT) -o $@ $(TRAINER_LIBS)

$(BUILD)/cudnn_attention.o: llmc/cudnn_attention.cpp $(HEADERS) $(BUILD)/flags_gpu | found-gpu
	$(CXX) -std=c++17 -O2 -Wall -Wextra -Wno-unused-variable -I. $(addprefix -isystem ,$(CUDA_HEADERS) $(dir $(CUDNN_H) $(CUDNN_FRONTEND_H))) -c $< -o $@

train_moe_emu: train_moe.cu $(HEADERS) $(EMU) $(BUILD)/flags_emu | found-emu $(EMU_HEADERS)
	dev/emu/emucc $(EMU_RANKS) -I. -o $@ $< $(EMU_LIBS)

$(BUILD)/test_moe_emu: test_moe.cu train_moe.cu train_moe_cpu.c $(HEADERS) $(EMU) $(BUILD)/flags_emu | found-emu $(EMU_HEADERS)
	dev/emu/emucc $(EMU_RANKS) -I. -o $@ $< $(EMU_LIBS)

# on a GPU, or in the emulator: the same test
test_moe test_moe_emu: %: $(BUILD)/%
	@$< $(ONLY)

# A kernel file alone, as in make build/dev/attention_forward: with nvcc where there is a GPU, else for the emulator with
# its checker and counters (EMU_FLAGS=--fast: without, for large shapes)
ifneq ($(and $(NVCC),$(GPUS)),)
DEV_HEADERS := # nvcc finds its own
dev_build = $(NVCC) $(NVCC_FLAGS) $(dev_ranks) $< -o $@ $(dev_cudnn) $(call link_lib,$(call find_lib,cublas,)) $(GPU_LIBS)
$(BUILD)/dev/nccl_all_reduce: dev_ranks = $(NVCC_RANKS) $(call link_lib,$(NCCL))
$(BUILD)/dev/attention_forward $(BUILD)/dev/attention_backward: dev_cudnn = $(CUDNN_OBJECT) $(CUDNN_LIBS)
$(BUILD)/dev/attention_forward $(BUILD)/dev/attention_backward: $(CUDNN_OBJECT)
else
DEV_HEADERS := $(EMU_HEADERS)
dev_build = dev/emu/emucc --check $(NCCL_INCLUDE) -I. -o $@ $< $(EMU_LIBS)
endif
DEV_NEEDS := $(wildcard dev/cuda/*.h) train_moe_cpu.c $(HEADERS) $(EMU) $(BUILD)/flags_gpu $(BUILD)/flags_emu
$(BUILD)/dev/%: dev/cuda/%.cu $(DEV_NEEDS) | $(DEV_HEADERS)
	@mkdir -p $(BUILD)/dev
	$(dev_build)

# for dev/bench/gpu_check.sh
$(BUILD)/peaks: dev/bench/peaks.cu $(DEV_NEEDS) | $(DEV_HEADERS)
	$(dev_build)

$(BUILD)/make_shard: dev/bench/make_shard.c llmc/check.h llmc/rand.h $(BUILD)/flags
	$(CC) $(CFLAGS) $(C_FLAGS) $< -o $@ -lm $(LDFLAGS)

bench: $(PYTHON)
	@$(PYTHON) dev/bench/bench_cuda.py $(ONLY)

# nvcc, cuBLASLt and NCCL from PyPI, for a machine that has NVIDIA's driver but no CUDA Toolkit
deps-cuda: $(PYTHON)
	$(BUILD)/venv/bin/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(BUILD)/cuda-wheels -r dev/requirements-cuda.txt
	@touch $(BUILD)/cuda-wheels/done

# cuDNN and the headers it is used through
deps-cudnn: $(PYTHON)
	$(BUILD)/venv/bin/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(BUILD)/cudnn-wheels nvidia-cudnn-cu13 nvidia-cudnn-frontend==1.32.0 nvidia-cuda-nvrtc

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
	@CC="$(CC)" PYTHON=$(PYTHON) OPENMP="$(OPENMP_FLAGS)" GEMM_FLAGS="$(GEMM_FLAGS)" GEMM_LIBS="$(GEMM_LIBS)" TEXT_FLAGS="$(TEXT_FLAGS)" TEXT_LIBS="$(TEXT_LIBS)" dev/test/run.sh $(ONLY)

test-long: test-deps all
	@CC="$(CC)" PYTHON=$(PYTHON) OPENMP="$(OPENMP_FLAGS)" GEMM_FLAGS="$(GEMM_FLAGS)" GEMM_LIBS="$(GEMM_LIBS)" TEXT_FLAGS="$(TEXT_FLAGS)" TEXT_LIBS="$(TEXT_LIBS)" dev/test/run.sh --long $(ONLY)

test-hf: all
	@dev/test/hf/run.sh

bench-cpu: all $(BUILD)/bench_cpu
	@$(BUILD)/bench_cpu $(SIZES)
	@HF_PYTHON=$(HF_PYTHON) python3 dev/bench/compare_cpu.py $(SIZES) $(BENCH)

$(BUILD)/bench_cpu: dev/bench/bench_cpu.c dev/bench/turns.h train_moe_cpu.c $(HEADERS) $(BUILD)/flags
	@mkdir -p $(BUILD)
	$(CC) $(CFLAGS) $(C_FLAGS) $(GEMM_FLAGS) $< -o $@ $(GEMM_LIBS) $(LIBS) $(LDFLAGS)

# an operation of the CPU trainer alone, as in make build/dev_cpu/attention; all of them, timed
$(BUILD)/dev_cpu/%: dev/cpu/%.c dev/cpu/common.h dev/bench/turns.h train_moe_cpu.c $(HEADERS) $(BUILD)/flags
	@mkdir -p $(BUILD)/dev_cpu
	$(CC) $(CFLAGS) $(C_FLAGS) $(GEMM_FLAGS) $< -o $@ $(GEMM_LIBS) $(LIBS) $(LDFLAGS)

bench-cpu-ops: found
	@CC="$(CC)" python3 dev/bench/bench_cpu_ops.py $(ONLY)

# the ladder (dev/bench/ladder.py): what each switch brings on this machine. TRAINER=cpu|gpu|emu MODEL=demo MINUTES=10 AGAINST=old.json
ladder: deps
	@$(MAKE) --no-print-directory run-ladder

run-ladder: all
	@python3 dev/bench/ladder.py $(if $(TRAINER),--trainer $(TRAINER)) $(if $(MODEL),--model $(MODEL)) \
	    $(if $(MINUTES),--minutes $(MINUTES)) $(if $(AGAINST),--against $(AGAINST)) $(LADDER)

# numpy, safetensors (tests) and matplotlib (plots), apart from the system's Python
$(PYTHON): dev/requirements.txt
	python3 -m venv $(BUILD)/venv
	$(BUILD)/venv/bin/pip install --quiet --disable-pip-version-check -r dev/requirements.txt
	@touch $@

deps:
	@dev/deps.sh

clean:
	rm -rf $(BUILD) train_moe_cpu train_moe train_moe_emu

help:
	@grep -E '^# make' Makefile
	@echo "# make test_moe          tests train_moe.cu on the GPU that is here        make test_moe_emu   the same in the emulator"
	@echo "# make build/dev/NAME    one file of dev/cuda: on a GPU if there is one, else in the emulator       make bench   times them all"
	@echo "# make build/dev_cpu/NAME    one file of dev/cpu: an operation of train_moe_cpu                    make bench-cpu-ops   times them all"
	@echo "# make deps    installs the libraries (apt, as root or with sudo), or says which ones are missing"
	@echo "# make deps-cuda (nvcc, cuBLAS, NCCL from PyPI), make deps-cudnn (for USE_CUDNN=1)"
	@echo "# make test-long, make test-hf (needs torch and transformers), make bench-cpu, make clean"
	@echo "# make ladder  what each speed switch brings on this machine, ten minutes (TRAINER=cpu|gpu|emu MODEL=NAME MINUTES=N AGAINST=OLD.json)"
