"""Text to learn: source code that every installation has (Python's own library, torch, numpy), or Shakespeare's plays.

Source code is read in the order of its paths, each file once. Every fiftieth file (by the hash of its content) is held out. The
bytes depend on the versions installed; results name the hash of what they were trained on.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT = 50  # one file in fifty
PACKAGES = ("torch", "numpy")
PLAYS = Path(__file__).parent / "tinyshakespeare.txt.gz"


@dataclass(frozen=True, eq=False)
class Text:
    """Bytes to train on and bytes held out."""

    name: str
    train: Tensor
    held_out: Tensor
    hash: str

    def to(self, device: str) -> Text:
        return Text(self.name, self.train.to(device), self.held_out.to(device), self.hash)


def as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def made(name: str, train: bytes, held_out: bytes) -> Text:
    return Text(name, as_tensor(train), as_tensor(held_out), hashlib.sha256(train + b"|" + held_out).hexdigest()[:16])


def source_files() -> Iterator[Path]:
    library = Path(sysconfig.get_paths()["stdlib"])
    yield from sorted(
        path for path in library.rglob("*.py") if not {"site-packages", "dist-packages"} & set(path.relative_to(library).parts)
    )
    for package in PACKAGES:
        found = importlib.util.find_spec(package)
        if found is not None and found.origin is not None:
            yield from sorted(Path(found.origin).parent.rglob("*.py"))


def source_code(most: int | None = None) -> Text:
    """Python source code of the standard library, torch and numpy; `most` files of it."""
    seen: set[bytes] = set()
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for count, path in enumerate(source_files()):
        if most is not None and count >= most:
            break
        content = path.read_bytes()
        key = hashlib.sha256(content).digest()
        if content and key not in seen:
            seen.add(key)
            parts[int.from_bytes(key[:4], "big") % HELD_OUT == 0].append(content)
    return made("Python source code", b"\0".join(parts[0]), b"\0".join(parts[1]))


def shakespeare() -> Text:
    """A million characters of plays; the last twentieth is held out."""
    content = gzip.decompress(PLAYS.read_bytes())
    cut = len(content) * 19 // 20
    return made("Shakespeare", content[:cut], content[cut:])


def batch(text: Tensor, count: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
    """Bytes and the bytes that follow them, (count, context) each, from random places."""
    return batch_at(text, places(text, count, context, seed).to(text.device), context)


def places(text: Tensor, count: int, context: int, seed: int) -> Tensor:
    """Where the sequences of a batch begin."""
    return torch.randint(len(text) - context - 1, (count,), generator=torch.Generator().manual_seed(seed))


def batch_at(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    window = text[starts[:, None] + torch.arange(context + 1, device=text.device)].long()
    return window[:, :-1], window[:, 1:]
