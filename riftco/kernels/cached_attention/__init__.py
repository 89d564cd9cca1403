from .cache import Cache, CacheLayer
from .op import attention_with_cache

__all__ = ["Cache", "CacheLayer", "attention_with_cache"]
