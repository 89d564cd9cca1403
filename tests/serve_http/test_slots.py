"""Slots on disk: byte for byte, under the same model and versions alone, inside one folder."""

import os
import threading

import httpx
import pytest
import torch
from server import refused, served, service

from riftco.serve import Refused, Request, Scheduler
from riftco.serve.saved_slots import SlotFiles, put, take

LONG = [{"role": "user", "content": "Where is the key to the blue box in the hall?"}]
ASK = {"messages": LONG, "max_tokens": 3, "temperature": 0, "id_slot": 0}


@pytest.fixture
def files(tmp_path):
    return SlotFiles(tmp_path / "slots", "digest")


@pytest.fixture
def made(tokenizer, tmp_path):
    return service(tokenizer, tmp_path / "train")


@pytest.fixture
def client(made, files):
    with served(made, slot_files=files) as url, httpx.Client(base_url=url, timeout=60) as talks:
        yield talks


def act(client, slot, action, **body):
    return client.post(f"/slots/{slot}", params={"action": action}, json=body or None)


def same(a, b):
    return a.start == b.start and all(
        x == y and all(torch.equal(s, t) for s, t in zip(p, q)) for (x, p), (y, q) in zip(a.rows, b.rows, strict=True)
    )


def test_save_erase_restore(client, made, files):
    first = client.post("/v1/chat/completions", json=ASK).json()
    rows, tokens = made.engine.cache.snapshot(0), list(made.engine.slots[0].tokens)
    saved = act(client, 0, "save", filename="one.bin").json()
    assert (saved["id_slot"], saved["filename"], saved["n_saved"]) == (0, "one.bin", len(tokens))
    assert saved["n_written"] == (files.folder / "one.bin").stat().st_size and saved["timings"]["save_ms"] > 0
    assert act(client, 0, "erase").json() == {"id_slot": 0, "n_erased": len(tokens)}
    assert made.engine.slots[0].tokens == []
    back = act(client, 1, "restore", filename="one.bin").json()
    assert (back["id_slot"], back["n_restored"], back["n_read"]) == (1, len(tokens), saved["n_written"])
    assert same(made.engine.cache.snapshot(1), rows) and made.engine.slots[1].tokens == tokens
    again = client.post("/v1/chat/completions", json={**ASK, "id_slot": 1}).json()
    assert again["choices"] == first["choices"]
    assert again["timings"]["cache_n"] == again["usage"]["prompt_tokens"] - 1, "its prefix is used again"
    assert os.listdir(files.folder) == ["one.bin"]
    listed = client.get("/slots").json()
    assert listed[1]["n_ctx"] == made.engine.window and not listed[1]["is_processing"] and listed[0]["n_tokens"] == 0


def test_rows_of_another_version_or_model_are_refused(client, made, files):
    under = {**ASK, "lora": [{"id": "live"}]}
    client.post("/v1/chat/completions", json=under)
    act(client, 0, "save", filename="v1")
    client.post("/v1/chat/completions", json={**under, "learn": {"lora_id": "live", "lr": 1e-3, "reply": "Here."}})
    assert act(client, 0, "restore", filename="v1").status_code == 200, "a shadow changes no row that is served"
    again = client.post("/v1/chat/completions", json=under).json()
    assert again["timings"]["cache_n"] == again["usage"]["prompt_tokens"] - 1, "under the same version"
    act(client, 0, "restore", filename="v1")
    base = client.post("/v1/chat/completions", json=ASK).json()
    assert base["timings"]["cache_n"] == 0, "the base made none of these rows"
    assert client.post("/adapters/live/promote").status_code == 200
    before = made.engine.cache.snapshot(0)
    refused(act(client, 0, "restore", filename="v1"), 400, "saved under version 1 of adapter 'live'")
    assert same(made.engine.cache.snapshot(0), before), "a refusal changes nothing"
    SlotFiles(files.folder, "other").write("alien", take(made.engine, 0))
    refused(act(client, 0, "restore", filename="alien"), 400, "another base model")


def test_rows_of_another_cache_and_damage_are_refused(client, made, files, tokenizer):
    client.post("/v1/chat/completions", json=ASK)
    act(client, 0, "save", filename="good")
    data = bytearray((files.folder / "good").read_bytes())
    data[-5] ^= 1
    (files.folder / "flipped").write_bytes(data)
    (files.folder / "short").write_bytes(data[:100])
    (files.folder / "empty").write_bytes(b"")
    for name in ("flipped", "short", "empty"):
        refused(act(client, 0, "restore", filename=name), 400, "no saved slot, or damaged")
    saved, _ = files.read("good")
    other = service(tokenizer, cache_dtype="float16").engine
    with pytest.raises(Refused, match="another dtype"):
        put(other, 0, saved)
    assert other.slots[0].tokens == [] and other.cache.lengths[0] == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "q8_0"])
def test_every_cache_is_saved_bit_for_bit(tokenizer, files, dtype):
    engine = service(tokenizer, cache_dtype=dtype, head=32).engine
    scheduler = Scheduler(engine)
    scheduler.submit(Request([5, 17, 42, 8], max_new_tokens=4, slot=0))
    scheduler.run()
    files.write("rows", take(engine, 0))
    put(engine, 1, files.read("rows")[0])
    assert same(engine.cache.snapshot(1), engine.cache.snapshot(0))
    assert engine.slots[1].tokens == engine.slots[0].tokens and len(engine.slots[1].tokens) == 7


def test_names_and_links_lead_nowhere_else(client, files, tmp_path):
    client.post("/v1/chat/completions", json=ASK)
    for name in ("../x", "..", "/etc/passwd", "a/b", "", ".hidden", "x" * 200, "a\0b", "a\\b"):
        for action in ("save", "restore"):
            refused(act(client, 0, action, filename=name), 400, "a name has letters")
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    (files.folder / "link").symlink_to(outside)
    refused(act(client, 0, "restore", filename="link"), 400, "cannot be read")
    assert act(client, 0, "save", filename="link").status_code == 200
    assert outside.read_bytes() == b"mine" and not (files.folder / "link").is_symlink(), "replaced, not followed"
    os.mkfifo(files.folder / "pipe")
    (files.folder / "folder").mkdir()
    for name in ("pipe", "folder"):
        refused(act(client, 0, "restore", filename=name), 400, "no regular file")
    refused(act(client, 0, "save", filename="folder"), 400, "is a folder")
    refused(act(client, 0, "restore", filename="absent"), 404, "no file 'absent'")
    refused(act(client, 0, "burn"), 400, "action")
    refused(act(client, 7, "erase"), 404, "no slot 7")
    refused(client.post("/slots/x?action=erase"), 400, "id")


def test_what_killed_servers_left_is_removed(files):
    """But not what another server writes at this moment, nor a slot that has been kept for long."""
    for name in (".writing-killed", ".writing-running", "kept"):
        (files.folder / name).write_bytes(b"half")
    for name in (".writing-killed", "kept"):
        os.utime(files.folder / name, (1, 1))
    SlotFiles(files.folder, "digest")
    assert sorted(f.name for f in files.folder.iterdir()) == [".writing-running", "kept"]


def test_without_a_folder_nothing_is_saved(tokenizer):
    with served(service(tokenizer)) as url, httpx.Client(base_url=url) as client:
        refused(act(client, 0, "save", filename="x"), 501, "--slot-save-path")
        assert act(client, 0, "erase").json()["n_erased"] == 0


def test_a_busy_slot_is_saved_after_its_turn(client, made):
    long = {**ASK, "max_tokens": 60}
    told = {}

    def talk():
        told.update(client.post("/v1/chat/completions", json=long).json())

    thread = threading.Thread(target=talk)
    thread.start()
    while not made.scheduler.turns:
        pass
    slots = client.get("/slots", params={"fail_on_no_slot": 1})
    assert slots.status_code == 200 and slots.json()[0]["is_processing"]
    saved = act(client, 0, "save", filename="after").json()
    thread.join()
    assert saved["n_saved"] == told["usage"]["total_tokens"] - 1, (
        "all of the turn but its last token, which is not read"
    )
