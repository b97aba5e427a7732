import errno
import json
import multiprocessing
import os
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.data import store as store_module
from longshore.data.source import Field, TokenizedSample
from longshore.data.store import Store, write_durably, write_store
from longshore.files import sealed_json

FIELDS = (
    Field("advantage", "token", "float16"),
    Field("kept", "token", "bool"),
    Field("experts", "token", "uint8", (2, 2)),
    Field("sample_id", "sequence", "int64"),
    Field("weights", "sequence", "float64", (3,)),
)


def made(lengths, fields=FIELDS, seed=0):
    """Random samples of these lengths."""
    rng = np.random.default_rng(seed)

    def values(field, n):
        return rng.integers(0, 2, field.array_shape(n)).astype(field.dtype)

    return [
        TokenizedSample(
            i,
            rng.integers(0, 2**31, n).astype(np.int32),
            rng.integers(0, 2, n).astype(np.bool_),
            {field.name: values(field, n) for field in fields},
        )
        for i, n in enumerate(lengths)
    ]


def files_of(folder):
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


@pytest.mark.property
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 5), st.booleans())
def test_what_goes_in_comes_out(tmp_path_factory, lengths, shard_sequences, with_fields):
    fields = FIELDS if with_fields else ()
    samples = made(lengths, fields)
    folder = tmp_path_factory.mktemp("store")
    store = write_store(folder, samples, fields=fields, shard_sequences=shard_sequences)
    assert len(store) == len(samples)
    assert [store[i] for i in range(len(store))] == samples
    assert store.lengths.tolist() == lengths
    assert store.loss_tokens.tolist() == [sample.loss_tokens for sample in samples]
    assert store.fields == fields
    for i, sample in enumerate(samples):
        assert store.mask_head(i, 5).tolist() == sample.loss_mask[:5].tolist()
    assert len(store.manifest.shards) == -(-len(lengths) // shard_sequences)
    store.verify()


def test_the_manifest(tmp_path):
    store = write_store(tmp_path, made([3, 1, 9]), fields=FIELDS, about={"by": "hand"})
    data = json.loads((tmp_path / "manifest.json").read_text())
    assert (data["format"], data["schema_version"]) == ("longshore store", 2)
    assert (data["sequences"], data["tokens"], data["longest"]) == (3, 13, 9)
    assert data["loss_tokens"] == store.loss_tokens.sum()
    assert data["fields"][2] == "experts:per_token:uint8:2x2"
    assert store.manifest.about == {"by": "hand"}
    assert sorted(files_of(tmp_path)) == [
        "checksums.npy",
        "lengths.npy",
        "loss_tokens.npy",
        "manifest.json",
        "mask_heads.npy",
        "shard-00000.arrow",
    ]


def test_the_same_samples_give_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        write_store(tmp_path / name, made([5, 1, 700]), fields=FIELDS, shard_sequences=2)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_places(tmp_path):
    store = write_store(tmp_path, made([2, 3, 4]), fields=FIELDS, shard_sequences=2)
    assert store[-1].id == 2
    assert store[np.int64(1)].length == 3
    with pytest.raises(IndexError, match="sequence 3 is out of range: the source has 3"):
        store[3]
    assert [sample.length for sample in store] == [2, 3, 4]


def test_lengths_need_no_shard(tmp_path, monkeypatch):
    write_store(tmp_path, made([2, 3, 4]), fields=FIELDS)
    monkeypatch.setattr(store_module, "pa", None)
    assert Store(tmp_path).lengths.tolist() == [2, 3, 4]


def test_samples_outlive_their_store_and_cannot_change_it(tmp_path):
    samples = made([2, 3], fields=())
    sample = write_store(tmp_path, samples)[1]
    assert sample == samples[1]
    with pytest.raises(ValueError, match="read-only"):
        sample.tokens[0] = 5


def test_no_file_stays_open(tmp_path):
    store = write_store(tmp_path, made([1] * 50, fields=()), shard_sequences=1)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert [sample.length for sample in store] == [1] * 50
    after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert after == before


def _read_all(store, connection):
    connection.send([(s.id, s.tokens.tobytes()) for s in store])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_other_processes(tmp_path, method):
    store = write_store(tmp_path, made([2, 3, 4]), fields=FIELDS, shard_sequences=2)
    expected = [(s.id, s.tokens.tobytes()) for s in store]
    context = multiprocessing.get_context(method)
    mine, theirs = context.Pipe()
    process = context.Process(target=_read_all, args=(store, theirs))
    process.start()
    theirs.close()
    assert mine.recv() == expected
    process.join()
    assert process.exitcode == 0
    assert [(s.id, s.tokens.tobytes()) for s in store] == expected


def test_pickled_it_is_a_path(tmp_path):
    store = write_store(tmp_path, made([2, 3000]), fields=FIELDS)
    assert store[1].length == 3000
    text = pickle.dumps(store)
    assert len(text) < 1000
    assert pickle.loads(text)[1] == store[1]


@pytest.mark.parametrize("name", ["shard-00001.arrow", "lengths.npy", "checksums.npy"])
def test_a_truncated_or_missing_file_is_named(tmp_path, name):
    write_store(tmp_path, made([20, 30, 40]), fields=FIELDS, shard_sequences=2)
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"{name}: has \d+ bytes and should have \d+"):
        Store(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match=rf"{name}: cannot be read \(No such file"):
        Store(tmp_path)


def test_a_shard_truncated_after_opening_is_named(tmp_path):
    store = write_store(tmp_path, made([20, 30, 40]), fields=FIELDS, shard_sequences=2)
    os.truncate(tmp_path / "shard-00001.arrow", 100)
    assert store[1].length == 30
    with pytest.raises(ValueError, match=r"shard-00001.arrow: has 100 bytes"):
        store[2]


def read(store, i):
    try:
        return store[i], ""
    except ValueError as error:
        return None, str(error)


@pytest.mark.fuzz
@given(st.data())
def test_a_damaged_shard_is_named_and_never_read_wrongly(tmp_path_factory, data):
    """Any bit may flip: what is read is what was written, until an error names the shard."""
    folder = tmp_path_factory.mktemp("store")
    samples = made([9, 4, 30])
    write_store(folder, samples, fields=FIELDS)
    path = folder / "shard-00000.arrow"
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    store = Store(folder)
    errors = []
    for i, sample in enumerate(samples):
        got, error = read(store, i)
        assert got == sample or error.startswith(f"{path}: is damaged")
        errors += [error] if error else []
    assert errors, "it is noticed, wherever it is"
    with pytest.raises(ValueError, match=r"shard-00000.arrow: is damaged \(its SHA-256"):
        store.verify()


def test_a_flipped_token_is_found_when_it_is_read(tmp_path):
    samples = made([9, 4], fields=())
    write_store(tmp_path, samples)
    path = tmp_path / "shard-00000.arrow"
    content = path.read_bytes()
    at = content.index(samples[1].tokens.tobytes())
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    store = Store(tmp_path)
    assert store[0] == samples[0]
    with pytest.raises(ValueError, match=r"damaged \(sequence 1 does not match its checksum\)"):
        store[1]


def test_no_store(tmp_path):
    with pytest.raises(
        ValueError, match=r"is not a prepared folder, or is unfinished .*longshore prepare"
    ):
        Store(tmp_path)
    with pytest.raises(ValueError, match="there are no sequences to store"):
        write_store(tmp_path / "empty", [])
    with pytest.raises(ValueError, match="is not empty"):
        write_store(tmp_path, made([1], fields=()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 1}, r"'longshore store', version 1; this Longshore reads"),
        ({"format": "other"}, r"is 'other', version 2"),
        ({"shards": [{"file": "x"}]}, "is damaged"),
        ({"fields": ["x"]}, "is damaged"),
        ({"sequences": None}, "is damaged"),
    ],
)
def test_a_manifest_that_does_not_fit(tmp_path, change, message):
    write_store(tmp_path, made([1, 2], fields=()))
    path = tmp_path / "manifest.json"
    path.write_bytes(sealed_json({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=message):
        Store(tmp_path)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"manifest.json: is damaged"):
        Store(tmp_path)


def flip(path, at, bit):
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def use(folder):
    """What a run does with a store."""
    store = Store(folder)
    return store.lengths.sum(), store.loss_tokens.sum(), [sample.length for sample in store]


def test_a_bit_in_any_file_of_a_store_is_noticed(tmp_path):
    """Some 40 places in each file, from its first byte to its last."""
    write_store(tmp_path, made([9, 4, 30, 1]), fields=FIELDS, shard_sequences=2)
    use(tmp_path)
    for path in sorted(tmp_path.iterdir()):
        size = path.stat().st_size
        places = {*range(0, size, -(-size // 40)), size - 1}
        for at in sorted(places):
            bit = at * 5 % 8
            flip(path, at, bit)
            with pytest.raises(ValueError, match="again or prepare the store again") as caught:
                use(tmp_path)
            assert str(path) in str(caught.value), (path.name, at, bit)
            flip(path, at, bit)
    use(tmp_path)


def test_the_head_of_a_mask_needs_no_shard(tmp_path):
    """It decides what a depth's loss is divided by, and every lane wants that of all sequences."""
    samples = made([200, 1, 64, 65, 3], fields=())
    store = write_store(tmp_path, samples, shard_sequences=2)
    for i, sample in enumerate(samples):
        for count in (0, 1, 2, 63, 64, 65, 300):
            assert store.mask_head(i, count).tolist() == sample.loss_mask[:count].tolist()
    for path in tmp_path.glob("shard-*"):
        path.write_bytes(bytes(path.stat().st_size))
    store = Store(tmp_path)
    assert store.mask_head(-5, 64).tolist() == samples[0].loss_mask[:64].tolist()
    with pytest.raises(ValueError, match="is damaged"):
        store.mask_head(0, 65)


def test_the_digest_names_the_content_alone(tmp_path):
    samples = made([9, 4, 30], fields=())
    by_one, whole = (
        write_store(tmp_path / str(n), samples, shard_sequences=n, about={"n": n}) for n in (1, 3)
    )
    assert by_one.digest == whole.digest
    other = [*samples[:2], made([30], fields=(), seed=5)[0]]
    assert write_store(tmp_path / "other", other).digest != whole.digest
    turned = write_store(tmp_path / "turned", samples[::-1])
    assert turned.digest != whole.digest


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_durably(path, b"old", scratch=tmp_path)

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_durably(path, b"new", scratch=tmp_path)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"], "and no partial"
