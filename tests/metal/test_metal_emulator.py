"""The Metal emulator itself: what a shader sees, and that each of its checks can fail."""

import dataclasses
import struct
import threading
import time

import metal_emulator
import pytest
import torch
from metal_emulator import Argument, Job, MetalError, toolchain

pytestmark = pytest.mark.skipif(bool(metal_emulator.why_not()), reason=metal_emulator.why_not())

SHADER = """
#include <metal_stdlib>
using namespace metal;

[[kernel]] void positions(device uint* out [[buffer(0)]],
    uint2 grid [[thread_position_in_grid]], uint2 size [[threads_per_grid]],
    uint2 group [[threadgroup_position_in_grid]], uint2 in_group [[thread_position_in_threadgroup]],
    uint2 threads [[threads_per_threadgroup]], uint index [[thread_index_in_threadgroup]]) {
  const uint at = grid.y * size.x + grid.x;
  out[4 * at] = group.y * 100 + group.x;
  out[4 * at + 1] = in_group.y * 100 + in_group.x;
  out[4 * at + 2] = threads.y * 100 + threads.x;
  out[4 * at + 3] = index;
}

[[kernel]] void simd(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
    uint i [[thread_index_in_threadgroup]]) {
  device float* row = out + i * 9;
  row[0] = simd_sum(x[i]);
  row[1] = simd_max(x[i]);
  row[2] = simd_min(x[i]);
  row[3] = simd_prefix_inclusive_sum(x[i]);
  row[4] = simd_prefix_exclusive_sum(x[i]);
  row[5] = simd_shuffle_xor(x[i], 1);
  row[6] = simd_shuffle_down(x[i], 3);
  row[7] = simd_broadcast(x[i], 5);
  row[8] = simd_any(x[i] > 2.0f) ? 1.0f : 0.0f;
}

template <typename T>
[[kernel]] void product(device const T* a [[buffer(0)]], device const T* b [[buffer(1)]],
    device float* out [[buffer(2)]]) {
  simdgroup_matrix<T, 8, 8> left, right;
  simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (uint k = 0; k < 16; k += 8) {
    simdgroup_load(left, a + k, 16);
    simdgroup_load(right, b + k, 16, ulong2(0, 0), true);
    simdgroup_multiply_accumulate(sum, left, right, sum);
  }
  simdgroup_store(sum, out, 8);
}
#define PRODUCT(T) template [[host_name("product_" #T)]] [[kernel]] decltype(product<T>) product<T>;
PRODUCT(float)
PRODUCT(half)
template [[host_name("product_bfloat")]] [[kernel]] void product<bfloat>(
    device const bfloat*, device const bfloat*, device float*);

struct Scale { float factor; int power; };
[[kernel]] void arithmetic(device const float* x [[buffer(0)]], device half* h [[buffer(1)]],
    device bfloat* b [[buffer(2)]], constant Scale& scale [[buffer(3)]], uint i [[thread_position_in_grid]]) {
  h[i] = half(x[i]) * half(scale.factor) + half(scale.power);
  b[i] = bfloat(x[i]);
}

[[kernel]] void counting(device atomic_uint* total [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  atomic_fetch_add_explicit(total, i, memory_order_relaxed);
}

[[kernel]] void unwritten(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float a[64];
  out[i] = a[i];
}

[[kernel]] void divergent(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  if (i < 16) out[i] = simd_sum(1.0f);
  else out[i] = simd_max(1.0f);
}

[[kernel]] void neighbour(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  threadgroup float shared[64];
  shared[i] = float(i);
  ORDER;
  out[i] = shared[(i + 1) % threads];
}

[[kernel]] void same_place(device float* out [[buffer(0)]], uint group [[threadgroup_position_in_grid]]) {
  out[group / 2] = 1.0f;
}
"""
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup)"


def shader(order: str = BARRIER) -> str:
    return SHADER.replace("ORDER", order)


def run(kernel, *arguments, grid, group, seed=0, order=BARRIER, sanitizer="none"):
    def of(a):
        if isinstance(a, bytes):
            return Argument.value(a)
        return Argument.tensor(a.contiguous().view(torch.uint8).numpy().tobytes(), a.element_size())

    pad = lambda size: (*size, 1, 1)[:3]  # noqa: E731
    job = Job(shader(order), kernel, pad(grid), pad(group), tuple(map(of, arguments)))
    replay = job.replay(sanitizer, seed)
    results = [
        torch.frombuffer(bytearray(data), dtype=a.dtype).view(a.shape)
        for a, data in zip(arguments, replay.buffers)
        if data and isinstance(a, torch.Tensor)
    ]
    return replay, results


def test_positions_in_a_grid_that_the_groups_do_not_divide():
    _, (out,) = run("positions", torch.zeros(5, 7, 4, dtype=torch.int32), grid=(7, 5), group=(4, 2))
    for y in range(5):
        for x in range(7):
            width, height = min(4, 7 - x // 4 * 4), min(2, 5 - y // 2 * 2)
            want = [y // 2 * 100 + x // 4, y % 2 * 100 + x % 4, height * 100 + width, y % 2 * width + x % 4]
            assert out[y, x].tolist() == want


@pytest.mark.parametrize("seed", range(4))
def test_simdgroup_functions(seed):
    x = torch.randint(-3, 9, (40,)).float()
    _, (_, out) = run("simd", x, torch.full((40, 9), torch.nan), grid=(40,), group=(40,), seed=seed)
    for first in (0, 32):
        lanes, got = x[first : first + 32], out[first : first + 32]
        n = len(lanes)
        down = torch.tensor([lanes[i + 3] if i + 3 < n else lanes[i] for i in range(n)])
        every = torch.tensor([lanes.sum(), lanes.max(), lanes.min()]).expand(n, 3)
        sums = lanes.cumsum(0)
        swapped = lanes.view(-1, 2).flip(1).flatten()
        rest = torch.tensor([lanes[5], float((lanes > 2).any())]).expand(n, 2)
        want = [every, sums[:, None], (sums - lanes)[:, None], swapped[:, None], down[:, None], rest]
        assert torch.equal(got, torch.cat(want, 1))


@pytest.mark.parametrize("name,dtype", [("float", torch.float32), ("half", torch.float16), ("bfloat", torch.bfloat16)])
def test_simdgroup_matrices(name, dtype):
    a, b = (torch.randint(-4, 5, (8, 16)).to(dtype) for _ in range(2))
    _, (_, _, out) = run(f"product_{name}", a, b, torch.full((8, 8), torch.nan), grid=(32,), group=(32,), seed=3)
    assert torch.equal(out, a.float() @ b.float().T)


def test_half_and_bfloat_round_at_every_step():
    x = torch.tensor([1.001, 3.3333, -7.77, 65519.0, 1e-8, torch.inf, torch.nan, 1.00390625, 1.01171875])
    out = [torch.zeros(9, dtype=t) for t in (torch.float16, torch.bfloat16)]
    _, (_, h, b) = run("arithmetic", x, *out, struct.pack("<fi", 1.3, 5), grid=(9,), group=(9,))
    want = x.half() * torch.tensor(1.3).half() + torch.tensor(5.0).half()
    assert torch.equal(h.nan_to_num(77), want.nan_to_num(77))
    assert torch.equal(b.nan_to_num(77), x.bfloat16().nan_to_num(77))


def test_atomics():
    _, (total,) = run("counting", torch.zeros(1, dtype=torch.int32), grid=(100,), group=(32,), seed=2)
    assert total.item() == sum(range(100))


def test_threadgroup_memory_starts_as_nan():
    _, (out,) = run("unwritten", torch.zeros(128), grid=(128,), group=(64,))
    assert out[:64].isnan().all()


def test_divergent_simd_operations_are_refused():
    replay, _ = run("divergent", torch.zeros(32), grid=(32,), group=(32,))
    assert replay.status == 3 and "different simd operations" in replay.report


@pytest.mark.parametrize(
    "order,threads,ordered",
    [
        (BARRIER, 64, True),
        ("simdgroup_barrier(mem_flags::mem_threadgroup)", 32, True),
        ("simdgroup_barrier(mem_flags::mem_threadgroup)", 64, False),
        ("threadgroup_barrier(mem_flags::mem_none)", 64, False),
        ("simd_sum(1.0f)", 32, False),
    ],
)
def test_what_orders_memory(order, threads, ordered):
    """Barriers do, each within its scope; simd operations do not."""
    if reason := metal_emulator.why_not_sanitizer("thread"):
        pytest.skip(reason)
    replay, (out,) = run(
        "neighbour", torch.zeros(threads), grid=(threads,), group=(threads,), order=order, sanitizer="thread"
    )
    assert ("data race" in replay.report) != ordered and (replay.status == 0) == ordered
    if ordered:
        assert torch.equal(out, (torch.arange(threads) + 1.0) % threads)


def test_threadgroups_are_not_ordered():
    if reason := metal_emulator.why_not_sanitizer("thread"):
        pytest.skip(reason)
    alone, _ = run("same_place", torch.zeros(1), grid=(1,), group=(1,), sanitizer="thread")
    two, _ = run("same_place", torch.zeros(1), grid=(2,), group=(1,), sanitizer="thread")
    assert alone.status == 0 and "data race" in two.report


@pytest.mark.parametrize(
    "change,text",
    [
        (lambda j: dataclasses.replace(j, kernel="nothing"), "no kernel nothing"),
        (lambda j: dataclasses.replace(j, arguments=j.arguments[:3]), r"buffer(3) was not set"),
        (lambda j: dataclasses.replace(j, arguments=(*j.arguments, j.arguments[0])), "no buffer(4)"),
        (lambda j: with_argument(j, 1, Argument.tensor(bytes(36), 4)), "4-byte elements; the kernel's have 2"),
        (lambda j: with_argument(j, 3, Argument.value(bytes(4))), "4 bytes; the kernel reads a struct of 8"),
        (lambda j: dataclasses.replace(j, group=(1025, 1, 1)), "1025 threads per threadgroup"),
    ],
)
def test_wrong_launches_are_refused(change, text):
    buffers = [Argument.tensor(bytes(9 * size), size) for size in (4, 2, 2)]
    job = Job(shader(), "arithmetic", (9, 1, 1), (9, 1, 1), (*buffers, Argument.value(bytes(8))))
    assert job.replay("none").status == 0
    replay = change(job).replay("none")
    assert replay.status == 3 and text in replay.report


def with_argument(job, index, argument):
    return dataclasses.replace(job, arguments=(*job.arguments[:index], argument, *job.arguments[index + 1 :]))


HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
KERNEL = HEAD + "[[kernel]] void k(device float* out [[buffer(0)]]) {{ {} }}\n"
STRAY = 'template [[host_name("x")]] [[kernel]] void f<float>(device float*);'


@pytest.mark.parametrize(
    "source,text",
    [
        ("[[kernel]] void k(device float* x [[buffer(0)]]) {}", "does not include <metal_stdlib>"),
        (KERNEL.format("threadgroup float a[2], b[2];"), "not understood"),
        (KERNEL.format("threadgroup float a[2] = {1, 2};"), "not understood"),
        (KERNEL.format("").replace(" [[buffer(0)]]", ""), "exactly one attribute"),
        (KERNEL.format("").replace("[[buffer(0)]]", "[[thread_number]]"), r"unknown attribute \[\[thread_number\]\]"),
        (KERNEL.format("").replace("device float* out [[buffer(0)]]", "threadgroup float* s [[threadgroup(0)]]"),
         "static arrays"),
        (KERNEL.format("").replace("[[buffer(0)]]", "[[buffer(0)]], device int* y [[buffer(0)]]"), "taken twice"),
        ("#include <metal_stdlib>\n", "no kernel"),
        (KERNEL.format("") + STRAY, "no kernel template"),
        (KERNEL.format("") + KERNEL.format("").removeprefix(HEAD), "kernels of one name"),
    ],
)  # fmt: skip
def test_what_the_pass_does_not_understand_is_an_error(source, text):
    with pytest.raises(MetalError, match=text):
        metal_emulator.translated(source)


@pytest.mark.parametrize("body", ["double x = 1; out[0] = x;", "out = new float[1];", "out[0] = exp(1);", "throw 1;"])
def test_what_metal_lacks_does_not_compile(body):
    with pytest.raises(metal_emulator.CompileError):
        metal_emulator.library(KERNEL.format(body))


@pytest.mark.parametrize(
    "body,text",
    [
        ("threadgroup float a[2]; device float* p = a; p[0] = 1;", "of type 'device float *'"),
        ("threadgroup float* p = out; p[0] = 1;", "of type 'device float *'"),
        ("float a[2]; device float* p = a; p[0] = 1;", "of type 'float[2]'"),
        ('constexpr auto f = [] { return 1; }; static_assert(f() == 1, "");', "non-literal type"),
    ],
)
def test_the_lint_can_fail(body, text):
    assert metal_emulator.lint(KERNEL.format("threadgroup float a[2]; a[0] = out[0]; out[1] = a[0];")) == ""
    assert text in metal_emulator.lint(KERNEL.format(body))


def test_what_is_missing_is_named(monkeypatch):
    """Instead of a failure somewhere later."""
    monkeypatch.setattr(toolchain, "clang", lambda: None)
    assert "apt-get install clang-19" in toolchain.why_not.__wrapped__()
    monkeypatch.setattr(toolchain.platform, "machine", lambda: "riscv64")
    assert "not on riscv64" in toolchain.why_not.__wrapped__()
    monkeypatch.setattr(toolchain.platform, "system", lambda: "Darwin")
    assert "runs on Linux" in toolchain.why_not.__wrapped__()


def test_two_processes_compile_a_file_once(monkeypatch, tmp_path):
    """A lock is held per open file, so two threads stand for two processes."""
    made = []

    def slow(arguments, text):
        made.append(text)
        time.sleep(0.2)
        open(arguments[-1], "w").close()

    monkeypatch.setattr(toolchain, "run_clang", slow)
    monkeypatch.setattr(toolchain, "CACHE", tmp_path)
    threads = [threading.Thread(target=toolchain.compiled, args=("x", [], [], "text")) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert made == ["text"]
