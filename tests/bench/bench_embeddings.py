"""What an image weighs on its way: as pixels, as an embedding, as KVCache; and the time of a pull.

Run: python tests/bench/bench_embeddings.py [--json FILE] [--smoke] [--sizes N ...] [--pulls N].

`bytes`: one image of N by N random pixels, and a prompt about it of `--text` tokens more: its PNG,
its JPEG, its embedding, and the KVCache of the whole prompt, by the configuration of the tiny model
with a vision tower. Random pixels make the largest files, a photograph's are smaller. With
`--hidden` an embedding has rows of another model's width.
`pull`: the embeddings of `--images` such images from one agent to another on this machine, in turns
over the sizes: the whole call, and the transfer alone.

No engine is started: the bytes of embeddings are made up.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from agent_process import AgentProcess
from embedding_ends import ENCODER, put, saving
from smoke import add_smoke
from tiny_vision import CONFIG, MAX_IMAGE_TOKENS, PIXELS_PER_TOKEN, image_url

from kvmanager.agent.between_agents import EmbeddingOrder, EmbeddingsPulled, pull_embeddings
from kvmanager.agent.client import AgentClient
from kvmanager.embedding_keys import embedding_key
from kvmanager.hf_config import ModelKv, read_model_kv

Row = dict[str, Any]

ITEM_BYTES: Final = 2
"""Of a bfloat16, the model's data type."""


def image_tokens(width: int) -> int:
    """The tokens of a square image, which is made smaller if it has too many."""
    return max(4, min(MAX_IMAGE_TOKENS, width * width // PIXELS_PER_TOKEN))


def weigh(width: int, hidden: int, text_tokens: int, model: ModelKv) -> Row:
    """The bytes of one image and of a prompt about it."""
    from PIL import Image

    png = base64.b64decode(image_url(width, width, width).partition(",")[2])
    jpeg = io.BytesIO()
    Image.open(io.BytesIO(png)).save(jpeg, "JPEG")
    num_tokens = image_tokens(width)
    return {
        "what": "bytes",
        "width": width,
        "image_tokens": num_tokens,
        "png_bytes": len(png),
        "jpeg_bytes": len(jpeg.getvalue()),
        "embedding_bytes": num_tokens * hidden * ITEM_BYTES,
        "kvcache_bytes": model.bytes_for(num_tokens + text_tokens),
    }


async def pull(
    source: AgentProcess, destination: AgentProcess, sizes: dict[bytes, int]
) -> EmbeddingsPulled:
    ends = [AgentClient(agent.ready["control"]) for agent in (source, destination)]
    try:
        # The first call of a client opens its channel.
        await asyncio.gather(*(end.status(10.0) for end in ends))
        return await pull_embeddings(ends[0], ends[1], EmbeddingOrder(sizes))
    finally:
        await asyncio.gather(*(end.close() for end in ends))


def measure_pulls(rows: list[Row], num_images: int, num_pulls: int, folder: Path) -> list[Row]:
    largest = num_images * max(row["embedding_bytes"] for row in rows)
    # Room for two pulls of the largest images: what is pulled makes room for the next ones.
    gib = max(2 * largest, 8 << 20) / (1 << 30)
    settings: dict[str, Any] = {"arena_gib": 1.5 * gib, "embedding_gib": gib}
    found: dict[int, list[EmbeddingsPulled]] = {row["width"]: [] for row in rows}
    with ExitStack() as stack:
        ends = [
            stack.enter_context(AgentProcess(folder / name, **settings))
            for name in ("source", "destination")
        ]
        saver = stack.enter_context(saving(ends[0]))
        for number in range(num_pulls + 1):
            for row in rows:
                nbytes, width = row["embedding_bytes"], row["width"]
                names = [f"{number} {width} {index}" for index in range(num_images)]
                for name in names:
                    if not put(saver, name, os.urandom(nbytes)):
                        raise RuntimeError(f"no room for {name}")
                sizes = {embedding_key(ENCODER, name): nbytes for name in names}
                pulled = asyncio.run(pull(ends[0], ends[1], sizes))
                if pulled.num_pulled != num_images:
                    raise RuntimeError(f"not all of {num_images} images came: {pulled}")
                if number:  # the first one opens connections
                    found[width].append(pulled)
    return [
        {
            "what": "pull",
            "width": width,
            "num_images": num_images,
            "nbytes": pulls[0].nbytes,
            "seconds": [one.seconds for one in pulls],
            "transfer_s": [one.transfer_s for one in pulls],
        }
        for width, pulls in found.items()
    ]


def summarise(weights: list[Row], pulls: list[Row]) -> list[str]:
    names = ("tokens", "PNG KiB", "JPEG KiB", "embedding KiB", "KVCache KiB", "pull ms", "sent ms")
    lines = [f"{'pixels':>9} " + " ".join(f"{name:>13}" for name in names)]
    for row, moved in zip(weights, pulls, strict=True):
        kinds = ("png_bytes", "jpeg_bytes", "embedding_bytes", "kvcache_bytes")
        kib = [row[kind] / 1024 for kind in kinds]
        times = [1e3 * statistics.median(moved[name]) for name in ("seconds", "transfer_s")]
        lines.append(
            f"{row['width']:>4}x{row['width']:<4} {row['image_tokens']:13} "
            + " ".join(f"{number:13.1f}" for number in (*kib, *times))
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    hidden = CONFIG["text_config"]["hidden_size"]
    parser.add_argument("--json", type=Path, help="write the raw numbers here")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--hidden", type=int, default=hidden, help="values in an embedding's row")
    parser.add_argument("--text", type=int, default=100, help="tokens of the prompt's text")
    parser.add_argument("--images", type=int, default=8, help="images of one pull")
    parser.add_argument("--pulls", type=int, default=20, help="pulls of each size")
    add_smoke(parser, sizes=[64, 256], images=2, pulls=2)
    arguments = parser.parse_args()
    model = read_model_kv(dict(CONFIG), dtype="bfloat16", tp_size=1)
    weights = [weigh(width, arguments.hidden, arguments.text, model) for width in arguments.sizes]
    with tempfile.TemporaryDirectory(prefix="em-") as folder:
        pulls = measure_pulls(weights, arguments.images, arguments.pulls, Path(folder))
    print("\n".join(summarise(weights, pulls)))
    print(f"KVCache: of a prompt of one image and {arguments.text} tokens of text")
    print(f"pull: of {arguments.images} images, the whole call (median); sent: the transfer alone")
    if arguments.json is not None:
        kept = {"cpus": os.cpu_count(), "hidden": arguments.hidden, "rows": [*weights, *pulls]}
        arguments.json.write_text(json.dumps(kept) + "\n")


if __name__ == "__main__":
    main()
