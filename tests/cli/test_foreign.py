"""Options under other programs' names are told by their names here; names that no layer has are refused."""

import json

import pytest
from typer.main import get_command

from riftco.cli.app import app
from riftco.cli.foreign import NAMES, told

TRAIN = ("finetune", "--model", "x", "--data", "y", "--output", "z")
CASES = [
    ((*TRAIN, "--learning_rate", "1e-4"), "--learning_rate: here it is --lr"),
    ((*TRAIN, "--lora-r=8"), "--lora-r: here it is --rank"),
    ((*TRAIN, "--batch_tokens", "8"), "--batch_tokens: here it is --batch-tokens"),
    ((*TRAIN, "--per_device_train_batch_size", "2"), "here it is --batch-tokens, which counts tokens"),
    ((*TRAIN, "--packing"), "documents are always packed"),
    (("serve", "--model", "x", "--ctx-size", "8"), "--ctx-size: here it is --window"),
    (("serve", "--model", "x", "--batch-size", "8"), "--batch-size: here it is --chunk"),
    (("serve", "--model", "x", "--no_cuda_graphs"), "here it is --no-cuda-graphs"),
    (("export", "--model", "x", "--outtype", "f16"), "here it is --dtype"),
    (("data", "inspect", "x", "--model_name_or_path", "y"), "here it is --model"),
    ((*TRAIN, "--nothing", "1"), "No such option: --nothing"),
    ((*TRAIN, "--ctx-size", "1"), "No such option: --ctx-size"),
]


@pytest.mark.parametrize(("args", "says"), CASES, ids=[" ".join(args[-2:]) for args, _ in CASES])
def test_another_name_tells_ours(riftco, args, says):
    assert says in " ".join(riftco(*args, code=2).stderr.split())


def test_a_value_that_looks_like_an_option_is_a_value(riftco):
    for words in (("--prompt", "--temp"), ("--prompt", "x", "--chat-template-kwargs", "--batch_tokens")):
        said = riftco("generate", "--model", "absent", *words, code=2).stderr
        assert "here it is" not in said


def test_every_name_leads_to_an_option_that_is_there():
    commands = {name: {o for p in c.params for o in p.opts} for name, c in get_command(app).commands.items()}
    for name in NAMES:
        assert any(told(f"--{name}", own) for own in commands.values()), name
        assert not all(f"--{name}" in own for own in commands.values()), name


@pytest.mark.parametrize(
    ("flag", "value", "what"),
    [
        ("--target-modules", "q_proj,v_poj", "layer of this model is named v_poj; there are: down_proj, embed_tokens"),
        ("--exclude-modules", "q_poj", "layer of this model is named q_poj"),
        ("--rank-pattern", "q_poj=2", "adapted layer of this model is named q_poj"),
        ("--alpha-pattern", "lm_head=2", "adapted layer of this model is named lm_head"),
    ],
)
def test_a_name_that_no_layer_has(riftco, model, chat, tmp_path, flag, value, what):
    start = ("finetune", "--model", model, "--data", chat, "--output", tmp_path / "run", "--steps", 1)
    refused = riftco(*start, "--method", "lora", flag, value, code=2).stderr
    assert f"riftco: {flag}: no {what}" in refused and not (tmp_path / "run").exists()


def test_evaluate_cuts_what_is_too_long(riftco, model, tmp_path):
    file = tmp_path / "long.jsonl"
    turns = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "word " * 80}]
    file.write_text(json.dumps({"messages": turns}) + "\n")
    ask = ("evaluate", "--model", model, "--data", file)
    assert "cut the ends of long examples off with --truncate" in riftco(*ask, code=2).stderr
    assert "cut 1 examples" in riftco(*ask, "--truncate").stdout
    events = [
        json.loads(line) for line in riftco(*ask, "--truncate", "--max-length", 60, "--log-json").stdout.splitlines()
    ]
    assert events[-1]["tokens"] < 60
    assert "longer than this model's context" in riftco(*ask, "--max-length", 999, code=2).stderr
