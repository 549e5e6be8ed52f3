"""The demo: a real model, a node, and two prompts, before and after everything was killed.

usage: demo_lib MODEL_FOLDER CACHE [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from demo_lib.processes import EngineProcess, Node, ProcessFailed
from demo_lib.report import print_report, problems_of, shortfalls_of
from demo_lib.story import Story

HOST_BYTES = "1536MiB"
NEW_TOKENS = 16


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--quick", action="store_true", help="bf16 only, a shorter code prompt, fewer runs")
    parser.add_argument("--json", type=Path, help="write all figures there as well")
    options = parser.parse_args()

    console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
    begun = time.monotonic()
    options.cache.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="demo-", dir=options.cache))
    data_dir = folder / "data"
    dtypes = ["bfloat16"] if options.quick else ["bfloat16", "float32"]

    def tell(text: str) -> None:
        console.print(f"{time.monotonic() - begun:5.0f} s  {text}")

    node = Node(data_dir, folder, host_bytes=HOST_BYTES)
    engine = EngineProcess(options.model, data_dir, dtypes, folder)
    socket_dir = node.socket_dir
    story = Story(node, engine, dtypes, pairs=1 if options.quick else 3, new_tokens=NEW_TOKENS, tell=tell)
    try:
        with node, engine:
            story.run(code_tokens=2_000 if options.quick else 6_000)
    except ProcessFailed as failure:
        console.print(f"the demo could not go on: {failure}", style="red", markup=False)
        return 1
    finally:
        console.print()
        console.print("written: the model     ", options.model, soft_wrap=True)
        console.print("         data and logs ", folder, soft_wrap=True)
        console.print("         sockets       ", socket_dir, soft_wrap=True)
        console.print(f"to remove it: rm -rf {options.model} {folder} {socket_dir}\n", soft_wrap=True)
    print_report(console, story.steps, story.overheads, story.notes, new_tokens=NEW_TOKENS)
    if options.json:
        figures = {"steps": story.steps, "overheads": story.overheads}
        rows = {name: [asdict(row) for row in found] for name, found in figures.items()}
        options.json.write_text(json.dumps(rows, indent=1))
    for shortfall in shortfalls_of(story.steps, story.overheads):
        console.print(f"below the aim: {shortfall}", style="yellow")
    problems = problems_of(story.steps)
    for problem in problems:
        console.print(f"wrong: {problem}", style="red")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
