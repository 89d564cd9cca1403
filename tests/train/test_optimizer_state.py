"""Which form of Adam's moments a run takes."""

import pytest

from riftco.train.config import ConfigError, FinetuneConfig, configured

PATHS = dict(model="m", data="d", output="o")


@pytest.mark.parametrize(
    "method,asked,got",
    [
        ("qlora", "auto", "paged"),
        ("lora", "auto", "contiguous"),
        ("full", "auto", "contiguous"),
        ("qlora", "contiguous", "contiguous"),
        ("full", "paged", "paged"),
        ("lora", "paged-8bit", "paged-8bit"),
    ],
)
def test_the_choice(method, asked, got):
    assert FinetuneConfig(**PATHS, method=method, optimizer_state=asked).moments == got


def test_it_is_checked_and_kept_on_resume():
    with pytest.raises(ConfigError, match="--optimizer-state must be one of auto, contiguous, paged, paged-8bit"):
        FinetuneConfig(**PATHS, optimizer_state="8bit")
    stored = FinetuneConfig(**PATHS, optimizer_state="paged").asdict()
    with pytest.raises(ConfigError, match="--optimizer-state contiguous differs from the run's paged"):
        configured({"optimizer_state": "contiguous"}, stored)
    del stored["optimizer_state"]  # a run of before the setting
    assert configured({}, stored).moments == "paged"
