"""Who riftco is compared with. A peer that is not installed is reported as missing, never left out."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from riftco.kernels._cases import Case
from riftco.kernels.nf4.spec import dequantize

Call = Callable[[dict[str, Tensor], Case], dict[str, Tensor]]


@dataclass(frozen=True)
class Peer:
    """`make(cases)` returns a function like the room's cases.call; it may return fewer outputs.

    needs: modules that must be importable. options: the case's options that it honours, None for all.
    dims: the case's dimensions that it knows, None for all. overwrites: it writes over its inputs, so it gets its own.
    """

    name: str
    make: Callable[..., Call]
    needs: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")
    options: tuple[str, ...] | None = None
    dims: str | None = None
    overwrites: bool = False

    def missing(self, device: str, case: Case) -> str:
        """Why it cannot run here, or ""."""
        if device not in self.devices:
            return f"runs on {', '.join(self.devices)} only"
        unknown = [] if self.options is None else [o for o in case.options if o not in self.options]
        unknown += [] if self.dims is None else [d for d in case.shape if d not in self.dims]
        if unknown:
            return f"has no {', '.join(unknown)}"
        absent = [m for m in self.needs if not _importable(m)]
        return f"{', '.join(absent)} not installed" if absent else ""


def _importable(module: str) -> bool:
    parts = module.split(".")
    return all(importlib.util.find_spec(".".join(parts[: i + 1])) is not None for i in range(len(parts)))


def _ce_target(inputs: dict[str, Tensor], case: Case) -> Tensor:
    """Labels as torch and Liger want them: int64, one ignore_index."""
    target = inputs["target"].long()
    return target.masked_fill(target < 0, -100)


def _ce_reduction(case: Case) -> str:
    return case.options.get("reduction", "mean")


def _ce_torch(cases) -> Call:
    def call(inputs, case):
        logits, target = inputs["logits"], _ce_target(inputs, case)
        loss = F.cross_entropy(logits.flatten(0, -2).float(), target.flatten(), reduction=_ce_reduction(case))
        return {"loss": loss.view(target.shape) if _ce_reduction(case) == "none" else loss}

    return call


def _ce_liger(cases) -> Call:
    from liger_kernel.transformers.functional import liger_cross_entropy

    def call(inputs, case):
        logits = inputs["logits"].flatten(0, -2)
        return {"loss": liger_cross_entropy(logits, _ce_target(inputs, case).flatten())}

    return call


def _ce_quack(inplace: bool) -> Callable[[Any], Call]:
    def make(cases) -> Call:
        from quack.cross_entropy import cross_entropy

        def call(inputs, case):
            logits, target = inputs["logits"].flatten(0, -2), _ce_target(inputs, case).flatten()
            return {"loss": cross_entropy(logits, target, reduction="mean", inplace_backward=inplace)}

        return call

    return make


def _head(inputs: dict[str, Tensor]) -> Tensor:
    return inputs["weight"] if "weight" in inputs else inputs["frozen_weight"]


def _decoded_head(inputs: dict[str, Tensor], case: Case) -> Tensor:
    """The head's weight, decoded where it is NF4."""
    if "codes" not in inputs:
        return _head(inputs)
    V, C = case.shape["V"], case.shape["C"]
    return dequantize(inputs["codes"], inputs["absmax"], V * C, 64, inputs["x"].dtype).view(V, C)


def _lce_torch(cases) -> Call:
    def call(inputs, case):
        x = inputs["x"].flatten(0, -2)
        logits = F.linear(x, _decoded_head(inputs, case))
        if "lora_a" in inputs:
            a, b = (inputs[n].to(x.dtype) for n in ("lora_a", "lora_b"))
            logits = logits + cases.LORA_SCALE * F.linear(F.linear(x, a), b)
        return {"loss": F.cross_entropy(logits.float(), _ce_target(inputs, case).flatten())}

    return call


def _lce_quack(cases) -> Call:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    def call(inputs, case):
        target = _ce_target(inputs, case).flatten()
        return {"loss": chunked_linear_cross_entropy(inputs["x"].flatten(0, -2), _head(inputs), target)}

    return call


def _lce_chunked(cases) -> Call:
    options = torch.nn.LinearCrossEntropyOptions(allow_retain_graph=True)

    def call(inputs, case):
        target = _ce_target(inputs, case).flatten()
        x = inputs["x"].flatten(0, -2)
        return {"loss": F.linear_cross_entropy(x, _decoded_head(inputs, case), target, options=options)}

    return call


def _lce_liger(cases) -> Call:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    def call(inputs, case):
        target = _ce_target(inputs, case).flatten()
        return {"loss": liger_fused_linear_cross_entropy(inputs["x"].flatten(0, -2), _head(inputs), target)}

    return call


def _lce_cce(impl: str) -> Callable[..., Call]:
    def make(cases) -> Call:
        from cut_cross_entropy import linear_cross_entropy

        def call(inputs, case):
            target = _ce_target(inputs, case).flatten()
            return {"loss": linear_cross_entropy(inputs["x"].flatten(0, -2), _head(inputs), target, impl=impl)}

        return call

    return make


def _norm_torch(cases) -> Call:
    def call(inputs, case):
        x, weight = inputs["x"], inputs.get("weight")
        scale = weight if weight is None else weight + case.options.get("offset", 0.0)
        return {"y": F.rms_norm(x, x.shape[-1:], scale, case.options.get("eps", 1e-6))}

    return call


def _norm_liger(cases) -> Call:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    def call(inputs, case):
        return {"y": LigerRMSNormFunction.apply(inputs["x"], inputs["weight"], case.options.get("eps", 1e-6))}

    return call


def _norm_quack(cases) -> Call:
    from quack import rmsnorm

    def call(inputs, case):
        x = inputs["x"]
        return {"y": rmsnorm(x.flatten(0, -2), inputs["weight"], eps=case.options.get("eps", 1e-6)).view(x.shape)}

    return call


def _sdpa(backend: str | None) -> Callable[..., Call]:
    def make(cases) -> Call:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def call(inputs, case):
            q, k, v = (inputs[n].transpose(1, 2) for n in "qkv")
            options = dict(is_causal=bool(case.options.get("causal")), enable_gqa=q.shape[1] != k.shape[1])
            if backend is None:
                out = F.scaled_dot_product_attention(q, k, v, **options)
            else:
                with sdpa_kernel(getattr(SDPBackend, backend)):
                    out = F.scaled_dot_product_attention(q, k, v, **options)
            return {"out": out.transpose(1, 2)}

        return call

    return make


def _flex(cases) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()
    torch._functorch.config.donated_buffer = False  # else its backward runs once a forward
    run = torch.compile(flex_attention, dynamic=False)
    masks: dict = {}

    def call(inputs, case):
        q, k, v = (inputs[n].transpose(1, 2) for n in "qkv")
        T, S = q.shape[2], k.shape[2]
        if case.options.get("causal") and (T, S) not in masks:
            masks[T, S] = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, S, device=q.device)
        out = run(q, k, v, block_mask=masks.get((T, S)), enable_gqa=q.shape[1] != k.shape[1])
        return {"out": out.transpose(1, 2)}

    return call


def _flash(module: str) -> Callable[..., Call]:
    def make(cases) -> Call:
        library = importlib.import_module(module)

        def call(inputs, case):
            tensors, options = [inputs[n] for n in "qkv"], {"causal": bool(case.options.get("causal"))}
            if "window" in case.options:
                options["window_size"] = case.options["window"]
            if "cu_q" in inputs:
                longest = max(b - a for a, b in itertools.pairwise(case.options["cu_q"]))
                names = ("cu_seqlens_q", "cu_seqlens_k"), ("max_seqlen_q", "max_seqlen_k")
                options |= dict.fromkeys(names[0], inputs["cu_q"]) | dict.fromkeys(names[1], longest)
            function = library.flash_attn_varlen_func if "cu_q" in inputs else library.flash_attn_func
            out = function(*tensors, **options)
            return {"out": out[0] if isinstance(out, tuple) else out}

        return call

    return make


def _nf4_bitsandbytes(cases) -> Call:
    import bitsandbytes.functional as B
    from bitsandbytes import matmul_4bit

    def call(inputs, case):
        codes, x = inputs["codes"].view(-1, 1), inputs["x"]
        state = B.QuantState(
            inputs["absmax"].view(-1), torch.Size((case.shape["N"], case.shape["K"])),
            B.get_4bit_type("nf4", device=x.device.type), case.options.get("block_size", 64), "nf4", x.dtype,
        )  # fmt: skip
        return {"y": matmul_4bit(x, codes.t(), state, bias=inputs.get("bias"))}

    return call


def _swiglu_liger(cases) -> Call:
    from liger_kernel.ops.geglu import LigerGELUMulFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def call(inputs, case):
        silu = case.options.get("activation", "silu") == "silu"
        function = LigerSiLUMulFunction if silu else LigerGELUMulFunction
        return {"out": function.apply(inputs["gate"], inputs["up"])}

    return call


def _torch_and_compile(
    make: Callable[..., Call], options: tuple[str, ...] | None = None, dims: str | None = None
) -> tuple[Peer, ...]:
    def compiled(cases) -> Call:
        torch.compiler.reset()  # past eight compilations of one function torch runs it eagerly, and says so in a log
        return torch.compile(make(cases), dynamic=False)

    how: dict[str, Any] = dict(options=options, dims=dims)
    return Peer("torch eager", make, **how), Peer("torch.compile", compiled, **how)


GPU = ("cuda",)
CHUNKED = ("torch.nn.modules.linear_cross_entropy_options",)
HEADS = ("frozen", "together", "narrow_sum")  # a peer's dW is one product of 16 bits, or such sums
PEERS: dict[str, tuple[Peer, ...]] = {
    "cross_entropy": (
        *_torch_and_compile(_ce_torch, ("reduction",)),
        Peer("Liger in place", _ce_liger, ("liger_kernel",), GPU, (), overwrites=True),
        Peer("quack", _ce_quack(False), ("quack",), GPU, ()),
        Peer("quack in place", _ce_quack(True), ("quack",), GPU, (), overwrites=True),
    ),
    "linear_cross_entropy": (
        *_torch_and_compile(_lce_torch, (*HEADS, "nf4"), "BTCVR"),
        Peer("torch chunked", _lce_chunked, CHUNKED, options=(*HEADS, "nf4"), dims="BTCV"),
        Peer("Liger", _lce_liger, ("liger_kernel",), GPU, (*HEADS, "slice_bytes"), "BTCV"),  # it has its own
        Peer("CCE", _lce_cce("cce"), ("cut_cross_entropy",), GPU, HEADS, "BTCV"),
        Peer("CCE exact", _lce_cce("cce_exact"), ("cut_cross_entropy",), GPU, HEADS, "BTCV"),
        Peer("quack chunked", _lce_quack, ("quack",), GPU, HEADS, "BTCV"),
    ),
    "rms_norm": (
        *_torch_and_compile(_norm_torch, ("eps", "offset", "weightless")),
        Peer("Liger", _norm_liger, ("liger_kernel",), GPU, ("eps",)),
        Peer("quack", _norm_quack, ("quack",), GPU, ("eps",)),
    ),
    "attention": (
        Peer("sdpa", _sdpa(None), options=("causal",)),
        Peer("sdpa flash 2", _sdpa("FLASH_ATTENTION"), (), GPU, ("causal",)),
        Peer("sdpa cuDNN", _sdpa("CUDNN_ATTENTION"), (), GPU, ("causal",)),
        Peer("FlexAttention", _flex, (), GPU, ("causal",)),
        Peer("flash-attn", _flash("flash_attn"), ("flash_attn",), GPU, ("causal", "cu_q")),
        Peer("flash-attn 4", _flash("flash_attn.cute"), ("flash_attn.cute",), GPU, ("causal", "cu_q", "window")),
    ),
    "nf4": (
        Peer("plain torch", lambda cases: cases.reference),
        Peer("bitsandbytes", _nf4_bitsandbytes, ("bitsandbytes",)),
    ),
    "swiglu": (
        *_torch_and_compile(lambda cases: cases.reference),
        Peer("Liger", _swiglu_liger, ("liger_kernel",), GPU, overwrites=True),
    ),
}


def peers_of(op: str) -> tuple[Peer, ...]:
    """The op's peers; an op without a list of its own is compared with its spec, as it is and compiled."""
    return PEERS.get(op, _torch_and_compile(lambda cases: cases.reference))
