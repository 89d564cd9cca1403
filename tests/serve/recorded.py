"""What a CUDA graph does, on a CPU: the operations of a piece of work are recorded once, with the memory that they read
and wrote, and done again on that memory. Python does not run again, so what it knew is frozen.

Recording refuses what a capture would: an operation that waits for the device, or that reads memory which another run
of the same work reads elsewhere.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

# their results' values, or shapes that depend on values, come to the host
WAIT = {
    "aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::nonzero_static", "aten::masked_select",
    "aten::unique_dim", "aten::_unique2", "aten::equal", "aten::is_nonzero", "aten::repeat_interleave.Tensor",
    "aten::bincount", "aten::_assert_async",
}  # fmt: skip


class Waits(Exception):
    """The work waits for the device, or brings numbers from the host."""


def storage(t):
    return t.untyped_storage()._cdata


class Tape(TorchDispatchMode):
    """The operations within the block, and the storages that they read and that none of them made."""

    def __init__(self):
        super().__init__()
        self.calls, self.outside, self._made, self._kept = [], set(), set(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name
        if name in WAIT or func.name() in WAIT:
            raise Waits(f"{func.name()} waits for the device")
        if name == "aten::lift_fresh":
            raise Waits("a tensor is made from the host's numbers")
        if name.startswith("aten::index") and any(t.dtype == torch.bool for t in indices_of(args)):
            raise Waits(f"{func.name()} by a mask waits for the device")
        given = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        self.outside |= {storage(t) for t in given} - self._made
        out = func(*args, **kwargs)
        fresh = [t for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor)]
        self._made |= {storage(t) for t in fresh} - self.outside
        self._kept += [*given, *fresh]  # no storage is given out twice
        self.calls.append((func, args, kwargs, out))
        return out


def indices_of(args):
    return [t for group in args[1:2] if isinstance(group, (list, tuple)) for t in group if t is not None]


class Recorded:
    """riftco.train.capture.Captured."""

    pool_bytes = 0

    def __init__(self, run):
        first, self.tape = Tape(), Tape()
        with first:
            run()
        elsewhere = [torch.full((n,), torch.nan) for n in (1, 7, 64, 1000, 4096) for _ in range(8)]  # memory moves on
        with self.tape:
            self.output = run()
        del elsewhere
        if first.outside != self.tape.outside:
            raise Waits(f"{len(first.outside ^ self.tape.outside)} tensors lie elsewhere when the work is done again")
        self.reads, self.replays, self.resets = self.tape.outside, 0, 0
        self.poison()

    def poison(self):
        """A capture computes nothing: what it made holds no result yet."""
        for t in tree_flatten(self.output)[0]:
            t.fill_(torch.nan if t.is_floating_point() else -1)

    @torch.no_grad()
    def replay(self):
        assert not self.resets, "a graph was used after it was given back"
        self.replays += 1
        for func, args, kwargs, out in self.tape.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_flatten(out)[0], tree_flatten(again)[0], strict=True):
                if isinstance(old, torch.Tensor) and storage(old) != storage(new):
                    old.copy_(new)

    def reset(self):
        self.resets += 1


class Recorder:
    """riftco.train.capture.Capture.

    Args:
        refuses: raised instead of recording.
    """

    def __init__(self, refuses=None):
        self.made, self.warm, self.refuses = [], [], refuses

    def why_not(self, device):
        return ""

    def __call__(self, run, device, warm=False):
        self.warm.append(warm)
        if not warm:
            run()
        if self.refuses is not None:
            raise self.refuses
        self.made.append(Recorded(run))
        return self.made[-1]
