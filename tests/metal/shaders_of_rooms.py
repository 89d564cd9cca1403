"""Which shaders the rooms have: one of the room's name, or those that its launcher in riftco/metal lists as SHADERS."""

import importlib
import importlib.util

import support

import riftco.metal


def _shaders(room: str) -> tuple[str, ...]:
    if importlib.util.find_spec(f"riftco.metal.{room}") is None:
        return ()
    named = getattr(importlib.import_module(f"riftco.metal.{room}"), "SHADERS", (room,))
    return tuple(s for s in named if (riftco.metal.CHECKOUT / f"{s}.metal").exists())


ROOM_OF = {shader: room for room in support.rooms() for shader in _shaders(room)}
