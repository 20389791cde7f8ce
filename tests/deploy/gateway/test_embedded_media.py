"""Which media have embeddings in which cluster, by what the directory says."""

from __future__ import annotations

from collections.abc import Sequence

from cache_doubles import StandinDirectory
from live_region_cases import MODEL, instance, report

from deploy.gateway.cache.embedded_media import embedded_media
from kvmanager.directory.messages import NodeName
from kvmanager.embedding_keys import embedding_key
from kvmanager.media_items import MediaItem

CAT, DOG = MediaItem("cat", 10, 100), MediaItem("dog", 200, 100)


class Directory(StandinDirectory):
    """Nodes by the key of the embedding that they have."""

    def __init__(self, **held: tuple[str, str, NodeName]) -> None:
        super().__init__()
        self._held: dict[bytes, list[NodeName]] = {}
        for encoder, name, node in held.values():
            self._held.setdefault(embedding_key(encoder, name), []).append(node)
        self.asked = 0

    async def embedding_holders(self, keys: Sequence[bytes]) -> list[list[NodeName]]:
        self.asked += 1
        return [self._held.get(key, []) for key in keys]


HOME = report("home", instance("d0", "decode", encoder="vit"), instance("d1", "decode"))
FAR = report("far", instance("p0", encoder="other vit"))


async def test_a_medium_counts_where_an_encoder_of_the_cluster_made_its_embedding() -> None:
    directory = Directory(
        one=("vit", "dog", NodeName("home", "n1")),
        two=("other vit", "cat", NodeName("far", "n9")),
        three=("vit", "cat", NodeName("far", "n9")),  # of no use there
    )
    found = await embedded_media(directory, (HOME, FAR, None), MODEL, (CAT, DOG))
    assert found == {"home": frozenset({1}), "far": frozenset({0})}
    assert directory.asked == 1


async def test_nobody_is_asked_where_engines_share_no_embeddings() -> None:
    directory = Directory()
    plain = report("home", instance("d0", "decode"), instance("x", "decode", model="other"))
    assert await embedded_media(directory, (plain, None), MODEL, (CAT,)) == {}
    of_another = report("home", instance("x", "decode", model="other", encoder="vit"))
    assert await embedded_media(directory, (of_another,), MODEL, (CAT,)) == {}
    assert directory.asked == 0
