import pytest

from riftco.models import ModelError, load_tokenizer, smollm2_path

pytest.importorskip("fastapi", reason="riftco[serve] is not installed")
pytest.importorskip("openai", reason="the official clients are not installed")


@pytest.fixture(scope="session")
def tokenizer():
    try:
        return load_tokenizer(smollm2_path())
    except ModelError as absent:
        if "not installed" not in str(absent):
            raise
        pytest.skip(str(absent))
