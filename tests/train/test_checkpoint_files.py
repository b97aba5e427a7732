"""A checkpoint as files, without ranks: every bit of it is checked before it is loaded."""

import pytest
import torch

from longshore.train.checkpoint_files import (
    CheckpointIndex,
    DamagedError,
    SavedTensor,
    begin_save,
    check_files,
    checkpoint_folder,
    finish_save,
    partial_folder,
    read_index,
    saved_steps,
)
from longshore.train.checkpoint_storage import write_safetensors

LOADER = {"epoch": 1, "step_in_epoch": 2, "step": 5, "data": "1f3a"}


def write(run, step=5):
    """Two lanes with two rows each."""
    begin_save(run, step, needed=100)
    names = [f"lane-0000{lane}.safetensors" for lane in (0, 1)]
    files = {
        name: write_safetensors(partial_folder(run, step) / name, {"w": torch.ones(2, 3)})
        for name in names
    }
    tensors = {"w": SavedTensor("F32", (4, 3), ((0, 2, names[0]), (2, 2, names[1])))}
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


@pytest.mark.parametrize(
    "chunks",
    [
        (),
        ((0, 2, "lane-00000.safetensors"),),
        ((0, 2, "lane-00000.safetensors"), (0, 2, "lane-00001.safetensors")),
        ((0, 2, "lane-00000.safetensors"), (2, 3, "lane-00001.safetensors")),
        ((0, 2, "lane-00000.safetensors"), (2, 0, "x"), (2, 2, "lane-00001.safetensors")),
    ],
)
def test_rows_must_be_there_once(tmp_path, chunks):
    saved = write(tmp_path)
    saved.tensors["w"] = SavedTensor("F32", (4, 3), chunks)
    begin_save(tmp_path, 6, needed=100)
    for name in saved.files:
        partial = partial_folder(tmp_path, 6) / name
        partial.write_bytes((checkpoint_folder(tmp_path, 5) / name).read_bytes())
    finish_save(tmp_path, CheckpointIndex(6, 4, 2, LOADER, saved.files, saved.tensors), keep=2)
    with pytest.raises(DamagedError, match="rows of w are missing or listed twice"):
        read_index(checkpoint_folder(tmp_path, 6))


def test_a_save_without_room_does_not_begin(tmp_path):
    left = partial_folder(tmp_path, 3)
    left.mkdir(parents=True)
    with pytest.raises(OSError, match=r"it takes .* are free"):
        begin_save(tmp_path, 5, needed=1 << 60)
    assert not left.exists(), "what a killed save has left may be what fills the disk"
    assert not partial_folder(tmp_path, 5).exists()
    assert saved_steps(tmp_path) == []
