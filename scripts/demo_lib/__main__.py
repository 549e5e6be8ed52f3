"""The demo: a real model, a node, and two prompts, before and after everything was killed.

usage: demo_lib MODEL_FOLDER CACHE [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from demo_lib.processes import EngineProcess, Node, ProcessFailed
from demo_lib.report import print_report, problems_of, shortfalls_of
from demo_lib.story import Story
from tierkv.wire.socket_directory import find_socket_dir

HOST_BYTES = "1536MiB"
NEW_TOKENS = 16


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--quick", action="store_true", help="bf16 only, a shorter code prompt, fewer runs")
    parser.add_argument("--json", type=Path, help="write all figures there as well")
    options = parser.parse_args()

    logging.getLogger("tierkv").setLevel(logging.ERROR)  # that a node is away is what it waits out here
    console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
    options.cache.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="demo-", dir=options.cache))
    try:
        return run(options, folder, console)
    except ProcessFailed as failure:
        console.print(f"the demo could not go on: {failure}", style="red", markup=False)
        return 1
    finally:
        tell_what_is_left(options.model, folder, console)


def run(options: argparse.Namespace, folder: Path, console: Console) -> int:
    begun = time.monotonic()
    dtypes = ["bfloat16"] if options.quick else ["bfloat16", "float32"]

    def tell(text: str) -> None:
        console.print(f"{time.monotonic() - begun:5.0f} s  {text}")

    node = Node(folder / "data", folder, host_bytes=HOST_BYTES)
    engine = EngineProcess(options.model, folder / "data", dtypes, folder)
    with node, engine:
        turns = 1 if options.quick else 3
        story = Story(node, engine, dtypes, rounds=turns, pairs=turns, new_tokens=NEW_TOKENS, tell=tell)
        story.run(code_tokens=2_000 if options.quick else 6_000)
    print_report(console, story.steps, story.overheads, story.notes, new_tokens=NEW_TOKENS)
    if options.json:
        steps, overheads = [asdict(step) for step in story.steps], [asdict(found) for found in story.overheads]
        options.json.write_text(json.dumps({"steps": steps, "overheads": overheads}, indent=1))
    for shortfall in shortfalls_of(story.steps, story.overheads):
        console.print(f"below the aim: {shortfall}", style="yellow")
    problems = problems_of(story.steps)
    for problem in problems:
        console.print(f"wrong: {problem}", style="red")
    return 1 if problems else 0


def tell_what_is_left(model: Path, folder: Path, console: Console) -> None:
    left = {
        "data directory and logs": folder,
        "sockets": find_socket_dir(folder / "data", ""),
        "model": model,
        "virtual environment": Path(sys.prefix),
    }
    console.print("\nWhat this has written, and how to remove it:")
    for name, path in left.items():
        console.print(f"  rm -rf {path!s:<50}  # {name}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
