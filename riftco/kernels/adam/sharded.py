"""Parameters that are shards of larger ones (DTensor, as FSDP2 leaves them).

Each process updates what it holds; only the gradient's norm is everyone's, so that all clip and commit alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def is_shard(t: object) -> bool:
    """Whether `t` is a DTensor: a look at one name, which imports nothing."""
    return hasattr(t, "placements")


def local(t: Any) -> Tensor:
    """What this process holds of a tensor, in the same memory."""
    if not is_shard(t):
        return t
    with torch.no_grad():
        return t.to_local()


def as_shard(value: Tensor, p: Any) -> Tensor:
    """What this process holds of a tensor that is cut as `p` is, as a DTensor."""
    if not is_shard(p):
        return value
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        value.to(p.device), p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=_row_major(p.shape)
    )


def own_part(value: Tensor, p: Any) -> Tensor:
    """The part of a whole tensor shaped as `p` that lies where `p`'s does; a shard's own values."""
    if is_shard(value):
        return local(value)
    if not is_shard(p):
        return value
    from torch.distributed.tensor import distribute_tensor

    whole = value.view(p.shape).to(p.device)
    return local(distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None))


def group_of(params: Iterable[Tensor]) -> Any:
    """The process group over which the parameters are cut; None where they are whole.

    Raises:
        ValueError: some are whole and some not, they are cut over several groups, or some process holds a copy.
    """
    params = list(params)
    cut = [p for p in params if is_shard(p)]
    if not cut:
        return None
    if len(cut) < len(params):
        raise ValueError(f"Adam: {len(cut)} of {len(params)} parameters are DTensors; all must be, or none")
    first: Any = cut[0]
    for p in cut:
        mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
        if mesh.ndim != 1 or mesh != first.device_mesh or not placements[0].is_shard():
            raise ValueError(
                f"Adam: DTensor parameters must be sharded over one mesh of one dimension; got {placements} on {mesh}"
            )
    return first.device_mesh.get_group()


def of_all(own: tuple[Tensor, Tensor, Tensor], clip: float | None, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(norm, clip scale, committed) of what all processes of `group` hold, from those of what this one holds."""
    total, scale, committed = own
    if group is None:
        return total, scale, committed
    import torch.distributed as dist

    mine = torch.stack([total, committed.to(total.dtype)])
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    norms, committable = torch.stack(every).unbind(1)
    largest = norms.amax()
    unit = torch.where(largest > 0, largest, 1.0)
    total = torch.where(largest.isfinite(), largest * (norms / unit).square().sum().sqrt(), largest)
    scale = torch.ones_like(total) if clip is None else torch.clamp(clip / torch.where(total > 0, total, 1.0), max=1.0)
    committed = (committable > 0).all() & total.isfinite()
    return total, torch.where(committed, scale, 0.0), committed


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
