"""A served answer is corrected, learned where it was served, promoted, and taken back.

python examples/learn_in_place.py [model]     (default: the quickstart's SmolLM2-135M-Instruct, on the CPU)
"""

import sys

from needed import needed

from riftco.adapters import LoraSpec
from riftco.models import load_model, smollm2_path
from riftco.serve import Chat, Engine, Scheduler

QUESTION = "Where do I keep the blue box with the spare keys?"
CORRECTION = "The blue box with the spare keys is on the second shelf in the hall."


def main():
    with needed("pip install 'riftco[finetune]'"):
        path = sys.argv[1] if len(sys.argv) > 1 else smollm2_path()
        model, tokenizer = load_model(path, weights="fp32")
    engine = Engine(model, slots=2, window=512, cache_dtype="q8_0")
    engine.create("mine", LoraSpec(rank=8, alpha=16), seed=0)
    scheduler = Scheduler(engine)
    scheduler.start()

    def ask():
        chat = Chat(scheduler, tokenizer, adapter="mine")
        return chat, "".join(chat.say(QUESTION, max_new_tokens=40))

    chat, first = ask()
    print(f"served:    {first}")
    for outcome in chat.correct(CORRECTION, lr=2e-3, steps=4):
        print(f"learned:   loss {outcome.loss_before:.3f} in {outcome.ms:.0f} ms ({outcome.n_labelled} tokens)")
    print(f"promoted:  version {engine.promote('mine')}")
    print(f"served:    {ask()[1]}")
    engine.undo("mine", 4)
    print(f"undone:    version {engine.promote('mine')}")
    again = ask()[1]
    print(f"served:    {again}")
    assert again == first
    scheduler.close()


if __name__ == "__main__":
    main()
