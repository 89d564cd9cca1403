# The XLA tests: torch_xla on the CPU, in an environment of its own. Linux on x86-64, gcc; 2.2 GB, about 2 minutes.
TPU_VENV := .venv-tpu
TPU_BIN := $(TPU_VENV)/bin

.PHONY: tpu-env test-tpu

$(TPU_VENV)/ready.stamp: tools/tpu.mk tools/tpu_requirements.txt tools/cuda_stubs.py
	$(PYTHON) -m venv --clear $(TPU_VENV)
	$(TPU_BIN)/pip install -q -r tools/tpu_requirements.txt
	$(TPU_BIN)/pip install -q --no-deps torch==2.9.1 torch_xla==2.9.0
	$(TPU_BIN)/python tools/cuda_stubs.py "$$($(TPU_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	$(TPU_BIN)/python -c "import torch, torch_xla; assert not torch.cuda.is_available()"
	@touch $@

tpu-env: $(TPU_VENV)/ready.stamp

# XLA's own optimisations, but not LLVM's, which take most of the time to compile what then runs once.
test-tpu: $(TPU_VENV)/ready.stamp
	PJRT_DEVICE=CPU XLA_FLAGS=--xla_backend_optimization_level=0 $(TPU_BIN)/python -m pytest -m "xla and not slow" tests/tpu tests/test_conformance.py
