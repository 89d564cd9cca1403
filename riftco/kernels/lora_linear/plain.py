"""The adapters in plain torch, over base products by the launchers of the device."""

from __future__ import annotations

import functools

from . import spec
from .base import launcher

forward = functools.partial(spec.forward, find=launcher)
backward = functools.partial(spec.backward, find=launcher)
