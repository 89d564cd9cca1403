"""What torch_xla did inside a with-block: graphs compiled and run, and ops that fell back to eager CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Record:
    compiles: int = 0
    executions: int = 0
    fallbacks: list[str] = field(default_factory=list)
    results: list[Tensor] = field(default_factory=list, repr=False)


@contextlib.contextmanager
def recorded() -> Iterator[Record]:
    """Yields a record that is filled in at the end of the block. What is put into its `results` is then computed, or
    else whatever is alive: that may include what the thread of a backward has not let go of yet.
    """
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
    if record.results:
        torch_xla._XLAC._xla_sync_multi(record.results, devices=[], wait=True, sync_xla_data=True)
        xm.wait_device_ops()
    else:
        finish()
    record.compiles, record.executions = count("CompileTime"), count("ExecuteTime")
    record.fallbacks = [c for c in metrics.counter_names() if c.startswith("aten::")]
