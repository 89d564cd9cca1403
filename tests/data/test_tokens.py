"""Token files: mapped, borrowed, checked before they are used."""

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from riftco.data import DataError, Loader, Staging, TokenArrays, TokenLoader, WindowSampler, load_tokens
from riftco.data.geometry import Geometry

IDS = np.arange(24, dtype=np.int64).reshape(4, 6)


def test_a_row_is_borrowed_not_copied():
    labels, weights = IDS + 1, np.full(IDS.shape, 0.5, np.float32)
    batch = TokenArrays(IDS, labels=labels, weights=weights).batch(slice(1, 3))
    for tensor, array in ((batch.input_ids, IDS), (batch.target, labels), (batch.row_weight, weights)):
        assert tensor.data_ptr() == array[1:].ctypes.data
    assert batch.input_ids.tolist() == list(range(6, 18))
    assert batch.cu_seqlens.tolist() == [0, 6, 12]
    assert batch.n_labelled == 12
    labels[1, 0] = -1  # the caller's array, seen by the batch
    assert batch.target[0] == -1


@pytest.mark.parametrize("kind", ["npy", "npz", "safetensors"])
def test_files_are_mapped(tmp_path, kind):
    path = tmp_path / f"t.{kind}"
    more = {"labels": np.where(IDS % 2 == 0, IDS + 1, -1), "weights": np.ones(IDS.shape, np.float32)}
    if kind == "npy":
        np.save(path, IDS)
        more = {}
    elif kind == "npz":
        np.savez(path, ids=IDS, **more)
    else:
        save_file({"ids": IDS, **more}, path)
    arrays = load_tokens(path, vocabulary=25)
    assert isinstance(arrays.ids, np.memmap)
    assert np.array_equal(arrays.ids, IDS)
    for name, value in more.items():
        assert isinstance(getattr(arrays, name), np.memmap)
        assert np.array_equal(getattr(arrays, name), value)
    before = path.read_bytes()
    batch = arrays.batch(slice(0, 2))
    assert batch.n_labelled == (6 if more else 10)
    batch.input_ids.zero_()
    assert path.read_bytes() == before
    with pytest.raises(DataError, match=r"ids holds 23; the model's vocabulary has 23 tokens"):
        load_tokens(path, vocabulary=23)


def test_a_large_file_is_not_read_to_be_mapped(tmp_path):
    path = tmp_path / "sparse.npy"
    with open(path, "wb") as f:
        np.lib.format.write_array_header_1_0(f, {"descr": "<i4", "fortran_order": False, "shape": (1 << 22, 4096)})
        f.truncate(f.tell() + (4 << 34))  # 64 GiB of holes
    arrays = load_tokens(path)
    assert arrays.batch(slice(0, 1)).input_ids.sum() == 0


def test_next_tokens_stay_inside_their_sequence():
    sequences = np.array([[0, 0, 1, 1, 1, 2]] * 4)
    batch = TokenArrays(IDS, sequence_ids=sequences).batch(slice(0, 2))
    assert batch.cu_seqlens.tolist() == [0, 2, 5, 6, 8, 11, 12]
    assert batch.target.tolist() == [1, -100, 3, 4, -100, -100, 7, -100, 9, 10, -100, -100]
    assert batch.max_seqlen == 3


def test_a_token_of_several_sequences_is_refused_by_name():
    shared = np.array([[[0, 1], [0, 1], [0, -1], [0, -1], [1, -1], [1, -1]]] * 4)
    with pytest.raises(DataError, match=r"token 0 belongs to the sequences \[0, 1\].*shared prefixes"):
        TokenArrays(IDS, sequence_ids=shared).batch(slice(0, 1))
    with pytest.raises(DataError, match=r"token 2 belongs to the sequences \[\]"):
        TokenArrays(IDS, sequence_ids=np.array([[0, 0, -1, 1, 1, 1]] * 4)).batch(slice(0, 1))
    with pytest.raises(DataError, match="sequence 0 lies in several pieces"):
        TokenArrays(IDS, sequence_ids=np.array([[0, 0, 1, 1, 0, 0]] * 4)).batch(slice(0, 1))


def test_top_k_materialises_the_label_column_alone():
    ids = np.stack([IDS + 1, IDS + 2], -1)
    weights = np.full(ids.shape, 0.5, np.float32)
    batch = TokenArrays(IDS, topk_ids=ids, topk_weights=weights).batch(slice(2, 3))
    assert batch.topk_ids.data_ptr() == ids[2:].ctypes.data
    assert batch.topk_weights.data_ptr() == weights[2:].ctypes.data
    assert batch.topk_ids.shape == (6, 2)
    assert batch.target.tolist() == (IDS[2] + 1).tolist()


BAD = {
    "ids must be": {"ids": np.zeros((0, 3), np.int64)},
    "labels .* does not fit": {"labels": IDS[:, :3]},
    "weights must be float32": {"weights": np.ones(IDS.shape)},
    "labels must be int64": {"labels": IDS.astype(np.float32)},
    "belong together": {"topk_ids": IDS[..., None]},
    "not both": {
        "labels": IDS, "topk_ids": IDS[..., None], "topk_weights": np.ones((4, 6, 1), np.float32)
    },
    "differ": {"topk_ids": IDS[..., None], "topk_weights": np.ones((4, 6, 2), np.float32)},
    "takes ids alone": {"ids": IDS[0], "labels": IDS[0]},
}  # fmt: skip


@pytest.mark.parametrize("why", BAD)
def test_arrays_that_do_not_fit_are_refused(why):
    with pytest.raises(DataError, match=why):
        TokenArrays(**{"ids": IDS, **BAD[why]})


@pytest.mark.parametrize("dtype", ["<u4", ">i8", ">i4", ">u2", "|i1", "|u1", "<i2"])
def test_integers_keep_their_values(tmp_path, dtype):
    top = min(np.iinfo(dtype).max, 1 << 40)
    ids = np.array([[0, 1, top]], dtype=dtype)
    np.save(tmp_path / "t.npy", ids)
    assert load_tokens(tmp_path / "t.npy").batch(slice(0, 1)).input_ids.tolist() == [0, 1, top]


def test_ids_that_no_model_has_are_refused(tmp_path):
    np.save(tmp_path / "u8.npy", np.array([[0, 1 << 63]], dtype=np.uint64))
    with pytest.raises(DataError, match=r"u8\.npy: ids must be int64, .*; got uint64"):
        load_tokens(tmp_path / "u8.npy")
    np.save(tmp_path / "t.npy", np.array([[3, 2], [-1, 5]]))
    for vocabulary, wrong in ((8, -1), (5, 5)):
        with pytest.raises(DataError, match=rf"t\.npy: ids holds {wrong}; the model's vocabulary has {vocabulary}"):
            load_tokens(tmp_path / "t.npy", vocabulary=vocabulary)
    arrays = load_tokens(tmp_path / "t.npy")
    arrays.batch(slice(0, 1))
    with pytest.raises(DataError, match="ids must be 0 or more; got -1"):
        arrays.batch(slice(1, 2))
    for bad in (0, True, "8"):
        with pytest.raises(DataError, match="vocabulary must be an integer of 1 or more, or None; got"):
            load_tokens(tmp_path / "t.npy", vocabulary=bad)


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_weights_are_checked_before_they_are_used(wrong):
    weights = np.ones(IDS.shape, np.float32)
    weights[2, 1] = wrong
    arrays = TokenArrays(IDS, weights=weights)
    arrays.batch(slice(0, 2))
    with pytest.raises(DataError, match="finite and 0 or more"):
        arrays.batch(slice(2, 3))


def test_files_that_cannot_be_mapped(tmp_path):
    np.savez_compressed(tmp_path / "c.npz", ids=IDS)
    with pytest.raises(DataError, match=r"is compressed; save it with np\.savez"):
        load_tokens(tmp_path / "c.npz")
    np.savez(tmp_path / "n.npz", tokens=IDS)
    with pytest.raises(DataError, match=r"must hold ids.*got \['tokens'\]"):
        load_tokens(tmp_path / "n.npz")
    with pytest.raises(DataError, match="no such file"):
        load_tokens(tmp_path / "x.npy")
    with pytest.raises(DataError, match="is one of"):
        load_tokens(tmp_path / "x.bin")
    (tmp_path / "e.npy").write_bytes(b"")
    with pytest.raises(DataError, match="cannot be mapped"):
        load_tokens(tmp_path / "e.npy")
    save_file({"ids": IDS.astype(np.float64)}, tmp_path / "f.safetensors")
    with pytest.raises(DataError, match="dtype F64"):
        load_tokens(tmp_path / "f.safetensors")
    whole = tmp_path / "t.safetensors"
    save_file({"ids": IDS}, whole)
    whole.write_bytes(whole.read_bytes()[:-1])
    with pytest.raises(DataError, match="does not fit the file"):
        load_tokens(whole)


def test_rows_come_once_an_epoch_and_resume():
    def loader():
        return TokenLoader(TokenArrays(IDS), 13, seed=2, epochs=2)

    whole, made = [], loader()
    while (batch := made.next()) is not None:
        whole.append(batch.documents)
    assert [len(d) for d in whole] == [2, 2, 2, 2]
    assert sorted(sum(whole[:2], ())) == sorted(sum(whole[2:], ())) == [0, 1, 2, 3]
    first, second = loader(), loader()
    first.next()
    second.load_state_dict(first.state_dict())
    assert second.next().documents == whole[1]
    with pytest.raises(DataError, match="a row of 6 tokens does not fit a micro-batch of 5"):
        TokenLoader(TokenArrays(IDS), 5, 0)


def test_a_corpus_follows_the_samplers_law():
    corpus = np.arange(50, dtype=np.uint16)
    loader = TokenLoader(TokenArrays(corpus), 20, seed=5, context=8)
    twin = WindowSampler(corpus, 8, 2, seed=5)
    for _ in range(3):
        batch, (inputs, targets) = loader.next(), twin.next()
        assert batch.input_ids.tolist() == [int(i) for row in inputs for i in row]
        assert batch.target.tolist() == [int(i) for row in targets for i in row]
        assert batch.input_ids.dtype == torch.int32
        assert batch.cu_seqlens.tolist() == [0, 8, 16]
    with pytest.raises(DataError, match="a corpus needs one"):
        TokenLoader(TokenArrays(corpus), 20, seed=5)


def test_host_buffers_are_used_again_and_hold_nothing_of_before():
    made = []

    def allocate(count, dtype):
        made.append((count, dtype))
        return torch.full((count,), 99, dtype=dtype)

    staging = Staging(torch.device("cpu"), allocate)
    big, small = TokenArrays(IDS).batch(slice(0, 4)), TokenArrays(IDS).batch(slice(1, 2))
    for _ in range(2):
        staging(big)
    first = len(made)
    for _ in range(4):
        moved = staging(small)
        for name in ("input_ids", "target", "positions", "cu_seqlens"):
            assert torch.equal(getattr(moved, name), getattr(small, name))
        assert moved.n_labelled == small.n_labelled
        assert staging(big).target.tolist() == big.target.tolist()
    assert len(made) == first == 8  # four fields, two sets


@pytest.mark.parametrize(
    "make",
    [
        lambda: Geometry.of([2**30, 2**30, 2]),
        lambda: Loader([], 2**31, 0),
        lambda: TokenLoader(TokenArrays(IDS), 2**40, 0),
        lambda: WindowSampler(range(10), 2**16, 2**16, 0),
    ],
)
def test_sizes_beyond_their_counters_are_refused_before_anything_is_made(make):
    with pytest.raises(OverflowError, match="32-bit offsets"):
        make()
