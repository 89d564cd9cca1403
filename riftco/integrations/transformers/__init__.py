"""riftco's kernels in transformers' models: as an attn_implementation, or in place of a model's modules."""

import dataclasses

import transformers
from transformers.modeling_outputs import CausalLMOutputWithPast

if "cache" not in {f.name for f in dataclasses.fields(CausalLMOutputWithPast)}:
    raise ImportError(f"riftco needs transformers 5.24 or later here; found {transformers.__version__}")

from .attention import register
from .patch import patch, report, unpatch
from .report import PatchReport

__all__ = ["PatchReport", "patch", "register", "report", "unpatch"]
