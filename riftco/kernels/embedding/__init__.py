from .op import embedding, gather_rows, scatter_rows

__all__ = ["embedding", "gather_rows", "scatter_rows"]
