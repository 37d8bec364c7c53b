#!/bin/sh
# make test-hf: runs test_hf.py with a Python that has torch and transformers: $HF_PYTHON, python3 or build/venv-hf.
# Where none has them it says how to get them; it installs nothing, torch alone is a gigabyte.
cd "$(dirname "$0")/../../.." || exit 1
for python in "$HF_PYTHON" python3 build/venv-hf/bin/python; do
    if [ -n "$python" ] && "$python" -c 'import torch, transformers, safetensors, numpy' 2>/dev/null; then
        exec "$python" dev/test/hf/test_hf.py "$@"
    fi
done
echo "make test-hf: no Python here has torch, transformers, safetensors and numpy: python3 -m venv build/venv-hf &&" \
     "build/venv-hf/bin/pip install torch transformers safetensors numpy (or name one: make test-hf HF_PYTHON=...)" >&2
exit 1
