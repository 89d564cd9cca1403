"""What torch_xla did inside a with-block: graphs compiled and run, and ops that fell back to eager CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Record:
    compiles: int = 0
    executions: int = 0
    fallbacks: list[str] = field(default_factory=list)


@contextlib.contextmanager
def recorded() -> Iterator[Record]:
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as metrics

    def finish() -> None:
        torch_xla.sync()
        xm.wait_device_ops()

    def count(name: str) -> int:
        data = metrics.metric_data(name)
        return data[0] if data else 0

    finish()
    metrics.clear_all()
    record = Record()
    yield record
    finish()
    record.compiles, record.executions = count("CompileTime"), count("ExecuteTime")
    record.fallbacks = [c for c in metrics.counter_names() if c.startswith("aten::")]
