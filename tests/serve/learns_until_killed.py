"""A server that learns, promotes and undoes until it is killed: learns_until_killed.py FOLDER MOST_EVENTS.

It says the number of each event that it acknowledges.
"""

import sys

import torch
from objective import SPEC, decoder, prefill, tokens

from riftco.serve import Engine, Scheduler, Store

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


def event(made, n, scheduler=None):
    """The n-th event is the same whatever happened between: learns, with a promotion and an undo now and then. Beside
    a scheduler a learn is written while others are served."""
    if n % 5 == 3:
        made.promote("a")
    elif n % 7 == 5:
        made.undo("a", 1)
    else:
        reply, note = REPLY.roll(n), {"learn_id": f"n{n}"}
        if scheduler is None:
            made.learn(0, 10, torch.cat([PROMPT[-1:], reply[:-1]]), reply, adapter="a", lr=1e-2, note=note)
        else:
            scheduler.learn(0, PROMPT.tolist(), reply.tolist(), "a", 1e-2, note=note)


if __name__ == "__main__":
    torch.set_num_threads(1)
    made = start(sys.argv[1])
    scheduler = Scheduler(made)
    print("ready", flush=True)
    for n in range(made.store.events["a"], int(sys.argv[2])):
        event(made, n, scheduler)
        print(n, flush=True)
