"""`tierkv fingerprint`: which model a folder holds, told by the content of its files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierkv_cli.options import Where, json_option, where_options

if TYPE_CHECKING:
    from tierkv.storage.digests import DigestMemory
    from tierkv.storage.manifest import WeightManifest


@click.command(short_help="Print a model's fingerprint and its files.")
@click.argument("model", metavar="DIR", type=click.Path(exists=True, path_type=Path))
@click.option("--adapter", metavar="DIR", type=click.Path(exists=True, path_type=Path), help="A LoRA adapter as well.")
@json_option
@where_options
def command(*, where: Where, model: Path, adapter: Path | None, as_json: bool) -> None:
    """Print the fingerprint of the model in DIR, and the files it is made from.

    Two folders have the same fingerprint exactly if their weight files have the same names, sizes and content; it is
    what keeps the cache of one model from being served to another. Digests are remembered in the data directory, if
    there is one, so that unchanged files are not read again.
    """
    from tierkv.storage.manifest import fingerprint_adapter, fingerprint_model
    from tierkv_cli.output import print_json
    from tierkv_cli.progress import Meter

    begun = time.monotonic()
    with remembered(where) as memory, Meter("hashing") as meter:
        manifests = {"model": fingerprint_model(model, memory, meter.show_bytes)}
        if adapter is not None:
            manifests["adapter"] = fingerprint_adapter(adapter, memory, meter.show_bytes)
    if as_json:
        print_json({what: _as_object(manifest) for what, manifest in manifests.items()})
    else:
        _tell(manifests, time.monotonic() - begun)


@contextmanager
def remembered(where: Where) -> Iterator[DigestMemory | None]:
    """The digests in the node's data directory. A directory that can't be used only means reading everything, which is
    worth a word when it was named on purpose."""
    from tierkv.errors import DataDirectoryError
    from tierkv.storage.digests import DigestMemory
    from tierkv.storage.directory import DataDirectory

    path = where.settings().settings.data_dir
    if path is None:
        yield None
        return
    try:
        directory = DataDirectory.open(path, create=False, writable=False)
    except DataDirectoryError as error:
        if where.data_dir is not None:
            click.echo(f"tierkv: digests are not remembered: {error}", err=True)
        yield None
        return
    with directory:
        yield DigestMemory(directory)


def _as_object(manifest: WeightManifest) -> dict[str, object]:
    return {
        "fingerprint": manifest.fingerprint,
        "total_bytes": manifest.total_bytes,
        "hashed_bytes": manifest.hashed_bytes,
        "files": manifest.entries,
    }


def _tell(manifests: dict[str, WeightManifest], seconds: float) -> None:
    from tierkv.config.sizes import human_size
    from tierkv_cli.output import console, table

    for what, manifest in manifests.items():
        click.echo(f"{what} {manifest.fingerprint}\n")
        shown = table("file", "size", "BLAKE3", numbers=("size",))
        for entry in manifest.entries:
            shown.add_row(entry.name, human_size(entry.size), entry.digest)
        console().print(shown)
        click.echo("")
    total = sum(manifest.total_bytes for manifest in manifests.values())
    hashed = sum(manifest.hashed_bytes for manifest in manifests.values())
    rate = f" ({human_size(int(hashed / seconds))}/s)" if hashed and seconds > 0.1 else ""
    remembered = f", the rest of {human_size(total)} was known" if hashed < total else ""
    click.echo(f"read {human_size(hashed)} in {seconds:.1f} s{rate}{remembered}")
