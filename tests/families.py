"""The registry of tiny model configs, and which of them each kind of test covers: docs/models.md's table is made of it.

To test something of every family, give the test a `family` argument and say which column it proves:

    from families import covers
    from tiny_models import hf_model

    @covers("patch")                              # once for each config of FAMILIES
    def test_a_patched_model_gives_the_same_loss(family):
        model = hf_model(family)

    @covers("bitsandbytes", without=("phi3",))    # all but these, or only=(...): these alone
    def test_a_checkpoint_comes_back(family): ...

Nothing else is to be registered: the table's cells are read from these decorators in the tests' source, so columns and
names must be written out as literals there. After adding one, `python tests/families.py` writes the table anew;
tests/models/test_families.py fails where the page says otherwise. A config belongs to the row of ROWS that lists it.
"""

from __future__ import annotations

import ast
import functools
import pathlib
from typing import Any

COLUMNS = ("forward", "gradient", "generate", "GGUF", "bitsandbytes", "patch")

SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
    "original_max_position_embeddings": 32,
}
GEMMA2 = {
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "attn_logit_softcapping": 6.0,
    "final_logit_softcapping": 8.0,
}
GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}
# name -> (model_type, what differs from SIZES)
FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama-3.1": ("llama", {"rope_parameters": LLAMA3, "head_dim": 32}),
    "llama-linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama-dynamic-rope": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 24}),
    "mistral-window": ("mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "smollm2": ("llama", {"tie_word_embeddings": True, "num_attention_heads": 3, "hidden_size": 96,
                          "num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "gemma2": ("gemma2", GEMMA2),
    "gemma3": ("gemma3_text", {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 8,
                               "layer_types": ["sliding_attention", "full_attention"],
                               "rope_parameters": GEMMA3_ROPE}),
    "phi3": ("phi3", {}),
    "phi3-window": ("phi3", {"sliding_window": 8, "num_key_value_heads": 4}),
    "phi3-longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
    "phi3-partial-rope": ("phi3", {"tie_word_embeddings": True, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}}),
}  # fmt: skip
# row of the table -> its configs
ROWS = {
    "Llama 2, 3, 3.1, 3.2": (
        "llama", "llama-tied", "llama-3.1", "llama-linear-rope", "llama-dynamic-rope", "llama-biases"
    ),
    "SmolLM, SmolLM2": ("smollm2",),
    "SmolLM3": ("smollm3",),
    "Mistral": ("mistral", "mistral-window"),
    "Qwen2, Qwen2.5": ("qwen2", "qwen2-yarn", "qwen2-window"),
    "Qwen3": ("qwen3",),
    "Gemma 2": ("gemma2",),
    "Gemma 3": ("gemma3",),
    "Phi-3, Phi-3.5, Phi-4": ("phi3", "phi3-window", "phi3-longrope", "phi3-partial-rope"),
}  # fmt: skip

TESTS = pathlib.Path(__file__).parent
PAGE = TESTS.parent / "docs" / "models.md"
BEGIN, END = "<!-- made by tests/families.py -->", "<!-- end -->"


def covers(column: str, *, without: tuple[str, ...] = (), only: tuple[str, ...] | None = None):
    """Run a test for each config of FAMILIES (its argument `family`) as what proves `column` of the table."""
    import pytest

    return pytest.mark.parametrize("family", chosen(column, without, only))


def chosen(column: str, without: tuple[str, ...] = (), only: tuple[str, ...] | None = None) -> list[str]:
    if column not in COLUMNS:
        raise ValueError(f"covers: {column!r} is no column; accepted: {', '.join(COLUMNS)}")
    unknown = [name for name in (*without, *(only or ())) if name not in FAMILIES]
    if unknown:
        raise ValueError(f"covers: no config is named {unknown[0]!r}")
    return [name for name in FAMILIES if name not in without and (only is None or name in only)]


@functools.cache
def covered() -> dict[str, frozenset[str]]:
    """Column -> the configs that some test covers, read from the decorators in the source of the tests."""
    found: dict[str, set[str]] = {column: set() for column in COLUMNS}
    for file in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            for mark in getattr(node, "decorator_list", ()):
                if isinstance(mark, ast.Call) and getattr(mark.func, "id", "") == "covers":
                    column = ast.literal_eval(mark.args[0])
                    options = {k.arg: ast.literal_eval(k.value) for k in mark.keywords}
                    found[column].update(chosen(column, **options))
    return {column: frozenset(names) for column, names in found.items()}


def table() -> str:
    """Families by columns: yes, -, or how many of the family's configs are covered."""
    lines = [f"| family | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    for row, configs in ROWS.items():
        counts = [len(covered()[column].intersection(configs)) for column in COLUMNS]
        cells = ["yes" if n == len(configs) else f"{n} of {len(configs)}" if n else "-" for n in counts]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def written() -> str:
    """The page with the table of now."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(written())
