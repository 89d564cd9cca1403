"""Decoding on a CPU without Python between the layers: a decoder and its cache as csrc/cpu reads them.

The same numbers as Decoder.hidden and Decoder.logits but for the order of sums: weights are decoded to the same floats,
activations are rounded where the layers round them, cached rows are written by the same arithmetic.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
from typing import Any

import torch
from torch import Tensor, nn

from .. import cpu
from ..cpu import layout
from ..nn import GGUFLinear, RMSNorm
from .decoder import Attention, Block, Decoder
from .errors import ModelError
from .kv_cache import KVCache, Step

log = logging.getLogger(__name__)
MOST_ROWS = 32  # of one forward; more are the work of large matrix products
KINDS = {"float32": 0, "float16": 1, "bfloat16": 2, "q8_0": 3}  # of cached rows, as attention.h counts them
DENSE = {torch.float32: 0, torch.bfloat16: 30}  # GGML's numbers of what dense weights are in


class Unfit(ModelError):
    """What decoding in Python has to be used for, in one line."""


class CompiledDecoder:
    """A decoder with the layers that it has now, over one cache; for up to MOST_ROWS rows at a time.

    Weights, adapters and cache are read where they are: they may change in place, and must not be replaced. One call at
    a time.

    Raises:
        Unfit: the model, a layer or the machine is not one that this is made for.
    """

    def __init__(self, model: Decoder, cache: KVCache):
        config, self.cache, self.model = model.config, cache, model
        self._check(model, cache)
        try:
            self._library = cpu.library()
        except RuntimeError as why:
            raise Unfit(str(why)) from None
        self._held: list[Any] = []  # what the structs point into
        self._layers = (layout.Layer * config.num_layers)(
            *(self._layer(block, i) for i, block in enumerate(model.model.layers))
        )
        self._struct = layout.Model(
            n_layers=config.num_layers, C=config.hidden_size, H=config.num_heads, K=config.num_kv_heads,
            D=config.head_dim, F=config.intermediate_size, V=config.vocab_size, half=config.rope.dim // 2,
            bf16=model.dtype == torch.bfloat16, gelu=config.activation == "gelu_tanh", eps=config.rms_norm_eps,
            scale=config.attention_scale, softcap=config.attention_softcap, final_softcap=config.final_softcap,
            layers=self._layers, norm=self._norm("model.norm", model.model.norm),
            head=self._matrices("lm_head", model.lm_head, [config.vocab_size])[0],
        )  # fmt: skip
        self._work, self._sized = torch.empty(0), (0, 0, 0)  # the scratch, and what it was made for

    @property
    def watched(self) -> bool:
        """Whether a layer has a hook, or a forward of its own, by now."""
        return any(self._hooks) or any(map(dict.__contains__, self._attributes, itertools.repeat("forward")))

    @torch.no_grad()
    def logits(self, tokens: Tensor, step: Step, wanted: Tensor) -> Tensor:
        """Read tokens [T] as `step` (of KVCache.begin) says; the logits [n, V] of the rows `wanted` (int64 [n]).

        Raises:
            ModelError: too many rows, a step of another cache or of what it held before, or a row that is not there.
        """
        T, model, asked = len(tokens), self.model, wanted.tolist()
        if step.total != T or T > MOST_ROWS or step.cache is not self.cache or step.cu_seqlens is None:
            raise ModelError(f"a step of this cache and of up to {MOST_ROWS} rows is needed; got {step.total} of {T}")
        if [self.cache.lengths[slot] for slot, _ in step.runs] != step.first.tolist():
            raise ModelError("the cache has changed since this step began; begin another")
        rows = sorted(set(asked))  # the compiled part moves them to the front, one after the other
        if rows and not 0 <= rows[0] <= rows[-1] < T:
            raise ModelError(f"logits of rows 0 to {T - 1} can be asked for; got {asked}")
        x = model.embed(tokens).float().contiguous()
        turns = [model.rotary(step.positions, step.reach)]
        turns.append(turns[0] if model.local_rotary is None else model.local_rotary(step.positions, step.reach))
        counts = step.cu_seqlens.diff()
        runs = [t.to(torch.int64).repeat_interleave(counts) for t in (step.slots, step.first, step.cu_seqlens[:-1])]
        kept = [step.rows[id(group)].contiguous() for group in self.cache.groups]
        which, n = torch.tensor(rows, dtype=torch.int64), len(rows)
        out = torch.empty(n if n < 3 else _eights(n), model.config.vocab_size)  # products write rows in these groups
        cos, sin = ([turn.cos for turn in turns], [turn.sin for turn in turns])
        at = _addresses(kept)
        struct = layout.Step(
            rows=T, capacity=_eights(T), parts=self._parts(step), threads=torch.get_num_threads(), x=layout.address(x),
            cos=_addresses(cos), sin=_addresses(sin), slot=layout.address(runs[0]), start=layout.address(runs[1]),
            begin=layout.address(runs[2]), at=ctypes.addressof(at), wanted=n, which=layout.address(which),
            logits=layout.address(out),
        )  # fmt: skip
        struct.work = self._scratch(struct)
        self._library.riftco_step(self._struct, struct)
        step.finish()
        made = out[:n].to(model.dtype)
        return made if rows == asked else made[[rows.index(row) for row in asked]]

    def _parts(self, step: Step) -> int:
        """Room for the parts that a row's attention is cut into: of the cached positions, and one of the new rows."""
        longest = max(self.cache.lengths[slot] for slot, _ in step.runs)
        chunks = -(-longest // self._library.riftco_cached_positions())
        return 1 + (1 << max(0, chunks - 1).bit_length())  # by powers of two, so that it seldom grows

    def _scratch(self, struct: layout.Step) -> int:
        """Zeros, made again where a step of another size would lay them out otherwise."""
        size = struct.capacity, struct.parts, struct.threads
        if self._sized != size:
            self._work, self._sized = torch.zeros(self._library.riftco_work(self._struct, struct)), size
        return self._work.data_ptr()

    def _check(self, model: Decoder, cache: KVCache) -> None:
        config, local = model.config, model.config.local_rope
        if model.device.type != "cpu" or cache.device.type != "cpu":
            raise Unfit(f"the compiled decoding is for CPUs; the model is on {model.device}")
        if model.dtype not in DENSE:
            raise Unfit(f"activations are {model.dtype}; the compiled decoding has float32 and bfloat16")
        if cache.states:
            raise Unfit("layers that keep a state of their own are decoded in Python")
        if local is not None and local.dim != config.rope.dim:
            raise Unfit("layers rotate different parts of a head")
        inner = [(name, module) for name, module in model.named_modules() if name]
        self._hooks = [hooks for _, m in inner for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._attributes = [m.__dict__ for _, m in inner]
        if self.watched:
            name = next(n for n, m in inner if m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__)
            raise Unfit(f"{name} has a hook, or a forward of its own, which must see its calls")

    def _layer(self, block: nn.Module, index: int) -> layout.Layer:
        assert isinstance(block, Block)
        name, attention, mlp, config = f"model.layers.{index}", block.self_attn, block.mlp, self.model.config
        assert isinstance(attention, Attention)
        sizes, halves = attention.sizes, [config.intermediate_size] * 2
        qkv = self._parts_of(f"{name}.self_attn", attention, ("q_proj", "k_proj", "v_proj"), "qkv_proj", sizes)
        gated = self._parts_of(f"{name}.mlp", mlp, ("gate_proj", "up_proj"), "gate_up_proj", halves)
        first, second = block.input_layernorm, block.post_attention_layernorm
        norms = {"before_attention": first, "before_mlp": second}
        if block.post_norms:
            norms |= {
                "after_attention": second, "before_mlp": block.pre_feedforward_layernorm,
                "after_mlp": block.post_feedforward_layernorm,
            }  # fmt: skip
        if attention.norms_qk:
            norms |= {"q_norm": attention.q_norm, "k_norm": attention.k_norm}
        window = attention.how["window"][0]
        return layout.Layer(
            **dict(zip("qkv", qkv)), o=self._matrices(f"{name}.self_attn.o_proj", attention.o_proj)[0], gate=gated[0],
            up=gated[1], down=self._matrices(f"{name}.mlp.down_proj", mlp.down_proj)[0],
            **{which: self._norm(f"{name}: {which}", norm) for which, norm in norms.items()},
            cache=self._rows(index), group=self._group(index),
            rotates=attention.rotates, local=index in config.sliding_layers, left=-1 if window is None else window,
        )  # fmt: skip

    def _parts_of(self, name: str, module: nn.Module, apart: tuple[str, ...], fused: str, sizes) -> list[layout.Matrix]:
        if hasattr(module, fused):
            return self._matrices(f"{name}.{fused}", getattr(module, fused), sizes)
        return [self._matrices(f"{name}.{n}", getattr(module, n))[0] for n in apart]

    def _matrices(self, name: str, layer: Any, sizes=None) -> list[layout.Matrix]:
        """A linear layer, cut into layers of these numbers of outputs."""
        base, adapter, dtype = layer, None, self.model.dtype
        if hasattr(layer, "adapter"):
            if getattr(layer, "use_dora", False):
                raise Unfit(f"{name} has a DoRA, which the compiled step does not read")
            if layer.training and layer.dropout:
                raise Unfit(f"{name} drops out")
            base, adapter = layer.base_layer, layer.adapter()
        if type(base) is GGUFLinear:
            data, kind = base.weight.packed, base.weight.info.ggml_type
        elif type(base) is not nn.Linear:
            raise Unfit(f"{name} is a {type(base).__name__}, which the compiled step does not read")
        elif base.weight.dtype != dtype:
            raise Unfit(f"{name} is in {base.weight.dtype} under activations in {dtype}")
        else:
            data, kind = base.weight, DENSE[dtype]
        data, a, b, scale = self._hold(data), None, None, 1.0
        bias = None if base.bias is None else self._hold(base.bias.to(dtype).float())
        if adapter is not None:
            a, b, scale = self._hold(adapter[0].float()), self._hold(adapter[1].float()), adapter[2]
        made, at, k = [], 0, base.in_features
        for n in sizes or [base.out_features]:
            rows = slice(at, at + n)
            made.append(
                layout.Matrix(
                    data=layout.address(data[rows]), bias=None if bias is None else layout.address(bias[rows]),
                    a=layout.address(a), b=None if b is None else layout.address(b[rows]), format=kind, n=n, k=k,
                    row_bytes=data.stride(0) * data.element_size(), rank=0 if a is None else len(a), scale=scale,
                )
            )  # fmt: skip
            at += n
        return made

    def _norm(self, name: str, norm: nn.Module) -> int | None:
        if type(norm) is not RMSNorm or norm.weight is None or norm.eps != self.model.config.rms_norm_eps:
            raise Unfit(f"{name} is not the decoder's own")
        return layout.address(self._hold(norm.weight.float() + norm.offset))

    def _rows(self, index: int) -> layout.Rows:
        cache, place = self.cache.layer(index)
        of, table = cache.layers[place], cache.block_table
        return layout.Rows(
            k=layout.address(of.k), v=layout.address(of.v), k_scale=layout.address(of.k_scale),
            v_scale=layout.address(of.v_scale), table=layout.address(table, torch.int32), kind=KINDS[cache.dtype],
            page=of.k.shape[1], table_stride=0 if table is None else table.shape[1],
        )  # fmt: skip

    def _group(self, index: int) -> int:
        return next(i for i, group in enumerate(self.cache.groups) if group.cache is self.cache.layer(index)[0])

    def _hold(self, t: Tensor) -> Tensor:
        """The tensor, contiguous, for as long as this lives."""
        t = t.detach().contiguous()
        self._held.append(t)
        return t


def compiled_decoder(model: Decoder, cache: KVCache) -> CompiledDecoder | None:
    """A CompiledDecoder; None where decoding stays in Python, which a warning says once for each reason."""
    try:
        return CompiledDecoder(model, cache)
    except Unfit as why:
        _say(str(why))
        return None


@functools.cache
def _say(why: str) -> None:
    log.warning("decoding stays in Python: %s", why)


def _eights(n: int) -> int:
    return -(-n // 8) * 8


def _addresses(tensors: list[Tensor]) -> Any:
    return (layout.POINTER * len(tensors))(*(layout.address(t) for t in tensors))
