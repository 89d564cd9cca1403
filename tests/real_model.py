"""SmolLM2, the model of the quickstart, where the package that carries it is installed."""

import pathlib

import pytest

from riftco.models import ModelError, smollm2_path


def smollm2_or_skip() -> pathlib.Path:
    try:
        return smollm2_path()
    except ModelError as absent:
        pytest.skip(str(absent))
