"""Compressed files, read from their start to their end without unpacking them on disk.

In: the name of a .gz or .zst file. Out: a file object that reads forward only, whose positions are
those of the unpacked bytes. Of chats.jsonl.gz with 1 GB of text at most some MB are in memory. A
file that is cut off or damaged is a ValueError with its name at the place of the damage, so its
rows are never silently fewer. pyarrow unpacks both, with the checksums of gzip and, where the file
has them, of zstd.

    kind_of("chats.jsonl.gz")          ".jsonl"
    with open_input("chats.jsonl.gz") as file: file.readline()
"""

import io
import os
from pathlib import Path
from typing import BinaryIO

CODECS = {".gz": "gzip", ".zst": "zstd"}
END = 1 << 62
"""Behind the last unpacked byte, of which nothing is known before all are read."""
BUFFER = 1 << 18


def is_compressed(name: str | Path) -> bool:
    return Path(name).suffix in CODECS


def kind_of(name: str | Path) -> str:
    """The ending that says what is in a file: .jsonl for a.jsonl and for a.jsonl.gz."""
    path = Path(name)
    return Path(path.stem).suffix if is_compressed(path) else path.suffix


def open_input(name: str | Path) -> BinaryIO:
    """The file's bytes, unpacked if need be."""
    return UnpackedFile(name) if is_compressed(name) else open(name, "rb")


class UnpackedFile(io.BufferedReader):
    """The unpacked bytes of a compressed file. `seek` goes forward only, by reading."""

    def __init__(self, name: str | Path) -> None:
        import pyarrow as pa

        self._path = str(name)
        self._at = 0
        codec = CODECS[Path(name).suffix]
        if not pa.Codec.is_available(codec):
            raise ValueError(
                f"{name}: this build of pyarrow cannot unpack {codec}; unpack the file, or install "
                "a pyarrow that has it"
            )
        self._packed = open(name, "rb")  # noqa: SIM115 - closed with this file
        super().__init__(pa.input_stream(self._packed, compression=codec), BUFFER)

    @property
    def packed(self) -> int:
        """How many bytes of the compressed file are read."""
        return self._packed.tell()

    def read(self, size: int | None = -1, /) -> bytes:
        try:
            data = super().read(size)
        except OSError as error:
            raise self._damaged(error) from None
        self._at += len(data)
        return data

    def readline(self, size: int | None = -1, /) -> bytes:
        try:
            line = super().readline(size)
        except OSError as error:
            raise self._damaged(error) from None
        self._at += len(line)
        return line

    def tell(self) -> int:
        return self._at

    def seek(self, target: int, whence: int = os.SEEK_SET, /) -> int:
        assert whence == os.SEEK_SET
        assert target >= self._at
        while self._at < target and self.read(min(BUFFER, target - self._at)):
            pass
        return self._at

    def _damaged(self, error: OSError) -> ValueError:
        return ValueError(
            f"{self._path}: cannot be unpacked after {self._at:,} bytes ({error}); it is cut off, "
            f"damaged or not {CODECS[Path(self._path).suffix]}: copy or compress it again"
        )
