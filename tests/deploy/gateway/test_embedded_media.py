"""Which media have embeddings in which cluster, by what the directory says."""

from __future__ import annotations

from cache_doubles import FakeDirectory
from live_region_cases import MODEL, instance, report

from deploy.gateway.cache.embedded_media import embedded_media
from kvmanager.directory.messages import NodeName
from kvmanager.embedding_keys import embedding_key
from kvmanager.media_items import MediaItem

CAT, DOG = MediaItem("cat", 10, 100), MediaItem("dog", 200, 100)
HOME = report("home", instance("d0", "decode", encoder="vit"), instance("d1", "decode"))
FAR = report("far", instance("p0", encoder="other vit"))


async def test_a_medium_counts_where_an_encoder_of_the_cluster_made_its_embedding() -> None:
    directory = FakeDirectory()
    directory.embeddings = {
        embedding_key("vit", "dog"): [NodeName("home", "n1")],
        embedding_key("other vit", "cat"): [NodeName("far", "n9")],
        embedding_key("vit", "cat"): [NodeName("far", "n9")],  # of no use there
    }
    found = await embedded_media(directory, (HOME, FAR, None), MODEL, (CAT, DOG))
    assert found == {"home": frozenset({1}), "far": frozenset({0})}
    assert len(directory.embeddings_asked) == 1


async def test_nobody_is_asked_where_engines_share_no_embeddings() -> None:
    directory = FakeDirectory()
    plain = report("home", instance("d0", "decode"), instance("x", "decode", model="other"))
    assert await embedded_media(directory, (plain, None), MODEL, (CAT,)) == {}
    of_another = report("home", instance("x", "decode", model="other", encoder="vit"))
    assert await embedded_media(directory, (of_another,), MODEL, (CAT,)) == {}
    assert directory.embeddings_asked == []
