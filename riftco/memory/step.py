"""One training step of a model, traced."""

from __future__ import annotations

import pathlib

import torch

from ..adapters import apply_lora
from ..models import Decoder, load_model
from ..models.config import DecoderConfig
from ..models.load import quantize_blocks
from ..models.safetensors_folder import read_json
from ..optim import Adam
from ..train.config import DTYPES, FinetuneConfig, at_least, pick_device
from .report import MemoryReport
from .trace import MemoryTrace


def trace_step(model: Decoder, optimizer: Adam, ids: torch.Tensor, *, top: int = 20) -> MemoryReport:
    """Trace the second of two steps on `ids` [B, T], in which every position predicts the next one.

    The first fills what stays: the optimizer's state and caches. Changes the parameters.
    """
    target = torch.cat((ids[:, 1:], torch.full_like(ids[:, :1], -100)), 1)
    labelled = ids.shape[0] * (ids.shape[1] - 1)
    cuda = ids.device.type == "cuda"
    for traced in (False, True):
        optimizer.zero_grad(set_to_none=True)
        if not traced:
            model.loss(ids, target, n_labelled=labelled).backward()
            optimizer.step()
            continue
        if cuda:
            torch.cuda.reset_peak_memory_stats(ids.device)
        trace = MemoryTrace(model, optimizer, {"input_ids": ids, "target": target})
        with trace:
            with trace.phase("forward"):
                loss = model.loss(ids, target, n_labelled=labelled)
            with trace.phase("backward"):
                loss.backward()
            del loss
            with trace.phase("optimizer step"):
                optimizer.step()
    return trace.report(top, torch.cuda.max_memory_allocated(ids.device) if cuda else None)


def memory_of(
    path: str,
    *,
    method: str = "qlora",
    tokens: int = 512,
    batch: int = 1,
    rank: int = 16,
    top: int = 20,
    device: str = "auto",
    dtype: str = "auto",
    activation_checkpointing: str = "disabled",
    attention: str = "flash",
    optimizer_state: str = "auto",
) -> MemoryReport:
    """One traced step of a model as `riftco finetune` would train it.

    Args:
        path: a .gguf file, a Hugging Face folder, or a config.json alone: then with random weights.
        tokens, batch: random ids [batch, tokens].
    """
    settings = FinetuneConfig(
        model=path, data="", output="", method=method, rank=rank, dtype=dtype, attention=attention,
        activation_checkpointing=activation_checkpointing, optimizer_state=optimizer_state,
    )  # fmt: skip
    for name, number, least in (("tokens", tokens, 2), ("batch", batch, 1), ("top", top, 1)):
        at_least(name, number, least)
    where = pick_device(device)
    kind = DTYPES[dtype]
    if pathlib.Path(path).name == "config.json":
        model = _random(pathlib.Path(path), method, where, kind)
    else:
        model, _ = load_model(
            path, weights=settings.held, dtype=kind if method == "qlora" else None, device=where, with_tokenizer=False
        )
    model.activation_checkpointing, model.attention = activation_checkpointing, attention
    if method != "full":
        apply_lora(model, settings.lora_spec(), seed=0)
    optimizer = Adam([p for p in model.parameters() if p.requires_grad], lr=1e-4, state=settings.moments)
    gen = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (batch, tokens), generator=gen).to(where)
    return trace_step(model.train(), optimizer, ids, top=top)


def _random(path: pathlib.Path, method: str, device: torch.device, dtype: torch.dtype | None) -> Decoder:
    """A decoder of this shape with random weights; NF4 where the method is qlora."""
    config = DecoderConfig.from_hf(read_json(path))
    small = torch.float32 if device.type == "cpu" or method == "full" else torch.bfloat16
    with device:
        model = Decoder(config).to(dtype or small)
    if method == "qlora":
        quantize_blocks(model)
    return model
