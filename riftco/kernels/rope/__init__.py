from .op import rope
from .tables import rope_tables

__all__ = ["rope", "rope_tables"]
