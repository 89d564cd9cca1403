import pytest
from real_model import smollm2_or_skip

from riftco.models import load_tokenizer

pytest.importorskip("fastapi", reason="riftco[serve] is not installed")
pytest.importorskip("openai", reason="the official clients are not installed")


@pytest.fixture(scope="session")
def tokenizer():
    return load_tokenizer(smollm2_or_skip())


@pytest.fixture(scope="module")
def guarded(tokenizer, tmp_path_factory):
    """The address of a server with both keys, a folder for what is learned, and one for slots."""
    from server import served, service

    from riftco.serve.http.auth import Keys
    from riftco.serve.saved_slots import SlotFiles

    folder = tmp_path_factory.mktemp("train")
    made = service(tokenizer, folder)
    files = SlotFiles(folder / "slots", "digest")
    with served(made, keys=Keys("user", "root"), train_dir=folder, slot_files=files, largest=1 << 16) as address:
        yield address


# a module that needs another service has its own `made`


@pytest.fixture(scope="module")
def made(tokenizer, tmp_path_factory):
    from server import service

    return service(tokenizer, tmp_path_factory.mktemp("train"))


@pytest.fixture(scope="module")
def url(made):
    from server import served

    with served(made) as address:
        yield address


@pytest.fixture
def client(made, tmp_path):
    """Of a server that has tmp_path for what is learned; modules that ask for it make a service for each test."""
    import httpx
    from server import served

    with served(made, train_dir=tmp_path) as address, httpx.Client(base_url=address, timeout=60) as talks:
        yield talks


@pytest.fixture(scope="module")
def gpt(url):
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(url):
    import anthropic

    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client
