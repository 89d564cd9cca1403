"""A tiny model file with a tokenizer and a chat template, a chat file, and the command line in this process."""

import json

import pytest
from tiny_models import byte_level_vocabulary, hf_model, write_gguf
from typer.testing import CliRunner

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
METADATA = {
    **byte_level_vocabulary([], ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
    "tokenizer__ggml__pre": "smollm",
    "tokenizer__ggml__eos_token_id": 2,
    "tokenizer__chat_template": CHATML,
}
VOCABULARY = 259


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_gguf(path, hf_model("llama-tied", vocab_size=VOCABULARY, max_position_embeddings=256), **METADATA)
    return str(path)


@pytest.fixture(scope="session")
def chat(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "chat.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": f"say {c}"}, {"role": "assistant", "content": c * 4}]}
        for c in "abcdefghij"
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return str(path)


@pytest.fixture
def riftco():
    """Call the command; the result has exit_code, stdout and stderr."""
    from riftco.cli.app import app

    def call(*args, code=0):
        result = CliRunner().invoke(app, [str(a) for a in args])
        if result.exit_code != code and result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, f"exit {result.exit_code}\n{result.stdout}\n{result.stderr}"
        return result

    return call
