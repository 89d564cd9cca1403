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
