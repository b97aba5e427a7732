"""A checkpoint as files, without ranks: every bit of it is checked before it is loaded."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longshore.files import sealed_json
from longshore.train.checkpoint_files import (
    CheckpointIndex,
    DamagedError,
    SavedChunk,
    SavedTensor,
    _tile,
    begin_save,
    check_files,
    checkpoint_folder,
    finish_save,
    newest_complete,
    partial_folder,
    read_index,
    saved_steps,
)
from longshore.train.safetensors_stream import write_safetensors

LOADER = {"epoch": 1, "step_in_epoch": 2, "step": 5, "data": "1f3a"}


def write(run, step=5):
    """Two ranks with two rows each."""
    begin_save(run, step, needed=100)
    names = [f"rank-0000{rank}.safetensors" for rank in (0, 1)]
    files = {
        name: write_safetensors(partial_folder(run, step) / name, {"w": torch.ones(2, 3)})
        for name in names
    }
    chunks = (SavedChunk((0, 0), (2, 3), names[0], "w"), SavedChunk((2, 0), (2, 3), names[1], "w"))
    tensors = {"w": SavedTensor("F32", (4, 3), chunks)}
    saved = CheckpointIndex(step, 4, 2, loader=LOADER, files=files, tensors=tensors)
    finish_save(run, saved, keep=2)
    return saved


def look(folder):
    saved = read_index(folder)
    for part in (0, 1):
        check_files(folder, saved, part=part, parts=2)
    return saved


def test_a_bit_in_any_file_of_a_checkpoint_is_noticed(tmp_path):
    folder = checkpoint_folder(tmp_path, 5)
    saved = write(tmp_path)
    assert look(folder) == saved
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for at in (*range(0, len(whole), 17), len(whole) - 1):
            other = bytearray(whole)
            other[at] ^= 1 << at * 3 % 8
            path.write_bytes(other)
            with pytest.raises(DamagedError) as caught:
                look(folder)
            assert str(path) in str(caught.value), at
        path.write_bytes(whole)
    assert look(folder) == saved


def rewrite(run, saved, tensors, *, version=3):
    """The same files with another list of tensors, as step 6."""
    begin_save(run, 6, needed=100)
    for name in saved.files:
        partial = partial_folder(run, 6) / name
        partial.write_bytes((checkpoint_folder(run, 5) / name).read_bytes())
    finish_save(run, CheckpointIndex(6, 4, 2, LOADER, saved.files, {}), keep=2)
    marker = checkpoint_folder(run, 6) / "checkpoint.json"
    data = json.loads(marker.read_bytes()) | {"tensors": tensors, "version": version}
    del data["sha256"]
    marker.write_bytes(sealed_json(data))
    return checkpoint_folder(run, 6)


FILES = ("rank-00000.safetensors", "rank-00001.safetensors")


@pytest.mark.parametrize(
    "blocks",
    [
        [],
        [((0, 0), (2, 3))],
        [((0, 0), (2, 3)), ((0, 0), (2, 3))],
        [((0, 0), (2, 3)), ((2, 0), (3, 3))],
        [((0, 0), (2, 3)), ((2, 0), (0, 3)), ((2, 0), (2, 3))],
        [((-1, 0), (3, 3)), ((2, 0), (2, 3))],
        [((0, 0), (4, 2)), ((0, 1), (4, 1))],
        [((0, 0), (4, 2)), ((0, 2), (3, 1))],
        [((0, 0), (2, 3)), ((2, 0), (2, 4))],
        [((0, 0), (2, 3)), ((2,), (2,))],
    ],
)
def test_every_value_must_be_there_once(tmp_path, blocks):
    chunks = [[*block, file, "w"] for block, file in zip(blocks, FILES * 2, strict=False)]
    tensors = {"w": {"dtype": "F32", "shape": [4, 3], "chunks": chunks}}
    folder = rewrite(tmp_path, write(tmp_path), tensors)
    with pytest.raises(
        DamagedError, match=r"parts of w (are missing or listed twice|have another)"
    ):
        read_index(folder)


@st.composite
def tilings(draw, rest=(4, 3, 5)):
    """Random blocks that cover all of `rest`: cuts along one dim, and each part cut again."""
    blocks = [((0,) * len(rest), rest)]
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(blocks) - 1))
        offsets, sizes = blocks[at]
        dim = draw(st.integers(0, len(rest) - 1))
        if sizes[dim] > 1:
            cut = draw(st.integers(1, sizes[dim] - 1))
            later = list(offsets)
            later[dim] += cut
            first, second = list(sizes), list(sizes)
            first[dim], second[dim] = cut, sizes[dim] - cut
            blocks[at : at + 1] = [(offsets, tuple(first)), (tuple(later), tuple(second))]
    return draw(st.permutations(blocks))


@given(tilings(), st.data())
def test_blocks_cover_a_tensor(blocks, data):
    assert _tile((4, 3, 5), blocks)
    at = data.draw(st.integers(0, len(blocks) - 1))
    assert not _tile((4, 3, 5), [*blocks[:at], *blocks[at + 1 :]])
    assert not _tile((4, 3, 5), [*blocks, blocks[at]])


def test_another_version_is_refused(tmp_path):
    folder = rewrite(tmp_path, write(tmp_path), {}, version=2)
    with pytest.raises(DamagedError, match=r"version 2; this Longshore reads .*, version 3"):
        read_index(folder)


@pytest.mark.parametrize("updates", [-5, 6, 1.5, True, "4"])
def test_counts_that_no_run_has_are_damage(tmp_path, updates):
    """Also where the checksum is right: five steps have 0 to 5 updates."""
    write(tmp_path)
    path = checkpoint_folder(tmp_path, 5) / "checkpoint.json"
    data = json.loads(path.read_text())
    del data["sha256"]
    path.write_bytes(sealed_json({**data, "updates": updates}))
    with pytest.raises(DamagedError, match=r"checkpoint\.json is damaged \(updates is "):
        read_index(path.parent)


def test_a_checkpoint_before_one_that_is_nested_too_deep_is_taken(tmp_path):
    write(tmp_path, 4)
    write(tmp_path, 5)
    path = checkpoint_folder(tmp_path, 5) / "checkpoint.json"
    path.write_text("[" * 100_000)
    with pytest.raises(DamagedError, match=r"is damaged \(its lists and objects are nested too"):
        read_index(path.parent)
    assert newest_complete(tmp_path) == checkpoint_folder(tmp_path, 4)


def test_a_save_without_room_does_not_begin(tmp_path):
    left = partial_folder(tmp_path, 3)
    left.mkdir(parents=True)
    with pytest.raises(OSError, match=r"it takes .* are free"):
        begin_save(tmp_path, 5, needed=1 << 60)
    assert not left.exists(), "what a killed save has left may be what fills the disk"
    assert not partial_folder(tmp_path, 5).exists()
    assert saved_steps(tmp_path) == []
