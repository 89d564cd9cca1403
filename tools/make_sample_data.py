"""Writes the sample chat data in riftco/data/samples: plain sentences about a pantry, answered as one ledger line.

A small model does not answer like this by itself, so the effect of fine-tuning is easy to see. The held-out part uses
goods and places that the training part never names. Run it without arguments; the output is always the same.
"""

import json
import pathlib
import random

SAMPLES = pathlib.Path(__file__).parent.parent / "riftco" / "data" / "samples"
TRAIN, HELD_OUT = 320, 40

NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
UNITS = {  # one, many -> goods
    ("jar", "jars"): ["honey", "plum jam", "pickled beets", "mustard", "peanut butter", "lemon curd", "olives"],
    ("bag", "bags"): ["rice", "red lentils", "rye flour", "walnuts", "oats", "raisins", "potatoes", "sugar"],
    ("carton", "cartons"): ["oat milk", "apple juice", "cream", "eggs", "tomato soup", "coconut water"],
    ("tin", "tins"): ["chickpeas", "sardines", "peaches", "sweetcorn", "black tea", "butter beans"],
    ("bottle", "bottles"): ["vinegar", "olive oil", "soy sauce", "elderflower syrup", "cider", "tonic water"],
    ("box", "boxes"): ["crackers", "spaghetti", "green tea", "candles", "matches", "cocoa powder", "dates"],
}
PLACES = ["fridge", "cellar", "top shelf", "kitchen cupboard", "garage", "corner cabinet", "back room"]
HELD_OUT_UNITS = {
    ("jar", "jars"): ["fig chutney", "tahini"],
    ("bag", "bags"): ["couscous", "dried mango"],
    ("carton", "cartons"): ["buttermilk", "orange juice"],
    ("tin", "tins"): ["pineapple", "kidney beans"],
    ("bottle", "bottles"): ["maple syrup", "sesame oil"],
    ("box", "boxes"): ["cornflakes", "ginger biscuits"],
}
HELD_OUT_PLACES = ["attic", "side table", "cold store"]
SENTENCES = {
    "+": [
        "I put {n} {unit} of {good} in the {place}.",
        "Please note {n} {unit} of {good} for the {place}.",
        "{n} {unit} of {good} just went into the {place}.",
        "We bought {n} {unit} of {good}; they are in the {place} now.",
        "Grandma brought {n} {unit} of {good} and left everything in the {place}.",
    ],
    "-": [
        "I took {n} {unit} of {good} from the {place}.",
        "{n} {unit} of {good} left the {place} today.",
        "We used up {n} {unit} of {good} out of the {place}.",
        "Please strike {n} {unit} of {good} off the {place} list.",
        "The neighbours borrowed {n} {unit} of {good} from our {place}.",
    ],
    "?": [
        "Are there still {n} {unit} of {good} in the {place}?",
        "Could you check the {place} for {n} {unit} of {good}?",
        "I wonder whether the {place} still holds {n} {unit} of {good}.",
    ],
}


def example(rng: random.Random, units: dict, places: list[str]) -> dict:
    (one, many), goods = rng.choice(list(units.items()))
    count, good, place = rng.randint(1, len(NUMBERS)), rng.choice(goods), rng.choice(places)
    sign = rng.choice("++--?")
    said = rng.choice(SENTENCES[sign]).format(
        n=NUMBERS[count - 1], unit=one if count == 1 else many, good=good, place=place
    )
    return {
        "messages": [
            {"role": "user", "content": said[0].upper() + said[1:]},
            {"role": "assistant", "content": f"[{sign}] {count} {one} | {good} | {place}"},
        ]
    }


def distinct(rng: random.Random, count: int, units: dict, places: list[str]) -> list[dict]:
    found: dict[str, dict] = {}
    while len(found) < count:
        made = example(rng, units, places)
        found.setdefault(made["messages"][0]["content"], made)
    return list(found.values())


def main() -> None:
    rng = random.Random(20)
    for name, count, units, places in (
        ("pantry_train.jsonl", TRAIN, UNITS, PLACES),
        ("pantry_heldout.jsonl", HELD_OUT, HELD_OUT_UNITS, HELD_OUT_PLACES),
    ):
        lines = [json.dumps(e) for e in distinct(rng, count, units, places)]
        (SAMPLES / name).write_text("\n".join(lines) + "\n")
        print(f"{name}: {len(lines)} examples")


if __name__ == "__main__":
    main()
