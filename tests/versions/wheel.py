"""Single files out of vLLM's wheels: their index is read, then the few members that are wanted.

A wheel of vLLM has 240 to 340 MB; of it about 2 MB are fetched, once, into a folder.
"""

import base64
import csv
import hashlib
import io
import json
import re
import urllib.parse
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

from packaging.version import Version

PINNED = {
    "0.20.2": "b59cc330896c1de740afa0eb9b312d5792ad67ed1e12e887f70db6ff72f10d22",
    "0.25.1": "e00862c005fbd5da372f3970fb0f5c6ca8f6ea1dd5c75ea205ce0f58ea74a1a5",
    "0.30.0": "98c60262010a2fe2759540bd49bd260712f1a2275eb5c4a55d67b2751abe5630",
    "0.31.0": "42b2205c6fa3ede3ad329ec24a4f0ce5358534c47ffc73c0d67d7e844c929d2d",
    "0.32.0": "7de1ca9fab186868f4794671b450d274a40739fd887f7e5a52bc5ca76aab0f85",
    "0.33.0": "a860951d44545b1b68c2d1484b9a03bbde52f6eae34850a6c22741c60ac386c4",
}
"""SHA-256 of each wheel's RECORD, which has the hashes of all its files."""
CACHE = Path(__file__).resolve().parents[2] / ".versions"
PLATFORM = "x86_64"
SECONDS = 60


class Remote(io.RawIOBase):
    """A file on a web server that is read by ranges."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.position = 0
        with urllib.request.urlopen(
            urllib.request.Request(url, method="HEAD"), timeout=SECONDS
        ) as answer:
            self.size = int(answer.headers["Content-Length"])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        self.position = start + offset
        return self.position

    def readinto(self, buffer: Any) -> int:
        end = min(self.position + len(buffer), self.size)
        if end <= self.position:
            return 0
        span = {"Range": f"bytes={self.position}-{end - 1}"}
        request = urllib.request.Request(self.url, headers=span)
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            if answer.status != 206:
                raise OSError(f"{self.url} is not served by ranges")
            data = answer.read()
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)


def wheels() -> dict[str, str]:
    """Where the wheel of each release is, by the package index that pip goes to."""
    from pip._internal.commands import create_command

    index = create_command("download").parser.get_default_values().index_url
    request = urllib.request.Request(
        f"{index.rstrip('/')}/vllm/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        files = json.load(answer)["files"]
    return {
        match[1]: urllib.parse.urljoin(request.full_url, file["url"])
        for file in files
        if (match := re.fullmatch(rf"vllm-([^-]+)-.*{PLATFORM}\.whl", file["filename"]))
        and not file.get("yanked")
    }


def newest(found: dict[str, str]) -> str:
    return max((v for v in found if not Version(v).is_prerelease), key=Version)


class Wheel:
    """The wheel of one version, as far as it was fetched."""

    def __init__(self, version: str, pin: str | None = None, cache: Path = CACHE) -> None:
        self.version = version
        self.folder = cache / version
        self._zip: zipfile.ZipFile | None = None
        text = self._stored("RECORD", f"vllm-{version}.dist-info/RECORD")
        self.pin = hashlib.sha256(text).hexdigest()
        if pin is not None and pin != self.pin:
            raise ValueError(f"vLLM {version} on the index is not the one that was checked here")
        self.hashes = {
            name: digest.removeprefix("sha256=")
            for name, digest, _ in csv.reader(text.decode().splitlines())
        }

    def text(self, name: str) -> str | None:
        """One file; None if the wheel has none of that name."""
        if name not in self.hashes:
            return None
        data = self._stored(name, name)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        if digest != self.hashes[name]:
            raise ValueError(f"{self.folder / name} is not what the wheel's RECORD says")
        return data.decode()

    def _stored(self, place: str, member: str) -> bytes:
        path = self.folder / place
        if not path.exists():
            if self._zip is None:
                remote = io.BufferedReader(Remote(wheels()[self.version]), 1 << 16)
                self._zip = zipfile.ZipFile(remote)
            data = self._zip.read(member)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return path.read_bytes()
