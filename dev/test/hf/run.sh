#!/bin/sh
# make test-hf: runs test_hf.py and compare_bf16.py with a Python that has torch and transformers: $HF_PYTHON, python3 or
# build/venv-hf. Where none has them it says how to get them; it installs nothing, torch alone is a gigabyte.
cd "$(dirname "$0")/../../.." || exit 1
for python in "$HF_PYTHON" python3 build/venv-hf/bin/python; do
    if [ -n "$python" ] && "$python" -c 'import torch, transformers, safetensors, numpy' 2>/dev/null; then
        if [ $# -gt 0 ]; then
            exec "$python" dev/test/hf/test_hf.py "$@"
        fi
        failed=0
        "$python" dev/test/hf/test_hf.py || failed=1
        case $("$python" -c 'import transformers; print(transformers.__version__)') in
        4.*) echo "compare_bf16.py is left out: it needs transformers 5" ;;
        *)
            "$python" dev/test/hf/compare_bf16.py --trainer ./train_moe_cpu --options "--precision bf16" dev/test/goldens/*/ || failed=1
            gpu=train_moe_emu
            if nvidia-smi -L >/dev/null 2>&1; then gpu=train_moe; fi
            if [ -x $gpu ]; then
                "$python" dev/test/hf/compare_bf16.py --trainer ./$gpu dev/test/goldens/*/ || failed=1
            fi ;;
        esac
        exit $failed
    fi
done
echo "make test-hf: no Python here has torch, transformers, safetensors and numpy: python3 -m venv build/venv-hf &&" \
     "build/venv-hf/bin/pip install torch transformers safetensors numpy (or name one: make test-hf HF_PYTHON=...)" >&2
exit 1
