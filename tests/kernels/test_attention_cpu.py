"""Attention on the CPU: every option against the spec, the memory it takes, the keys that it does not visit."""

import collections
import itertools
import os
import signal
import threading
from unittest import mock

import pytest
import support
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from riftco.functional import attention
from riftco.kernels._check import inputs_of
from riftco.kernels.attention import cases, cpu, cpu_blocks, cpu_plain, cpu_products, philox, spec

CPU = support.DEVICES[0]
MODULE = "riftco.kernels.attention.cpu"


@pytest.fixture(autouse=True)
def blocks(request, monkeypatch):
    """What this file tests, whatever PyTorch's own kernel would take from them."""
    if "plain" not in request.function.__name__:
        monkeypatch.setattr(cpu_plain, "MOST", 0)


def test_plain_calls_are_as_the_blocks_compute_them(monkeypatch):
    """Of grouped heads, strided and contiguous, full and causal: out, lse and gradients; options take the blocks."""
    for right, T in ((None, 70), (0, 90), (1 << 40, 70), (0, 1)):
        tensors = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv(T, 90, H=6, K=2, D=16, B=2)]
        for made in (tensors, [t.mT.contiguous().mT for t in tensors]):
            runs = []
            for most in (128, 0):
                monkeypatch.setattr(cpu_plain, "MOST", most)
                options = (*(None,) * 8, right, 0.0, 0.0)
                out, lse = cpu.forward(*made, *options)
                d_out = torch.sin(out)
                grads = cpu.backward(d_out, None, *made, out, lse, *options, 0, False, True, True, True, False, False)
                runs.append((out, lse, *grads[:3], grads[5]))
            for plain, blocks in zip(*runs):
                assert plain.is_contiguous() and plain.shape == blocks.shape
                torch.testing.assert_close(plain, blocks, rtol=1e-5, atol=1e-5)


def test_what_is_not_plain():
    q, k, v = qkv(5, 5)
    none = (*(None,) * 6, 0.0)
    for right, left in ((None, None), (0, None), (0, 4), (4, None), (9, 9)):
        assert not cpu_plain.why_not(q, k, v, None, left, right, *none)
    refused = [
        ((q[:, :4], k, v, None, 0, *none), "as many rows"), ((q, k, v, 3, None, *none), "full or causal"),
        ((q, k, v, None, 1, *none), "full or causal"), ((q, k, v, None, None, k), "plain"),
        ((q, k, v, None, None, 0.5), "plain"), ((q[:0], k, v, None, None), "empty"),
        ((q[0], k[0], v[0], None, None), "batches"), ((q, k, v[..., :4], None, None), "head dims"),
        ((*(t.bfloat16() for t in (q, k, v)), None, None), "float32"),
    ]  # fmt: skip
    for given, why in refused:
        assert why in cpu_plain.why_not(*given[:3], 1.0, *given[3:])


def plain_and_spec(q, k, v, scale, right):
    """out, lse, d_q, d_k and d_v of both."""
    options, runs = (*(None,) * 6, scale, None, right, 0.0, 0.0), []
    for module in (cpu, spec):
        out, lse = module.forward(q, k, v, *options)
        d_out = torch.ones_like(out)
        grads = module.backward(d_out, None, q, k, v, out, lse, *options, 0, False, True, True, True, False, False)
        runs.append((out, lse, *grads[:3]))
    return zip(*runs)


@pytest.mark.parametrize("scale", [0.0, -0.7, 1e-60])
@pytest.mark.parametrize("right", [None, 0])
def test_scales_of_plain_calls_that_are_not_positive(scale, right):
    """0 and -0.7 times the -inf of a hidden score."""
    for made, want in plain_and_spec(*qkv(20, 20), scale, right):
        torch.testing.assert_close(made, want, rtol=1e-5, atol=1e-5)


def test_plain_queries_that_overlap():
    """Rows one element apart, fewer than the head dim: what `unfold` gives."""
    _, k, v = qkv(5, 5, D=16)
    q = torch.randn(1, 20).unfold(1, 16, 1).unsqueeze(2)
    for made, want in plain_and_spec(q, k, v, None, None):
        torch.testing.assert_close(made, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("T", [3, 20])
@pytest.mark.parametrize("what", ["nan query", "inf query", "nan keys", "-inf keys", "nan in the first key"])
def test_rows_without_a_number_among_their_plain_scores(T, what):
    """NaN must not become 0; rows whose keys are all hidden give 0, lse -inf and no gradient."""
    q, k, v = qkv(T, T)
    q = q.abs()
    if "query" in what:
        q[:, 1] = float(what.split()[0])
    else:
        (k[:, :1] if "first" in what else k).fill_(float(what.split()[0]))
    for made, want in itertools.islice(plain_and_spec(q, k, v, None, 0), 2 if "nan" in what else 4):
        torch.testing.assert_close(made, want, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_zeros_for_lse_are_no_reason_to_leave_plain_calls():
    """Compiled graphs pass zeros for a result that nobody used."""
    q, k, v = qkv(5, 5)
    options = (*(None,) * 8, 0, 0.0, 0.0)
    out, lse = cpu.forward(q, k, v, *options)
    grads = [
        cpu.backward(out, d, q, k, v, out, lse, *options, 0, False, True, True, True, False, False)[0]
        for d in (None, torch.zeros_like(lse), torch.ones_like(lse))
    ]
    assert torch.equal(grads[0], grads[1]) and not torch.equal(grads[0], grads[2])


@pytest.mark.parametrize("case", cases.OPTION_CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_options_over_several_blocks(case, dtype, monkeypatch):
    monkeypatch.setattr(cpu_blocks, "KEYS", 16)
    support.check_case(cases, case, dtype, CPU)


@pytest.mark.parametrize("D,H,K,S,T", [(128, 8, 2, 512, 64), (64, 4, 2, 300, 37), (256, 16, 4, 2048, 256)])
@pytest.mark.parametrize("dtype,bound", [(torch.float32, 5e-13), (torch.bfloat16, 1e-5)], ids=str)
def test_nmse(dtype, bound, D, H, K, S, T):
    """Beside the spec in float64 on the same inputs, dO ~ 1e-3."""
    q, k, v = (t.to(dtype) for t in qkv(T, S, H, K, D))
    d_out = (torch.randn(q.shape) * 1e-3).to(dtype)
    outcomes = []
    for tensors in ((q, k, v, d_out), tuple(t.double() for t in (q, k, v, d_out))):
        leaves = [t.requires_grad_() for t in tensors[:3]]
        out, lse = attention(*leaves, causal=True, return_lse=True)
        outcomes.append((out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, tensors[3])))
    for name, got, want in zip(("out", "lse", "dq", "dk", "dv"), *outcomes):
        error = ((got.double() - want).square().sum() / want.square().sum()).item()
        assert error <= (1e-12 if name == "lse" else bound), (name, error)


class Watch(TorchDispatchMode):
    """Elements of the largest tensor among the results of torch's operations, and multiply-adds of its matmuls."""

    def __init__(self):
        super().__init__()
        self.largest = self.products = 0

    def __enter__(self):
        self.threads = torch.get_num_threads()
        torch.set_num_threads(1)  # a mode sees one thread only
        return super().__enter__()

    def __exit__(self, *error):
        torch.set_num_threads(self.threads)
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, t.untyped_storage().nbytes() // t.element_size())
        matrices = [t for t in args if isinstance(t, torch.Tensor)][-2:]
        if "mm" in func.__name__:
            self.products += matrices[0].numel() * matrices[1].shape[-1]
        return result


def qkv(T, S, H=2, K=1, D=8, B=1):
    return tuple(torch.randn(B, n, h, D) for n, h in ((T, H), (S, K), (S, K)))


def watched(q, k, v, start=0, **given):
    """What forward and backward took, called directly: a mode does not look into an op; and the gradients."""
    names = "k_lens", "bias", "sinks", "seed", "scale", "left", "right", "softcap", "dropout_p"
    options = [None, None, *({"softcap": 0.0, "dropout_p": 0.0, **given}.get(n) for n in names)]
    needs = True, True, True, "bias" in given, "sinks" in given
    with Watch() as watch:
        out, lse = cpu.forward(q, k, v, *options)
        grads = cpu.backward(torch.ones_like(out), None, q, k, v, out, lse, *options, start, False, *needs)
    assert watch.products
    return watch, grads


@pytest.mark.parametrize("shape", [(1, 1, 1, 2000), (1, 2, 1, 1), (1, 1, 1800, 1)], ids=str)
def test_no_option_takes_a_matrix_of_all_scores(shape):
    """Not even of one head; the gradient of a bias has the bias's own shape."""
    T, S = 1800, 2000
    watch, grads = watched(
        *qkv(T, S), start=100, left=1500, right=0, softcap=3.0, sinks=torch.randn(2), bias=torch.randn(shape),
        seed=torch.tensor([5]), dropout_p=0.1, k_lens=torch.tensor([1990]),
    )  # fmt: skip
    assert watch.largest < T * S / 4
    assert grads[3].shape == shape


@pytest.fixture
def threads(monkeypatch):
    """Two threads, each with a group of heads by itself."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(cpu_blocks, "THREADED", 0)
    yield
    torch.set_num_threads(before)


THREAD_CASES = (
    "sinks", "bias", "bias for all heads, -inf in it", "dropout", "key lengths", "odd sizes", "softcap",
    "packed, spare rows of NaN", "gradients of the last keys",
)  # fmt: skip


@pytest.mark.parametrize("name", THREAD_CASES)
@pytest.mark.parametrize("count", [2, 3, 7])
def test_threads(threads, name, count, monkeypatch):
    torch.set_num_threads(count)
    monkeypatch.setattr(cpu_blocks, "UNEVEN", 16)
    monkeypatch.setattr(cpu_blocks, "EVEN", 16)
    case = next(c for c in cases.CASES if c.name == name)
    workers = set()
    real = cpu_blocks.Heads.load

    def load(self, *args):
        workers.add(threading.get_ident())
        assert not torch.is_grad_enabled() or threading.get_ident() == threading.main_thread().ident
        return real(self, *args)

    with mock.patch.object(cpu_blocks.Heads, "load", load):
        support.check_case(cases, case, torch.float32, CPU)
        with torch.inference_mode():
            cases.call(inputs_of(cases, case, torch.float32), case)
    assert workers - {threading.main_thread().ident}
    seen = [torch.get_num_threads()]
    other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert seen == [count, count]  # PyTorch's own setting is as it was, for new threads too


def test_threads_after_a_fork(threads):
    q, k, v = qkv(40, 40, H=4, K=4)
    want = attention(q, k, v)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if torch.equal(attention(q, k, v), want) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_an_error_in_a_thread_is_the_callers(threads):
    q, k, v = qkv(5, 6, H=4, K=4)
    with mock.patch.object(cpu_blocks.Heads, "load", side_effect=ZeroDivisionError), pytest.raises(ZeroDivisionError):
        attention(q, k, v)


@pytest.mark.parametrize("D,K", [(64, 2), (256, 1)])
def test_bfloat16_products_are_float32_sums(D, K):
    """Where the CPU multiplies bfloat16: out, lse and gradients beside float32 products of the same inputs."""
    q, k, v = (t.bfloat16() for t in qkv(120, 700, H=4, K=K, D=D))
    if not isinstance(cpu_products.products(q.dtype, 1 << 30), cpu_products.Bfloat16):
        pytest.skip("this CPU has no bfloat16 products")
    runs = []
    for force in (cpu_products.Bfloat16, cpu_products.Float32):
        with mock.patch.object(cpu, "products", lambda *_, force=force: force()):
            _, grads = watched(q, k, v, right=0)
            runs.append((*cpu.forward(q, k, v, *(None,) * 8, 0, 0.0, 0.0), *grads[:3]))
    want = outcome(*(t.double() for t in (q, k, v)))
    for (fast, exact), truth in zip(zip(*runs), want):
        a, b = (((t.double() - truth).square().sum() / truth.square().sum()).item() for t in (fast, exact))
        assert a < 1e-5 and a < 4 * b + 1e-12, (a, b)
    a, b = torch.randn(2, 100, 300).bfloat16(), torch.randn(2, 300, 80).bfloat16()
    error = cpu_products.Bfloat16().product(a, b, "x").double() - a.double() @ b.double()
    assert error.abs().max() < 2**-15 * 300**0.5 * 3


def outcome(q, k, v):
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = attention(*leaves, causal=True, return_lse=True)
    return out.detach(), lse.detach(), *torch.autograd.grad(out.sum(), leaves)


@pytest.mark.parametrize("causal", [False, True])
def test_each_row_is_converted_once(causal, monkeypatch):
    """Of 16-bit inputs every element of q, k, v and the upstream becomes float32 once a direction, however many blocks
    of the others meet it; and as many blocks again take no more buffers."""
    converted, real_load, real_tiles = collections.Counter(), cpu_blocks.Heads.load, cpu_blocks.Heads.tiles

    def load(self, t, rows, dtype=torch.float32):
        converted[t.data_ptr()] += self._pick(t, rows).numel()
        return real_load(self, t, rows, dtype)

    def tiles(self, t, bounds, k_lens, dtype):
        converted[t.data_ptr()] += sum(self._pick(t, cols).numel() for cols in bounds)
        return real_tiles(self, t, bounds, k_lens, dtype)

    monkeypatch.setattr(cpu_blocks.Heads, "load", load)
    monkeypatch.setattr(cpu_blocks.Heads, "tiles", tiles)
    options = *(None,) * 8, 0 if causal else None, 0.0, 0.0
    large = []
    for n in (700, 1400):
        q, k, v = (t.bfloat16() for t in qkv(n, n, H=4, K=2, D=16))
        d_out = torch.randn(q.shape).bfloat16()
        converted.clear()
        with Watch() as watch:
            out, lse = cpu.forward(q, k, v, *options)
            assert {t.data_ptr(): t.numel() for t in (q, k, v)}.items() <= converted.items()
            converted.clear()
            cpu.backward(d_out, None, q, k, v, out, lse, *options, 0, False, True, True, True, False, False)
        assert {t.data_ptr(): t.numel() for t in (q, k, v, d_out)}.items() <= converted.items()
        large.append(watch.largest)
    assert large[1] <= 2 * large[0], "with the rows alone"


def test_keys_outside_the_window_are_not_visited():
    tensors = qkv(2000, 2000)
    full = watched(*tensors, right=0)[0].products
    assert watched(*tensors, left=63, right=0)[0].products < full / 5  # a tile of 96 rows sees 159 keys, not 1000
    assert watched(*tensors, left=1999, right=0)[0].products == full


def test_gradients_of_the_last_keys_cost_less():
    """Of 1/8 of the keys: forward 2 matmuls, then s, dP and dQ over all keys and dK, dV over an eighth of them."""
    tensors = qkv(256, 2048)
    (full, _), (last, grads) = (watched(*tensors, start) for start in (0, 1792))
    assert last.products == full.products * (5 + 2 / 8) / 7
    assert grads[1].shape == grads[2].shape == (1, 256, 1, 8)
    q, k, v = tensors
    options = (None,) * 7 + (None, None, 0.0, 0.0)
    out, lse = cpu.forward(q, k, v, *options)
    with Watch() as watch:
        cpu.backward(out, None, q, k, v, out, lse, *options, 1792, False, False, True, True, False, False)
    assert watch.products == full.products / 7 * 4 / 8  # keys below are not looked at where q needs no gradient


def test_masks_of_the_lowest_number():
    """finfo.min hides its keys; a row with nothing else is empty, where PyTorch's softmax spreads evenly."""
    q, k, v = qkv(5, 6, H=1)
    bias = torch.zeros(5, 6)
    bias[:3] = torch.finfo(torch.float32).min
    bias[4, 2:] = torch.finfo(torch.float32).min
    got = attention(q, k, v, bias=bias)
    want = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), bias).transpose(1, 2)
    torch.testing.assert_close(got[:, 3:], want[:, 3:])
    assert (got[:, :3] == 0).all()


def test_dropout_is_a_function_of_the_key_not_of_the_block():
    seed = torch.tensor([0x1234567890ABCDEF])
    head, row = torch.arange(6).view(2, 3, 1), torch.arange(7, 12)
    whole = philox.keep(seed, head.unsqueeze(-1), row.unsqueeze(-1), torch.arange(50), 0.4)
    for start, stop in ((0, 50), (3, 41), (16, 17), (7, 8), (9, 9)):
        assert torch.equal(philox.keep_range(seed, head, row, start, stop, 0.4), whole[..., start:stop]), (start, stop)


@pytest.mark.parametrize(
    "old,new,case",
    [
        ("total = total.mul_(shrink).add_", "total = total.add_", "sinks"),
        ("use.add(acc.mul_(shrink)", "use.add(acc", "sinks"),
        ("sink.clamp_min(LOWEST), (sink > -torch.inf)", "sink.clamp_min(LOWEST), (sink > torch.inf)", "sinks"),
        ("(total * (1 - dropout_p))", "total", "dropout"),
        ("d_s.mul_(kept)).add_(minus_delta)", "d_s).add_(minus_delta)", "dropout"),
        ("p if kept is None else p * kept", "p", "packed, dropout"),
        ("square_().neg_().add_(1.0)", "neg_().add_(1.0)", "softcap"),
        ("to += heads", "to -= heads", "bias for all heads, -inf in it"),
        ("if t and cols.start >= start else", "if t and cols.start > start else", "gradients of the last keys"),
        ("use.add(wanted_k, d_s.mT, x)", "use.add(wanted_k, p.mT, x)", "window"),
        ("masked_fill_(~part, -torch.inf)", "masked_fill_(part, -torch.inf)", "mask"),
        ("block.hidden[:, None, None]", "block.hidden[:1, None, None]", "key lengths"),
    ],
)  # fmt: skip
def test_planted_bugs(old, new, case, monkeypatch):
    monkeypatch.setattr(cpu_blocks, "KEYS", 16)
    chosen = next(c for c in cases.CASES if c.name == case)
    with support.mutant(MODULE, old, new), pytest.raises(AssertionError):
        support.check_case(cases, chosen, torch.float32, CPU)
