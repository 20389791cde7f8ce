"""Which media of a prompt have embeddings where, as the directory knows it.

An embedding is named after the medium and the encoder that made it. A cluster needs not encode a
medium of which one of its nodes has an embedding by an encoder of its own: engines load it, and
another node of the cluster pulls it. It does not know requests or routes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvmanager.directory.reader import DirectoryReader
from kvmanager.embedding_keys import embedding_key
from kvmanager.media_items import MediaItem
from scheduler.reports import ClusterReport, is_of_model


async def embedded_media(
    directory: DirectoryReader,
    reports: Iterable[ClusterReport | None],
    model: str,
    media: Sequence[MediaItem],
) -> dict[str, frozenset[int]]:
    """By cluster, the numbers of the media in `media` of which it has embeddings. Clusters without
    any are left out. The directory is asked only where engines share embeddings.
    """
    clusters: dict[str, set[str]] = {}
    for report in reports:
        if report is None:
            continue
        for item in report.instances:
            if item.encoder and is_of_model(item, model):
                clusters.setdefault(item.encoder, set()).add(report.name)
    if not clusters:
        return {}
    asked = [(encoder, number) for encoder in clusters for number in range(len(media))]
    keys = [embedding_key(encoder, media[number].identifier) for encoder, number in asked]
    found: dict[str, set[int]] = {}
    holders = await directory.embedding_holders(keys)
    for (encoder, number), nodes in zip(asked, holders, strict=True):
        for node in nodes:
            if node.cluster in clusters[encoder]:
                found.setdefault(node.cluster, set()).add(number)
    return {cluster: frozenset(numbers) for cluster, numbers in found.items()}
