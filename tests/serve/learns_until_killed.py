"""A server that learns, promotes and undoes until it is killed: learns_until_killed.py FOLDER MOST_EVENTS."""

import sys

import torch
from objective import SPEC, decoder, prefill, tokens

from riftco.serve import Engine, Store

PROMPT, REPLY = tokens(11, 1), tokens(9, 2)


OPEN = []


def start(folder):
    """A server on the folder, as if those before it had ended."""
    while OPEN:
        OPEN.pop().close()
    OPEN.append(store := Store(folder, "digest"))
    made = Engine(decoder(), slots=1, window=40, cache_dtype="float32", store=store, journal=3)
    if "a" not in made.bank.adapters:
        made.create("a", SPEC, seed=1)
    prefill(made, 0, PROMPT)
    return made


def event(made, n):
    """The n-th event is the same whatever happened between: learns, with a promotion and an undo now and then."""
    if n % 5 == 3:
        made.promote("a")
    elif n % 7 == 5:
        made.undo("a", 1)
    else:
        ids = torch.cat([PROMPT[-1:], REPLY[:-1]])
        made.learn(0, 10, ids, REPLY.roll(n), adapter="a", lr=1e-2, note={"learn_id": f"n{n}"})


if __name__ == "__main__":
    torch.set_num_threads(1)
    made = start(sys.argv[1])
    print("ready", flush=True)
    for n in range(made.store.events["a"], int(sys.argv[2])):
        event(made, n)
