"""CIFAR-10 from its official binary files, checked by their digests; and scikit-learn's digits, which need no download.

A record is 1 byte of label and 3072 bytes of image: 1024 red, 1024 green, 1024 blue, row by row.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
ARCHIVE = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
FOLDER = "cifar-10-batches-bin"
DIGESTS = {  # MD5, as for the archive on the page above
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
RECORD = 1 + 3 * 32 * 32
COLOURS = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # mean and deviation of the training set's red, green and blue


class DataError(Exception):
    """Data files that are missing or damaged."""


@dataclass(frozen=True)
class Data:
    """Images (number, channel, row, column) as bytes, and labels."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    mean: Tensor
    deviation: Tensor
    name: str = "CIFAR-10"
    validation_images: Tensor | None = None
    validation_labels: Tensor | None = None

    @property
    def examined(self) -> list[tuple[Tensor, Tensor]]:
        """Images and labels that networks are evaluated on: the test set and, where there is one, the validation set."""
        found = [(self.test_images, self.test_labels)]
        if self.validation_images is not None and self.validation_labels is not None:
            found.append((self.validation_images, self.validation_labels))
        return found

    def first(self, train: int, test: int) -> Data:
        """A small part, for trying things out."""
        return replace(
            self,
            images=self.images[:train],
            labels=self.labels[:train],
            test_images=self.test_images[:test],
            test_labels=self.test_labels[:test],
            validation_images=None if self.validation_images is None else self.validation_images[:test],
            validation_labels=None if self.validation_labels is None else self.validation_labels[:test],
            name=f"{self.name}, the first {train:,} images",
        )

    def held_out(self, number: int = 5_000) -> Data:
        """The last images of the training set in the test set's place: for choosing, without a look at the test set."""
        images, labels = self.images[-number:], self.labels[-number:]
        name = f"{self.name}, {number:,} training images held out"
        return replace(
            self, images=self.images[:-number], labels=self.labels[:-number], test_images=images, test_labels=labels, name=name
        )

    def validated(self, number: int = 1_000) -> Data:
        """The last images of the training set, a tenth at most, as a validation set, as in the author's code."""
        number = min(number, len(self.labels) // 10)
        return replace(
            self,
            images=self.images[:-number],
            labels=self.labels[:-number],
            validation_images=self.images[-number:],
            validation_labels=self.labels[-number:],
            name=f"{self.name}, {number:,} training images for validation",
        )


def cifar10(folder: Path) -> Data:
    """CIFAR-10, from `folder` or its subfolder cifar-10-batches-bin."""
    place = next((place for place in (folder / FOLDER, folder) if (place / "test_batch.bin").exists()), None)
    if place is None:
        raise DataError(
            f"There is no CIFAR-10 in {folder}. Let it be downloaded (--download), or get cifar-10-binary.tar.gz from {PAGE}, "
            f"unpack it there (tar -xzf cifar-10-binary.tar.gz makes the folder {FOLDER}) and name that place with --data."
        )
    parts = [read_records(place / name, digest) for name, digest in DIGESTS.items()]
    train = parts[:-1]
    mean, deviation = (torch.tensor(values) for values in COLOURS)
    return Data(torch.cat([i for i, _ in train]), torch.cat([y for _, y in train]), *parts[-1], mean, deviation)


def digits() -> Data:
    """Scikit-learn's digits, 1,797 real images of 8 × 8: every fourth one, after a fixed shuffle, is kept for the test."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.tensor(bunch.images * 15.9375).to(torch.uint8)[:, None]
    labels = torch.tensor(bunch.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[::4], order[torch.arange(len(order)) % 4 != 0]
    numbers = images[train].float() / 255
    colours = numbers.mean().view(1), numbers.std().view(1)
    return Data(images[train], labels[train], images[test], labels[test], *colours, name="digits")


def read_records(path: Path, digest: str) -> tuple[Tensor, Tensor]:
    if not path.is_file():
        raise DataError(f"{path} is missing: unpack the archive from {PAGE} once more")
    content = path.read_bytes()
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != digest:
        raise DataError(
            f"{path} is damaged, or another file: its MD5 is {found} and should be {digest}. "
            f"Delete it and unpack the archive from {PAGE} once more."
        )
    records = torch.from_numpy(np.frombuffer(content, dtype=np.uint8).reshape(-1, RECORD).copy())
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long()


def download(folder: Path) -> None:
    """Fetch the archive and unpack the six files into `folder`, unless they are there, and whole."""
    try:
        cifar10(folder)
    except DataError:
        pass
    else:
        return
    print(f"downloading {ARCHIVE} (162 MB) …")
    try:
        with urllib.request.urlopen(ARCHIVE) as reply:
            content = reply.read()
    except OSError as error:
        raise DataError(f"{ARCHIVE} could not be read ({error}): get it by hand, and name its place with --data") from error
    target = folder / FOLDER
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for name, digest in DIGESTS.items():
            member = archive.extractfile(f"{FOLDER}/{name}")
            records = member.read() if member else b""
            if hashlib.md5(records, usedforsecurity=False).hexdigest() != digest:
                raise DataError(f"{name} in {ARCHIVE} is not the file that was expected: nothing of it was written")
            (target / f"{name}.part").write_bytes(records)
            (target / f"{name}.part").rename(target / name)


def batches(seed: int, epoch: int, number: int, batch: int, steps: int) -> tuple[Tensor, Tensor]:
    """Which images each step of an epoch sees, (step, sample), and which of them are mirrored; the same on every machine."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    order = torch.randperm(number, generator=generator)[: steps * batch].view(steps, batch)
    return order, torch.randint(2, order.shape, generator=generator, dtype=torch.int8)
