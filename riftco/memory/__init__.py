"""Where a training step's memory goes: the tensors that are alive at its peak, who made them and who holds them; and
the peak of a step before it runs."""

from .budget import Fit, Forecast, fitting, forecast
from .predict import Prediction, predict
from .report import MemoryReport, Row
from .trace import MemoryTrace

__all__ = [
    "Fit",
    "Forecast",
    "MemoryReport",
    "MemoryTrace",
    "Prediction",
    "Row",
    "fitting",
    "forecast",
    "predict",
]
