"""Shared set-up: kernels run in Triton's interpreter where there is no GPU, and the summary counts cases a device."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# torch_xla keeps 2,048 compiled graphs; on a CPU each holds some hundred memory maps, of which Linux allows 65,530
os.environ.setdefault("XLA_COMPILATION_CACHE_SIZE", "64")

import collections
import gc
import importlib.util

import pytest
import support

if os.environ.get("PYTEST_XDIST_WORKER"):
    torch.set_num_threads(1)  # the workers share the cores


if importlib.util.find_spec("hypothesis"):  # it is not in every environment
    from hypothesis import HealthCheck, settings

    # how long a machine takes is no property
    settings.register_profile("riftco", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("riftco")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def pytest_runtest_setup(item):
    support.skip_without_a_gpu(item)
    if item.get_closest_marker("gpu"):
        gc.collect()  # what earlier tests left in cycles would be freed while this one's memory is measured


def pytest_terminal_summary(terminalreporter):
    """How many cases ran per device, and what was skipped and why."""
    ran: collections.Counter = collections.Counter()
    for report in terminalreporter.stats.get("passed", []) + terminalreporter.stats.get("failed", []):
        for key, value in report.user_properties:
            if key == "device":
                ran[value] += 1
    terminalreporter.section("conformance cases per device")
    for device in support.DEVICES:
        reason = "" if device.available else f"  (not run: {device.why_not})"
        terminalreporter.line(f"{device.name:14s} {ran[device.name]:5d}{reason}")
    skipped: collections.Counter = collections.Counter()
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        skipped[reason.removeprefix("Skipped: ")] += 1
    for reason, count in skipped.most_common():
        terminalreporter.line(f"skipped {count:5d}  {reason}")
