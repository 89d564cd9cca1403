"""Not collected beside a transformers that riftco refuses; its own message says which it needs."""

import pytest

try:
    import riftco.integrations.transformers  # noqa: F401
except ImportError as refused:
    why = str(refused)

    def pytest_ignore_collect(collection_path):
        return collection_path.name.startswith("test_") or None

    @pytest.hookimpl(tryfirst=True)
    def pytest_terminal_summary(terminalreporter):
        terminalreporter.line(f"tests/integrations not collected: {why}")
