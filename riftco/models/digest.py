"""The identity of a model's weights, for checkpoints: fast enough to take at every start."""

from __future__ import annotations

import hashlib
from pathlib import Path

from .errors import ModelError

_HEAD = 1 << 16
_BLOCK = 1 << 16
_BLOCKS = 64


def base_digest(path: str | Path) -> str:
    """sha256 over what identifies the weights at `path`, as 64 hexadecimal digits.

    Of a GGUF file, or of a folder's config.json and each of its safetensors files in the order of their names: the
    name (of files in a folder), the size, the first 64 KiB (the header) and 64 blocks of 64 KiB spread evenly to the
    end. At most 4 MiB is read per file, whatever its size; a file of up to 4 MiB is read whole. A change that keeps
    the sizes and falls between the blocks is not seen: a fine-tuned copy changes every tensor, and is. Moving or
    renaming the folder, or the GGUF file, does not change the digest.

    Raises:
        ModelError: a file that cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        files = [(p.name, p) for p in sorted(path.glob("*.safetensors")) + [path / "config.json"]]
    else:
        files = [("", path)]
    total = hashlib.sha256()
    for name, file in files:
        try:
            total.update(f"{name}\0{file.stat().st_size}\0".encode())
            total.update(_sample(file))
        except OSError as why:
            raise ModelError(f"{file}: cannot be read ({why.strerror})") from why
    return total.hexdigest()


def _sample(file: Path) -> bytes:
    size = file.stat().st_size
    found = hashlib.sha256()
    with file.open("rb") as f:
        if size <= _BLOCKS * _BLOCK:
            found.update(f.read())
        else:
            found.update(f.read(_HEAD))
            for i in range(_BLOCKS):
                f.seek((size - _BLOCK) * i // (_BLOCKS - 1))
                found.update(f.read(_BLOCK))
    return found.digest()
