"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[str, typer.Option("--model", help="A .gguf file, or a Hugging Face folder.")]
Adapter = Annotated[str | None, typer.Option("--adapter", help="A PEFT adapter folder to put on the model.")]
NamedAdapter = Annotated[str, typer.Option("--adapter", help="A PEFT adapter folder.")]
Output = Annotated[str, typer.Option("--output", help="What to write: a new file or folder.")]
Dtype = Annotated[
    str, typer.Option("--dtype", help="Of what is written: fp32, bf16, fp16; auto: as the model is stored.")
]
WithTokenizer = Annotated[bool, typer.Option(help="Write the tokenizer, too.")]
Device = Annotated[str, typer.Option("--device", "--backend", help="auto, cpu, cuda, cuda:N, mps (or metal) or tpu.")]
Weights = Annotated[
    str,
    typer.Option(
        "--weights",
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
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
LogJson = Annotated[bool, typer.Option("--log-json", help="Print JSON lines.")]
