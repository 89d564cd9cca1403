"""The adapters' kernels compile for GPUs that are not here, within the shared memory of the smallest."""

import pytest
import support

pytest.importorskip("triton")
ROOM = 99 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    "call",
    ["bfloat16 float32 16", "bfloat16 float32 64", "bfloat16 bfloat16 64", "float16 float32 5", "float32 float32 256"],
)
def test_kernels_compile_within_shared_memory(call, capability):
    shared = [(name, int(size)) for name, size, _ in support.compiled("compile_lora.py", capability, *call.split())]
    adapters = {"down", "down_each", "up", "up_each", "up_alone", "up_each_alone", "grads"}
    assert adapters | {"rescale_fwd", "rescale_bwd"} == {name for name, _ in shared}
    assert max(size for _, size in shared) <= ROOM, shared
