"""riftco's kernels in transformers' models: as an attn_implementation, or in place of a model's modules."""

from .attention import register
from .patch import patch, report, unpatch
from .report import PatchReport

__all__ = ["PatchReport", "patch", "register", "report", "unpatch"]
