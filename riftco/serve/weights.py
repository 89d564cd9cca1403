"""How a server holds its base's weights where nobody says: a quantised file as it is, where that is the fastest."""

from __future__ import annotations

from .. import cpu
from ..models.gguf import GGUFFile
from ..models.load import open_source
from ..train.config import pick_device
from ..train.use import Loaded, load

DEVICES = ("cpu", "cuda", "mps")  # that have products of GGUF's blocks


def load_to_serve(path: str, *, weights: str = "auto", device: str = "auto") -> tuple[Loaded, str]:
    """A model, and in a few words how its weights are held.

    "auto" keeps the blocks of a GGUF file that has them on a device with products of such, on a CPU where decoding is
    compiled; else it is that of load_model.
    """
    where, why = pick_device(device), ""
    source = open_source(path)
    if weights == "auto" and isinstance(source, GGUFFile) and source.packable and where.type in DEVICES:
        why = cpu.why_not() if where.type == "cpu" else ""
        weights = "auto" if why else "packed"
        why = f"; not packed: {why}" if why else ""
    loaded = load(path, weights=weights, device=device)
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    if weights == "packed":
        assert isinstance(source, GGUFFile)  # or it was refused
        return loaded, f"packed as in the file ({', '.join(source.kinds)}), all else {dtype}"
    return loaded, f"{'nf4' if weights == 'nf4' else dtype}{why}"
