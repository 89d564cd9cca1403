"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer


def known(*values: str) -> Callable[[], list[str]]:
    """What the shell completes an option's value to; the command itself judges what is given."""
    return lambda: list(values)


DEVICES = known("auto", "cpu", "cuda", "mps", "tpu")
CACHES = known("float32", "float16", "bfloat16", "q8_0")
METHODS = known("qlora", "lora", "full")
DTYPES = known("auto", "fp32", "bf16")
ATTENTIONS = known("flash", "materialized")
CHECKPOINTING = known("disabled", "selective", "block")
MOMENTS = known("auto", "contiguous", "paged", "paged-8bit")

Model = Annotated[str, typer.Option("--model", help="A .gguf file, or a Hugging Face folder.")]
Adapter = Annotated[str | None, typer.Option("--adapter", help="A PEFT adapter folder to put on the model.")]
NamedAdapter = Annotated[str, typer.Option("--adapter", help="A PEFT adapter folder.")]
Output = Annotated[str, typer.Option("--output", help="What to write: a new file or folder.")]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        autocompletion=known("auto", "fp32", "bf16", "fp16"),
        help="Of what is written: fp32, bf16, fp16; auto: as the model is stored.",
    ),
]
WithTokenizer = Annotated[bool, typer.Option(help="Write the tokenizer, too.")]
Device = Annotated[
    str,
    typer.Option(
        "--device", "--backend", autocompletion=DEVICES, help="auto, cpu, cuda, cuda:N, mps (or metal) or tpu."
    ),
]
Weights = Annotated[
    str,
    typer.Option(
        "--weights",
        autocompletion=known("auto", "fp32", "bf16", "fp16", "nf4", "packed"),
        help="fp32, bf16, fp16, nf4, packed (a GGUF file as it is); auto: as the adapter was trained, or by device.",
    ),
]
ServedWeights = Annotated[
    str,
    typer.Option(
        "--weights",
        help="fp32, bf16, fp16, nf4, packed; auto: a quantised GGUF file's own blocks where the device has products of "
        "them, else by device.",
    ),
]
TemplateKwargs = Annotated[
    str | None,
    typer.Option(
        "--chat-template-kwargs", help='JSON: options of the chat template, such as {"enable_thinking": false}.'
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
LogJson = Annotated[bool, typer.Option("--log-json", help="Print JSON lines.")]
