"""A machine with GPUs as the stand-in for NVML has it: what the tests set, and may change."""

import os
import subprocess
from pathlib import Path

GIB = 1 << 30
H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "total": 80 * GIB,
    "reserved": GIB,
    "free": 7 * GIB,  # so 72 GiB are used
    "utilization": 93,
    "power": 512_345,
    "throttles": 0xFF,
    "throttled": 0x4 | 0x1,  # the power cap; idle, which is none
    "rate.tx": 2000,
    "rate.rx": 1000,
    "links": 4,
    "down.3": 1,
    "field.138": 10,
    "field.139": 20,
    "ecc.corrected": 3,
    "ecc.uncorrected": 0,
    "xids": 0,
}
UUIDS = (
    "GPU-11111111-aaaa-4000-8000-000000000000",
    "GPU-11112222-bbbb-4000-8000-000000000001",
    "GPU-33333333-cccc-4000-8000-000000000002",
)


def build(folder: Path, *options: str) -> Path:
    """Compile the stand-in; its folder is for LD_LIBRARY_PATH."""
    library = folder / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("stand_in.c")
    flags = ["-O1", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", *options]
    subprocess.run(["gcc", *flags, "-o", str(library), str(source)], check=True)
    return library


class Machine:
    """`settings` are the lines of the stand-in's file, written anew at each change."""

    def __init__(self, path: Path, gpus: int = 1) -> None:
        self.path = path
        self.settings: dict[str, object] = {"gpus": gpus}
        for gpu in range(gpus):
            self.settings |= {f"{gpu}.{key}": value for key, value in H100.items()}
            self.settings[f"{gpu}.uuid"] = UUIDS[gpu]
        self.change({})

    def change(self, settings: dict[str, object]) -> None:
        """None takes a line away."""
        self.settings |= settings
        lines = [f"{key} {value}\n" for key, value in self.settings.items() if value is not None]
        partial = self.path.with_suffix(".new")
        partial.write_text("".join(lines))
        os.replace(partial, self.path)
